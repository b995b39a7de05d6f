"""The kernel compiles for GPUs, too: the interpreter accepts more than the compiler."""

import json
import os
import subprocess
import sys
from inspect import signature
from pathlib import Path

import pytest
import torch

from tests.gpu.compile_kernels import CASES
from vllm_kvpool.layout.page_formats import from_token_content

pytestmark = pytest.mark.triton

ROOT = Path(__file__).parent.parent.parent
WIDE = {"ld.global.v2.b64", "st.global.v2.b64"}
LIMIT_S = 300


def test_constants_are_the_last_parameters_in_their_order() -> None:
    """A compiled kernel gets its constants by position."""
    from vllm_kvpool.staging.triton_kernel import kernel_constants, move_fragments
    from vllm_kvpool.staging.triton_tables import run_tables

    (table,) = run_tables([from_token_content(torch.zeros(4, 2, 16, 64))])
    names = list(kernel_constants(table, is_gather=True))
    assert list(signature(move_fragments.fn).parameters)[-len(names) :] == names


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
