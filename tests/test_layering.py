"""The package's imports point down, and outside names stop where these two tables say.

A new edge is a design decision: it is made here, in review. A unit is a module or folder directly
below the package. Imports for type checkers count for units, not for outside names.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = "vllm_kvpool"
ROOT = Path(__file__).parent.parent / PACKAGE

MAY_IMPORT: dict[str, set[str]] = {
    "__init__": set(),
    "__main__": {"cli"},
    "errors": set(),
    "parsing": set(),
    "private_files": {"errors"},
    "sizes": {"errors"},
    "transitions": set(),
    "metrics": {"parsing", "private_files"},
    "host_memory": {"errors"},
    "config": {"errors", "parsing", "sizes"},
    "identity": {"parsing"},
    "layout": {"errors", "identity"},
    "storage": {"config", "errors", "identity", "parsing", "private_files", "sizes"},
    "staging": {"errors", "host_memory", "layout", "storage"},
    "transfer": {
        *("errors", "identity", "layout", "metrics", "parsing", "private_files", "staging"),
        "storage",
    },
    "scheduler": {
        *("config", "errors", "handover", "identity", "layout", "metrics", "network", "storage"),
        *("transfer", "transitions"),
    },
    "worker": {
        *("config", "errors", "handover", "host_memory", "identity", "layout", "metrics"),
        *("network", "scheduler", "staging", "storage", "transfer"),
    },
    "prefetch": {"config", "errors", "identity", "parsing", "storage"},
    "vllm_adapt": {
        *("config", "errors", "identity", "layout", "metrics", "scheduler", "staging"),
        *("handover", "network", "parsing", "storage", "transfer", "worker"),
    },
    "network": {"errors", "private_files"},
    "handover": {"errors", "metrics", "network", "parsing"},
    "embeds": {
        "config",
        "errors",
        "host_memory",
        "metrics",
        "network",
        "parsing",
        "plugin",
        "private_files",
        "sizes",
        "staging",
        "storage",
        "transitions",
        "vllm_adapt",
    },
    "connector": {
        *(
            "config",
            "identity",
            "layout",
            "network",
            "plugin",
            "scheduler",
            "storage",
            "vllm_adapt",
            "worker",
        ),
    },
    "plugin": {"vllm_adapt"},
    # Of the client the answer's form, of storage the circuit breaker.
    "router": {
        *("client", "config", "errors", "identity", "metrics", "parsing", "private_files"),
        *("sizes", "storage"),
    },
    "direct_http": set(),
    "client": {"direct_http", "parsing"},
    "cli": {
        *(
            "client",
            "config",
            "direct_http",
            "errors",
            "host_memory",
            "identity",
            "layout",
            "metrics",
            "network",  # `kvpool doctor` reads allowed_peers
            "parsing",
            "prefetch",
            "router",
            "scheduler",
            "sizes",
            "staging",  # `kvpool doctor` tries copies on GPUs
            "storage",
            "vllm_adapt",
        ),
    },
}

ONLY_IN: dict[str, tuple[str, ...]] = {
    "vllm": ("connector.py", "plugin.py", "vllm_adapt/", "embeds/connector.py"),
    "mooncake": ("storage/mooncake.py", "storage/mooncake_engine.py"),
    "obstore": ("storage/s3.py",),
    "opentelemetry": ("router/ops/tracing.py", "vllm_adapt/tracing.py"),
    "cryptography": ("storage/contents/encryption.py",),
    "torch": (
        *("layout/page_formats.py", "staging/", "vllm_adapt/"),
        *("embeds/connector.py", "embeds/dataplane/tensors.py"),
    ),
    "zmq": ("network/transport_zmq.py",),
    "torch_npu": ("staging/devices.py",),
    "vllm_ascend": ("vllm_adapt/ascend.py",),
    "numba": ("staging/copy_cpu.py", "staging/driver_copies.py"),
    "triton": ("staging/triton_kernel.py",),
    "threading": (
        *(
            "metrics.py",
            *("scheduler/aliases.py", "scheduler/lookup_service.py"),
            *("prefetch.py", "cli/serve.py", "cli/sharing.py", "cli/common/tokenizer.py"),
            "staging/arena.py",
            "storage/",
            *("embeds/faults.py", "embeds/dataplane/", "network/"),
            "handover/channel.py",
        ),
        *("staging/copy_triton.py", "transfer/lanes.py", "transfer/lane_pool.py"),
        "transfer/replicas.py",
        *("transfer/executor.py", "transfer/trace.py"),
    ),
    "asyncio": (
        *("cli/serve.py", "storage/s3.py"),
        *(
            "router/run.py",
            "router/dataplane/http_server.py",
            "router/dataplane/upstream.py",
            "router/ops/monitor.py",
        ),
        *(
            "router/ops/commands.py",
            "router/dataplane/answers.py",
            "router/dataplane/calls.py",
            "router/dataplane/request_handler.py",
        ),
        *(
            "router/ops/discovery.py",
            "router/ops/replicas.py",
            "router/ops/tasks.py",
            "router/ops/tracing.py",
        ),
    ),
    "aiohttp": (),
    "httptools": ("router/dataplane/http_server.py", "router/dataplane/upstream.py"),
    "rich": ("cli/common/tables.py",),
    "os.environ": ("config.py", "router/config.py"),
    "os.getenv": ("config.py",),
}

# The folders of a unit, and what of it they may import beside themselves.
FOLDERS: dict[str, set[str]] = {
    "cli/common": set(),
    "storage/contents": {"storage.base", "storage.guarded"},
    "embeds/protocol": set(),
    "embeds/machines": {"embeds.protocol.messages", "embeds.protocol.rows"},
    "router/control": set(),
    "vllm_adapt/kv_cache_specs": {
        *("vllm_adapt.ascend", "vllm_adapt.compat", "vllm_adapt.weight_sources"),
    },
    "vllm_adapt/identity": {
        *("vllm_adapt.ascend", "vllm_adapt.compat", "vllm_adapt.weight_sources"),
        "vllm_adapt.kv_cache_specs",
    },
    "embeds/dataplane": {
        *("embeds.protocol.messages", "embeds.protocol.rows"),
        *("embeds.faults", "embeds.machines.effects"),
    },
}
PURE = (
    *("embeds/machines/", "embeds/protocol/messages.py", "embeds/protocol/rows.py"),
    *("handover/messages.py", "handover/watches.py"),
    "router/control/",
)
"""Modules that perform no I/O and do not read the clock."""
IMPURE = ("asyncio", "logging", "os", "queue", "select", "socket", "threading", "time", "zmq")


class Use(NamedTuple):
    name: str
    line: int
    for_types: bool


def names_used(tree: ast.AST, for_types: bool = False) -> Iterator[Use]:
    """Every name imported, and `os.environ` and `os.getenv` wherever they are read."""
    for node in ast.iter_child_nodes(tree):
        typed = for_types
        match node:
            case ast.Import(names=names):
                yield from (Use(alias.name, node.lineno, typed) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                assert level == 0, f"line {node.lineno}: relative import"
                yield from (Use(f"{module}.{alias.name}", node.lineno, typed) for alias in names)
            case ast.Attribute(value=ast.Name(id="os"), attr="environ" | "getenv" as attribute):
                yield Use(f"os.{attribute}", node.lineno, typed)
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                typed = True
        yield from names_used(node, typed)


def violations(path: str, source: str) -> list[str]:
    """Return the forbidden imports of one file, at `path` below the package."""
    found: list[str] = []
    unit = path.split("/")[0].removesuffix(".py")
    for use in names_used(ast.parse(source)):
        head, _, rest = use.name.partition(".")
        if head == PACKAGE:
            target = rest.split(".")[0]
            # What is no unit is a name of __init__, such as the version.
            if target in MAY_IMPORT and target not in {unit, "__init__", *MAY_IMPORT[unit]}:
                found.append(f"{path}:{use.line}: {unit} may not import {target}")
            allowed = FOLDERS.get(path.rpartition("/")[0])
            if allowed is not None and target == unit:
                own = path.rpartition("/")[0].replace("/", ".")
                if not any(f"{rest}.".startswith(f"{each}.") for each in (own, *allowed)):
                    found.append(f"{path}:{use.line}: {own} may not import {rest}")
        if head in IMPURE and path.startswith(PURE):
            found.append(f"{path}:{use.line}: {head} in a module that is pure")
        for name, places in ONLY_IN.items():
            is_it = use.name == name or use.name.startswith(f"{name}.")
            if is_it and not use.for_types and not path.startswith(places):
                found.append(f"{path}:{use.line}: {name} stops at {places}")
    return found


def test_imports_point_down() -> None:
    files = {path.relative_to(ROOT).as_posix(): path.read_text() for path in ROOT.rglob("*.py")}
    assert {path.split("/")[0].removesuffix(".py") for path in files} == set(MAY_IMPORT)
    assert [line for path in sorted(files) for line in violations(path, files[path])] == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("identity/keys.py", "from vllm_kvpool.scheduler.prefix_search import Lookup"),
        ("storage/files.py", "from vllm_kvpool import connector"),
        ("worker.py", "def f():\n    import vllm.config"),
        ("storage/url.py", "import os\nhome = os.environ['HOME']"),
        ("embeds/machines/window.py", "from vllm_kvpool.embeds.control import Control"),
        ("embeds/machines/window.py", "import time"),
        (
            "vllm_adapt/kv_cache_specs/layer_groups.py",
            "from vllm_kvpool.vllm_adapt.identity.namespace import engine_namespace",
        ),
        ("layout/pages.py", "if TYPE_CHECKING:\n    import vllm_kvpool.staging"),
    ],
)
def test_a_planted_violation_is_caught(path: str, source: str) -> None:
    assert len(violations(path, source)) == 1


def test_imports_for_type_checkers_may_name_outside_packages() -> None:
    assert violations("worker.py", "if TYPE_CHECKING:\n    import torch") == []
