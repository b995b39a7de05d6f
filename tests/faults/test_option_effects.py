"""Every option of the pool and of a request has an effect, seen from outside a whole engine.

A case sets an option of the connector, or a field of a request's `kv_transfer_params`. It observes
the difference in answers, counters, stores, files or the log. An option without a case fails the
walk at the end. The engine is vLLM's scheduler and the connector over a fake model (`rig.py`).
"""

import base64
import itertools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import vllm
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups
from vllm.v1.kv_cache_interface import FullAttentionSpec

from tests.faults.model import FakeModel
from tests.faults.rig import BLOCK, CHUNK, PAUSE_S, Rig, RigSpec
from tests.faults.workshop import Workshop
from tests.support.drafters import EvenShape, make_eagle, speculation
from tests.support.faults import Fault
from tests.support.memory_store import MemoryStore
from tests.support.models import make_model
from tests.support.releases import LAYERWISE, since
from vllm_kvpool.config import KVPoolConfig, RequestOptions, read_config
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.storage.file import space
from vllm_kvpool.storage.file import store as file_store
from vllm_kvpool.storage.file.store import FileStore
from vllm_kvpool.vllm_adapt import engine_config
from vllm_kvpool.worker.worker_part import VLLM_SHUTDOWN_S

CHUNKS = 4
WHOLE = CHUNKS * CHUNK
PROMPT = [3 + 7 * i % 900 for i in range(WHOLE + 9)]
CELLS = CHUNKS * FakeModel().heads * FakeModel().layers  # of PROMPT: spans of one layer
ANSWER_TOKENS = 3
LIMIT_S = 60.0
LONG_MS, SHORT_MS = 30_000, 30
LONG_S, SHORT_S = 30.0, 0.05
TURNS = 30  # steps of a waiting engine in which nothing may happen
HELD_S = 0.6  # duration of a put at exit
SLOW_S = 0.2  # delay that makes a load slower than computing
DAY_NS = 86_400 * 10**9
FLOOD = 10  # more prompts than fit into a directory of 1 MiB
ELSEWHERE = "tcp://192.0.2.1:9"  # an unassigned address (RFC 5737)


@dataclass(frozen=True, slots=True)
class Bench:
    """The fixtures with which cases build engines."""

    workshop: Workshop
    tmp_path: Path
    monkeypatch: pytest.MonkeyPatch
    caplog: pytest.LogCaptureFixture

    def rig(self, store: str | list[str] = "", name: str = "rig", **options: Any) -> Rig:
        return self.rig_of(RigSpec(options=options), store, name)

    def rig_of(self, spec: RigSpec, store: str | list[str] = "", name: str = "rig") -> Rig:
        return self.workshop.rig(spec, store or self.workshop.memory(), name)

    def stored(self, **options: Any) -> str:
        """Return a store in which an engine with these options has saved PROMPT."""
        url = self.workshop.memory()
        serve(self.rig(url, "writer", **options))
        return url

    def num_cells(self, url: str) -> int:
        store = self.workshop.plain_store(url)
        assert isinstance(store, MemoryStore)
        return sum("@manifest" not in key for key in store._table.list_keys())

    def hits(self, url: str, **options: Any) -> float:
        """Return the hit tokens of PROMPT in a new engine over a store."""
        return serve(self.rig(url, "reader", **options))


def serve(rig: Rig, prompt: list[int] = PROMPT, **asked: Any) -> float:
    """Answer a prompt, assert that its output is right, and return its hit tokens."""
    before = rig.count("kvpool_hit_tokens")
    request_id = rig.add(prompt, ANSWER_TOKENS, **asked)
    rig.run(LIMIT_S)
    rig.expect([request_id])
    rig.settle()
    return rig.count("kvpool_hit_tokens") - before


def has_begun(rig: Rig, request_id: str) -> bool:
    return bool(rig.answers[request_id].tokens)


def waits(rig: Rig, request_id: str) -> bool:
    """Return True if the request has no token after some steps without a pause."""
    for _ in range(TURNS):
        rig.step()
    return not has_begun(rig, request_id)


