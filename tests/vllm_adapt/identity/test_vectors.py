"""Contents of users' pools that must not change: names of cells, and orders of their bytes.

A change here costs every user their stored cells, and needs a line in CHANGELOG.md that says so.

A vector gives every value that it depends on; `weights_id` stands for the weights. A vector that
depends on the release of vLLM is fixed for each release.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from tests.cache_tensors import tensors_of
from tests.support.models import DeepseekShape, LlamaShape, LlavaShape, make_model
from tests.support.moves import cell_move
from vllm_kvpool.config import read_config
from vllm_kvpool.identity.chunk_hash import ChunkChain, MediaItem, RequestIdentity
from vllm_kvpool.identity.keys import make_namespace, with_weights
from vllm_kvpool.identity.weights import digest_adapter, sample_weights
from vllm_kvpool.layout import page_formats
from vllm_kvpool.layout.description import described
from vllm_kvpool.layout.pages import LayerPages
from vllm_kvpool.layout.states import StateForm, WindowPart
from vllm_kvpool.scheduler.prefix_search import CellNames
from vllm_kvpool.staging.copy_torch import TorchCopier
from vllm_kvpool.vllm_adapt import compat, engine_config

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

LAYERS = 4
MODEL = LlamaShape(kv_heads=4, layers=LAYERS)
HASH = bytes(range(20))
FLOAT32 = {"dtype": "float32"}
BFLOAT16 = {"dtype": "bfloat16"}

BASE: dict[str, Any] = {"block_size": 256, "num_kv_heads": 4, "head_size": 32}
FULL = FullAttentionSpec(**BASE, dtype=torch.float32)
HALF = FullAttentionSpec(**BASE, dtype=torch.bfloat16)
FP8 = FullAttentionSpec(**BASE, dtype=torch.uint8, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)
WINDOW = SlidingWindowSpec(**BASE, dtype=torch.float32, sliding_window=64)
LOCAL = ChunkedLocalAttentionSpec(**BASE, dtype=torch.float32, attention_chunk_size=128)
LATENT = MLAAttentionSpec(block_size=256, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)

Group = tuple[Sequence[int], Any]
ALL: Sequence[int] = range(LAYERS)


@dataclass(frozen=True)
class Engine:
    """An engine: model, vLLM's arguments, parallel sizes, KV cache groups, the pool's options."""

    groups: Sequence[Group]
    model: LlamaShape = MODEL
    arguments: Mapping[str, Any] = field(default_factory=lambda: FLOAT32)
    parallel: Mapping[str, int] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    aligned: bool = False  # keeps recurrent states at the ends of blocks


ENGINES = {
    "Llama": Engine([(ALL, FULL)]),
    "Llama, TP 2": Engine(
        [(ALL, replace(FULL, num_kv_heads=2))], parallel={"tensor_parallel_size": 2}
    ),
    "a cell for each rank": Engine(
        [(ALL, replace(FULL, num_kv_heads=2))],
        parallel={"tensor_parallel_size": 2},
        options={"per_head_storage": False, "namespace": "blue", "chunk_tokens": 128},
    ),
    "decode context parallelism": Engine(
        [(ALL, replace(FULL, num_kv_heads=1))],
        model=replace(MODEL, kv_heads=2),
        parallel={
            "tensor_parallel_size": 4,
            "decode_context_parallel_size": 2,
            "cp_kv_cache_interleave_size": 16,
        },
    ),
    "LoRA": Engine(
        [(ALL, FULL)],
        arguments={
            **FLOAT32,
            "enable_lora": True,
            "lora_dtype": "bfloat16",
            "lora_target_modules": ["v_proj", "k_proj"],
        },
    ),
    "encrypted": Engine([(ALL, HALF)], options={"encryption_key_file": "/keys"}),
    "KV in fp8": Engine([(ALL, FP8)], arguments={**FLOAT32, "kv_cache_dtype": "fp8"}),
    "windows and local attention": Engine([([0, 2], WINDOW), ([1], FULL), ([3], LOCAL)]),
    "MLA": Engine([(range(3), LATENT)], model=DeepseekShape(), arguments=BFLOAT16),
    "hf_overrides": Engine(
        [(ALL, FULL)], arguments={**FLOAT32, "hf_overrides": {"rope_theta": 5000.0}}
    ),
    "quantised": Engine([(ALL, HALF)], arguments={**BFLOAT16, "quantization": "fp8"}),
}
if compat.offers_states():
    STATE = MambaSpec(
        block_size=256,
        shapes=((3, 64), (4, 8, 8)),
        dtypes=(torch.bfloat16, torch.float32),
        mamba_type=MambaAttentionBackendEnum.GDN_ATTN,
        mamba_cache_mode="align",
    )
    CONV = replace(
        STATE,
        shapes=((2, 64),),
        dtypes=(torch.float32,),
        mamba_type=MambaAttentionBackendEnum.SHORT_CONV,
    )
    ROLES = type(LATENT.cache_role)
    SPARSE = replace(
        LATENT,
        dtype=torch.uint8,
        cache_dtype_str="fp8_ds_mla",
        state_content_bytes=656,
        kv_quant_mode=KVQuantMode.FP8_PER_TENSOR,
        cache_role=ROLES.SPARSE,
    )
    INDEXER = replace(LATENT, dtype=torch.uint8, head_size=132, cache_role=ROLES.INDEXER)
    ENGINES |= {
        "images": Engine([(ALL, FULL)], model=LlavaShape(kv_heads=4, layers=LAYERS)),
        "delta nets": Engine([([0, 1, 2], STATE), ([3], FULL)], aligned=True),
        "short convolution alone": Engine([(ALL, CONV)], aligned=True),
        "sparse attention": Engine(
            [(range(3), SPARSE), ([0, 2], INDEXER)], model=DeepseekShape(), arguments=BFLOAT16
        ),
        "NVFP4": Engine(
            [
                (
                    ALL,
                    replace(
                        HALF,
                        dtype=torch.uint8,
                        kv_quant_mode=KVQuantMode.NVFP4,
                        num_head_slots=8,
                        state_content_bytes=18,
                    ),
                )
            ],
            arguments=BFLOAT16,
        ),
    }

# The end of the namespace, and of each layer group how many cells a chunk has and which is last.
NAMES = {
    "Llama": ("cc8d12fa5857", "16 @dcp0of1@head:3@layers:3-4"),
    "Llama, TP 2": ("cc8d12fa5857", "16 @dcp0of1@head:3@layers:3-4"),
    "a cell for each rank": ("0edc51b7fb3d", "8 @dcp0of1@rank:1of2@layers:3-4"),
    "decode context parallelism": ("cf519fde525b", "16 @dcp1of2@head:1@layers:3-4"),
    "LoRA": ("f98217d324e0", "16 @dcp0of1@head:3@layers:3-4"),
    "encrypted": ("36640e519475", "16 @dcp0of1@head:3@layers:3-4"),
    "KV in fp8": ("2882f37628fc", "16 @dcp0of1@head:3@layers:3-4"),
    "windows and local attention": (
        "a4b5be6dc1c3",
        "4 @dcp0of1@head:3@layers:0-1@kind:full-4x256",
        "4 @dcp0of1@head:3@layers:0-1@kind:local128-4x256",
        "8 @dcp0of1@head:3@layers:1-2@kind:window64-4x256",
    ),
    "MLA": ("ec99777817b5", "3 @dcp0of1@head:0@layers:2-3"),
    "images": ("0cf824cfbfe0", "16 @dcp0of1@head:3@layers:3-4"),
    "hf_overrides": ("01b3ba56a947", "16 @dcp0of1@head:3@layers:3-4"),
    "quantised": ("e1529a844a92", "16 @dcp0of1@head:3@layers:3-4"),
    "delta nets": (
        "06c46b2e4809",
        "4 @dcp0of1@head:3@layers:0-1@kind:full-4x256",
        "6 @dcp0of1@head:1@layers:2-3@kind:state-gdn-2x704",
    ),
    "short convolution alone": (
        "1f93c6fd4d6f",
        "32 @dcp0of1@head:7@layers:3-4@kind:state-short_conv-8x64",
    ),
    "sparse attention": (
        "1e94f0ba5845",
        "3 @dcp0of1@head:0@layers:2-3@kind:full-1x656",
        "2 @dcp0of1@head:0@layers:1-2@kind:indexer-1x132",
    ),
    "NVFP4": ("38af0f891c04", "16 @dcp0of1@head:3@layers:3-4"),
}
WEIGHTS_VERSION = "org%2Fmodel@fmt:f6b201e285a7"
DESCRIPTIONS = (
    {
        "kind": "local128-4x256",
        "heads": 4,
        "tp": 1,
        "stages": [[0, 1]],
        "span": 1,
        "per_head": True,
        "dcp": 1,
        "row_bytes": 256,
        "window": [0, 128],
    },
    {
        "kind": "window64-4x256",
        "heads": 4,
        "tp": 1,
        "stages": [[0, 2]],
        "span": 1,
        "per_head": True,
        "dcp": 1,
        "row_bytes": 256,
        "window": [64, 0],
    },
)
HASHES = {
    "text": [
        "77654ce234e7a218b067fb355117208d96d6d9fd",
        "839a17bf59d1282372b4e8146bdbd8a65dfe6ec4",
        "2b72a98b25fc80ed6ff1f728f957b63e65a8d00c",
    ],
    "image": [
        "05bc0c0d8d3d5f58cded1c862fbbd2c304db9bf1",
        "850672ede5326187423d538cab0d3894cb837063",
        "fbd9aa76ae2cd83ba8092ef9d9eb82c05c81bdbc",
    ],
}
SAMPLES = (
    "be8d50140fa683cac194ce7a964da6ed",
    "6d05e9ae3070ece9ab1c55d1137eb51a",
    "f56f45d520686f8f9d7a135d9dee37e8",
)
ORDERS = {
    "head-major": "01aac79ab4d866c3",
    "token-major": "e8be2865126a757f",
    "kernel blocks": "101c869b8c7e1e53",
    "CPU": "5d17b3da7dc14437",
    "CPU with AMX": "3124479ebe319b29",
    "CPU with BFMMLA": "27fe9518f8c65e40",
    "a pair": "c42d94c159630b82",
    "planes": "d2cac235e1e55f59",
    "planes of ROCm": "ab200ded2cac129a",
    "NVFP4": "0e7c9d0b68daec5f",
    "NVFP4, swizzled": "d2b26aa03121b62b",
    "indexer": "9cc90c37da8cf359",
    "indexer, shuffled": "4cff68995df9b97c",
    "state": "67d00ffcf0cde520",
    "state, channels first": "731a1f1ae243f205",
    "state with shared parts": "409e26376a98ccca",
}


def cells_of(facts: engine_config.EngineFacts) -> tuple[str, ...]:
    names = CellNames(facts.shape.namespace, facts.shape.layer_groups)
    found = []
    for i in range(len(facts.shape.layer_groups)):
        keys = names.of_chunk(HASH, i)
        last = keys[-1].removeprefix(facts.shape.namespace).removesuffix(f"@{HASH.hex()}")
        found.append(f"{len(keys)} {last}")
    return (facts.shape.namespace.partition("@fmt:")[2], *found)


def part_of(spec: Any) -> str:
    return "self_attn.indexer.k_cache" if compat.is_indexer(spec) else "self_attn.attn"


def start(directory: Path, engine: Engine) -> engine_config.EngineFacts:
    model = make_model(directory, engine.model)
    config = EngineArgs(
        model=str(model), skip_tokenizer_init=True, **engine.arguments
    ).create_engine_config()
    for name, value in engine.parallel.items():
        setattr(config.parallel_config, name, value)
    if engine.aligned:
        config.cache_config.mamba_cache_mode = "align"
    groups = [
        KVCacheGroupSpec([f"model.layers.{i}.{part_of(spec)}" for i in layers], spec)
        for layers, spec in engine.groups
    ]
    cache = KVCacheConfig(
        num_blocks=100,
        kv_cache_tensors=tensors_of([name for group in groups for name in group.layer_names]),
        kv_cache_groups=groups,
    )
    options = read_config({"weights_id": "vectors", **engine.options}, env={})
    return engine_config.read_engine(config, cache, options)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("name", ENGINES)
def test_namespaces_and_keys_are_what_they_were(
    directory: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "fp8_name", lambda: "float8_e4m3fn")
    monkeypatch.setattr(compat, "mixes_nvfp4_scales", lambda: True)
    monkeypatch.setattr(compat, "quantising_device", lambda: "cuda 9.0")
    facts = start(directory, ENGINES[name])
    assert cells_of(facts) == NAMES[name], json.dumps(facts.values, indent=1, default=str)


def test_names_under_other_weights_are_what_they_were() -> None:
    namespace = make_namespace("org/model", "0123456789abcdef")
    assert namespace == "org%2Fmodel@fmt:0123456789ab"
    assert with_weights(namespace, "sample:ff") == WEIGHTS_VERSION


def test_descriptions_of_cells_are_what_they_were(directory: Path) -> None:
    """Descriptions are stored beside the cells, for tools."""
    facts = start(directory, ENGINES["windows and local attention"])
    assert described(facts.shape.layer_groups)[1:] == DESCRIPTIONS


IMAGE = MediaItem("image", 2, 8, "vllm 0.32.0, transformers 5.19.0")


@pytest.mark.parametrize(("prompt", "media"), [("text", ()), ("image", (IMAGE,))])
def test_hashes_of_chunks_are_what_they_were(prompt: str, media: tuple[MediaItem, ...]) -> None:
    rows = (b"", b"row", *[b""] * 6)
    chain = ChunkChain(4, RequestIdentity(b"adapter", "salt", media, rows))
    chain.extend(range(1000, 1012))
    assert [each.hex() for each in chain.hashes] == HASHES[prompt]


# Weights


def tensors(sizes: Mapping[str, tuple[int, ...]]) -> bytes:
    """Return a safetensors file of bytes."""
    header: dict[str, Any] = {}
    start = 0
    for name, shape in sizes.items():
        stop = start + int(np.prod(shape))
        header[name] = {"dtype": "U8", "shape": shape, "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + pattern(start).tobytes()


def pattern(nbytes: int) -> np.ndarray:
    """Return bytes in which no two pieces of a file are alike."""
    return np.random.default_rng(1).integers(0, 256, nbytes, np.uint8)


def test_samples_of_weights_are_what_they_were(tmp_path: Path) -> None:
    for name, content in {
        "model-00001-of-00002.safetensors": tensors(
            {"embed_tokens.weight": (300, 128), "experts.w1": (4, 64, 32), "q_proj": (200, 100)}
        ),
        "model-00002-of-00002.safetensors": tensors({"wte.weight": (300, 16), "norm": (7,)}),
        "consolidated.pth": pattern(100_000).tobytes(),
        "config.json": b"{}",
    }.items():
        (tmp_path / name).write_bytes(content)
    assert sample_weights(tmp_path) == SAMPLES[0]
    assert sample_weights(tmp_path / "model-00002-of-00002.safetensors") == SAMPLES[1]
    assert digest_adapter(tmp_path).hex() == SAMPLES[2]


# The order of bytes in a cell

TOKENS, HEADS, DIM = 32, 4, 32  # of a block
FORM = StateForm(4, 3, 2, (WindowPart(8), WindowPart(8), WindowPart(20)), 96)
SHARED = StateForm(4, 3, 2, (WindowPart(16), WindowPart(12, True), WindowPart(12, True)), 64)


def pages(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Two blocks, by size in elements."""
    nbytes = 2 * int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(pattern(nbytes)).view(dtype).view(2, *shape)


