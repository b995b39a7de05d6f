"""Cells written in one page format and read in another, with vLLM's own pages and worker parts.

All memory of a reader is compared. The test finds a wrong byte beside the tokens as well as a lost
byte.
"""

import itertools
from pathlib import Path

import pytest
import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.attention.backends.turboquant_attn import TurboQuantAttentionBackend
from vllm.v1.kv_cache_interface import KVQuantMode

from tests.support.memory_store import MemoryStore
from tests.support.models import LlamaShape, make_model
from tests.vllm_adapt.vllm_pages import FORMATS, Content, Rank, hashes_of

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

STORES = itertools.count()
TRITON, TURBO = TritonAttentionBackend, TurboQuantAttentionBackend
BYTES = torch.uint8
CONTENTS = {
    "float32": Content(dtype=torch.float32),
    "float16": Content(dtype=torch.float16),
    "bfloat16": Content(dtype=torch.bfloat16),
    "fp8_e4m3": Content(dtype=torch.float8_e4m3fn, quant=KVQuantMode.FP8_PER_TENSOR),
    "fp8_e5m2": Content(dtype=torch.float8_e5m2, quant=KVQuantMode.FP8_PER_TENSOR),
    "int8": Content(dtype=torch.int8),
    "K and V of different size": Content(dtype=torch.float16, key_dim=48, value_dim=32),
    "int8, scales in the row": Content(
        dtype=torch.int8, quant=KVQuantMode.INT8_PER_TOKEN_HEAD, backend=TRITON
    ),
    "fp8, scales in the row": Content(
        dtype=torch.float8_e4m3fn, quant=KVQuantMode.FP8_PER_TOKEN_HEAD, backend=TRITON
    ),
    "int4, scales in the row": Content(
        dtype=BYTES, quant=KVQuantMode.INT4_PER_TOKEN_HEAD, backend=TRITON
    ),
    "TurboQuant": Content(
        dtype=BYTES, key_dim=128, quant=KVQuantMode.TURBOQUANT_K8V4, backend=TURBO
    ),
    # Its backend cannot be imported without Triton.
    "UltraQuant": Content(
        dtype=BYTES, key_dim=256, quant=KVQuantMode.ULTRAQUANT_4BIT, slot_bytes=272
    ),
    "MLA": Content(dtype=torch.bfloat16, key_dim=576, latent="auto"),
    "MLA fp8_ds_mla": Content(dtype=BYTES, key_dim=576, latent="fp8_ds_mla", slot_bytes=656),
    "MLA nvfp4_ds_mla": Content(dtype=BYTES, key_dim=576, latent="nvfp4_ds_mla", slot_bytes=352),
}
KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models"), LlamaShape(kv_heads=4, layers=4))


def config_of(model: Path, content: Content) -> VllmConfig:
    dtype = content.dtype if content.dtype in KERNEL_DTYPES else torch.float32
    name = str(dtype).removeprefix("torch.")
    arguments = EngineArgs(model=str(model), dtype=name, skip_tokenizer_init=True)
    return arguments.create_engine_config()


@pytest.mark.parametrize("name", CONTENTS)
def test_every_format_reads_what_every_format_has_written(name: str, model: Path) -> None:
    content = CONTENTS[name]
    config = config_of(model, content)
    store = f"memory://formats{next(STORES)}"
    shared = MemoryStore(store.removeprefix("memory://"), 1 << 30)
    by_kernel = content.on_cpus and content.dtype in KERNEL_DTYPES
    # vLLM's library for processors without AVX-512 BF16 has no such kernels.
    has_amx = content.dtype == torch.bfloat16 and torch.cpu._is_avx512_bf16_supported()
    formats = {
        n: f for n, f in FORMATS.items() if not f.isa or (by_kernel and (f.isa != "amx" or has_amx))
    }
    wanted = {}
    for number, (writes, page_format) in enumerate(formats.items()):
        writer = Rank(store, content, page_format, config)
        rows = writer.random_rows(number)
        writer.fill(rows)
        writer.save(hashes_of(number))
        writer.part.close()
        wanted[writes] = (hashes_of(number), rows)
    for reads, page_format in formats.items():
        reader = Rank(store, content, page_format, config)
        for writes, (hashes, rows) in wanted.items():
            reader.load(hashes)
            read = reader.memory.clone()
            assert torch.equal(read, reader.bytes_after(rows)), f"{writes} -> {reads}"
        reader.part.close()
    shared.close()