def wait_for(condition: Callable[[], bool], *stepping: Rig) -> None:
    """Wait for `condition`, which threads of an engine make true; `stepping` engines step
    meanwhile."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        for rig in stepping:
            rig.step()
        time.sleep(PAUSE_S)


Case = Callable[[Bench], None]
OPTIONS: dict[str, Case] = {}
REQUEST: dict[str, Case] = {}


def shows(table: dict[str, Case]) -> Callable[[Case], Case]:
    """Register a case under the name of its option."""

    def register(case: Case) -> Case:
        table[case.__name__] = case
        return case

    return register


# Options of the connector


@shows(OPTIONS)
def store(bench: Bench) -> None:
    url = bench.stored()
    assert bench.hits(url) == WHOLE
    assert bench.hits(bench.workshop.memory()) == 0


@shows(OPTIONS)
def chunk_tokens(bench: Bench) -> None:
    url = bench.stored(chunk_tokens=2 * CHUNK)
    assert bench.num_cells(url) == CELLS // 2
    assert bench.hits(url, chunk_tokens=2 * CHUNK) == WHOLE
    assert bench.hits(url) == 0


@shows(OPTIONS)
def layer_span(bench: Bench) -> None:
    assert bench.num_cells(bench.stored(layer_span=1)) == CELLS
    assert bench.num_cells(bench.stored(layer_span=2)) == CELLS // 2


@shows(OPTIONS)
def per_head_storage(bench: Bench) -> None:
    assert bench.num_cells(bench.stored(per_head_storage=False)) == CELLS // FakeModel().heads


@shows(OPTIONS)
def namespace(bench: Bench) -> None:
    url = bench.stored(namespace="ours")
    assert bench.hits(url, namespace="ours") == WHOLE
    assert bench.hits(url, namespace="theirs") == 0


@shows(OPTIONS)
def weights_id(bench: Bench) -> None:
    url = bench.stored(weights_id="v1")
    assert bench.hits(url, weights_id="v1") == WHOLE
    assert bench.hits(url, weights_id="v2") == 0


@shows(OPTIONS)
def staging_bytes(bench: Bench) -> None:
    with pytest.raises(ConfigError, match="staging_bytes"):
        bench.rig(staging_bytes="1KiB")


@shows(OPTIONS)
def write_policy(bench: Bench) -> None:
    for policy, cells in (("through", CELLS), ("back", 0)):
        url = bench.workshop.memory()
        serve(bench.rig(["host://1MiB", url], write_policy=policy))
        assert bench.num_cells(url) == cells


@shows(OPTIONS)
def prefetch(bench: Bench) -> None:
    """The cells of the second queued request are in host memory before its turn."""
    url = bench.stored()
    for is_on in (True, False):
        spec = RigSpec(num_blocks=16, options={"prefetch": is_on})
        rig = bench.rig_of(spec, ["host://1MiB", url], "reader")
        running = rig.add([3 + 5 * i % 900 for i in range(WHOLE + CHUNK)], 60)
        rig.run(LIMIT_S, until=partial(has_begun, rig, running))
        queue = [rig.add(PROMPT[::-1], ANSWER_TOKENS), rig.add(PROMPT, ANSWER_TOKENS)]
        rig.run(LIMIT_S)
        rig.expect([running, *queue])
        rig.shutdown()
        assert (rig.count("kvpool_prefetched_cells", "outcome=used") > 0) is is_on


@shows(OPTIONS)
def layerwise(bench: Bench) -> None:
    """A request runs in the step in which its load begins."""
    url = bench.stored()
    if not since(LAYERWISE, vllm.__version__):
        with pytest.raises(ConfigError, match="layerwise"):
            bench.rig(url, layerwise=True)
        return
    for is_on in (True, False):
        rig = bench.rig(url, "reader", layerwise=is_on)
        at_once: list[bool] = []

        def look(output: Any, at_once: list[bool] = at_once) -> None:
            loads = output.kv_connector_metadata.plan.loads
            at_once.extend(load.request_id in output.num_scheduled_tokens for load in loads)

        rig.on_scheduled.append(look)
        assert serve(rig) == WHOLE
        assert at_once == [is_on]


@shows(OPTIONS)
def load_policy(bench: Bench) -> None:
    """The store is slower than computing, so the second hit is not loaded."""
    other, long = ([3 + n * i % 900 for i in range(m * WHOLE)] for n, m in ((11, 1), (5, 2)))
    url = bench.stored()
    serve(bench.rig(url, "writer"), other)
    bench.workshop.slow_s = SLOW_S
    bench.workshop.faults.inject(Fault.SLOW, "get", store="reader.0")
    for policy, found in (("always", WHOLE - 1), ("auto", 0)):
        rig = bench.rig(url, "reader", load_policy=policy)
        serve(rig, long, save=False)  # measures the cost of computing
        assert serve(rig) == WHOLE
        assert serve(rig, other) == found


@shows(OPTIONS)
def load_failure(bench: Bench) -> None:
    url = bench.stored()
    bench.workshop.faults.inject(Fault.MISSING, "get", store="reader.0")
    for policy, ended in (("recompute", "length"), ("fail", "error")):
        rig = bench.rig(url, "reader", load_failure=policy)
        request_id = rig.add(PROMPT, ANSWER_TOKENS)
        rig.run(LIMIT_S)
        assert rig.answers[request_id].ended == ended


@shows(OPTIONS)
def lookup_timeout_ms(bench: Bench) -> None:
    """A hasty engine computes a prompt while a patient one still waits for the tier's answer."""
    url, faults = bench.stored(), bench.workshop.faults
    faults.inject(Fault.BLOCKED, "exists", store="scheduler")
    patient = bench.rig(url, "patient", lookup_timeout_ms=LONG_MS)
    waiting = patient.add(PROMPT, ANSWER_TOKENS)
    patient.run(LIMIT_S, until=faults.entered.is_set)
    assert serve(bench.rig(url, "hasty", lookup_timeout_ms=SHORT_MS)) == 0
    assert waits(patient, waiting)
    faults.release()
    patient.run(LIMIT_S)
    patient.expect([waiting])
    leaves_late_tier_alone(bench, url)


