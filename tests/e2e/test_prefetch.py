"""Cells that are brought near before an engine starts are hits of that engine."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from tests.e2e.engine import Engine, EngineSpec, Prompt
from tests.e2e.pool import files, fresh, pool, same, tokens
from tests.support.models import LlamaShape
from tests.support.object_server import ObjectServer
from vllm_kvpool.identity.cell_names import Brought, ChunkNames

pytestmark = [pytest.mark.e2e, pytest.mark.s3]

SHAPE = LlamaShape(kv_heads=2)
LIMIT_S = 60.0


def test_a_prompt_is_brought_to_where_another_engine_starts(
    llama: Callable[[LlamaShape], Path], tmp_path: Path
) -> None:
    """Of another block size; when it starts, the far tier is gone."""
    model = llama(SHAPE)
    prompt = Prompt(ids=tokens(seed=91, count=1100))
    asking = replace(prompt, kv_transfer_params={"kvpool": {"name_cells": True}})
    keys = {"AWS_ACCESS_KEY_ID": "test-id", "AWS_SECRET_ACCESS_KEY": "test-secret"}
    with ObjectServer() as server:
        server.make_bucket("cells")
        far = f"s3://cells/pool?endpoint={server.endpoint}"
        written = pool([files(tmp_path / "a"), far])
        with Engine(
            EngineSpec(model=model, kv_transfer_config=written, env=keys), tmp_path / "a.log"
        ) as writer:
            (computed,) = writer.generate(asking)
            assert computed.cached_tokens == 0
            assert computed.kv_transfer_params is not None
            told = computed.kv_transfer_params["kvpool"]
            assert told["tokens"] == 1024
            # Found or computed, the cells have the same names.
            asked = {"kvpool": {"name_cells": True, "expect_tokens": 1024}}
            again = fresh(writer, replace(prompt, kv_transfer_params=asked)).kv_transfer_params
            assert again == computed.kv_transfer_params
        names = msgspec.convert(told["cells"], ChunkNames)
        assert len(names.chunks) == 4
        read = pool([files(tmp_path / "b"), far])
        done = subprocess.run(
            [
                *(sys.executable, "-m", "vllm_kvpool.cli", "prefetch", "--finish"),
                *("--kv-transfer-config", json.dumps(read)),
            ],
            input=msgspec.json.encode(names),
            capture_output=True,
            timeout=LIMIT_S,
            env={**os.environ, **keys},
            check=True,
        )
        brought = msgspec.json.decode(done.stdout, type=Brought)
        assert (brought.brought, brought.bad, brought.missing) == (
            len(names.key_prefixes) * len(names.chunks),
            0,
            0,
        )
    spec = EngineSpec(model=model, block_size=64, kv_transfer_config=read, env=keys)
    with Engine(spec, tmp_path / "b.log") as reader:
        (loaded,) = reader.generate(prompt)
        assert loaded.cached_tokens == 1024
        same(loaded, computed)
