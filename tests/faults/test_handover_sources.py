"""Hand-over of a prompt whose parts are in prefill's host memory, in its cache, in the store or
nowhere.

The next engine must load all tokens that prefill's answer promises.
"""

import random
from dataclasses import dataclass
from typing import Any

import pytest

from tests.faults.audit import check_nothing_leaked, serve
from tests.faults.model import WINDOWS, FakeModel
from tests.faults.rig import BLOCK, CHUNK, Rig, RigSpec
from tests.faults.workshop import WITH_STATES, WITH_WINDOWS, Workshop
from tests.support.seeds import seeds
from tests.support.worker_steps import prompt_hashes

CHANCE = random.Random(11)
PROMPT = CHANCE.choices(range(3, 1000), k=9 * CHUNK + 13)
CROWD = CHANCE.choices(range(3, 1000), k=200)
STEP_TOKENS = 48
FEW_BLOCKS, ENOUGH_BLOCKS = 64, 384  # the few cannot pin a whole prompt at once
LIMIT_S = 60.0
MODELS = {
    "plain": FakeModel(),
    "windows of 8": FakeModel(layers=6, windows=(8, 8, 0, 8, 8, 0)),
    "windows of 40": WINDOWS,
    "windows of 100": FakeModel(layers=6, windows=(100, 100, 0, 100, 100, 0)),
    "windows alone": FakeModel(layers=2, windows=(40, 40)),
    "states": FakeModel(layers=4, states=(0, 2)),
    "states and windows": FakeModel(layers=6, states=(0, 1), windows=(0, 0, 0, 0, 40, 40)),
}
EACH_MODEL = pytest.mark.parametrize(
    "model",
    [
        pytest.param(
            name,
            marks=[
                *([WITH_WINDOWS] if model.windows else []),
                *([WITH_STATES] if model.states else []),
            ],
        )
        for name, model in MODELS.items()
    ],
)


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Sources of the prompt's KV for prefill. Each source has the prompt's first tokens, from an
    earlier request."""

    in_store: int = 0  # saved by another engine
    in_host: int = 0
    own: int = 0  # computed without a save
    keeps_own: bool = False  # prefill's own cache is not emptied
    lost: float = 0.0  # share of the store's cells that are lost
    num_blocks: int = ENOUGH_BLOCKS
    crowd: int = 0  # tokens of another prompt that take room in host memory
    tokens: int = len(PROMPT)  # length of the handed-over prompt

    @classmethod
    def draw(cls, rng: random.Random) -> "Sources":
        lengths = [rng.choice((0, rng.randrange(len(PROMPT)), len(PROMPT))) for _ in range(3)]
        return cls(
            in_store=lengths[0],
            in_host=lengths[1],
            own=lengths[2],
            keeps_own=rng.random() < 0.6,
            lost=rng.choice((0.0, 0.2, 1.0)),
            num_blocks=rng.choice((FEW_BLOCKS, ENOUGH_BLOCKS)),
            crowd=rng.choice((0, 60, 200)),
            tokens=rng.randrange(CHUNK, len(PROMPT) + 1),
        )


KNOWN = {
    "host memory alone": Sources(in_host=len(PROMPT), lost=1.0, tokens=6 * CHUNK + 5),
    "own cache alone": Sources(own=275, keeps_own=True, tokens=264),
    "own cache, its start in the pool": Sources(in_host=35, own=169, keeps_own=True, tokens=115),
    "full attention in the store": Sources(in_store=96, in_host=170, lost=0.5, tokens=250),
    "few blocks": Sources(in_host=len(PROMPT), crowd=200, lost=1.0, num_blocks=FEW_BLOCKS),
}


class HandOver:
    """A prefill engine that finds a prompt in these sources and hands it over."""

    def __init__(self, workshop: Workshop, model: FakeModel, sources: Sources, rng: random.Random):
        self.workshop, self.url = workshop, workshop.memory()
        self.spec = RigSpec(
            model=model, num_blocks=sources.num_blocks, max_batched_tokens=STEP_TOKENS
        )
        self.prompt = PROMPT[: sources.tokens]
        if sources.in_store:
            serve(workshop.rig(self.spec, self.url, "writer"), PROMPT[: sources.in_store])
        self.prefill = workshop.rig(self.spec, ["host://1MiB", self.url], "prefill")
        if sources.in_host:
            self._serve(self.prefill, PROMPT[: sources.in_host])
        if sources.own:
            self._serve(self.prefill, PROMPT[: sources.own], save=False)
        if sources.crowd:
            self._serve(self.prefill, CROWD[: sources.crowd])
        self._lose(sources.lost, rng)
        if not sources.keeps_own:
            self.prefill.reset()

    @staticmethod
    def _serve(rig: Rig, prompt: list[int], **options: Any) -> dict[str, Any]:
        request = rig.add(prompt, 1, **options)
        rig.run(LIMIT_S)
        rig.expect([request])
        rig.settle()
        params = rig.answers[request].params
        return {} if params is None else params["kvpool"]

    def _lose(self, share: float, rng: random.Random) -> None:
        store, names = self.workshop.plain_store(self.url), self.prefill.pool._service.core._names
        for chunk_hash in prompt_hashes(PROMPT, CHUNK):
            for layer_group in range(len(names.layer_groups)):
                if rng.random() < share:
                    store.remove(names.of_chunk(chunk_hash, layer_group))

    def promised(self) -> dict[str, Any]:
        """Hand the prompt over, and return prefill's answer."""
        return self._serve(self.prefill, self.prompt, hand_over=True)

    def loaded(self, answer: dict[str, Any]) -> int:
        """Return the number of tokens that decode loads. Assert that it waits for no missing
        chunk."""
        decode = self.workshop.rig(self.spec, self.url, "decode")
        # Without notices decode would wait for a false promise until `expect_timeout_ms`.
        self._serve(decode, self.prompt, expect_tokens=answer["tokens"], expect_end=True)
        if answer["tokens"]:
            assert decode.count("kvpool_expected_prompts", "outcome=found") == 1
        check_nothing_leaked(self.prefill)
        check_nothing_leaked(decode)
        return int(decode.count("kvpool_hit_tokens"))


