"""Whole engines whose weights change: no answer from KV of other weights, and none lost for it.

Model A is what engines start with; B has other weights throughout, C has A's but for its norms.
"""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.e2e.compare import LOGPROB_TOLERANCE, logprob_distance
from tests.e2e.engine import Completion, Engine, EngineSpec, Image, Prompt
from tests.e2e.pool import cell_files, expecting, files, fresh, pool, same, tokens
from tests.e2e.vision import about
from tests.support.models import LlamaShape, LlavaShape

pytestmark = pytest.mark.e2e

Llama = Callable[[LlamaShape], Path]
SHAPE = LlamaShape(layers=2)
HIT = 512
SMALL = {"max_model_len": 1024, "max_num_seqs": 4, "kv_cache_memory_bytes": 64 << 20}
TO_B = ("path", "iterator", "sleep")
TO_C = ("apply_model", "callable", "load_weights", "parameters")
NAMED = ("path", "sleep")  # ways whose epoch other engines can name
PROMPTS = {
    name: Prompt(ids=tokens(seed=900 + number, count=600))
    for number, name in enumerate((*TO_B, *TO_C, "shared", "awake", "version"))
}


@dataclass(frozen=True)
class Models:
    a: Path
    b: Path
    c: Path

    def target(self, how: str) -> Path:
        return self.c if how in TO_C else self.b


def with_other_norms(model: Path, copy: Path) -> Path:
    shutil.copytree(model, copy)
    weights, rng = load_file(model / "model.safetensors"), np.random.default_rng(5)
    for name in weights:
        if name.endswith("norm.weight"):
            weights[name] = rng.uniform(0.3, 1.7, weights[name].shape).astype(np.float32)
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("epochs")


@pytest.fixture(scope="module")
def models(llama: Llama, directory: Path) -> Models:
    a = llama(SHAPE)
    return Models(a, llama(replace(SHAPE, seed=7)), with_other_norms(a, directory / "other-norms"))


@pytest.fixture(scope="module")
def truth(models: Models, directory: Path) -> dict[str, Completion]:
    """Return the answers of engines started with the new weights and without a pool."""
    answers: dict[str, Completion] = {}
    for model in (models.b, models.c):
        names = [name for name in PROMPTS if models.target(name) == model]
        with Engine(EngineSpec(model=model, llm=SMALL), directory / f"{model.name}.log") as engine:
            found = engine.generate(*(PROMPTS[name] for name in names))
            answers |= dict(zip(names, found, strict=True))
    return answers


@pytest.fixture(scope="module")
def start(models: Models, directory: Path) -> Iterator[Callable[[str], Engine]]:
    """Engines by name, of model A on one store; all are closed at the end.

    They differ in what a failed load does, which nothing else shall mind.
    """
    started: dict[str, Engine] = {}

    def start(name: str) -> Engine:
        if name not in started:
            store = files(directory / "pool")
            config = pool(store) if name == "one" else pool(store, load_failure="fail")
            spec = EngineSpec(model=models.a, kv_transfer_config=config, llm=SMALL)
            started[name] = Engine(spec, directory / f"{name}.log")
        return started[name]

    yield start
    for engine in started.values():
        engine.close()


@pytest.fixture
def engine(start: Callable[[str], Engine], models: Models) -> Engine:
    """The one that most tests share, with its first weights."""
    engine = start("one")
    engine.set_weights("path", models.a)
    assert engine.reset_prefix_cache()
    return engine


