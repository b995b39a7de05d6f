"""Properties of every kind of layers, over vLLM's real scheduler and KV cache manager.

Every step compares the KV from which it continues (`rig.py`). Tests of a single kind are in
test_windows.py, test_ends.py, test_indexers.py and test_states.py.
"""

from dataclasses import replace

import pytest

from tests.faults import test_ends, test_indexers, test_states
from tests.faults.audit import check_nothing_leaked, end, serve
from tests.faults.model import WINDOWS
from tests.faults.rig import CHUNK, RigSpec
from tests.faults.scene import tokens
from tests.faults.test_windows import WINDOWS_ALONE
from tests.faults.workshop import Workshop
from tests.support.faults import Fault
from tests.support.worker_steps import prompt_hashes
from vllm_kvpool.vllm_adapt.kv_cache_specs import deepseek_v4, page_specs

PROMPT = tokens(5, 300)
OTHERS = [tokens(60 + i, 250) for i in range(6)]
# The kinds in a model, and what the keys of each hold.
SPECS = {
    "windows": (RigSpec(model=WINDOWS_ALONE, num_blocks=300), [""]),
    "windows beside full attention": (RigSpec(model=WINDOWS, num_blocks=300), [""]),
    "ends of windows": (test_ends.SPEC, ["@kind:window16", "@kind:window32", "@kind:full"]),
    "an indexer": (test_indexers.SPEC, ["@kind:full", "@kind:indexer", "@kind:state"]),
    "states": (test_states.SPEC, []),  # an earlier boundary is loaded: test_states.py
}
KINDS = pytest.mark.parametrize("spec", SPECS, indirect=True)
PARTS = [(name, part) for name, (_, parts) in SPECS.items() for part in parts]


@pytest.fixture
def spec(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> RigSpec:
    if request.param == "ends of windows":
        monkeypatch.setattr(deepseek_v4, "keeps_ends", test_ends.keeps_ends)
    monkeypatch.setattr(page_specs, "needs_gpu", lambda spec: False)
    return SPECS[request.param][0]


def chunk_of(spec: RigSpec) -> int:
    return int(spec.options.get("chunk_tokens", CHUNK))


@KINDS
@pytest.mark.parametrize("step_tokens", [24, 41, 96, 512])
@pytest.mark.parametrize(("wrote", "reads"), [(1, 2), (2, 1)])
def test_what_one_engine_saves_another_loads(
    workshop: Workshop, spec: RigSpec, wrote: int, reads: int, step_tokens: int
) -> None:
    """A chunk may be computed in several steps, so that its first blocks are freed early."""
    store = workshop.memory()
    spec = replace(spec, max_batched_tokens=step_tokens)
    writer = workshop.rig(replace(spec, tp=wrote), store)
    assert serve(writer, PROMPT) == 0
    reader = workshop.rig(replace(spec, tp=reads), store)
    assert serve(reader, PROMPT, max_tokens=20) == len(PROMPT) // chunk_of(spec) * chunk_of(spec)
    end(workshop, writer, reader)


@pytest.mark.parametrize(("spec", "part"), PARTS, indirect=["spec"])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("fault", [Fault.MISSING, Fault.FLIPPED, Fault.UNREACHABLE])
def test_a_load_that_fails_starts_again_and_ends_well(
    workshop: Workshop, spec: RigSpec, tp: int, fault: Fault, part: str
) -> None:
    """A fault of the cells whose keys contain `part` costs a reader hits, but no answer."""
    store = workshop.memory()
    writer = workshop.rig(spec, store)
    serve(writer, PROMPT, OTHERS[0])
    reader = workshop.rig(replace(spec, tp=tp), store, name="reader")
    workshop.faults.inject(fault, "get", part)
    assert serve(reader, PROMPT, OTHERS[0]) == 0
    workshop.faults.heal()
    assert reader.count("kvpool_failures", "load_") > 0
    end(workshop, writer, reader)


@pytest.mark.parametrize("spec", ["windows beside full attention"], indirect=True)
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("bad", [1, 4])
def test_a_request_that_starts_again_is_loaded_up_to_the_first_bad_chunk(
    workshop: Workshop, spec: RigSpec, tp: int, bad: int
) -> None:
    """vLLM cannot resume the request at the bad chunk, so it starts again and loads up to there."""
    store = workshop.memory()
    writer = workshop.rig(spec, store)
    serve(writer, PROMPT)
    writer.settle()
    chunk_hash = prompt_hashes(PROMPT, chunk_of(spec))[bad].hex()
    keys = workshop.plain_store(store)._table.list_keys()  # type: ignore[attr-defined]
    key = min(key for key in keys if chunk_hash in key and "@kind:full" in key)
    reader = workshop.rig(replace(spec, tp=tp), store)
    workshop.faults.inject(Fault.FLIPPED, "get", key)
    assert serve(reader, PROMPT) == bad * chunk_of(spec)
    workshop.faults.heal()
    end(workshop, writer, reader)


@KINDS
def test_many_at_once_in_few_blocks(workshop: Workshop, spec: RigSpec) -> None:
    """With preemptions, and blocks that are reused as soon as they are free."""
    store = workshop.memory()
    for _ in range(2):
        rig = workshop.rig(replace(spec, num_blocks=90, max_batched_tokens=80), store)
        hits = serve(rig, PROMPT, *OTHERS, PROMPT[:150], OTHERS[1][:100] + OTHERS[2], max_tokens=40)
        check_nothing_leaked(rig)
        rig.shutdown()
    assert hits > 5 * chunk_of(spec)