def leaves_late_tier_alone(bench: Bench, url: str) -> None:
    """Lookups of a hasty engine leave out a tier that answers after their timeout."""
    bench.workshop.slow_s = 5 * SHORT_MS / 1000
    bench.workshop.faults.inject(Fault.SLOW, "exists", store="scheduler")
    hasty, tokens = bench.rig(url, "late", lookup_timeout_ms=SHORT_MS), itertools.count()

    def is_left_alone() -> bool:
        serve(hasty, [next(tokens), *PROMPT[1:]])
        return hasty.count("kvpool_lookup_tier_up") == 0

    wait_for(is_left_alone)


@shows(OPTIONS)
def load_timeout_s(bench: Bench) -> None:
    """An engine computes a prompt while another one still waits for the same cells."""
    url, faults = bench.stored(), bench.workshop.faults
    faults.inject(Fault.BLOCKED, "get", store=".0")
    patient = bench.rig(url, "patient", load_timeout_s=LONG_S, call_timeout_s=LONG_S)
    waiting = patient.add(PROMPT, ANSWER_TOKENS)
    patient.run(LIMIT_S, until=faults.entered.is_set)
    hasty = bench.rig(url, "hasty", load_timeout_s=SHORT_S, call_timeout_s=LONG_S)
    computed = hasty.add(PROMPT, ANSWER_TOKENS)
    hasty.run(LIMIT_S)
    hasty.expect([computed])
    assert waits(patient, waiting)
    faults.release()
    patient.run(LIMIT_S)
    patient.expect([waiting])
    assert patient.count("kvpool_hit_tokens") == WHOLE


@shows(OPTIONS)
def call_timeout_s(bench: Bench) -> None:
    """Puts of two engines hang: the first one's store counts as away before the second one's."""
    bench.workshop.faults.inject(Fault.BLOCKED, "put", store=".0")
    hasty, patient = (
        bench.rig("", name, call_timeout_s=limit_s)
        for name, limit_s in (("hasty", SHORT_S), ("patient", LONG_S))
    )
    for rig in (patient, hasty):
        bench.workshop.faults.entered.clear()
        rig.add(PROMPT, ANSWER_TOKENS)
        rig.run(LIMIT_S, until=bench.workshop.faults.entered.is_set)
    wait_for(lambda: hasty.count("kvpool_failures", "kind=store_stuck") > 0, hasty, patient)
    assert not patient.count("kvpool_failures")


