"""Loads layer by layer: a request runs while it is loaded, and says what it says without a pool."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import EngineShelf
from tests.e2e.engine import Completion, Engine, EngineSpec, Prompt
from tests.e2e.pool import cell_files, expecting, files, fresh, pool, same, tokens
from tests.support.models import LlamaShape
from tests.support.releases import LAYERWISE, since

pytestmark = pytest.mark.e2e

Llama = Callable[[LlamaShape], Path]
CHUNK, BLOCK = 256, 32
SHAPE = LlamaShape(kv_heads=2)
HITS = "vllm:kvpool_hit_tokens"
FEW_TOKENS = {"max_num_batched_tokens": 320}  # of a step: what is computed again takes several


class Layered:
    """Engines over one store: layer by layer with the pool, and without a pool."""

    def __init__(self, engines: EngineShelf, model: Path, directory: Path) -> None:
        self.directory = directory
        self._engines, self._model = engines, model

    def engine(self, tp: int = 1, llm: dict[str, Any] = FEW_TOKENS, **options: Any) -> Engine:
        config = pool(files(self.directory), **{"layerwise": True, **options})
        return self._engines.get(
            EngineSpec(
                model=self._model,
                tp=tp,
                block_size=BLOCK,
                kv_transfer_config=config,
                llm=llm,
            )
        )

    def expected(self, *prompts: Prompt) -> list[Completion]:
        return self.plain().generate(*prompts)

    def plain(self) -> Engine:
        return self._engines.get(EngineSpec(model=self._model))

    def store(self, engine: Engine, ids: Sequence[int]) -> set[Path]:
        """Compute and save a prompt's whole chunks; the files that this has added."""
        before = set(cell_files(self.directory))
        fresh(engine, Prompt(ids=ids, max_tokens=2))
        fresh(engine, expecting(Prompt(ids=ids), len(ids) // CHUNK * CHUNK))
        return set(cell_files(self.directory)) - before


@pytest.fixture(scope="module")
def layered(
    llama: Llama, engines: EngineShelf, tmp_path_factory: pytest.TempPathFactory
) -> Layered:
    here = Layered(engines, llama(SHAPE), tmp_path_factory.mktemp("layers"))
    if not since(LAYERWISE, here.plain().release()):
        pytest.skip("refused by name")
    return here


def damage(paths: Iterable[Path]) -> None:
    for path in paths:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)


def remove(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink()


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("count", [4 * CHUNK + 240, 3 * CHUNK])
def test_a_hit_runs_in_the_step_that_loads_it(layered: Layered, tp: int, count: int) -> None:
    prompt = Prompt(ids=tokens(seed=10 * tp + count, count=count))
    (expected,) = layered.expected(prompt)
    engine = layered.engine(tp)
    (written,) = engine.generate(prompt)
    assert written.cached_tokens == 0
    same(written, expected)
    before = engine.metrics().get(HITS, 0)
    read = fresh(engine, expecting(prompt, count // CHUNK * CHUNK))
    cached = min(count // CHUNK * CHUNK, count - 1)
    assert read.cached_tokens == cached
    same(read, expected)
    assert engine.metrics()[HITS] - before == cached


@pytest.mark.parametrize("harm", [damage, remove])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_cell_that_is_bad_in_mid_step_is_computed_again(
    layered: Layered, harm: Callable[[Iterable[Path]], None], tp: int
) -> None:
    """A cell (a head of a layer) in the second half of a hit is bad.

    The step's results are discarded and not stored, and later readers load correct KV.
    """
    engine = layered.engine(tp)
    seed = 100 * tp + (harm is damage)
    first = tokens(seed=seed, count=2 * CHUNK)
    ids = [*first, *tokens(seed=seed + 50, count=2 * CHUNK)]
    tail = tokens(seed=seed + 60, count=2 * CHUNK + 30)
    prompt = Prompt(ids=[*ids, *tail])
    (expected,) = layered.expected(prompt)
    layered.store(engine, first)
    added = sorted(layered.store(engine, ids))
    assert len(added) == 2 * SHAPE.layers * SHAPE.kv_heads
    harm(added[5:6])
    before = engine.metrics()[HITS]
    same(fresh(engine, prompt), expected)
    assert engine.metrics()[HITS] - before in (2 * CHUNK, 3 * CHUNK)
    read = fresh(engine, expecting(prompt, 6 * CHUNK))
    assert read.cached_tokens == 6 * CHUNK
    same(read, expected)


def test_requests_that_share_a_bad_prefix_in_one_step(layered: Layered) -> None:
    """The other requests must not read blocks that the first recomputes over several steps."""
    engine = layered.engine()
    ids = tokens(seed=300, count=4 * CHUNK)
    prompts = [
        Prompt(ids=[*ids, *tokens(seed=301 + i, count=40 + 300 * (i == 1))]) for i in range(3)
    ]
    prompts.append(Prompt(ids=tokens(seed=310, count=500)))
    expected = layered.expected(*prompts)
    damage(sorted(layered.store(engine, ids))[:3])
    assert engine.reset_prefix_cache()
    for actual, wanted in zip(engine.generate(*prompts), expected, strict=True):
        same(actual, wanted)
    assert engine.reset_prefix_cache()
    again = engine.generate(*[expecting(p, len(p.ids) // CHUNK * CHUNK) for p in prompts])
    for actual, wanted in zip(again, expected, strict=True):
        assert actual.cached_tokens >= CHUNK
        same(actual, wanted)


def test_time_runs_out_in_mid_step(layered: Layered) -> None:
    """Chunks that miss the load timeout are computed, and a late load never overwrites them."""
    ids = tokens(seed=400, count=5 * CHUNK)
    prompt = Prompt(ids=[*ids, *tokens(seed=401, count=50)])
    (expected,) = layered.expected(prompt)
    layered.store(layered.engine(), ids)
    hurried = layered.engine(load_timeout_s=0.0005)
    for _ in range(3):
        same(fresh(hurried, prompt), expected)


def test_a_prompt_of_one_answer_is_saved_behind_its_load(layered: Layered) -> None:
    """The request ends in the step that loaded its prefix; the next step saves the rest."""
    engine = layered.engine()
    ids = tokens(seed=500, count=2 * CHUNK)
    longer = Prompt(ids=[*ids, *tokens(seed=501, count=CHUNK)], max_tokens=1)
    (expected,) = layered.expected(longer)
    layered.store(engine, ids)
    same(fresh(engine, longer), expected)
    engine.generate(Prompt(ids=tokens(seed=502, count=20)))
    read = fresh(engine, expecting(longer, 3 * CHUNK))
    assert read.cached_tokens == 3 * CHUNK - 1
    same(read, expected)


def test_few_blocks(layered: Layered) -> None:
    """Requests that do not fit together are preempted, and loaded again."""
    engine = layered.engine(llm={"num_gpu_blocks_override": 52, "max_model_len": 1024})
    prompts = [Prompt(ids=tokens(seed=600 + i, count=3 * CHUNK), max_tokens=40) for i in range(4)]
    expected = layered.expected(*prompts)
    for prompt in prompts:
        layered.store(layered.engine(), prompt.ids)  # too few blocks to hold for its saves
    before = engine.metrics()
    for actual, wanted in zip(engine.generate(*prompts), expected, strict=True):
        same(actual, wanted)
    after = engine.metrics()
    assert after["vllm:num_preemptions"] > before["vllm:num_preemptions"]
    assert after[HITS] > before.get(HITS, 0)
