"""Differences between releases of vLLM: block tables from both kinds of steps, page sizes."""

import inspect
import math
import queue
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import vllm
from packaging.version import Version
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from tests.support.releases import (
    FEATURES_BY_RELEASE,
    NEWEST,
    OLDEST,
    SLEEPING_WORKERS,
    since,
)
from tests.support.step_queue import step_queue
from vllm_kvpool.connector import KVPoolConnector
from vllm_kvpool.vllm_adapt import compat
from vllm_kvpool.vllm_adapt.compat import BlockTables

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def step(
    new: dict[str, list[int]] | None = None,
    more: dict[str, list[int] | None] | None = None,
    resumed: set[str] | None = None,
) -> Any:
    """Return a step of an older release: tables of new requests, and blocks added to others."""
    more = more or {}
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, block_ids=(ids,)) for name, ids in (new or {}).items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(more),
            new_block_ids=[None if ids is None else (ids,) for ids in more.values()],
            resumed_req_ids=resumed or set(),
        ),
    )


def embeddings_are_there() -> bool:
    try:
        import vllm_kvpool.embeds.connector  # noqa: F401 - refuses older releases
    except ImportError:
        return False
    return True


def test_features_of_this_release_are_those_of_the_table() -> None:
    expected = {name: since(table, vllm.__version__) for name, table in FEATURES_BY_RELEASE.items()}
    assert expected == {
        "KV events of the pool": compat.tells_locality(),
        "loads of models with several KV cache groups": compat.reports_failed_loads_by_request(),
        "recurrent states": compat.offers_states(),
        "`layerwise`": compat.has_loads_within_steps(),
        "embeddings (`KVPoolECConnector`)": embeddings_are_there(),
    }


def test_tables_grow_with_what_steps_say() -> None:
    tables = BlockTables()
    table = tables.of_step(step(new={"a": [1, 2], "b": [3]}))
    assert (table("a"), table("b"), table("c")) == ([[1, 2]], [[3]], ())
    table = tables.of_step(step(more={"a": [4], "b": None}))
    assert (table("a"), table("b")) == ([[1, 2, 4]], [[3]])


def test_a_resumed_request_has_a_table_of_its_own() -> None:
    tables = BlockTables()
    tables.of_step(step(new={"a": [1, 2]}))
    assert tables.of_step(step(more={"a": [7, 8]}, resumed={"a"}))("a") == [[7, 8]]
    assert tables.of_step(step(more={"a": [9]}))("a") == [[7, 8, 9]]


def test_a_request_that_has_ended_leaves_nothing() -> None:
    tables = BlockTables()
    tables.of_step(step(new={"a": [1]}))
    tables.drop_request("a")
    tables.drop_request("a")
    assert tables.of_step(step())("a") == ()


def test_a_release_that_has_tables_of_some_requests_alone_is_read_by_its_steps() -> None:
    """vLLM 0.28 and 0.29 have tables only of requests that got blocks in the step."""
    tables = BlockTables()
    first, second = step(new={"a": [1, 2]}), step(more={"a": None})
    first.kv_connector_block_state = SimpleNamespace(block_ids={"a": ([1, 2],)})
    second.kv_connector_block_state = SimpleNamespace(block_ids={})
    assert tables.of_step(first)("a") == tables.of_step(second)("a") == [[1, 2]]


def test_what_an_engine_says_does_not_change_with_our_table() -> None:
    ids = [1, 2]
    tables = BlockTables()
    tables.of_step(step(new={"a": ids}))
    tables.of_step(step(more={"a": [3]}))
    assert ids == [1, 2]


def test_a_newer_release_resolves_tables_itself() -> None:
    known = {"a": ([5, 6],)}
    output: Any = SimpleNamespace(kv_connector_block_state=SimpleNamespace(get_block_ids=known.get))
    table = BlockTables().of_step(output)
    assert (table("a"), table("b")) == (([5, 6],), ())