@shows(OPTIONS)
def save_decode(bench: Bench) -> None:
    """A second turn finds the first one's answer."""
    for saves in (True, False):
        url = bench.workshop.memory()
        writer = bench.rig(url, "writer", save_decode=saves)
        request_id = writer.add(PROMPT, CHUNK)
        writer.run(LIMIT_S)
        writer.settle()
        turn = [*PROMPT, *writer.answers[request_id].tokens]
        found = serve(bench.rig(url, "reader", save_decode=saves), turn)
        assert found == WHOLE + (CHUNK if saves else 0)


@shows(OPTIONS)
def alias_tokens(bench: Bench) -> None:
    """A prompt that differs from a stored one inside a chunk hits the blocks before the
    difference."""
    parted = [*PROMPT[: WHOLE - BLOCK], *reversed(PROMPT)]
    for step in (0, 8):
        url = bench.stored(alias_tokens=step)
        reader = bench.rig(url, "reader", alias_tokens=step)
        assert serve(reader, parted) == WHOLE - (BLOCK if step else CHUNK)


@shows(OPTIONS)
def drafts(bench: Bench) -> None:
    """Compare the drafter's layer in an engine's configuration for each value of `drafts`."""
    shape = EvenShape(layers=2)
    model = make_model(bench.tmp_path, shape)
    config = EngineArgs(
        model=str(model),
        dtype="float32",
        skip_tokenizer_init=True,
        speculative_config=dict(speculation("eagle", make_eagle(bench.tmp_path, shape), 1)),
    ).create_engine_config()
    config.cache_config.kv_cache_layout = "LBHNC"
    spec = FullAttentionSpec(
        block_size=16,
        num_kv_heads=shape.kv_heads,
        head_size=shape.head_dim,
        dtype=FakeModel().torch_dtype,
    )
    names = [f"model.layers.{layer}.self_attn.attn" for layer in range(shape.layers + 1)]
    groups = get_kv_cache_groups(config, dict.fromkeys(names, spec))
    cache = get_kv_cache_config_from_groups(config, groups, available_memory=64 << 20)
    found = {
        value: [
            each.is_optional
            for each in engine_config.read_engine(
                config, cache, read_config({"drafts": value}, env={})
            ).shape.layer_groups
            if each.is_draft
        ]
        for value in ("prefer", "require", "off")
    }
    assert found == {"prefer": [True], "require": [False], "off": []}


@shows(OPTIONS)
def verify(bench: Bench) -> None:
    """A bit of a cell's rows is flipped in the store."""
    url = bench.stored()
    bench.workshop.faults.inject(Fault.FLIPPED, "get", store="reader.0")
    assert bench.hits(url, verify="checksum") < WHOLE
    with pytest.raises(AssertionError, match="wrong rows"):
        bench.hits(bench.stored(), verify="length")


@shows(OPTIONS)
def encryption_key_file(bench: Bench) -> None:
    key = bench.tmp_path / "key"
    key.write_text(base64.b64encode(bytes(range(32))).decode())
    key.chmod(0o600)
    url = bench.stored(encryption_key_file=str(key))
    assert bench.hits(url, encryption_key_file=str(key)) == WHOLE
    assert bench.hits(url) == 0


@shows(OPTIONS)
def notice_listen(bench: Bench) -> None:
    for listen, is_told in (("", True), ("off", False)):
        rig = bench.rig(notice_listen=listen)
        request_id = rig.add(PROMPT, 1, hand_over=True)
        rig.run(LIMIT_S)
        params = rig.answers[request_id].params
        assert params is not None
        assert ("notices" in params["kvpool"]) is is_told


