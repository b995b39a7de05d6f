"""Engines that encrypt cells: one with keys from a command, one with rotated keys from a file."""

import base64
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import EngineShelf
from tests.e2e.engine import EngineSpec, Prompt
from tests.e2e.pool import cell_files, expecting, files, fresh, pool, same, tokens
from tests.support.models import LlamaShape
from vllm_kvpool.storage.contents.cell_format import is_encrypted

pytestmark = pytest.mark.e2e

IDS = tokens(seed=31, count=600)
HIT = 512


def test_cells_of_one_engine_are_read_by_another_that_has_their_key(
    llama: Callable[[LlamaShape], Path], engines: EngineShelf, tmp_path: Path
) -> None:
    old, new = (base64.b64encode(bytes([number]) * 32).decode() for number in range(2))
    keys, rotated = tmp_path / "keys", tmp_path / "rotated"
    keys.write_text(old)
    keys.chmod(0o600)
    rotated.write_text(f"{new}\n{old}\n")
    rotated.chmod(0o600)
    writer, reader = (
        engines.get(
            EngineSpec(
                model=llama(LlamaShape(kv_heads=2)),
                kv_transfer_config=pool(files(tmp_path / "pool"), **options),
                block_size=block,
            )
        )
        for block, options in (
            (32, {"encryption_key_file": str(keys)}),
            (64, {"encryption_key_file": str(rotated)}),
        )
    )
    expected = fresh(writer, Prompt(ids=IDS))
    read = fresh(reader, expecting(Prompt(ids=IDS), HIT))
    same(read, expected)
    assert read.cached_tokens == HIT
    cells = cell_files(tmp_path / "pool")
    assert cells
    assert all(is_encrypted(memoryview(path.read_bytes())) for path in cells)
