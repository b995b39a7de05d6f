"""Two ranks that hold the same KV head fetch each cell once, and save it once."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import EngineShelf
from tests.e2e.engine import Engine, EngineSpec, Prompt
from tests.e2e.pool import cell_files, expecting, files, fresh, pool, same, tokens
from tests.support.models import LlamaShape
from tests.support.releases import LAYERWISE, since

pytestmark = pytest.mark.e2e

Llama = Callable[[LlamaShape], Path]
ONE_HEAD = LlamaShape(kv_heads=1)


def loaded_cells(stats: Path, rank: int) -> dict[str, float]:
    """Return a rank's counts of loaded cells, by the other labels."""
    counted = json.loads(Path(f"{stats}.kv.worker.{rank}").read_bytes())
    start = "kvpool_cells{direction=load,"
    return {name.removeprefix(start): n for name, n in counted.items() if name.startswith(start)}


@pytest.mark.small
@pytest.mark.parametrize("layerwise", [False, True], ids=["", "layerwise"])
def test_a_prompt_is_fetched_once_for_both_ranks(
    llama: Llama, engines: EngineShelf, tmp_path: Path, layerwise: bool
) -> None:
    """A prompt saved by both ranks is also read at TP 1."""
    model, store, stats = llama(ONE_HEAD), files(tmp_path / "pool"), tmp_path / "stats"
    prompt, back = (Prompt(ids=tokens(seed=seed, count=1100)) for seed in (91, 92))
    plain = engines.get(EngineSpec(model=model))
    if layerwise and not since(LAYERWISE, plain.release()):
        pytest.skip("refused by name")
    expected, wanted = plain.generate(prompt, back)
    one = EngineSpec(model=model, kv_transfer_config=pool(store))
    config = pool(store, stats_file=str(stats), layerwise=layerwise)
    two = EngineSpec(model=model, tp=2, block_size=64, kv_transfer_config=config)
    with Engine(one, tmp_path / "one.log") as writer, Engine(two, tmp_path / "two.log") as reader:
        writer.generate(prompt)
        (read,) = reader.generate(expecting(prompt, 1024))
        assert read.cached_tokens == 1024
        same(read, expected)
        again = fresh(reader, prompt)
        assert again.cached_tokens == 1024
        same(again, expected)
        share = len(cell_files(tmp_path / "pool"))  # two loads, of each half by a rank
        reader.generate(back)
        (read,) = writer.generate(expecting(back, 1024))
        assert read.cached_tokens == 1024
        same(read, wanted)
        assert len(cell_files(tmp_path / "pool")) == 2 * share
    for rank in range(2):
        cells = loaded_cells(stats, rank)
        assert cells.pop("store=replica,outcome=done}") == share
        # The second load may find slabs that are retained since the first.
        assert share / 2 <= cells.pop("store=file,outcome=done}") <= share
        assert not cells
