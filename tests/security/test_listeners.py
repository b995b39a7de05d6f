"""Every socket at which the package listens.

For each: the check of a peer before any of its data is kept. Further the limit of waiting bytes,
from strangers and from one admitted connection.
"""

import ast
from pathlib import Path
from typing import NamedTuple

import pytest

from vllm_kvpool.cli import serve
from vllm_kvpool.embeds.protocol import messages as embeds_messages
from vllm_kvpool.network import transport_zmq
from vllm_kvpool.router.ops import admin_api
from vllm_kvpool.transfer import replicas

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "vllm_kvpool"
LISTENS = {
    *("bind", "create_server", "create_unix_server", "start_server", "start_unix_server"),
    *("TCPServer", "UnixStreamServer", "HTTPServer", "ThreadingHTTPServer"),
}
MIB = 1 << 20


class Listener(NamedTuple):
    """A place where the package begins to listen."""

    judged_by: str
    """Check that decides about a peer before its data is read."""
    waiting_bytes: int
    """Limit of bytes from one connection that wait, unread or undecoded."""
    shown_by: tuple[str, ...]
    """Tests, as `file::function`."""


HTTP = (
    "tests/router/test_server.py::test_all_bodies_together_are_bounded",
    "tests/router/test_server.py::test_more_connections_than_allowed_are_closed",
    "tests/router/test_server.py::test_clients_that_are_too_slow_are_let_go_while_others_are_served",
    "tests/cli/test_serve.py::test_the_client_asks_over_http",
    "tests/cli/test_serve.py::test_requests_of_web_pages_are_refused",
    "tests/cli/test_serve.py::test_connection_that_sends_no_whole_request_is_closed",
)
LISTENERS = {
    "cli/try_model.py:_start": Listener(
        "nobody is accepted: it is closed as soon as its port is known",
        0,
        (
            "tests/cli/test_try_model.py::"
            "test_try_of_conversations_finds_them_after_the_restart_in_the_pool_alone",
        ),
    ),
    "network/transport_zmq.py:_bind": Listener(
        "the peer's address and CURVE key, at the handshake",
        transport_zmq.RECEIVE_QUEUE_FRAMES * embeds_messages.MAX_FRAME_BYTES,
        (
            "tests/network/test_transport_zmq.py::"
            "test_host_that_is_not_admitted_fills_no_memory_of_a_busy_thread",
            "tests/network/test_transport_zmq.py::"
            "test_frames_of_an_admitted_host_are_bounded_in_bytes",
            "tests/embeds/test_orders.py::test_order_of_another_process_of_this_machine_is_refused",
            "tests/handover/test_notices.py::"
            "test_host_that_is_not_listed_is_refused_before_it_is_read",
            "tests/handover/test_notices.py::test_large_frame_ends_its_connection_alone",
        ),
    ),
    "network/transport_zmq.py:_listen_to_handshakes": Listener(
        "nobody else reaches it: libzmq asks there, within the process",
        0,
        (
            "tests/network/test_transport_zmq.py::"
            "test_host_that_is_not_admitted_fills_no_memory_of_a_busy_thread",
        ),
    ),
    "transfer/replicas.py:__init__": Listener(
        "the user of the other process (SO_PEERCRED), as it connects; then a token",
        replicas.MAX_MESSAGE,
        (
            "tests/transfer/test_replicas.py::test_process_of_another_user_is_not_read",
            "tests/transfer/test_replicas.py::test_message_over_the_limit_ends_its_connection",
        ),
    ),
    "router/dataplane/http_server.py:start": Listener(
        "clients: their number, sizes and times; then their key, or Host and Origin",
        max(admin_api.MAX_BODY_BYTES, serve.MAX_BODY_BYTES),
        HTTP,
    ),
}


def called(node: ast.AST) -> str:
    match node:
        case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)):
            return name
    return ""


def listeners() -> set[str]:
    """Yield `file:function` of each call that begins to listen."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                place = f"{path.relative_to(PACKAGE)}:{function.name}"
                found |= {place for node in ast.walk(function) if called(node) in LISTENS}
    return found


def test_every_listener_of_the_package_is_in_the_table() -> None:
    assert listeners() == LISTENERS.keys()


@pytest.mark.parametrize("place", LISTENERS)
def test_listener_is_bounded_in_bytes_by_tests_that_exist(place: str) -> None:
    listener = LISTENERS[place]
    assert listener.waiting_bytes <= 64 * MIB
    assert listener.shown_by
    for test in listener.shown_by:
        file, _, name = test.partition("::")
        tree = ast.parse((ROOT / file).read_text())
        functions = (ast.FunctionDef, ast.AsyncFunctionDef)
        assert name in {each.name for each in tree.body if isinstance(each, functions)}, test