def test_older_releases_offer_no_states() -> None:
    offers = {"a": [(1, 7, 64)], "b": [(1, 8, 64), (2, 9, 64)]}
    state = SimpleNamespace(boundary_state_offloads=offers)
    output: Any = SimpleNamespace(kv_connector_block_state=state)
    assert compat.state_offers(output) == offers
    older: Any = SimpleNamespace()
    assert compat.state_offers(older) == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rows_bytes_are_the_same_by_either_releases_names(dtype: torch.dtype) -> None:
    spec = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=dtype)
    item = torch.empty((), dtype=dtype).element_size()
    older = SimpleNamespace(
        block_size=32, num_kv_heads=2, real_page_size_bytes=2 * 32 * 2 * 64 * item
    )
    assert compat.row_bytes(spec) == compat.row_bytes(older) == 2 * 64 * item
    assert compat.tokens_per_state(older) == compat.tokens_per_state(spec) == 1
    assert not compat.has_own_content(older)


# Releases that accept failed loads by request.
BY_REQUEST = {"0.23.0": False, "0.30.0": True}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_blocks_are_zeroed_before_a_steps_loads_begin() -> None:
    """A drafter's layers lie in blocks that are loaded, and their cells may be missing."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as Newer
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as Older

    assert KVPoolConnector.get_loaded_kv_cache_group_ids(Mock(), Mock()) == ()
    for runner, update, loads in (
        (Older, "_update_states", ("kv_connector_no_forward", "get_kv_connector_output")),
        (Newer, "update_requests", ("kv_connector.no_forward", "kv_connector.pre_forward")),
    ):
        assert "zero_block_ids" in inspect.getsource(getattr(runner, update))
        steps = inspect.getsource(runner.execute_model)
        assert all(0 < steps.index(f".{update}(") < steps.index(each) for each in loads)


def test_failed_loads_are_told_by_request_where_the_release_can() -> None:
    """The first of two ranks has failed to load "a", both have loaded "b"."""
    by_request = compat.reports_failed_loads_by_request()
    assert by_request is since(BY_REQUEST, vllm.__version__)
    first, second = (KVConnectorOutput(finished_recving={"a", "b"}) for _ in range(2))
    if by_request:
        first.failed_recving = {"a"}
    merged = KVOutputAggregator(2).aggregate(
        [ModelRunnerOutput.with_kv_conn_output_only(rank) for rank in (first, second)]
    )
    assert merged is not None
    output = merged.kv_connector_output
    assert output is not None
    assert output.finished_recving == {"a", "b"}
    assert getattr(output, "failed_recving", None) == ({"a"} if by_request else None)


def test_the_width_of_values_is_that_of_keys_where_nothing_else_is_said() -> None:
    older = SimpleNamespace(head_size=64)
    assert compat.value_head_size(older) == 64
    assert compat.value_head_size(SimpleNamespace(head_size=64, head_size_v=32)) == 32


ROPES: tuple[dict[str, Any], ...] = (
    {},
    {"attention_factor": 1.0},
    {"attention_factor": 1.2079441541679836},
    {"mscale": 1.0, "mscale_all_dim": 1.0},  # Ministral 3
    {"mscale": 0.707, "mscale_all_dim": 1.0},
    {"mscale": 1.0},
    {"attn_factor": 1.5},
    {"apply_yarn_scaling": False},
    {"apply_yarn_scaling": False, "attn_factor": 2.0},
    {"extrapolation_factor": 0.5},
    {"mscale": None, "attention_factor": None},
)
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "original_max_position_embeddings": 16}


def build_rope(kind: str, fields: dict[str, Any]) -> Any:
    """Return the rotary embedding that this release builds."""
    from vllm.model_executor.layers.rotary_embedding import get_rope

    read = {name: value for name, value in fields.items() if value is not None}
    with set_current_vllm_config(VllmConfig()):
        return get_rope(8, 128, True, {**YARN, **read, "rope_type": kind}, torch.float32)


@pytest.mark.parametrize("factor", [1.0, 8.0])
@pytest.mark.parametrize("fields", ROPES, ids=str)
def test_yarn_is_what_this_release_reads(fields: dict[str, Any], factor: float) -> None:
    built = build_rope("yarn", {**fields, "factor": factor})
    usual = build_rope("yarn", {"factor": factor})
    found = compat.yarn_reading({**YARN, **fields, "factor": factor}, is_latent=False)
    assert math.isclose(built.mscale, found.get("scale", usual.mscale))
    # With a factor of 1 all frequencies are the same.
    told = "extrapolation" in found and factor > 1
    turns = [each.cos_sin_cache / each.mscale for each in (built, usual)]
    assert told is not torch.allclose(*turns)
    assert ("scale" in found) is not math.isclose(built.mscale, usual.mscale)


@pytest.mark.parametrize(
    "fields", [{}, {"mscale": 1.0}, {"attn_factor": 1.5}, {"extrapolation_factor": 0.5}], ids=str
)
def test_yarn_of_mla_is_deepseeks(fields: dict[str, Any]) -> None:
    """Every release reads `mscale` here.

    `yarn_reading` tells only fields that change the values.
    """
    whole = {"mscale": 0.707, "mscale_all_dim": 1.0, **fields, "factor": 40.0}
    others = {name: value for name, value in whole.items() if "mscale" in name or name == "factor"}
    built, usual = (build_rope("deepseek_yarn", each) for each in (whole, others))
    found = compat.yarn_reading({**YARN, **whole}, is_latent=True)
    assert math.isclose(built.mscale, usual.mscale * found.get("scale", 1.0))
    assert bool(found) is not torch.equal(built.cos_sin_cache, usual.cos_sin_cache)


def test_other_ropes_are_not_yarn() -> None:
    fields = {"factor": 8.0, "attention_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    assert compat.yarn_reading({"rope_type": "llama3", **fields}, is_latent=False) == {}
    assert compat.yarn_reading({}, is_latent=False) == {}


def test_yarn_of_mla_is_deepseeks_unless_it_says_otherwise() -> None:
    plain = {"attention_factor": 1.0, "apply_yarn_scaling": False}
    whole = {"type": "yarn", "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.0, **plain}
    assert compat.yarn_reading(whole, is_latent=True) == {"scale": 1.0}


def test_the_second_model_runner_takes_no_step_back() -> None:
    """vLLM lowers a running request's computed tokens after a load that failed within a step. That
    runner takes positions from a count on the device, and writes it for new requests alone: here
    the device has none. A release that writes it fails this test, and `takes_steps_back` with it.
    """
    counts = SimpleNamespace(
        req_id_to_index={"a": 0},
        num_computed_tokens_np=np.array([64]),
        prefill_len=SimpleNamespace(np=np.array([100])),
        num_computed_prefill_tokens=np.array([64]),
    )
    again = SimpleNamespace(req_ids=["a"], num_computed_tokens=[32], new_block_ids=[None])
    step = SimpleNamespace(
        scheduled_cached_reqs=again,
        new_block_ids_to_zero=None,
        kv_cache_block_copies=None,
        block_table_updates=None,  # of 0.31
    )
    runner: Any = SimpleNamespace(req_states=counts)
    GPUModelRunner.update_requests(runner, step)
    assert counts.num_computed_tokens_np == [32]


FEATURES: Mapping[str, Callable[[], bool]] = {
    "KV and tensor parallelism, block sizes, tiers, failures": lambda: True,
    "KV events of the pool": compat.tells_locality,
    "loads of models with several KV cache groups": compat.reports_failed_loads_by_request,
    "recurrent states": compat.offers_states,
    "`layerwise`": compat.has_loads_within_steps,
    "embeddings (`KVPoolECConnector`)": lambda: bool(
        find_spec("vllm.distributed.ec_transfer.ec_connector.metrics")
    ),
}


def test_what_a_release_lacks_is_in_the_documents() -> None:
    """docs/support.md has a column for each release that is tested in full, and for the last one.

    A release that no test runs is never called on.
    """
    document = (Path(__file__).parents[2] / "docs" / "support.md").read_text()
    section = document.partition("## By release of vLLM")[2].partition("\n## ")[0]
    rows = [row.strip("| ").split(" | ") for row in section.splitlines() if row.startswith("| ")]
    (_, *releases), _, *features = rows
    last = max(compat.EQUAL_RELEASES, key=Version)
    assert {OLDEST, NEWEST, last} <= set(releases)
    assert [name for name, *_ in features] == list(FEATURES)
    for name, *columns in features:
        by_release = dict(zip(releases, columns, strict=True))
        here = by_release.get(vllm.__version__)
        assert here in (None, "on" if FEATURES[name]() else "off"), name
        untested = {by_release[each] for each in releases if Version(each) > Version(NEWEST)}
        assert untested <= {"tried by hand", "not tried"}, name


def test_the_package_admits_the_releases_that_are_tested() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    [needed] = project["optional-dependencies"]["vllm"]
    assert needed == f"vllm>={OLDEST},<0.34"
    assert Version(NEWEST) < Version("0.34")


class EngineCore:
    """A stand-in for vLLM's engine, which makes its connector when its queue exists.

    Only an engine in a process of its own has a queue.
    """

    def __init__(self, inbox: "queue.Queue[object] | None", on_arrival: Callable[[], None]) -> None:
        if inbox is not None:
            self.input_queue = inbox
        self.make_scheduler(on_arrival)

    def make_scheduler(self, on_arrival: Callable[[], None]) -> None:
        self.has_arrivals = compat.watch_arrivals(on_arrival)


@pytest.mark.parametrize("put", ["put", "put_nowait"])
def test_whatever_an_engine_is_sent_is_noticed_until_it_takes_it(put: str) -> None:
    inbox: queue.Queue[object] = queue.Queue()
    seen: list[bool] = []
    engine = EngineCore(inbox, lambda: seen.append(bool(inbox.queue)))
    assert engine.has_arrivals is not None
    assert not engine.has_arrivals()
    getattr(inbox, put)("request")
    assert engine.has_arrivals()
    assert seen == [True], "it is in the queue by then"
    assert inbox.get_nowait() == "request"
    assert not engine.has_arrivals()


def test_nothing_is_sent_to_an_engine_in_its_callers_process() -> None:
    assert EngineCore(None, lambda: None).has_arrivals is None
    assert compat.watch_arrivals(lambda: None) is None


class WorkerProc:
    """A stand-in for vLLM's process of a worker, which reads its steps from a queue."""

    def __init__(self, steps: MessageQueue) -> None:
        self.rpc_broadcast_mq = steps

    def make_worker(self) -> Callable[[], None]:
        return compat.polling_end()


