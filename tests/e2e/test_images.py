"""Images in prompts: a hit may end within one, and what follows knows where it stands (M-RoPE)."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.e2e.conftest import EngineShelf
from tests.e2e.engine import EngineSpec, Image
from tests.e2e.pool import expecting, files, fresh, pool, same, unpooled
from tests.e2e.vision import TEXT_TOKENS, about
from tests.support.models import Qwen2VLShape

pytestmark = pytest.mark.e2e

SHAPE = Qwen2VLShape()
CHUNK = 32
WIDE = Image(seed=1, width=28 * 12, height=28 * 7)  # 84 rows: the last whole chunk ends within
TALL = Image(seed=2, width=28 * 2, height=28 * 20)  # 40 rows: likewise


def test_what_follows_an_image_stands_where_the_images_grid_says(
    qwen2_vl: Callable[[Qwen2VLShape], Path], engines: EngineShelf, tmp_path: Path
) -> None:
    """Written at TP 1 and read at TP 2; as many tokens and other positions in the next prompt."""
    store = pool(files(tmp_path / "pool"), chunk_tokens=CHUNK)
    llm = {"limit_mm_per_prompt": {"image": 2, "video": 0}}
    one = EngineSpec(model=qwen2_vl(SHAPE), images=2, kv_transfer_config=store, llm=llm)
    writer, reader = engines.get(one), engines.get(replace(one, tp=2))
    for images in ((WIDE,), (WIDE, TALL)):
        rows = [SHAPE.image_rows(image.width, image.height) for image in images]
        end = TEXT_TOKENS * len(rows) + sum(rows)
        hit = (end + TEXT_TOKENS) // CHUNK * CHUNK
        assert end - rows[-1] < hit < end
        prompt = about(*images, seed=5)
        expected = fresh(writer, unpooled(prompt))
        same(fresh(writer, prompt), expected)
        for engine in (writer, reader):
            read = fresh(engine, expecting(prompt, hit))
            assert read.cached_tokens == hit
            same(read, expected)
    # The same number of rows in another grid is another image, after the same text.
    other = about(replace(WIDE, width=28 * 7, height=28 * 12), seed=5)
    read = fresh(reader, other)
    assert read.cached_tokens < TEXT_TOKENS
    same(read, fresh(reader, unpooled(other)))
