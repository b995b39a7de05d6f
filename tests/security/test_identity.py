"""Models and requests that look alike and are not: none may read what another has stored.

What vLLM's real configurations make of a namespace is tests/vllm_adapt/test_engine_config.py's;
here are directories of weights that differ where it is easy to overlook.
"""

import copy
import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from tests.support.models import LlamaShape, make_lora, make_model
from vllm_kvpool.config import read_config
from vllm_kvpool.identity import chunk_hash as hashing
from vllm_kvpool.identity.chunk_hash import ChunkChain, RequestIdentity
from vllm_kvpool.identity.weights import digest_adapter
from vllm_kvpool.layout.topology import LayerGroup, Topology
from vllm_kvpool.storage.contents import cell_format

Identity = Callable[[Path], str]
SHAPE = LlamaShape(layers=2, vocab=64)


@pytest.fixture(scope="module")
def identity_of() -> Identity:
    """What a namespace says of the weights of a directory."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's and torch's own, while they are imported
        from vllm_kvpool.vllm_adapt.identity.namespace import weights_identity

    def identify(directory: Path) -> str:
        config: Any = SimpleNamespace(
            model_config=SimpleNamespace(model=str(directory), revision=None, seed=0),
            load_config=SimpleNamespace(load_format="auto"),
            parallel_config=SimpleNamespace(tensor_parallel_size=1),
        )
        return weights_identity(config)

    return identify


def with_scales(directory: Path, to: Path, **scales: float) -> Path:
    """A copy of a model with static FP8 scales of layer 0."""
    shutil.copytree(directory, to)
    path = to / "model.safetensors"
    weights = load_file(path)
    for name, value in scales.items():
        weights[f"model.layers.0.self_attn.{name}"] = np.array([value], np.float32)
    save_file(weights, path, metadata={"format": "pt"})
    return to


def test_single_files_of_one_name_and_other_content_are_kept_apart(
    tmp_path: Path, identity_of: Identity
) -> None:
    path = tmp_path / "model.gguf"
    seen = set()
    for content in (b"one", b"two"):
        path.write_bytes(content)
        seen.add(identity_of(path))
    assert len(seen) == 2
    assert all(each.startswith("sample:") for each in seen)


def test_static_scales_that_differ_keep_models_apart(tmp_path: Path, identity_of: Identity) -> None:
    model = make_model(tmp_path, SHAPE)
    copies = {
        "same": {"k_scale": 0.5, "v_scale": 0.5},
        "also": {"k_scale": 0.5, "v_scale": 0.5},
        "k": {"k_scale": 0.25, "v_scale": 0.5},
        "v": {"k_scale": 0.5, "v_scale": 0.25},
        "last bit": {"k_scale": float(np.nextafter(np.float32(0.5), np.float32(1)))},
        "swapped": {"k_scale": 0.25, "v_scale": 0.25},
    }
    copies["last bit"]["v_scale"] = 0.5
    seen = {
        name: identity_of(with_scales(model, tmp_path / name / model.name, **scales))
        for name, scales in copies.items()
    }
    assert seen["same"] == seen["also"]
    assert len(set(seen.values())) == len(seen) - 1
    assert identity_of(model) not in seen.values()


def test_a_namesake_with_other_weights_is_another_model(
    tmp_path: Path, identity_of: Identity
) -> None:
    one = make_model(tmp_path, SHAPE)
    namesake = tmp_path / "other" / one.name
    shutil.copytree(make_model(tmp_path, LlamaShape(layers=2, vocab=64, seed=1)), namesake)
    copy = tmp_path / "copy" / one.name
    shutil.copytree(one, copy)
    assert identity_of(one) == identity_of(copy) != identity_of(namesake)


def test_two_adapters_of_one_name_and_shape_are_two(tmp_path: Path) -> None:
    one, other = (make_lora(tmp_path / str(seed), SHAPE, seed=seed) for seed in (1, 2))
    digests = {digest_adapter(one), digest_adapter(other)}
    shutil.copytree(one, tmp_path / "changed")
    path = tmp_path / "changed" / "adapter_model.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) * 2 // 3] ^= 1  # one bit, anywhere: adapters are read whole
    path.write_bytes(data)
    digests.add(digest_adapter(tmp_path / "changed"))
    assert len(digests) == 3
    assert len({chain(adapter=digest) for digest in digests}) == 3


def chain(chunk_tokens: int = 16, **identity: Any) -> tuple[bytes, ...]:
    made = ChunkChain(chunk_tokens, RequestIdentity(**identity))
    made.extend(range(64))
    return tuple(made.hashes)


def test_another_chunk_size_shares_no_hash() -> None:
    """Not even where the chunks of one are a whole number of the other's."""
    sizes = [16, 32, 64]
    links = [set(chain(size)) for size in sizes]
    assert not any(links[i] & links[j] for i in range(3) for j in range(i))


def test_another_scheme_shares_no_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    before = chain()
    monkeypatch.setattr(hashing, "SCHEME", b"kvpool-chain-3")
    assert not set(before) & set(chain())