class Worker:
    """Reads steps from a queue on a thread, and is stopped between a look for one and the wait."""

    def __init__(self, reader: MessageQueue, pool: ThreadPoolExecutor) -> None:
        self._reader, self._pool = reader, pool
        self.polled = reader._spin_condition
        self._asleep, self._looked, self._goes_on = Event(), Event(), Event()
        self._looks_left = 0
        self._poll, self._wait = self.polled.poller.poll, self.polled.wait
        vars(self.polled.poller)["poll"] = self._sleep
        vars(self.polled)["wait"] = self._look
        self.end_polling = WorkerProc(reader).make_worker()

    def _sleep(self, timeout: int | None = None) -> Any:
        if timeout is None or timeout > 1_000:
            self._asleep.set()
        return self._poll(timeout)

    def _look(self, timeout_ms: int | None = None) -> None:
        self._looks_left -= 1
        if self._looks_left == 0:
            self._looked.set()
            assert self._goes_on.wait(LIMIT_S)
        self._wait(timeout_ms)

    def read(self) -> "Future[str]":
        return self._pool.submit(self._reader.dequeue, LIMIT_S)

    def sleep(self) -> None:
        """Return as soon as it waits in vLLM's long poll: nothing but a wake-up ends it soon."""
        self.polled.last_read = -math.inf
        assert self._asleep.wait(LIMIT_S)

    def read_and_stop(self, looks: int) -> "Future[str]":
        """Stop it after so many looks for a step that is not there."""
        self._looks_left = looks
        read = self.read()
        assert self._looked.wait(LIMIT_S)
        return read

    def go_on(self) -> None:
        self._goes_on.set()


