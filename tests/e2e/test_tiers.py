"""Tiers on whole engines: host memory, files, both ways of writing, restarts."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import EngineShelf
from tests.e2e.engine import Engine, EngineSpec, Prompt
from tests.e2e.pool import cell_files, expecting, files, fresh, pool, same, tokens
from tests.support.models import LlamaShape
from tests.support.object_server import ObjectServer

pytestmark = pytest.mark.e2e

Llama = Callable[[LlamaShape], Path]
SHAPE = LlamaShape(kv_heads=2)
REPLICATED = LlamaShape(kv_heads=1)  # with TP=2 both ranks hold the one head


@pytest.mark.parametrize(("shape", "tp"), [(SHAPE, 1), (REPLICATED, 2)])
def test_host_memory_alone_gives_back_what_the_engine_has_forgotten(
    llama: Llama, engines: EngineShelf, shape: LlamaShape, tp: int
) -> None:
    model = llama(shape)
    prompt = Prompt(ids=tokens(seed=61, count=1100))
    (expected,) = engines.get(EngineSpec(model=model)).generate(prompt)
    engine = engines.get(EngineSpec(model=model, tp=tp, kv_transfer_config=pool(["host://64MiB"])))
    assert engine.generate(prompt)[0].cached_tokens == 0
    again = fresh(engine, prompt)
    assert again.cached_tokens == 1024
    same(again, expected)


@pytest.mark.small
def test_what_is_written_back_reaches_files_when_the_engine_ends(
    llama: Llama, engines: EngineShelf, tmp_path: Path
) -> None:
    """Host memory first; a later engine of another TP size finds it in the files."""
    model = llama(SHAPE)
    config = pool(["host://64MiB", files(tmp_path / "pool")], write_policy="back")
    prompt = Prompt(ids=tokens(seed=62, count=1100))
    (expected,) = engines.get(EngineSpec(model=model)).generate(prompt)
    with Engine(EngineSpec(model=model, kv_transfer_config=config), tmp_path / "one.log") as writer:
        writer.generate(prompt)
        assert cell_files(tmp_path / "pool") == []
        assert fresh(writer, prompt).cached_tokens == 1024
    assert cell_files(tmp_path / "pool")
    spec = EngineSpec(
        model=model, tp=2, block_size=64, kv_transfer_config=pool(files(tmp_path / "pool"))
    )
    (read,) = engines.get(spec).generate(prompt)
    assert read.cached_tokens == 1024
    same(read, expected)


@pytest.mark.s3
def test_two_engines_share_over_object_storage(llama: Llama, tmp_path: Path) -> None:
    model = llama(SHAPE)
    prompt = Prompt(ids=tokens(seed=72, count=1100))
    keys = {"AWS_ACCESS_KEY_ID": "test-id", "AWS_SECRET_ACCESS_KEY": "test-secret"}
    with ObjectServer() as server:
        server.make_bucket("cells")
        config = pool(["host://64MiB", f"s3://cells/pool?endpoint={server.endpoint}"])
        spec = EngineSpec(model=model, kv_transfer_config=config, env=keys)
        with Engine(spec, tmp_path / "writer.log") as writer:
            (computed,) = writer.generate(prompt)
            assert computed.cached_tokens == 0
        other = EngineSpec(model=model, block_size=64, kv_transfer_config=config, env=keys)
        with Engine(other, tmp_path / "reader.log") as reader:
            (read,) = reader.generate(expecting(prompt, 1024))
            assert read.cached_tokens == 1024
            same(read, computed)
