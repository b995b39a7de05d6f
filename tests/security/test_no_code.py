"""No input becomes code, and only listed modules listen: by the source, and at run time."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent / "vllm_kvpool"
CHILD_LIMIT_S = 60
IMPORT_LIMIT_S = 1.0  # of the processor's time

# Modules that turn data into code or objects, or run other programs: forbidden in the package.
MODULES = frozenset(
    {
        *("pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"),
        *("yaml", "jsonpickle", "xmlrpc", "code", "codeop", "runpy", "pty", "importlib"),
        "multiprocessing",
    }
)
CALLS = frozenset(
    {
        *("eval", "exec", "compile", "__import__", "torch.load", "torch.jit", "torch.hub"),
        *("numpy.load", "np.load", "os.system", "os.popen", "os.execv", "os.execve"),
        *("os.posix_spawn", "os.spawnv"),
    }
)
# Allowed only in tests, whose servers are child processes with sockets.
ONLY_IN_TESTS = frozenset(
    {"subprocess", "socketserver", "http.server", "http.client", "zmq", "multiprocessing"}
)
SERVING = frozenset(
    {"bind", "accept", "create_server", "start_server", "start_unix_server", "bind_socket"}
)
STARTING = frozenset({"create_subprocess_exec", "create_subprocess_shell", "subprocess_exec"})
# Uses: probing a master, listing this machine's addresses, resolving names, finding a router's
# engines behind one name.
MAY_IMPORT_SOCKET = (
    *("storage/mooncake.py", "transfer/replicas.py"),
    *("network/allowed_peers.py", "router/ops/discovery.py"),
    *("cli/serve.py", "cli/try_model.py"),
)
# Uses: the `start` and `stop` commands of replicas, and the engines of `kvpool try`.
MAY_START = ("router/ops/commands.py",)
MAY_IMPORT_SUBPROCESS = ("cli/try_model.py",)
MAY_USE_ZMQ = "network/transport_zmq.py"
# `urllib` returns these responses and raises these exceptions. Nothing else of `http.client` may
# be imported.
HTTP_TYPES = frozenset(
    f"http.client.{name}" for name in ("HTTPException", "HTTPResponse", "IncompleteRead")
)
MAY_NAME_HTTP_TYPES = (
    "client.py",
    "direct_http.py",
    "cli/common/engine_metrics.py",
    "cli/common/tokenizer.py",
    "cli/try_model.py",
)
# Versions and paths of installed packages. Nothing is imported by these calls.
ABOUT_INSTALLED = ("importlib.metadata", "importlib.util.find_spec")
# The commands in the module's table are imported when they run.
IMPORTS_BY_NAME = ("cli/main.py", "importlib.import_module")
MAY_READ_METADATA = (
    "cli/doctor.py",
    "cli/commands/try_model.py",
    "storage/mooncake_wheel.py",
    "vllm_adapt/identity/model_code.py",
)
# Received messages are decoded by type. Replicas of a rank listen on an abstract socket of this
# host. The router and `kvpool serve` each have an HTTP server, for clients and administration.
# `kvpool try` looks for a free port, and takes no connection there.
MAY_LISTEN = (
    MAY_USE_ZMQ,
    "transfer/replicas.py",
    "router/dataplane/http_server.py",
    "cli/serve.py",
    "cli/try_model.py",
)


def dotted(node: ast.AST) -> str:
    """Return `a.b.c` for an attribute or a name, "" for other nodes."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return ""


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield every imported module, and every name imported from a module."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=module, names=names):
                yield from ((node.lineno, f"{module}.{alias.name}") for alias in names)


