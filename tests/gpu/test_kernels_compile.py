"""The interpreter takes more than the compiler does; so the kernel is compiled too, for GPUs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.compile_kernels import CASES

pytestmark = pytest.mark.triton

ROOT = Path(__file__).parent.parent.parent
WIDE = {"ld.global.v2.b64", "st.global.v2.b64"}
LIMIT_S = 300


def test_kernels_compile_and_move_sixteen_bytes_at_a_time() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.gpu.compile_kernels"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr[-4000:]
    for case, kernels in zip(CASES, json.loads(done.stdout), strict=True):
        _, dtype, page_format = case
        wide = [set(accesses) >= WIDE for accesses in kernels]
        if page_format == "token":
            assert wide == [True, True], (case, kernels)
        elif page_format == "nvfp4":  # scales of V lie in tiles, byte by byte
            assert any({"ld.global.b8", "st.global.b8"} <= set(each) for each in kernels), kernels
        else:  # K, whose elements lie apart, and V; both directions of each
            assert sorted(wide) == [False, False, True, True], (case, kernels)
            narrow = f"st.global.b{8 * torch.empty(0, dtype=dtype).element_size()}"
            assert all(narrow in kernels[i] for i, is_wide in enumerate(wide) if not is_wide)