@pytest.mark.parametrize("how", [*TO_B, *TO_C])
def test_new_weights_are_what_answers_come_from(
    engine: Engine, models: Models, truth: dict[str, Completion], how: str
) -> None:
    prompt = PROMPTS[how]
    old = engine.generate(prompt)[0]
    again = fresh(engine, expecting(prompt, HIT))
    assert (old.cached_tokens, again.cached_tokens) == (0, HIT)
    assert logprob_distance(old, truth[how]) > 10 * LOGPROB_TOLERANCE, "the models say the same"

    engine.set_weights(how, models.target(how))
    new = fresh(engine, prompt)
    assert new.cached_tokens == 0
    same(new, truth[how])
    # The new weights have cells of their own.
    again = fresh(engine, expecting(prompt, HIT))
    assert again.cached_tokens == HIT
    same(again, truth[how])

    # The cells of the first weights are still there, and good.
    engine.set_weights("path", models.a)
    back = fresh(engine, expecting(prompt, HIT))
    assert back.cached_tokens == HIT
    same(back, old)

    # And those of the new ones where they can be told to be the same.
    if how in NAMED:
        engine.set_weights("path", models.target(how))
        there = fresh(engine, expecting(prompt, HIT))
        assert there.cached_tokens == HIT
        same(there, truth[how])


def test_engines_that_load_the_same_files_share(
    start: Callable[[str], Engine],
    engine: Engine,
    models: Models,
    truth: dict[str, Completion],
) -> None:
    other, prompt = start("two"), PROMPTS["shared"]
    engine.set_weights("path", models.b)
    same(fresh(engine, prompt), truth["shared"])
    assert fresh(engine, expecting(prompt, HIT)).cached_tokens == HIT
    # The other one has its first weights still.
    old = fresh(other, prompt)
    assert old.cached_tokens == 0
    assert logprob_distance(old, truth["shared"]) > 10 * LOGPROB_TOLERANCE

    other.set_weights("path", models.b)
    shared = fresh(other, expecting(prompt, HIT))
    assert shared.cached_tokens == HIT
    same(shared, truth["shared"])

    # Nobody can tell whether tensors that were handed over are the same.
    for each in (engine, other):
        each.set_weights("path", models.a)
        each.set_weights("apply_model", models.c)
    fresh(engine, prompt)
    assert fresh(engine, expecting(prompt, HIT)).cached_tokens == HIT
    assert fresh(other, prompt).cached_tokens == 0
    assert fresh(other, expecting(prompt, HIT)).cached_tokens == HIT


def test_images_that_were_encoded_before_are_not_answered_with_from_the_pool(
    llava: Callable[[LlavaShape], Path], directory: Path, tmp_path: Path
) -> None:
    """vLLM keeps what its encoder has made until it is told to forget it; the pool must not."""
    shape = LlavaShape(kv_heads=2)
    prompt = about(*(Image(seed=i) for i in range(4)))
    config = pool(files(tmp_path / "pool"), chunk_tokens=32)
    spec = EngineSpec(model=llava(shape), images=4, kv_transfer_config=config)
    with Engine(spec, directory / "images.log") as engine:
        old = engine.generate(prompt)[0]
        engine.set_weights("tower", llava(replace(shape, seed=7)))
        assert fresh(engine, prompt).token_ids == old.token_ids, "vLLM forgets it by itself"
        engine.reset_encoder_cache()
        new = fresh(engine, prompt)
        assert logprob_distance(new, old) > 10 * LOGPROB_TOLERANCE
        assert new.cached_tokens == 0
        again = fresh(engine, expecting(prompt, 96))
        assert again.cached_tokens >= 96
        same(again, new)


@pytest.mark.small
@pytest.mark.parametrize("level", [0, 1])
def test_a_nap_keeps_the_pool(engine: Engine, directory: Path, level: int) -> None:
    prompt = PROMPTS["awake"]
    engine.generate(prompt)
    old = fresh(engine, expecting(prompt, HIT))
    before = cell_files(directory / "pool")
    assert before
    engine.sleep(level)
    assert cell_files(directory / "pool") == before
    engine.wake_up(*["scheduling"] * (level == 0))
    assert cell_files(directory / "pool") == before
    again = fresh(engine, expecting(prompt, HIT))
    assert again.cached_tokens == HIT
    same(again, old)
