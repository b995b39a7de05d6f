"""Stores and options on whole engines: Mooncake, cells per rank, damage, metrics, bad input."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import EngineShelf
from tests.e2e.engine import Engine, EngineError, EngineSpec, Prompt
from tests.e2e.pool import cell_files, expecting, files, fresh, pool, same, tokens
from tests.support.models import LlamaShape
from tests.support.mooncake_master import MooncakeMaster
from vllm_kvpool.metrics import METRICS, PREFIX, parse_sample

pytestmark = pytest.mark.e2e

SHAPE = LlamaShape(kv_heads=2)
# Loads begin in steps without outputs; what those count `LLM` of 0.27.1 drops (`LLMEngine.step`).
# Servers do not (`AsyncLLM`), nor does the file.
SERVED_HITS = {"0.27.1": 0, "0.32.0": 512}
Llama = Callable[[LlamaShape], Path]


@pytest.fixture(scope="module")
def master() -> Iterator[MooncakeMaster]:
    with MooncakeMaster() as running:
        yield running


@pytest.mark.mooncake
def test_two_engines_share_over_mooncake(
    llama: Llama, engines: EngineShelf, master: MooncakeMaster
) -> None:
    config = pool(f"mooncake://{master.address}?protocol=tcp&segment=256MiB&required=1")
    model = llama(SHAPE)
    prompt = Prompt(ids=tokens(seed=1, count=1264))
    (expected,) = engines.get(EngineSpec(model=model)).generate(prompt)
    writer = engines.get(EngineSpec(model=model, kv_transfer_config=config))
    reader = engines.get(EngineSpec(model=model, tp=2, block_size=64, kv_transfer_config=config))
    assert writer.generate(prompt)[0].cached_tokens == 0
    (read,) = reader.generate(expecting(prompt, 1024))
    assert read.cached_tokens == 1024
    same(read, expected)


def test_an_unreachable_master_leaves_the_engine_without_a_pool(
    llama: Llama, engines: EngineShelf
) -> None:
    # Nothing listens on the discard port of the loopback.
    config = pool("mooncake://127.0.0.1:9?protocol=tcp")
    engine = engines.get(EngineSpec(model=llama(SHAPE), kv_transfer_config=config))
    prompt = Prompt(ids=tokens(seed=2, count=600))
    (done,) = engine.generate(prompt)
    assert done.cached_tokens == 0
    assert fresh(engine, prompt).cached_tokens == 0
    log = engine.log.read_text()
    assert "127.0.0.1:9" in log
    assert "tried again in the background" in log


@pytest.mark.parametrize(
    ("store", "options", "words"),
    [
        ("mooncake://127.0.0.1:9?required=1", {}, "127.0.0.1:9"),
        ("file:///proc/nowhere", {}, "/proc/nowhere"),
        ("", {"chunk_tokns": 128}, "did you mean 'chunk_tokens'"),
    ],
)
def test_bad_input_ends_the_start_with_a_clear_error(
    llama: Llama, tmp_path: Path, store: str, options: dict[str, object], words: str
) -> None:
    spec = EngineSpec(model=llama(SHAPE), kv_transfer_config=pool(store, **options))
    with pytest.raises(EngineError, match=words):
        Engine(spec, tmp_path / "engine.log")


def test_cells_per_rank(llama: Llama, engines: EngineShelf, tmp_path: Path) -> None:
    """Same store, same model: cells per head and cells per rank do not meet."""
    store = files(tmp_path / "pool")
    prompt = Prompt(ids=tokens(seed=3, count=600))
    per_head = engines.get(EngineSpec(model=llama(SHAPE), kv_transfer_config=pool(store)))
    per_rank = engines.get(
        EngineSpec(model=llama(SHAPE), kv_transfer_config=pool(store, per_head_storage=False))
    )
    expected = per_head.generate(prompt)[0]
    assert fresh(per_head, expecting(prompt, 512)).cached_tokens == 512
    before = len(cell_files(tmp_path / "pool"))
    assert per_rank.generate(prompt)[0].cached_tokens == 0
    read = fresh(per_rank, expecting(prompt, 512))
    assert read.cached_tokens == 512
    same(read, expected)
    added = len(cell_files(tmp_path / "pool")) - before
    assert added * SHAPE.kv_heads == before


def test_damaged_cells_are_computed_and_replaced(
    llama: Llama, engines: EngineShelf, tmp_path: Path
) -> None:
    """Damage from the third chunk on: two chunks are kept, the rest is computed and stored anew."""
    stats = tmp_path / "stats.json"
    config = pool(files(tmp_path / "pool"), stats_file=str(stats))
    engine = engines.get(EngineSpec(model=llama(SHAPE), kv_transfer_config=config))
    first = Prompt(ids=tokens(seed=4, count=2 * 256))
    prompt = Prompt(ids=[*first.ids, *tokens(seed=5, count=2 * 256 + 9)])
    fresh(engine, first)
    fresh(engine, expecting(first, 512))
    intact = set(cell_files(tmp_path / "pool"))
    expected = fresh(engine, prompt)
    fresh(engine, expecting(prompt, 1024))
    for path in set(cell_files(tmp_path / "pool")) - intact:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    same(fresh(engine, prompt), expected)
    same(again := fresh(engine, expecting(prompt, 1024)), expected)
    assert again.cached_tokens == 1024
    engine.close()
    counted = json.loads(Path(f"{stats}.kv.worker.0").read_bytes())
    assert sum(counted[name] for name in counted if name.startswith("kvpool_failures{")) > 0


def test_a_reset_forgets_the_own_namespace_only(
    llama: Llama, engines: EngineShelf, tmp_path: Path
) -> None:
    store = files(tmp_path / "pool")
    prompt = Prompt(ids=tokens(seed=8, count=600))
    mine, other = (
        engines.get(EngineSpec(model=llama(SHAPE), kv_transfer_config=pool(store, namespace=name)))
        for name in ("mine", "other")
    )
    for engine in (mine, other):
        assert engine.generate(prompt)[0].cached_tokens == 0
        assert fresh(engine, expecting(prompt, 512)).cached_tokens == 512
    assert mine.reset_pool()
    assert fresh(other, prompt).cached_tokens == 512
    assert mine.generate(prompt)[0].cached_tokens == 0
    assert fresh(mine, expecting(prompt, 512)).cached_tokens == 512


def test_metrics_of_both_sides(llama: Llama, engines: EngineShelf, tmp_path: Path) -> None:
    stats = tmp_path / "stats.json"
    config = pool(files(tmp_path / "pool"), stats_file=str(stats))
    spec = EngineSpec(model=llama(SHAPE), kv_transfer_config=config)
    engine = Engine(spec, tmp_path / "engine.log")
    prompt = Prompt(ids=tokens(seed=6, count=600))
    engine.generate(prompt)
    fresh(engine, expecting(prompt, 512))
    served, release = engine.metrics(), engine.release()
    engine.close()
    assert served.get("vllm:kvpool_hit_tokens", 0) == SERVED_HITS[release]
    assert served["vllm:kvpool_saved_tokens"] == 512
    assert {name for name in served if "kvpool" in name} <= {PREFIX + name for name in METRICS}
    written = {
        side: json.loads(Path(f"{stats}.kv.{side}.0").read_bytes())
        for side in ("scheduler", "worker")
    }
    assert written["scheduler"]["kvpool_hit_tokens"] == 512
    assert written["scheduler"]["kvpool_miss_tokens{reason=absent}"] == 512
    assert written["worker"]["kvpool_bytes{direction=load,store=file}"] > 0
    assert written["worker"]["kvpool_slots{state=held}"] == 0
    for samples in written.values():
        for sample in samples:
            parse_sample(sample)


def test_the_module_path_is_enough(llama: Llama, engines: EngineShelf, tmp_path: Path) -> None:
    """Without the plugin, and with no option at all: files below the cache directory."""
    config = {
        "kv_connector": "KVPoolConnector",
        "kv_connector_module_path": "vllm_kvpool.connector",
        "kv_role": "kv_both",
    }
    env = {"VLLM_PLUGINS": "", "XDG_CACHE_HOME": str(tmp_path)}
    engine = engines.get(EngineSpec(model=llama(SHAPE), kv_transfer_config=config, env=env))
    prompt = Prompt(ids=tokens(seed=7, count=600))
    engine.generate(prompt)
    assert fresh(engine, expecting(prompt, 512)).cached_tokens == 512
    assert cell_files(tmp_path / "vllm-kvpool")
