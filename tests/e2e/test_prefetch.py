"""Cells that are brought near before an engine starts are hits of that engine."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tests.e2e.engine import Engine, EngineSpec, Prompt
from tests.e2e.pool import files, pool, same, tokens
from tests.support.models import LlamaShape
from tests.support.object_server import ObjectServer
from vllm_kvpool.prefetch import Brought
from vllm_kvpool.storage.file.store import ReadOnlyFileStore

pytestmark = [pytest.mark.e2e, pytest.mark.s3]

SHAPE = LlamaShape(kv_heads=2)
LIMIT_S = 60.0


def test_a_prompt_is_brought_to_where_another_engine_starts(
    llama: Callable[[LlamaShape], Path], tmp_path: Path
) -> None:
    """The reader has another block size, and starts after the far tier is gone."""
    model = llama(SHAPE)
    prompt = Prompt(ids=tokens(seed=91, count=1100))
    keys = {"AWS_ACCESS_KEY_ID": "test-id", "AWS_SECRET_ACCESS_KEY": "test-secret"}
    with ObjectServer() as server:
        server.make_bucket("cells")
        far = f"s3://cells/pool?endpoint={server.endpoint}"
        written = pool([files(tmp_path / "a"), far])
        with Engine(
            EngineSpec(model=model, kv_transfer_config=written, env=keys), tmp_path / "a.log"
        ) as writer:
            (computed,) = writer.generate(prompt)
            assert computed.cached_tokens == 0
        read = pool([files(tmp_path / "b"), far])
        [namespace] = ReadOnlyFileStore(str(tmp_path / "a")).namespaces()
        named = tmp_path / "prompt.json"
        named.write_text(json.dumps(prompt.ids))
        done = subprocess.run(
            [
                *(sys.executable, "-m", "vllm_kvpool", "prefetch", "--json"),
                *("--kv-transfer-config", json.dumps(read)),
                *("--namespace", namespace, "--tokens", str(named)),
            ],
            capture_output=True,
            timeout=LIMIT_S,
            env={**os.environ, **keys},
            check=True,
        )
        brought = msgspec.json.decode(done.stdout, type=Brought)
        assert brought.brought >= 4 * SHAPE.kv_heads
        assert (brought.bad, brought.missing) == (0, 0)
    spec = EngineSpec(model=model, block_size=64, kv_transfer_config=read, env=keys)
    with Engine(spec, tmp_path / "b.log") as reader:
        (loaded,) = reader.generate(prompt)
        assert loaded.cached_tokens == 1024
        same(loaded, computed)
