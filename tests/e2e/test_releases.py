"""Engines of two releases of vLLM on one store, which know nothing of each other.

The other release has an environment of its own, whose interpreter `KVPOOL_OLDER_PYTHON` names;
`make test-matrix` makes one. `OLDER_VLLM` names the release.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.e2e.conftest import EngineShelf
from tests.e2e.engine import Engine, EngineSpec, Image, Prompt
from tests.e2e.pool import expecting, files, fresh, pool, same, tokens, unpooled
from tests.e2e.vision import TEXT_TOKENS, about
from tests.support.models import LlamaShape, Qwen2VLShape
from tests.support.releases import NEWEST, OLDER

pytestmark = [pytest.mark.e2e, pytest.mark.matrix, pytest.mark.timeout(900)]

ROOT = Path(__file__).parent.parent.parent
OLDER_PYTHON = Path(os.environ.get("KVPOOL_OLDER_PYTHON", ROOT / f".venv-{OLDER}/bin/python"))
RELEASES = {"older": OLDER, "newer": NEWEST}
PYTHONS = {"older": OLDER_PYTHON, "newer": Path(sys.executable)}
# The older CPU kernel takes blocks of 16 tokens, the newer one multiples of 32 only.
BLOCK = {"older": 16, "newer": 64}
CHUNK = 32
PROMPT_TOKENS = 620
SHAPE = LlamaShape(kv_heads=2)

Llama = Callable[[LlamaShape], Path]
Qwen2VL = Callable[[Qwen2VLShape], Path]
Start = Callable[[str, int], Engine]


@dataclass(frozen=True)
class Case:
    """The vLLM release and number of ranks of the writer and of the reader."""

    writer: str
    writer_tp: int
    reader: str
    reader_tp: int


CASES = [
    Case("older", 1, "newer", 1),
    Case("newer", 1, "older", 1),
    Case("older", 2, "newer", 1),
    Case("newer", 1, "older", 2),
]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("releases")


@pytest.fixture
def start(llama: Llama, engines: EngineShelf, store: Path) -> Start:
    """`start(release, tp)`: an engine on the module's store."""
    config = pool(files(store), chunk_tokens=CHUNK, save_decode=True)

    def start(release: str, tp: int) -> Engine:
        assert PYTHONS[release].exists(), f"no {PYTHONS[release]}: make test-matrix sets it up"
        return engines.get(
            EngineSpec(
                model=llama(SHAPE),
                tp=tp,
                block_size=BLOCK[release],
                kv_transfer_config=config,
                python=PYTHONS[release],
            )
        )

    return start


@pytest.fixture
def without_pool(llama: Llama, engines: EngineShelf) -> Engine:
    return engines.get(EngineSpec(model=llama(SHAPE)))


def found(stored: int, release: str) -> int:
    """So many of the stored tokens are whole blocks of the release's engines."""
    return stored // BLOCK[release] * BLOCK[release]


def test_they_are_two_releases(start: Start) -> None:
    assert {name: start(name, 1).release() for name in RELEASES} == RELEASES


def test_a_conversation_may_change_releases_in_every_turn(
    start: Start, without_pool: Engine
) -> None:
    ids, stored = tokens(seed=750, count=300), 0
    for release in ("older", "newer", "older"):
        turn = Prompt(ids=ids, max_tokens=80)
        answer = fresh(start(release, 1), expecting(turn, stored))
        assert answer.cached_tokens == found(stored, release)
        same(answer, fresh(without_pool, turn))
        ids = [*ids, *answer.token_ids]
        stored = (len(ids) - 1) // CHUNK * CHUNK  # the last token has no KV
        ids += tokens(seed=751, count=30)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_one_release_computed_the_other_reuses(
    case: Case, start: Start, without_pool: Engine
) -> None:
    prompt = Prompt(ids=tokens(seed=700 + CASES.index(case), count=PROMPT_TOKENS))
    (expected,) = without_pool.generate(prompt)
    written = fresh(start(case.writer, case.writer_tp), prompt)
    assert written.cached_tokens == 0
    same(written, expected)
    stored = PROMPT_TOKENS // CHUNK * CHUNK
    read = fresh(start(case.reader, case.reader_tp), expecting(prompt, stored))
    assert read.cached_tokens == found(stored, case.reader)
    same(read, expected)


@pytest.mark.parametrize("writer", RELEASES)
def test_an_image_that_a_client_names_is_shared_within_one_release_alone(
    writer: str, qwen2_vl: Qwen2VL, engines: EngineShelf, tmp_path: Path
) -> None:
    """The text before the image is shared by both.

    The tiny model's processor names no mean of colours: vLLM 0.32 takes none from it, vLLM 0.23
    that of transformers, and their images differ.
    """
    shape = Qwen2VLShape()
    chunk = 64
    config = pool(files(tmp_path), chunk_tokens=chunk)
    image = Image(seed=1, width=28 * 12, height=28 * 7, uuid="cat")
    asked = about(image, seed=5)
    asked = replace(asked, ids=[*tokens(seed=760, count=2 * chunk), *asked.ids])
    whole = (2 * chunk + 2 * TEXT_TOKENS + shape.image_rows(image.width, image.height)) // chunk
    (reader,) = RELEASES.keys() - {writer}
    for release, found in ((writer, 0), (writer, whole), (reader, 2), (reader, whole)):
        spec = EngineSpec(
            model=qwen2_vl(shape),
            images=1,
            block_size=BLOCK[release],
            kv_transfer_config=config,
            llm={"limit_mm_per_prompt": {"image": 1, "video": 0}},
            python=PYTHONS[release],
        )
        engine = engines.get(spec)
        answer = fresh(engine, expecting(asked, found * chunk))
        assert answer.cached_tokens == found * chunk
        same(answer, fresh(engine, unpooled(asked)))
