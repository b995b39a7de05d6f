"""Stores and options on whole engines: Mooncake, cells per rank, damage, metrics, bad input."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import EngineShelf
from tests.e2e.engine import Engine, EngineError, EngineSpec, Prompt
from tests.e2e.pool import cell_files, counts_once, expecting, files, fresh, pool, same, tokens
from tests.support.models import LlamaShape
from tests.support.mooncake_master import MooncakeMaster
from tests.support.releases import since
from vllm_kvpool.metrics import METRICS, PREFIX

pytestmark = pytest.mark.e2e

SHAPE = LlamaShape(kv_heads=2)
SAVED, UNSAVED = "vllm:kvpool_saved_tokens", "vllm:kvpool_unsaved_tokens"
# Loads begin in steps without outputs; what those count `LLM` of 0.23.0 and 0.27.1 drops
# (`LLMEngine.step`). Servers do not (`AsyncLLM`), nor does the file.
SERVED_HITS = {"0.23.0": 0, "0.32.0": 512}
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


@pytest.mark.mooncake
def test_a_dead_store_counts_as_nothing_saved_and_is_told(llama: Llama, tmp_path: Path) -> None:
    log, stats = tmp_path / "engine.log", tmp_path / "stats.json"
    config = pool("mooncake://127.0.0.1:9?protocol=rdma", stats_file=str(stats))
    engine = Engine(EngineSpec(model=llama(SHAPE), kv_transfer_config=config), log)
    engine.generate(Prompt(ids=tokens(seed=6, count=600)))
    served = counts_once(engine, lambda counts: counts.get(UNSAVED, 0) >= 512)
    engine.close()
    assert SAVED not in served
    written = log.read_text()
    assert "cells were not saved (unreachable): no store can be written to" in written
    assert "tiers mooncake (tcp, not as its URL says: rdma; away: it is tried again)" in written


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


def test_metrics_of_both_sides(llama: Llama, engines: EngineShelf, tmp_path: Path) -> None:
    stats = tmp_path / "stats.json"
    config = pool(files(tmp_path / "pool"), stats_file=str(stats))
    spec = EngineSpec(model=llama(SHAPE), kv_transfer_config=config)
    engine = Engine(spec, tmp_path / "engine.log")
    prompt = Prompt(ids=tokens(seed=6, count=600))
    engine.generate(prompt)
    fresh(engine, expecting(prompt, 512))
    served = counts_once(engine, lambda counts: counts.get(SAVED, 0) >= 512)
    release = engine.release()
    engine.close()
    assert served.get("vllm:kvpool_hit_tokens", 0) == since(SERVED_HITS, release)
    assert served[SAVED] == 512
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
            assert sample.partition("{")[0] in METRICS


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