def loadable(tokens: int, prompt: list[int]) -> int:
    """Return the tokens that decode loads of `tokens` stored ones: whole blocks, or all but the
    prompt's last token."""
    return len(prompt) - 1 if tokens == len(prompt) else tokens - tokens % BLOCK


@EACH_MODEL
@pytest.mark.parametrize("case", [*KNOWN, *seeds(2, 40)])
def test_decode_loads_what_prefill_promises_wherever_prefill_had_it(
    workshop: Workshop, model: str, case: str | int
) -> None:
    rng = random.Random(f"{model} {case}")
    sources = KNOWN[case] if isinstance(case, str) else Sources.draw(rng)
    handed = HandOver(workshop, MODELS[model], sources, rng)
    answer = handed.promised()
    print(sources, answer)
    is_short = sources.keeps_own or sources.num_blocks == FEW_BLOCKS or MODELS[model].states
    assert is_short or answer["tokens"] == sources.tokens, "each part was found, or computed"
    assert handed.loaded(answer) >= loadable(answer["tokens"], handed.prompt)


@EACH_MODEL
@pytest.mark.parametrize("keeps_own", [False, True])
def test_prompt_in_host_memory_alone_is_handed_over_whole_with_few_blocks(
    workshop: Workshop, model: str, *, keeps_own: bool
) -> None:
    """The prompt has more blocks than may be pinned for saves at once."""
    sources = Sources(in_host=len(PROMPT), keeps_own=keeps_own, lost=1.0, num_blocks=FEW_BLOCKS)
    handed = HandOver(workshop, MODELS[model], sources, random.Random())
    answer = handed.promised()
    whole = len(PROMPT) // CHUNK * CHUNK
    assert handed.loaded(answer) >= (whole if MODELS[model].states else len(PROMPT) - 1)
