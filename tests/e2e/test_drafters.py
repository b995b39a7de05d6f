"""Drafters draft after a hit of the pool as they do after computing the prompt.

The measure is the number of accepted drafts: the drafters are as good as their models
(`support/drafters.py`), and after a hit without their KV next to none of their drafts is accepted.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.e2e.conftest import RELEASE, EngineShelf
from tests.e2e.engine import Completion, Engine, EngineSpec, Prompt
from tests.e2e.pool import cell_files, expecting, files, fresh, pool, same, tokens, unpooled
from tests.support.drafters import (
    AttentiveShape,
    EvenShape,
    MimoShape,
    make_eagle,
    make_eagle3,
    make_mimo,
    speculation,
)
from tests.support.models import make_model
from tests.support.releases import DRAWN_DRAFTS, since
from tests.support.waiting import wait_until

pytestmark = pytest.mark.e2e

CHUNK = 64
PROMPT, ANSWER = 5 * CHUNK + 20, 64
FOUND = PROMPT // CHUNK * CHUNK
SOON_S = 30.0
SHAPE, ATTENTIVE = EvenShape(layers=2), AttentiveShape()


@dataclass(frozen=True)
class Drafter:
    """A model with a drafter; `lookahead`: later tokens that a row of the drafter depends on.

    Its cells are of one head and one layer. `rounding`: accepted drafts that other ranks' order of
    sums and other steps may change; where it is 2, 1 was seen (30 and 29 of 33 or 34). `modules`:
    of MTP; vLLM's runner for CPUs runs the first one for every draft.
    """

    method: str
    num_tokens: int
    lookahead: int
    cells_per_chunk: int
    rounding: int = 0
    modules: int = 1

    def spec(self, models: Path, store: str, **more: Any) -> EngineSpec:
        """An engine with the drafter and a pool."""
        if self.method == "mtp":
            model = drafter = make_mimo(
                models, MimoShape(layers=self.modules, modules=self.modules)
            )
        elif self.method == "eagle3":
            model, drafter = make_model(models, ATTENTIVE), make_eagle3(models, ATTENTIVE)
        else:
            model = drafter = make_model(models, SHAPE)
        if self.method == "eagle":
            drafter = make_eagle(models, SHAPE)
        options = {"chunk_tokens": CHUNK, **more.pop("options", {})}
        drafts = more.pop("drafts", {})
        llm = {"speculative_config": speculation(self.method, drafter, self.num_tokens, **drafts)}
        return EngineSpec(
            model=model,
            kv_transfer_config=pool(store, **options),
            llm=llm | more.pop("llm", {}),
            **more,
        )


DRAFTERS = {
    "draft_model": Drafter("draft_model", 3, 0, 8),
    "eagle": Drafter("eagle", 3, 1, 8),
    "mtp": Drafter("mtp", 1, 1, 4),
}
EAGLE3 = {"eagle3": Drafter("eagle3", 1, 1, 4, rounding=2)}
MODULES = {"mtp, 2 modules": Drafter("mtp", 2, 1, 4, rounding=2, modules=2)}


class Drafted(NamedTuple):
    """Draft tokens of some requests: accepted and in all."""

    accepted: int
    drafted: int


def answer(engine: Engine, *prompts: Prompt) -> tuple[Drafted, list[Completion]]:
    before = counts(engine)
    answers = engine.generate(*prompts)
    after = counts(engine)
    return Drafted(after.accepted - before.accepted, after.drafted - before.drafted), answers


def counts(engine: Engine) -> Drafted:
    metrics = engine.metrics()
    return Drafted(
        int(metrics["vllm:spec_decode_num_accepted_tokens"]),
        int(metrics["vllm:spec_decode_num_draft_tokens"]),
    )


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drafters")


@pytest.fixture
def store(tmp_path: Path) -> str:
    return files(tmp_path / "pool")


def prompt(seed: int, count: int = PROMPT) -> Prompt:
    return Prompt(ids=tokens(seed, count), max_tokens=ANSWER)


def draft_cells(directory: Path) -> list[Path]:
    """The files of drafters' cells; their keys are in the files."""
    return [path for path in cell_files(directory) if b"@kind:draft-" in path.read_bytes()]