@shows(OPTIONS)
def allowed_peers(bench: Bench) -> None:
    """Notices of another host are read only if the host is allowed."""
    for allowed, refused in (((), 1), (("192.0.2.0/24",), 0)):
        rig = bench.rig(allowed_peers=list(allowed))
        asked = {"expect_tokens": WHOLE, "expect_timeout_ms": SHORT_MS, "notices": [ELSEWHERE]}
        serve(rig, **asked)
        if refused:
            wait_for(lambda rig=rig: rig.count("kvpool_notices", "event=refused") > 0)  # type: ignore[misc]
        assert rig.count("kvpool_notices", "event=refused") == refused


@shows(OPTIONS)
def shutdown_timeout_s(bench: Bench) -> None:
    """An exit waits for a put, or leaves it, which ends before the longest wait would."""
    faults = bench.workshop.faults
    for limit_s, put_s, is_left in ((SHORT_S, VLLM_SHUTDOWN_S / 2, True), (LONG_S, HELD_S, False)):
        faults.inject(Fault.BLOCKED, "put", store=".0")
        faults.entered.clear()
        rig = bench.rig(shutdown_timeout_s=limit_s)
        rig.add(PROMPT, 1)
        rig.run(LIMIT_S, until=faults.entered.is_set)
        releaser = threading.Timer(put_s, faults.release)
        releaser.start()
        with logged() as lines:
            rig.shutdown()
        releaser.cancel()
        faults.release()
        assert any("has not returned" in line for line in lines) is is_left
        faults.heal()


@shows(OPTIONS)
def log_requests(bench: Bench) -> None:
    for is_on in (True, False):
        rig = bench.rig(log_requests=is_on)
        with logged() as lines:
            serve(rig)
        assert any("r0" in line and "prompt" in line for line in lines) is is_on


@shows(OPTIONS)
def stats_file(bench: Bench) -> None:
    rig = bench.rig(stats_file=str(bench.tmp_path / "stats"))
    serve(rig)
    rig.shutdown()
    assert {path.name for path in bench.tmp_path.glob("stats*")} == {
        "stats.kv.scheduler.0",
        "stats.kv.worker.0",
    }


@shows(OPTIONS)
def trace_file(bench: Bench) -> None:
    rig = bench.rig(trace_file=str(bench.tmp_path / "trace"))
    serve(rig)
    rig.shutdown()
    assert "gather" in (bench.tmp_path / "trace.0.json").read_text()


class logged(logging.Handler):
    """A handler that captures the package's log lines, which go to vLLM's handlers once a connector
    has started."""

    def __enter__(self) -> list[str]:
        self.lines: list[str] = []
        logging.getLogger("vllm_kvpool").setLevel(logging.INFO)
        logging.getLogger("vllm_kvpool").addHandler(self)
        return self.lines

    def __exit__(self, *exc: object) -> None:
        logging.getLogger("vllm_kvpool").removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


# Fields of a request


@shows(REQUEST)
def save(bench: Bench) -> None:
    url = bench.workshop.memory()
    serve(bench.rig(url, "writer"), save=False)
    assert bench.num_cells(url) == 0


@shows(REQUEST)
def load(bench: Bench) -> None:
    url = bench.stored()
    assert serve(bench.rig(url, "reader"), load=False) == 0


@shows(REQUEST)
def hand_over(bench: Bench) -> None:
    """The prompt's end is stored as well."""
    url = bench.workshop.memory()
    serve(bench.rig(url, "writer"), hand_over=True)
    assert bench.num_cells(url) == CELLS * (CHUNKS + 1) // CHUNKS


@shows(REQUEST)
def expect_tokens(bench: Bench) -> None:
    """The prompt is computed elsewhere after the request has come."""
    for asked, found in (({"expect_tokens": WHOLE}, WHOLE), ({}, 0)):
        url = bench.workshop.memory()
        reader, writer = bench.rig(url, "reader"), bench.rig(url, "writer")
        writer.add(PROMPT, 1)
        request_id = reader.add(PROMPT, ANSWER_TOKENS, **asked)
        for _ in range(TURNS):
            reader.step()
        writer.run(LIMIT_S)
        writer.settle()
        reader.run(LIMIT_S)
        reader.expect([request_id])
        assert reader.count("kvpool_hit_tokens") == found