def called(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield every call, and the keywords that would make a call dangerous."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield node.lineno, dotted(node.func)
            yield from ((node.lineno, f"{k.arg}=") for k in node.keywords if k.arg)


def violations(path: str, source: str) -> list[str]:
    """Return the forbidden names in one file; `path` is below the package or tests/support."""
    tree = ast.parse(source)
    for_tests = path.startswith("tests/support/")
    found = []
    for line, name in imported(tree):
        module = name.partition(".")[0]
        two = ".".join(name.split(".")[:2])
        refused = MODULES if for_tests else MODULES | ONLY_IN_TESTS
        if path == MAY_USE_ZMQ:
            refused = refused - {"zmq"}
        if path in MAY_IMPORT_SUBPROCESS:
            refused = refused - {"subprocess"}
        if path in MAY_NAME_HTTP_TYPES and name in HTTP_TYPES:
            continue
        if path in MAY_READ_METADATA and name.startswith(ABOUT_INSTALLED):
            continue
        if (path, name) == IMPORTS_BY_NAME:
            continue
        opens = module == "socket" and not for_tests and path not in MAY_IMPORT_SOCKET
        if module in refused or two in refused or name in CALLS or opens:
            found.append(f"{path}:{line}: {name}")
    for line, name in called(tree):
        may_serve = for_tests or path in MAY_LISTEN
        last = name.rpartition(".")[2]
        starts = last in STARTING and path not in MAY_START and not for_tests
        serves = not may_serve and last in SERVING
        if name in CALLS or name in ("shell=", "allow_pickle=") or serves or starts:
            found.append(f"{path}:{line}: {name}")
    return found


def test_no_data_becomes_code_and_five_files_bind_a_socket() -> None:
    files = {path.relative_to(ROOT).as_posix(): path.read_text() for path in ROOT.rglob("*.py")}
    support = (ROOT.parent / "tests" / "support").rglob("*.py")
    files |= {path.relative_to(ROOT.parent).as_posix(): path.read_text() for path in support}
    assert len(files) > 50
    assert [line for path in sorted(files) for line in violations(path, files[path])] == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("storage/tiers.py", "import pickle"),
        ("tests/support/fakes.py", "from marshal import loads"),
        ("config.py", "value = eval(text)"),
        ("identity/weights.py", "import torch\nw = torch.load(path)"),
        ("identity/weights.py", "np.frombuffer(x)\nnp.load(path, mmap_mode='r')"),
        ("tests/support/models.py", "subprocess.run(command, shell=True)"),
        ("scheduler/scheduler_part.py", "import subprocess"),
        ("storage/contents/encryption.py", "import subprocess"),
        ("scheduler/scheduler_part.py", "from importlib import metadata"),
        ("cli/doctor.py", "import importlib"),
        ("scheduler/scheduler_part.py", "import os\nos.system('ls')"),
        ("storage/mooncake.py", "import socket\nserver = socket.create_server(('', 0))"),
        ("scheduler/lookup_service.py", "import socket"),
        ("storage/mooncake.py", "connection.bind(('', 0))"),
        ("vllm_adapt/engine_config.py", "import yaml\nyaml.load(text)"),
    ],
)
def test_a_planted_violation_is_caught(path: str, source: str) -> None:
    assert violations(path, source)


WATCHED = """
import sys
seen = []
refused = ("socket.bind", "socket.listen", "socket.connect", "pickle.find_class",
           "marshal.load", "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn",
           "os.fork", "urllib.Request")
def hook(event, arguments):
    if watching and event.startswith(refused):
        seen.append((event, arguments))
watching = False
sys.addaudithook(hook)
"""

AT_WORK = """
from vllm_kvpool.config import KVRole, read_config
from vllm_kvpool.identity.chunk_hash import RequestIdentity
from vllm_kvpool.identity.keys import make_namespace
from vllm_kvpool.layout.topology import KVCacheGroup, LayerGroup, Topology
from vllm_kvpool.layout.engine_shape import ModelShape
from vllm_kvpool.scheduler.scheduler_part import SchedulerPart
from vllm_kvpool.storage.base import ChunkRef, GetOutcome, PutOutcome
from vllm_kvpool.storage.file.store import FileStore
from vllm_kvpool.storage.backends import open_store
from vllm_kvpool.storage.url import parse_store_url
from tests.support.buffers import make_buffer
from vllm_kvpool.identity.weights import sample_weights
from pathlib import Path
watching = True
config = read_config({"store": f"file://{sys.argv[1]}/pool?size=4MiB"}, env={})
topology = Topology(2, 1, ((0, 4),), 2, True)
layer_groups, groups = (LayerGroup(topology, 64),), (KVCacheGroup(16),)
shape = ModelShape(make_namespace("m", "0" * 12), layer_groups, groups, 16, 1)
side = SchedulerPart(config, KVRole.BOTH, shape, None)
store = open_store(parse_store_url(config.store), segment=True)
keys = [f"{shape.namespace}@dcp0of1@head:0@layers:0-4@{n:040x}" for n in range(80)]
buffers = [make_buffer(100_000) for _ in keys]
assert PutOutcome.STORED in store.put(keys, buffers, [ChunkRef("g")] * 80)
assert GetOutcome.OK in store.get(keys, buffers)
store.remove_namespace(shape.namespace)
(Path(sys.argv[1]) / "model.safetensors").write_bytes(bytes(1000))
assert sample_weights(Path(sys.argv[1]))
store.close()
side.close()
watching = False
assert not seen, seen
"""

LIGHT = """
import sys, time
start = time.process_time()
import vllm_kvpool.storage.url, vllm_kvpool.config, vllm_kvpool.identity.keys
import vllm_kvpool.storage.contents.cell_format
heavy = {"torch", "numba", "mooncake", "obstore", "vllm", "asyncio", "subprocess"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
print(time.process_time() - start)
"""


def run(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=CHILD_LIMIT_S,
        cwd=ROOT.parent,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_at_work_the_interpreter_sees_no_socket_and_no_program(tmp_path: Path) -> None:
    """Python's audit events are checked with a file store and with both sides, without pages."""
    run(WATCHED + AT_WORK, str(tmp_path))


def test_the_watch_sees_what_it_is_for() -> None:
    run(WATCHED + "import socket\nwatching = True\nsocket.create_server(('', 0))\nassert seen")


@pytest.mark.alone
def test_reading_a_configuration_is_light_and_brings_no_client_along() -> None:
    """A store's client is imported only if a url names the store."""
    assert float(run(LIGHT)) < IMPORT_LIMIT_S