def wait_for(is_so: Callable[[], bool]) -> None:
    """Wait for cells of drafters, for which no request waits."""
    wait_until(is_so, SOON_S)


def until_stored(directory: Path, drafter: Drafter, chunks: int) -> None:
    wait_for(lambda: len(draft_cells(directory)) >= chunks * drafter.cells_per_chunk)


EACH = pytest.mark.parametrize("drafter", DRAFTERS.values(), ids=DRAFTERS)
OTHERS = EAGLE3 | MODULES
ALL = pytest.mark.parametrize("drafter", (DRAFTERS | OTHERS).values(), ids=DRAFTERS | OTHERS)
DRAWN = {"draft_sample_method": "probabilistic"}
LONG = 128  # tokens of a block of the other engine


@ALL
def test_drafts_accepted_after_any_hit_are_as_many_as_after_computing(
    drafter: Drafter, models: Path, tmp_path: Path, store: str, engines: EngineShelf
) -> None:
    """Cold, after vLLM's own hit, after a hit of the pool, and after vLLM's own hit after that."""
    writer = engines.get(drafter.spec(models, store))
    reader = engines.get(drafter.spec(models, store, llm={"max_num_seqs": 4}))
    cold, [expected] = answer(writer, prompt(1))
    until_stored(tmp_path / "pool", drafter, PROMPT // CHUNK)
    own, [again] = answer(writer, unpooled(prompt(1)))
    from_pool, [loaded] = answer(reader, expecting(prompt(1), FOUND))
    own_after, [last] = answer(reader, unpooled(prompt(1)))
    assert loaded.cached_tokens == FOUND - drafter.lookahead
    assert 0 < again.cached_tokens == last.cached_tokens
    assert again.token_ids == loaded.token_ids == last.token_ids == expected.token_ids
    assert cold.accepted > cold.drafted / 2
    assert own == from_pool == own_after == cold
    outcomes = reader.by_label("vllm:kvpool_draft_tokens", "outcome")
    assert outcomes == {"loaded": FOUND - drafter.lookahead, "missing": 0}


@ALL
def test_without_a_drafters_kv_far_fewer_drafts_are_accepted(
    drafter: Drafter, models: Path, store: str, engines: EngineShelf
) -> None:
    """The same with `drafts` off: what the test above would show without stored rows. What vLLM's
    own cache keeps is as bad from then on."""
    writer = engines.get(drafter.spec(models, store, options={"drafts": "off"}))
    cold, [expected] = answer(writer, prompt(1))
    assert writer.reset_prefix_cache()
    from_pool, [loaded] = answer(writer, expecting(prompt(1), FOUND))
    own_after, [last] = answer(writer, unpooled(prompt(1)))
    assert loaded.cached_tokens == FOUND
    assert loaded.token_ids == last.token_ids == expected.token_ids
    assert max(from_pool.accepted, own_after.accepted) < 0.6 * cold.accepted


@ALL
def test_engines_of_other_parallelism_and_blocks_share_a_drafters_kv(
    drafter: Drafter, models: Path, tmp_path: Path, store: str, engines: EngineShelf
) -> None:
    """TP 1 writes, in steps of two chunks; TP 2 with longer blocks reads.

    In a step that ends within the prompt, vLLM 0.32 computes EAGLE's and MTP's last row from the
    prompt's last token. The accepted drafts depend on the size of steps, with and without a pool.
    """
    writer = engines.get(drafter.spec(models, store, llm={"max_num_batched_tokens": 2 * CHUNK}))
    cold, [expected] = answer(writer, prompt(2))
    until_stored(tmp_path / "pool", drafter, PROMPT // CHUNK)
    reader = engines.get(drafter.spec(models, store, tp=2, block_size=LONG))
    from_pool, [loaded] = answer(reader, expecting(prompt(2), FOUND))
    assert loaded.cached_tokens == FOUND // LONG * LONG
    assert loaded.token_ids == expected.token_ids
    assert abs(from_pool.accepted - cold.accepted) <= drafter.rounding


@EACH
def test_prompts_that_part_at_the_end_of_a_chunk_draft_alike(
    drafter: Drafter, models: Path, tmp_path: Path, store: str, engines: EngineShelf
) -> None:
    """The last row before the end of their common chunks depends on the token where they part, and
    is computed by each engine itself."""
    writer = engines.get(drafter.spec(models, store))
    reader = engines.get(drafter.spec(models, store, llm={"max_num_seqs": 4}))
    common = tokens(3, FOUND)
    some, other = (Prompt(ids=[*common, *tokens(i, 20)], max_tokens=ANSWER) for i in (31, 32))
    writer.generate(some)
    until_stored(tmp_path / "pool", drafter, PROMPT // CHUNK)
    assert writer.reset_prefix_cache()
    cold, [expected] = answer(writer, unpooled(other))
    from_pool, [loaded] = answer(reader, expecting(other, FOUND))
    assert loaded.cached_tokens == FOUND - drafter.lookahead
    assert loaded.token_ids == expected.token_ids
    assert from_pool == cold


@EACH
def test_engines_with_and_without_a_drafter_share_the_models_cells(
    drafter: Drafter, models: Path, tmp_path: Path, store: str, engines: EngineShelf
) -> None:
    """An engine with a drafter loads all cells of an engine without one, and vice versa."""
    hit = FOUND - drafter.lookahead
    drafts = engines.get(drafter.spec(models, store))
    spec = drafter.spec(models, store)
    plain = engines.get(replace(spec, llm={}))
    [expected] = plain.generate(prompt(4))
    [loaded] = drafts.generate(expecting(prompt(4), FOUND))
    assert loaded.cached_tokens == hit
    same(loaded, expected)
    outcomes = drafts.by_label("vllm:kvpool_draft_tokens", "outcome")
    assert outcomes["missing"] == hit
    # What is computed behind rows that are missing is not stored, nor by whoever finds their
    # blocks in the engine's own cache.
    turn = Prompt(ids=[*prompt(4).ids, *tokens(41, CHUNK)], max_tokens=1)
    drafts.generate(turn)
    [whole] = plain.generate(expecting(turn, FOUND + CHUNK))
    assert whole.cached_tokens == FOUND + CHUNK
    assert not draft_cells(tmp_path / "pool")

    [expected] = drafts.generate(prompt(5))
    [loaded] = plain.generate(expecting(prompt(5), FOUND))
    assert loaded.cached_tokens == FOUND
    same(loaded, expected)


@EACH
@pytest.mark.parametrize("drafts", ["prefer", "require"])
def test_a_lost_cell_of_a_drafter_shortens_hits_only_where_they_are_required(
    drafts: str, drafter: Drafter, models: Path, tmp_path: Path, store: str, engines: EngineShelf
) -> None:
    hit = FOUND - drafter.lookahead
    engine = engines.get(drafter.spec(models, store, options={"drafts": drafts}))
    [expected] = engine.generate(prompt(6))
    until_stored(tmp_path / "pool", drafter, PROMPT // CHUNK)
    assert fresh(engine, prompt(6)).cached_tokens == hit
    lost = draft_cells(tmp_path / "pool")[0]
    lost.unlink()
    again = fresh(engine, prompt(6))
    assert again.token_ids == expected.token_ids
    missing = engine.by_label("vllm:kvpool_draft_tokens", "outcome")["missing"]
    if drafts == "prefer":
        assert again.cached_tokens == hit
        assert CHUNK - 1 <= missing <= CHUNK
    else:
        assert again.cached_tokens <= hit - CHUNK
        assert missing == 0


@EACH
@pytest.mark.skipif(not since(DRAWN_DRAFTS, RELEASE), reason="not on CPUs")
def test_drafts_behind_a_lost_cell_are_drawn_from_finite_probabilities(
    drafter: Drafter, models: Path, tmp_path: Path, store: str, engines: EngineShelf
) -> None:
    """With NaN in a drafter's pages from before, and with a drafter that draws its drafts."""
    sampled = replace(prompt(11), sampling={"temperature": 1.0})
    engine = engines.get(drafter.spec(models, store, drafts=DRAWN))
    engine.generate(sampled)
    until_stored(tmp_path / "pool", drafter, PROMPT // CHUNK)
    draft_cells(tmp_path / "pool")[0].unlink()
    assert engine.reset_prefix_cache()
    engine.watch_drafts(FOUND)
    [loaded] = engine.generate(sampled)
    assert loaded.cached_tokens == FOUND - drafter.lookahead
    assert engine.by_label("vllm:kvpool_draft_tokens", "outcome")["missing"] > 0
    drawn = engine.draft_probabilities()
    assert drawn["other"] == 0 < drawn["finite"]


@EACH
def test_drafts_are_as_good_after_preemptions(
    drafter: Drafter, models: Path, tmp_path: Path, store: str, engines: EngineShelf
) -> None:
    """Requests that are thrown out go on from what the pool has of them."""
    few = {"num_gpu_blocks_override": 40, "max_model_len": 1024, "max_num_seqs": 4}
    plain = drafter.spec(models, store, options={"drafts": "off"})
    cold = engines.get(replace(plain, kv_transfer_config=None))
    prompts = [replace(prompt(70 + i), max_tokens=2 * ANSWER) for i in range(4)]
    expected = [answer(cold, each) for each in prompts]
    engine = engines.get(drafter.spec(models, store, llm=few))
    counted, answers = answer(engine, *prompts)
    assert engine.metrics()["vllm:num_preemptions"] > 0
    wanted = [each.token_ids for _, [each] in expected]
    assert [each.token_ids for each in answers] == wanted
    accepted = sum(each.accepted for each, _ in expected)
    assert counted.accepted >= 0.9 * accepted


@EACH
def test_a_prompt_that_is_handed_over_is_drafted_for_as_where_it_was_computed(
    drafter: Drafter, models: Path, tmp_path: Path, store: str, engines: EngineShelf
) -> None:
    """The prompt's end is a cell of the drafter's, too: decode computes the last token alone.

    vLLM 0.32 fills up such a step with as many drafts as usual, which are never accepted.
    """
    prefill = engines.get(drafter.spec(models, store))
    decode = engines.get(drafter.spec(models, store, llm={"max_num_seqs": 4}))
    cold, [expected] = answer(prefill, unpooled(prompt(8)))
    assert prefill.reset_prefix_cache()
    handed = {"kvpool": {"hand_over": True}}
    prefill.generate(replace(prompt(8), max_tokens=1, kv_transfer_params=handed))
    until_stored(tmp_path / "pool", drafter, PROMPT // CHUNK + 1)
    wanted = {"expect_tokens": PROMPT, "expect_end": True, "expect_timeout_ms": 20_000}
    from_pool, [loaded] = answer(decode, replace(prompt(8), kv_transfer_params={"kvpool": wanted}))
    assert loaded.cached_tokens == PROMPT - 1
    assert loaded.token_ids == expected.token_ids
    assert from_pool.accepted == cold.accepted
    assert from_pool.drafted == cold.drafted + drafter.num_tokens


@pytest.mark.parametrize("tp", [1, 2])
def test_a_drafters_kv_is_found_in_host_memory(
    tp: int, models: Path, tmp_path: Path, engines: EngineShelf
) -> None:
    """Also where a hit needs it: lookups know which chunks of it host memory has."""
    drafter = DRAFTERS["eagle"]
    options = {"drafts": "require"}
    engine = engines.get(drafter.spec(models, "host://64MiB", tp=tp, options=options))
    cold, [expected] = answer(engine, prompt(9))
    for _ in range(2):
        assert engine.reset_prefix_cache()
        again, [loaded] = answer(engine, expecting(prompt(9), FOUND))
        assert loaded.cached_tokens == FOUND - 1
        assert loaded.token_ids == expected.token_ids
        assert again == cold