def test_a_cell_of_another_format_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Besides the version being in the namespace, so that it is not even asked for."""
    cell, digest = bytearray(cell_format.HEADER_BYTES + 100), bytes(16)
    monkeypatch.setattr(cell_format, "FORMAT_VERSION", cell_format.FORMAT_VERSION + 1)
    cell_format.write_header(memoryview(cell), digest)
    monkeypatch.undo()
    for checksum in (True, False):
        fault = cell_format.verify(memoryview(cell), digest, checksum=checksum)
        assert fault is cell_format.CellFault.VERSION


@pytest.fixture(scope="module")
def namespace_with(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """`namespace_with("model_config.dtype", "bfloat16")`: of an engine but for one value."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm.engine.arg_utils import EngineArgs

        from vllm_kvpool.vllm_adapt.identity import namespace

        model = make_model(tmp_path_factory.mktemp("models"), SHAPE)
        started = EngineArgs(model=str(model), skip_tokenizer_init=True, dtype="float16")
        whole = started.create_engine_config()

    def build(path: str = "", value: object = None, **options: object) -> str:
        engine: Any = SimpleNamespace(
            vllm=copy.deepcopy(whole),
            spec=SimpleNamespace(
                **{"state_content_size_bytes": 128, "head_size": 32, "head_size_v": 32},
                dtype=torch.float16,
                kv_quant_mode=SimpleNamespace(name="NONE", is_nvfp4=False),
            ),
            layer_group=LayerGroup(Topology(4, 1, ((0, 2),), 1, True), 128),
            config=read_config(options, env={}),
        )
        *way, last = path.split(".") if path else [""]
        place = engine
        for name in way:
            place = getattr(place, name)
        if way and way[0] == "config":
            engine.config = read_config({last: value}, env={})
        elif path:
            setattr(place, last, value)
        specs, layer_groups = [engine.spec], [engine.layer_group]
        return namespace.engine_namespace(engine.vllm, engine.config, specs, layer_groups).namespace

    return build


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("config.chunk_tokens", 128),
        ("config.namespace", "tenant"),
        ("config.namespace", "caf\u00e9"),
        ("config.namespace", "cafe\u0301"),
        ("config.weights_id", "w"),
        ("vllm.model_config.dtype", torch.bfloat16),
        ("vllm.model_config.quantization", "fp8"),
        ("vllm.cache_config.cache_dtype", "fp8_e4m3"),
        ("spec.dtype", torch.uint8),
        ("spec.kv_quant_mode.name", "FP8_PER_TENSOR"),
        ("spec.head_size_v", 16),
        ("layer_group", LayerGroup(Topology(2, 1, ((0, 2),), 1, True), 128)),
        ("layer_group", LayerGroup(Topology(4, 1, ((0, 2),), 1, True), 128, layers=((0,), (2,)))),
        ("layer_group", LayerGroup(Topology(4, 1, ((0, 2),), 1, True, "window"), 128)),
    ],
)
def test_one_value_that_differs_is_another_namespace(
    namespace_with: Callable[..., str], path: str, value: object
) -> None:
    assert namespace_with(path, value) != namespace_with() == namespace_with()


@pytest.mark.parametrize(
    ("said", "is_same"),
    [
        ({}, True),
        ({"transformers_version": "9", "torch_dtype": "float16", "_name_or_path": "x"}, True),
        ({"use_parallel_residual": False}, False),
        ({"routed_scaling_factor": 2.5}, False),
        ({"vision_config": {"vision_feature_layer": -1}}, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("place", ["vllm.model_config.model", "vllm.model_config.hf_config_path"])
def test_equal_weights_of_another_configuration_are_another_model(
    tmp_path: Path,
    namespace_with: Callable[..., str],
    place: str,
    said: dict[str, Any],
    is_same: bool,
) -> None:
    """Whatever it is that differs: only the model's code knows what comes of it."""
    other = tmp_path / make_model(tmp_path / "made", SHAPE).name
    shutil.copytree(tmp_path / "made" / other.name, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | said))
    assert (namespace_with(place, str(other)) == namespace_with()) is is_same
    named = {"weights_id": "checked by hand"}
    assert namespace_with(place, str(other), **named) == namespace_with(**named)


def test_unicode_forms_of_one_tenants_name_are_two_tenants(
    namespace_with: Callable[..., str],
) -> None:
    """Which is said in SECURITY.md: a namespace is compared as it is written."""
    names = ("caf\u00e9", "cafe\u0301", "\ud800", "\udfff", "a\0", "a", "@", "a@fmt:0123456789ab")
    assert len({namespace_with("config.namespace", name) for name in names}) == len(names)


@pytest.mark.parametrize("name", ["FORMAT_VERSION", "SCHEME"])
def test_another_format_is_another_namespace(
    namespace_with: Callable[..., str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    from vllm_kvpool.vllm_adapt.identity import namespace

    before = namespace_with()
    monkeypatch.setattr(namespace, name, {"FORMAT_VERSION": 2, "SCHEME": b"other"}[name])
    assert namespace_with() != before