LIMIT_S = 60.0
SOON_S = 2.0  # vLLM looks again after 5 s


@pytest.fixture
def steps_and_worker() -> Iterator[tuple[MessageQueue, Worker]]:
    """A wake-up of before is still to be taken."""
    with step_queue() as (steps, reader), ThreadPoolExecutor(1) as pool:
        while not reader._spin_condition.local_notify_socket.poll(10):  # not subscribed yet
            steps._spin_condition.notify()
        yield steps, Worker(reader, pool)


@pytest.mark.parametrize("field", ["last_read", "busy_loop_s", "poller"])
def test_worker_polls_on_where_vllm_lacks_a_name(field: str) -> None:
    with step_queue() as (_, reader):
        polled = reader._spin_condition
        delattr(polled, field)
        before = dict(vars(polled))
        WorkerProc(reader).make_worker()()
        assert vars(polled) == before


def test_worker_polls_no_more_after_a_step_without_work() -> None:
    with step_queue() as (_, reader):
        polled = reader._spin_condition
        polled.busy_loop_s = LIMIT_S
        WorkerProc(reader).make_worker()()
        polls = time.monotonic() <= polled.last_read + polled.busy_loop_s
        assert polls is not since(SLEEPING_WORKERS, vllm.__version__)


needs_sleep = pytest.mark.skipif(
    not since(SLEEPING_WORKERS, vllm.__version__), reason="this release's workers poll on"
)


