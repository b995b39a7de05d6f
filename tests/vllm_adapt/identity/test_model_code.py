"""What computes a model besides vLLM: plugins, classes, weights and files from elsewhere."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import MultiModalConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models import ModelRegistry

from tests.support.models import LlamaShape, make_model
from tests.vllm_adapt.identity.test_factors import sources_of_models
from vllm_kvpool.config import read_config
from vllm_kvpool.identity.weights import FOLDERS_OF_WEIGHTS, known_sample
from vllm_kvpool.vllm_adapt.identity.namespace import (
    FOLDERS_OF_FILES,
    OTHER_MODELS,
    engine_namespace,
    sample_at_start,
)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

CHILD_LIMIT_S = 120
ROOT = Path(__file__).parents[3]


@pytest.fixture
def config(tmp_path: Path) -> VllmConfig:
    model = make_model(tmp_path, LlamaShape(layers=1))
    return EngineArgs(
        model=str(model), dtype="float32", skip_tokenizer_init=True
    ).create_engine_config()


def namespace(config: VllmConfig) -> str:
    return str(engine_namespace(config, read_config({}, env={}), [], []).namespace)


# Code


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path, for packages that are installed in a test."""
    folder = tmp_path / "installed"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    before = set(sys.modules)
    yield folder
    for name in set(sys.modules) - before:
        if name.startswith("stranger"):
            del sys.modules[name]


def install(folder: Path, name: str, version: str, plugin: str) -> None:
    about = folder / f"{name}-1.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (about / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{name} = {plugin}\n")


def test_an_installed_plugin_counts_by_its_version(config: VllmConfig, packages: Path) -> None:
    """It may replace any part of vLLM."""
    names = [namespace(config)]
    for version in ("1.0", "1.1", "1.0"):
        install(packages, "stranger", version, "stranger.plugin:register")
        names.append(namespace(config))
    assert names[1] == names[3]
    assert len(set(names)) == 3


def test_a_plugin_that_is_not_loaded_does_not_count(
    config: VllmConfig, packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "vllm_kvpool")
    before = namespace(config)
    install(packages, "stranger", "1.0", "stranger.plugin:register")
    assert namespace(config) == before


@pytest.mark.parametrize("package", ["vllm", "vllm_kvpool", "vllm_ascend"])
def test_plugins_that_change_no_kv_do_not_count(
    config: VllmConfig, packages: Path, package: str
) -> None:
    before = namespace(config)
    install(packages, "another", "1.0", f"{package}.plugin:register")
    assert namespace(config) == before


@pytest.fixture
def registry() -> Iterator[Any]:
    before = dict(ModelRegistry.models)
    yield ModelRegistry
    ModelRegistry.models.clear()
    ModelRegistry.models.update(before)


def test_a_class_in_place_of_vllms_counts_by_its_source(
    config: VllmConfig, packages: Path, registry: Any
) -> None:
    names = [namespace(config)]
    package = packages / "stranger"
    package.mkdir()
    (package / "__init__.py").touch()
    registry.register_model("LlamaForCausalLM", "stranger.model:ScaledLlama")
    __import__("stranger")
    for source in ("SCALE = 1", "SCALE = 2"):
        (package / "model.py").write_text(source)
        names.append(namespace(config))
    assert len(set(names)) == 3


def test_a_class_that_is_imported_counts(config: VllmConfig, registry: Any) -> None:
    class OwnLlama(torch.nn.Module):
        pass

    before = namespace(config)
    registered = type("Registered", (), {"model_cls": OwnLlama})()
    registry.models["LlamaForCausalLM"] = registered
    assert namespace(config) != before


def test_models_that_transformers_computes_count_by_its_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(tmp_path, LlamaShape(layers=1))
    config = EngineArgs(
        model=str(model), dtype="float32", skip_tokenizer_init=True, model_impl="transformers"
    ).create_engine_config()
    before = namespace(config)
    monkeypatch.setattr(
        "vllm_kvpool.vllm_adapt.identity.model_code.version", lambda name: f"{name} 99"
    )
    assert namespace(config) != before


# Weights and files from elsewhere

