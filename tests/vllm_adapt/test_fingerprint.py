"""Fingerprints of embeddings: engines exchange them only if they compute equal embeddings."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import vllm
from vllm.engine.arg_utils import EngineArgs

from tests.support.models import LlavaShape, make_model
from vllm_kvpool.config import EmbedsConfig
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.vllm_adapt import compat, embeds

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def fingerprint(directory: Path, **arguments: Any) -> str:
    values = {"dtype": "float32", "skip_tokenizer_init": True} | arguments
    model = str(make_model(directory, LlavaShape()))
    config = EngineArgs(model=model, **values).create_engine_config()
    return embeds.base_fingerprint(config, EmbedsConfig())


LORA = {"enable_lora": True}


def test_adapters_of_an_encoder_are_refused(directory: Path) -> None:
    """No name of an encoded item contains the adapter's content."""
    model = str(make_model(directory, LlavaShape()))
    values = {"model": model, "dtype": "float32", "skip_tokenizer_init": True, **LORA}
    embeds.check_model(EngineArgs(**values).create_engine_config())
    config = EngineArgs(**values, enable_tower_connector_lora=True).create_engine_config()
    with pytest.raises(ConfigError, match="enable_tower_connector_lora"):
        embeds.check_model(config)


def test_an_encoder_with_quantised_weights_may_run_on_another_device(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = set()
    for device in ("cuda 8.0", "cuda 9.0"):
        monkeypatch.setattr(compat, "quantising_device", lambda each=device: each)
        seen.add(fingerprint(directory, dtype="bfloat16", quantization="fp8"))
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("arguments", "warns"),
    [
        ({"enable_prefix_caching": False, "mm_processor_cache_gb": 0}, True),
        ({"enable_prefix_caching": False}, False),
        ({"mm_processor_cache_gb": 0}, False),
    ],
)
def test_that_media_have_numbers_for_names_is_logged(
    directory: Path, caplog: pytest.LogCaptureFixture, arguments: dict[str, Any], warns: bool
) -> None:
    model = str(make_model(directory, LlavaShape()))
    engine = EngineArgs(model=model, dtype="float32", skip_tokenizer_init=True, **arguments)
    embeds.warn_of_numbers(engine.create_engine_config())
    assert ("vLLM numbers media" in caplog.text) is warns


def test_encoder_decoder_models_are_refused(tmp_path: Path) -> None:
    """vLLM feeds cross attention from its own encoder only."""
    values = {"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"]}
    values |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 1)
    (tmp_path / "config.json").write_text(json.dumps(values))
    arguments = EngineArgs(model=str(tmp_path), dtype="float32", skip_tokenizer_init=True)
    with pytest.raises(ConfigError, match="encoder-decoder"):
        embeds.check_model(arguments.create_engine_config())


@pytest.mark.parametrize(
    "arguments",
    [
        {"hf_overrides": {"vision_feature_layer": -2}},
        {"mm_processor_kwargs": {"do_normalize": False}},
        {"media_io_kwargs": {"image": {"image_mode": "L"}}},
        {"dtype": "bfloat16"},
        {
            "dtype": "bfloat16",
            "quantization": "online",
            "quantization_config": {"linear": {"weight": "fp8_per_channel_static"}},
        },
    ],
    ids=str,
)
def test_engines_that_encode_otherwise_are_no_peers(
    directory: Path, arguments: dict[str, Any]
) -> None:
    plain = {"dtype": arguments["dtype"]} if "quantization" in arguments else {}
    assert fingerprint(directory, **arguments) != fingerprint(directory, **plain)


def test_engines_of_two_releases_are_no_peers(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Releases may share the KV of text and still encode an image differently."""
    seen = set()
    for release in ("0.32.0", "0.33.0"):
        monkeypatch.setattr(vllm, "__version__", release)
        assert not compat.release_apart()
        seen.add(fingerprint(directory))
    assert len(seen) == 2


@pytest.mark.parametrize(
    "arguments",
    [
        {"mm_encoder_only": True},
        {"kv_cache_dtype": "bfloat16", "block_size": 64, "max_model_len": 512},
        {**LORA, "lora_target_modules": ["o_proj"]},
        {"limit_mm_per_prompt": {"image": 7}, "mm_processor_cache_gb": 0},
    ],
    ids=str,
)
def test_an_encoder_and_a_language_engine_of_one_model_are_peers(
    directory: Path, arguments: dict[str, Any]
) -> None:
    assert fingerprint(directory, **arguments) == fingerprint(directory)


@dataclass
class Group:
    """A tensor-parallel group, as one of its ranks sees it."""

    rank_in_group: int
    told: Any = None

    def broadcast_object(self, value: Any, src: int) -> Any:
        assert src == 0
        if self.rank_in_group == 0:
            self.told = value
        return self.told


def test_ranks_are_told_by_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Group(0)
    monkeypatch.setattr(embeds, "get_tp_group", lambda: first)
    assert embeds.broadcast_from_first_rank(lambda: "print") == "print"
    monkeypatch.setattr(embeds, "get_tp_group", lambda: Group(1, first.told))
    assert embeds.broadcast_from_first_rank(pytest.fail) == "print"


def test_what_the_first_rank_cannot_read_is_said_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> str:
        raise OSError("gone")

    first = Group(0)
    for group in (first, Group(1)):
        group.told = first.told
        monkeypatch.setattr(embeds, "get_tp_group", lambda group=group: group)
        with pytest.raises(OSError, match="gone"):
            embeds.broadcast_from_first_rank(fail)