def of_cpu(form: page_formats.CpuForm) -> LayerPages:
    tensor = pages(HEADS, TOKENS, 2 * DIM, dtype=torch.bfloat16)
    return page_formats.from_cpu_attention(tensor, DIM, DIM, form=form)


def of_states(form: StateForm, *, dim_first: bool = False) -> LayerPages:
    channels = sum(each.channels * (1 if each.is_shared else HEADS) for each in form.parts)
    nbytes = (form.window_rows + 1) * channels * form.item_bytes + HEADS * form.recurrent_bytes
    return page_formats.from_state(
        pages(1, 1, nbytes), form, HEADS, dim_first=dim_first, draft_rows=1
    )


LAYOUTS: dict[str, Callable[[], LayerPages]] = {
    "head-major": lambda: page_formats.from_token_content(pages(HEADS, TOKENS, 2 * DIM)),
    "token-major": lambda: page_formats.from_token_content(
        pages(TOKENS, HEADS, 2 * DIM).transpose(1, 2)
    ),
    "kernel blocks": lambda: page_formats.from_token_content(
        pages(HEADS, TOKENS, 2 * DIM).view(4, HEADS, TOKENS // 2, 2 * DIM), blocks_per_id=2
    ),
    "CPU": lambda: of_cpu(page_formats.PLAIN_CPU_FORM),
    "CPU with AMX": lambda: of_cpu(page_formats.AMX_FORM),
    "CPU with BFMMLA": lambda: of_cpu(page_formats.BFMMLA_FORM),
    "a pair": lambda: page_formats.from_pair(
        pages(TOKENS, HEADS, DIM, dtype=torch.bfloat16), pages(TOKENS, HEADS, DIM // 2)
    ),
    "planes": lambda: page_formats.from_planes(pages(2, TOKENS, HEADS * DIM), HEADS),
    "planes of ROCm": lambda: page_formats.from_planes(
        pages(2, TOKENS, HEADS * DIM, dtype=torch.bfloat16), HEADS, pack_bytes=16
    ),
    "NVFP4": lambda: page_formats.from_nvfp4(pages(2 * HEADS, TOKENS, 72), HEADS, swizzled=False),
    "NVFP4, swizzled": lambda: page_formats.from_nvfp4(
        pages(2 * HEADS, TOKENS, 72), HEADS, swizzled=True
    ),
    "indexer": lambda: page_formats.from_values_and_scales(pages(1, TOKENS, 132), 4),
    "indexer, shuffled": lambda: page_formats.from_values_and_scales(
        pages(1, TOKENS, 132), 4, shuffled=True
    ),
    "state": lambda: of_states(FORM),
    "state, channels first": lambda: of_states(FORM, dim_first=True),
    "state with shared parts": lambda: of_states(SHARED),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_bytes_of_cells_lie_as_they_did(name: str) -> None:
    """The cell has all heads of two equal layers."""
    one = LAYOUTS[name]()
    rows = 2 * one.tokens_per_block * one.blocks_per_id
    cell = np.zeros((one.num_heads, 2, rows, one.row_bytes), np.uint8)
    place = 0, 2, 0, one.num_heads
    copier = TorchCopier([one, one], torch.device("cpu"))
    address = cell.ctypes.data
    copier.gather([cell_move(address, place, (1, 0), chunk_tokens=rows, clip=(1, rows))])
    assert digest(cell) == ORDERS[name]


def digest(cell: np.ndarray) -> str:
    return hashlib.blake2b(cell.tobytes(), digest_size=8).hexdigest()