# What vLLM's models read besides the model's directory, and where it counts.
READERS_ELSEWHERE = {
    "clef_omni": "of the directory itself, for an output",
    "roberta": "of the directory itself, for an output",
    "kimi_audio": "a folder",
    "funaudiochat": "a folder",
    "mimo_audio": "a folder",
    "ultravox": "other models",
}
READS_ELSEWHERE = re.compile(r"secondary_weights\s*=|subfolder\s*=|load_file\(|torch\.load\(")
READ_FOR_OUTPUT = {
    "adapters": "layers after the model",
    "qwen3_dflash": "a drafter",
}


def test_models_that_read_weights_from_elsewhere_are_known() -> None:
    found = {Path(name).stem for name, text in sources_of_models() if READS_ELSEWHERE.search(text)}
    assert found <= READERS_ELSEWHERE.keys() | READ_FOR_OUTPUT.keys()


def test_the_folders_are_those_that_models_read() -> None:
    text = "".join(text for _, text in sources_of_models())
    for folder in {*FOLDERS_OF_WEIGHTS, *FOLDERS_OF_FILES}:
        assert f'"{folder}"' in text
    for name in OTHER_MODELS:
        assert f"config.{name}" in text


@pytest.mark.parametrize("name", OTHER_MODELS)
def test_models_that_are_parts_of_a_model_count_by_content(
    config: VllmConfig, tmp_path: Path, name: str
) -> None:
    """Ultravox takes its language model from there."""
    names = [namespace(config)]
    part = make_model(tmp_path / "part", LlamaShape(layers=1, seed=1))
    setattr(config.model_config.hf_config, name, str(part))
    names.append(namespace(config))
    [weights] = part.glob("*.safetensors")
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    names.append(namespace(config))
    values = json.loads((part / "config.json").read_text()) | {"rope_theta": 5.0}
    (part / "config.json").write_text(json.dumps(values))
    names.append(namespace(config))
    assert len(set(names)) == 4


@pytest.mark.parametrize("folder", FOLDERS_OF_FILES)
def test_files_in_a_folder_that_models_read_count(config: VllmConfig, folder: str) -> None:
    before = namespace(config)
    path = Path(config.model_config.model) / folder
    path.mkdir()
    (path / "preprocessor_config.json").write_text("{}")
    assert namespace(config) != before


@pytest.mark.parametrize(
    ("section", "has_media", "mode", "is_seen"),
    [
        ("image", True, "mistral", True),
        ("audio", True, "auto", True),
        ("vocab", True, "mistral", False),
        ("image", False, "mistral", False),
        ("image", True, "hf", False),
    ],
)
def test_what_mistrals_tokenizer_says_of_media_counts(
    config: VllmConfig, tmp_path: Path, section: str, has_media: bool, mode: str, is_seen: bool
) -> None:
    """The tokenizer may be another directory's, and is the only configuration of its processor."""
    model = config.model_config
    model.multimodal_config = MultiModalConfig() if has_media else None
    model.tokenizer_mode, model.tokenizer = mode, str(tmp_path)
    names = []
    for size in (16, 14):
        (tmp_path / "tekken.json").write_text(json.dumps({section: {"size": size}, "version": 3}))
        names.append(namespace(config))
    assert (names[0] != names[1]) is is_seen


# Weights that change while an engine starts


class EngineCoreProc:
    """Has the name of the class by which vLLM runs an engine in a process of its own."""

    def sample(self, weights: Path) -> str | None:
        return sample_at_start(weights)


def test_weights_written_after_the_engines_process_started_are_nobody_elses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It may have read the old ones, and the new ones' namespace is for those who read them."""
    model = make_model(tmp_path, LlamaShape(layers=1))
    sampled = EngineCoreProc().sample(model)
    assert sampled not in (known_sample(model), None)
    assert EngineCoreProc().sample(model) == sampled
    assert caplog.text.count("were written after this engine's process started") == 1
    assert sample_at_start(model) == known_sample(model)


def test_weights_written_before_the_engines_process_started_are_its_own(tmp_path: Path) -> None:
    model = make_model(tmp_path, LlamaShape(layers=1))
    time.sleep(0.1)  # the kernel counts the starts of processes in hundredths of a second
    script = (
        "from pathlib import Path\n"
        "from tests.vllm_adapt.identity.test_model_code import EngineCoreProc\n"
        f"print('sample', EngineCoreProc().sample(Path({str(model)!r})))"
    )
    child = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=CHILD_LIMIT_S,
        check=True,
    )
    assert f"sample {known_sample(model)}" in child.stdout