@needs_sleep
def test_worker_that_sleeps_wakes_for_its_next_step(
    steps_and_worker: tuple[MessageQueue, Worker],
) -> None:
    steps, worker = steps_and_worker
    read = worker.read()
    worker.sleep()
    steps.enqueue("step")
    assert read.result(SOON_S) == "step"


@needs_sleep
@pytest.mark.parametrize(
    ("was_asleep", "looks"),
    [
        pytest.param(True, 1, id="woken by the step before"),
        pytest.param(False, 2, id="a wake-up was left"),
    ],
)
def test_step_whose_wake_up_is_dropped_is_found_soon(
    steps_and_worker: tuple[MessageQueue, Worker],
    monkeypatch: pytest.MonkeyPatch,
    was_asleep: bool,
    looks: int,
) -> None:
    """The worker is paused after its look for the next step, which is written meanwhile."""
    steps, worker = steps_and_worker
    read = worker.read()
    if was_asleep:
        worker.sleep()
        steps.enqueue("without work")
        assert read.result(SOON_S) == "without work"
    monkeypatch.setattr(steps._spin_condition, "notify", lambda: None)  # as ZeroMQ drops it
    if not was_asleep:
        steps.enqueue("without work")
        assert read.result(SOON_S) == "without work"
    worker.end_polling()
    read = worker.read_and_stop(looks)
    steps.enqueue("step")
    worker.go_on()
    assert read.result(SOON_S) == "step"


class RecordedPoller:
    """A poller that nothing wakes; records how long it was to wait, in milliseconds."""

    def __init__(self) -> None:
        self.waits: list[int | None] = []

    def poll(self, timeout: int | None = None) -> list[object]:
        self.waits.append(timeout)
        return []


@pytest.mark.parametrize(
    ("given", "waited"), [(None, compat.LOOK_MS), (5000, compat.LOOK_MS), (1, 1), (0, 0)]
)
def test_second_look_of_a_worker_comes_no_later_than_vllm_wants_it(
    given: int | None, waited: int
) -> None:
    poller = RecordedPoller()
    wake_ups = compat._WakeUps(poller)
    wake_ups.poll(given)
    wake_ups.poll(given)
    assert poller.waits == [waited, given]


def test_worker_without_a_process_of_its_own_polls_for_nothing() -> None:
    compat.polling_end()()


def test_engine_has_its_queue_before_it_makes_the_scheduler() -> None:
    """The installed release of vLLM keeps this order."""
    source = inspect.getsource(EngineCoreProc.__init__)
    assert source.index("self.input_queue = queue.Queue") < source.index("super().__init__(")
    assert "EngineCore" in {each.__name__ for each in EngineCoreProc.__mro__}
