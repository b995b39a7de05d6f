"""Compiles the kernel for GPUs that are not there, and prints how each variant reads and writes.

    python -m tests.gpu.compile_kernels

JSON: for each of `CASES`, for each kernel that a copier of such pages launches, the kinds of global
loads and stores in it. A process of its own: the interpreter, once chosen, stays.
"""

import json
import re
import warnings

import torch

from vllm_kvpool.layout.page_formats import (
    from_cpu_attention,
    from_nvfp4,
    from_token_content,
)

WARP_THREADS = 32
# Compute capability, dtype, pages.
CASES = (
    (80, torch.bfloat16, "token"),
    (90, torch.bfloat16, "token"),
    (90, torch.uint8, "cpu"),
    (90, torch.float32, "cpu"),
    (100, torch.bfloat16, "token"),
    (100, torch.uint8, "nvfp4"),
)
TABLE_ALIGNMENT = 16


def compiled_accesses(capability: int, dtype: torch.dtype, page_format: str) -> list[list[str]]:
    """Return the global loads and stores of each kernel that a copier of these pages launches."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from vllm_kvpool.staging.triton_kernel import NUM_WARPS, kernel_constants, move_fragments
    from vllm_kvpool.staging.triton_tables import run_tables

    tensor = torch.zeros(4, 2, 16, 64, dtype=torch.uint8).view(dtype)
    width = tensor.shape[3]
    if page_format == "cpu":
        pages = from_cpu_attention(tensor, width // 2, width // 2)
    elif page_format == "nvfp4":  # of heads of 128 numbers
        pages = from_nvfp4(torch.zeros(4, 4, 16, 72, dtype=dtype), 2, swizzled=True)
    else:
        pages = from_token_content(tensor)
    found = []
    for table in run_tables([pages]):
        for is_gather in (True, False):
            constants = kernel_constants(table, is_gather=is_gather)
            plain = move_fragments.arg_names[1 : -len(constants)]
            signature = {"table": "*i64", **dict.fromkeys(plain, "i32")}
            source = ASTSource(
                fn=move_fragments,
                signature=signature | dict.fromkeys(constants, "constexpr"),
                constexprs=constants,
                attrs={(0,): [["tt.divisibility", TABLE_ALIGNMENT]]},
            )
            target = GPUTarget("cuda", capability, WARP_THREADS)
            binary = triton.compile(source, target=target, options={"num_warps": NUM_WARPS})
            assert binary.asm["cubin"]
            ptx = binary.asm["ptx"]
            found.append(sorted(set(re.findall(r"\b(?:ld|st)\.global(?:\.v\d)?\.b\d+", ptx))))
    return found


def main() -> None:
    warnings.simplefilter("ignore")
    print(json.dumps([compiled_accesses(*case) for case in CASES]))


if __name__ == "__main__":
    main()
