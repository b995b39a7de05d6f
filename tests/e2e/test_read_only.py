"""Whole engines on a directory that is mounted read-only: hits come, and nothing is saved."""

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import EngineShelf
from tests.e2e.engine import Engine, EngineSpec, Prompt
from tests.e2e.pool import cell_files, expecting, files, fresh, pool, same, tokens
from tests.support.models import LlamaShape
from tests.test_read_only import mounted

pytestmark = pytest.mark.e2e

Llama = Callable[[LlamaShape], Path]
SHAPE = LlamaShape(kv_heads=2)


@pytest.mark.parametrize("place", ["only", "first", "second"])
def test_an_engine_reads_what_is_in_a_read_only_directory(
    llama: Llama, engines: EngineShelf, tmp_path: Path, place: str
) -> None:
    model, prompt = llama(SHAPE), Prompt(ids=tokens(seed=81, count=1100))
    sealed, other = tmp_path / "sealed", tmp_path / "other"
    writer = EngineSpec(model=model, kv_transfer_config=pool(files(sealed)))
    with Engine(writer, tmp_path / "writer.log") as engine:
        (expected,) = engine.generate(prompt)
        assert fresh(engine, expecting(prompt, 1024)).cached_tokens == 1024
    saved = len(cell_files(sealed))
    stores = {
        "only": [files(sealed) + "&required=1"],
        "first": [files(sealed), files(other)],
        "second": [files(other), files(sealed) + "&required=1"],
    }[place]
    with contextlib.ExitStack() as stack:
        mounted(stack, sealed)
        spec = EngineSpec(model=model, kv_transfer_config=pool(stores))
        with Engine(spec, tmp_path / "reader.log") as engine:
            (read,) = engine.generate(prompt)
            assert read.cached_tokens == 1024
            same(read, expected)
            engine.generate(Prompt(ids=tokens(seed=82, count=1100)))
        assert len(cell_files(sealed)) == saved
        assert bool(cell_files(other)) == (place != "only")
    log = (tmp_path / "reader.log").read_text()
    assert "cells are read, none are saved" in log