@shows(REQUEST)
def expect_end(bench: Bench) -> None:
    for is_asked, found in ((True, len(PROMPT) - 1), (False, WHOLE)):
        url = bench.workshop.memory()
        serve(bench.rig(url, "writer"), hand_over=True)
        asked = {"expect_tokens": len(PROMPT), "expect_end": is_asked}
        assert serve(bench.rig(url, "reader"), **asked) == found


@shows(REQUEST)
def expect_timeout_ms(bench: Bench) -> None:
    rig = bench.rig()
    serve(rig, expect_tokens=WHOLE, expect_timeout_ms=SHORT_MS)
    rig.reset()
    request_id = rig.add(PROMPT[::-1], 1, expect_tokens=WHOLE, expect_timeout_ms=LONG_MS)
    assert waits(rig, request_id)
    rig.abort(request_id)


@shows(REQUEST)
def expect_from(bench: Bench) -> None:
    rig = bench.rig(bench.stored(), "reader")
    serve(rig, expect_tokens=WHOLE, expect_from="prefill-7")
    assert rig.count("kvpool_expected_prompts", "source=prefill-7") == 1


@shows(REQUEST)
def notices(bench: Bench) -> None:
    """The reader can only rely on notices: its store hangs until the notice has come."""
    for hears in (True, False):
        url = bench.workshop.memory()
        writer, reader = bench.rig(url, "writer"), bench.rig(url, "reader")
        told = {"notices": [each.part._notices.endpoint for each in writer.ranks]}  # type: ignore[union-attr]
        reader.companions.append(writer)
        reader.add(PROMPT, ANSWER_TOKENS, expect_tokens=WHOLE, **(told if hears else {}))
        writer.add(PROMPT, 1, hand_over=True)
        reader.run(LIMIT_S)
        reader.expect(["r0"])
        assert reader.count("kvpool_hit_tokens") >= WHOLE
        assert (reader.count("kvpool_notices", "event=received") > 0) is hears


def flood(rig: Rig) -> None:
    for number in range(1, FLOOD):
        serve(rig, [3 + (number * 97 + 13 * i) % 900 for i in range(WHOLE)], save=True)


@shows(REQUEST)
def pin_s(bench: Bench) -> None:
    for pinned, found in ((3600.0, WHOLE), (0.0, 0)):
        url = f"file://{bench.tmp_path}/{pinned}?size=1MiB"
        rig = bench.rig(url, "rig")
        serve(rig, pin_s=pinned)
        flood(rig)
        rig.shutdown()
        assert bench.hits(url) == found


@shows(REQUEST)
def ttl_s(bench: Bench) -> None:
    days = [0]
    clock = partial(FileStore, clock_ns=lambda: time.time_ns() + days[0] * DAY_NS)
    bench.monkeypatch.setattr(file_store, "FileStore", clock)
    bench.monkeypatch.setattr(space, "LOOK_EVERY_S", 0.0)
    for seconds, found in ((3600.0, 0), (0.0, WHOLE)):
        url, days[0] = f"file://{bench.tmp_path}/{seconds}?size=64MiB", 0
        rig = bench.rig(url, "writer")
        serve(rig, ttl_s=seconds)
        rig.shutdown()
        days[0] = 1
        assert bench.hits(url) == found


@shows(REQUEST)
def tenant(bench: Bench) -> None:
    rig = bench.rig()
    serve(rig, tenant="quiet")
    assert rig.count("kvpool_tenant_tokens", "tenant=quiet") == WHOLE


# Coverage of all options


@pytest.fixture
def bench(
    workshop: Workshop,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> Bench:
    return Bench(workshop, tmp_path, monkeypatch, caplog)


@pytest.mark.parametrize("case", OPTIONS.values(), ids=OPTIONS)
def test_option_has_an_effect(bench: Bench, case: Case) -> None:
    case(bench)


@pytest.mark.parametrize("case", REQUEST.values(), ids=REQUEST)
def test_request_field_has_an_effect(bench: Bench, case: Case) -> None:
    case(bench)


def test_every_option_and_every_field_has_a_case() -> None:
    assert list(OPTIONS) == [field.name for field in fields(KVPoolConfig)]
    assert list(REQUEST) == [field.name for field in fields(RequestOptions)]
