"""MLA models over vLLM's real scheduler and KV cache manager: one latent, which every rank holds.

Every step compares every row that a rank reads (`rig.py`), whichever rank has written it. These
tests also count the cells that each rank stores.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from tests.faults.audit import check_nothing_leaked, check_threads, check_tokens, serve
from tests.faults.model import FakeModel
from tests.faults.rig import CHUNK, RigSpec
from tests.faults.scene import tokens
from tests.faults.workshop import Workshop
from tests.support.faults import Fault
from tests.support.worker_steps import prompt_hashes

SIZES = (1, 2, 4)
LATENT = FakeModel(layers=4, heads=1, latent=True)
SPANS = 2  # of two layers each
PROMPT = tokens(5, 9 * CHUNK + 7)
HIT = 9 * CHUNK
BAD_CHUNK = 4
OTHERS = [tokens(60 + i, 250) for i in range(5)]


def spec_of(tp: int, **fields: Any) -> RigSpec:
    options = {"layer_span": LATENT.layers // SPANS, **fields.pop("options", {})}
    return RigSpec(model=LATENT, tp=tp, options=options, **fields)


class Puts:
    """Puts of cells, by store client."""

    def __init__(self, workshop: Workshop) -> None:
        self._by: dict[str, Counter[str]] = {}
        workshop.faults.on_call = self._see

    def _see(self, store: str, method: str, keys: Sequence[str]) -> None:
        if method == "put":
            self._by.setdefault(store, Counter()).update(keys)

    def of(self, store: str) -> int:
        return self._by.get(store, Counter()).total()

    @property
    def times(self) -> list[int]:
        """Number of puts of each cell."""
        return list(sum(self._by.values(), Counter()).values())


def test_the_engine_has_one_group_of_latents(workshop: Workshop) -> None:
    """The tests below need this group to be meaningful."""
    rig = workshop.rig(spec_of(2), workshop.memory())
    [group] = rig.scheduler.kv_cache_manager.kv_cache_config.kv_cache_groups
    assert isinstance(group.kv_cache_spec, MLAAttentionSpec)
    model = rig.scheduler.vllm_config.model_config
    assert model.use_mla
    assert rig.ranks[0].pages.heads == rig.ranks[1].pages.heads == slice(0, 1)


@pytest.mark.parametrize("step_tokens", [40, 512])
@pytest.mark.parametrize("tp", SIZES)
def test_ranks_take_turns_and_store_nothing_twice(
    workshop: Workshop, tp: int, step_tokens: int
) -> None:
    puts = Puts(workshop)
    spec = spec_of(tp, max_batched_tokens=step_tokens)
    rig = workshop.rig(spec, workshop.memory(), "writer")
    serve(rig, PROMPT)
    check_nothing_leaked(rig)
    assert puts.times == [1] * (HIT // CHUNK * SPANS)
    shares = [puts.of(f"writer.{rank}") for rank in range(tp)]
    assert min(shares) > 0
    assert max(shares) - min(shares) <= SPANS, f"no turns: {shares}"


@pytest.mark.parametrize(("writes", "reads"), [*product(SIZES, SIZES)])
def test_any_number_of_ranks_reads_what_any_number_has_written(
    workshop: Workshop, writes: int, reads: int
) -> None:
    store = workshop.memory()
    writer = workshop.rig(spec_of(writes), store, "writer")
    serve(writer, PROMPT)
    check_nothing_leaked(writer)
    writer.shutdown()
    puts = Puts(workshop)
    reader = workshop.rig(spec_of(reads), store, "reader")
    for prompt in (PROMPT, PROMPT[:HIT]):  # the second a full hit
        serve(reader, prompt)
        check_nothing_leaked(reader)
    assert reader.count("kvpool_hit_tokens") == HIT + HIT - 1
    check_tokens(reader)
    assert not puts.times, "what was there has been put again"
    reader.shutdown()
    check_threads(workshop)


@pytest.mark.parametrize("rank", ["", ".1"], ids=["every rank", "one rank"])
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("fault", [Fault.MISSING, Fault.FLIPPED, Fault.FAILED])
def test_a_load_that_fails_is_computed_from_there_on(
    workshop: Workshop, tp: int, fault: Fault, rank: str
) -> None:
    store = workshop.memory()
    writer = workshop.rig(spec_of(1), store, "writer")
    serve(writer, PROMPT)
    writer.shutdown()
    reader = workshop.rig(spec_of(tp), store, "reader")
    bad = prompt_hashes(PROMPT, CHUNK)[BAD_CHUNK].hex()
    workshop.faults.inject(fault, "get", bad, store=f"reader{rank}")
    serve(reader, PROMPT)
    workshop.faults.heal()
    assert reader.count("kvpool_hit_tokens") == BAD_CHUNK * CHUNK
    assert reader.count("kvpool_failures", "load_") > 0
    check_nothing_leaked(reader)
    check_tokens(reader)
    # The rank whose turn it is has stored the bad cells again.
    last = workshop.rig(spec_of(1), store, "last")
    serve(last, PROMPT)
    assert last.count("kvpool_hit_tokens") == HIT


@pytest.mark.parametrize("tp", SIZES)
@pytest.mark.parametrize("policy", ["through", "back"])
def test_many_at_once_in_few_blocks(workshop: Workshop, tp: int, policy: str) -> None:
    """With preemptions, saved answers, a host tier, and then a reader with another number of
    ranks."""
    tiers = ["host://1MiB", workshop.memory()]
    options = {"save_decode": True, "write_policy": policy}
    prompts = [PROMPT, *OTHERS, PROMPT[:150], OTHERS[1][:100] + OTHERS[2]]
    for size in (tp, SIZES[-1] // tp):
        rig = workshop.rig(
            spec_of(size, num_blocks=60, max_batched_tokens=80, options=options), tiers
        )
        serve(rig, *prompts, max_tokens=40)
        check_nothing_leaked(rig)
        rig.shutdown()
    assert rig.count("kvpool_hit_tokens") > HIT
    check_threads(workshop)
