"""`kvpool try` over four servers of vLLM: two, and after the restart two more."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.models import LlamaShape, add_tokenizer, make_model

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(1200)]

ENGINE = (
    *("--dtype", "float32", "--max-model-len", "1024", "--enforce-eager"),
    *("--kv-cache-memory-bytes", "134217728"),
)


def test_try_of_a_model_loads_after_the_restart_what_it_saved_before(tmp_path: Path) -> None:
    model = make_model(tmp_path / "models", LlamaShape(vocab=1024))
    add_tokenizer(model, 1024)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    done = subprocess.run(
        [
            *(sys.executable, "-m", "vllm_kvpool", "try", str(model)),
            *("--json", "--", *ENGINE),
        ],
        env={
            **os.environ,
            "TMPDIR": str(temporary),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "TORCH_COMPILE_DISABLE": "1",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    rows = {row["kind"]: row for row in found["rows"]}
    assert rows["new"]["pool"]["found"] == rows["new"]["without"]["found"] == 0
    for side in ("without", "pool"):
        assert rows["seen by this engine"][side]["found"] > 0.8
        assert all(row[side]["ttft_mean_s"] > 0 < row[side]["cpu_s"] for row in rows.values())
    assert rows["seen before a restart"]["without"]["found"] == 0
    # Chunks of 256 tokens: of some 900, three are whole.
    assert rows["seen before a restart"]["pool"]["found"] > 0.7
    counts = found["counts"]
    assert (counts["unsaved"], counts["failures"]) == ({}, {})
    assert counts["file_bytes"] > counts["saved_tokens"] > 8 * 768
    assert "TTFT mean" in done.stderr
    assert list(temporary.glob("kvpool-try-*")) == []
