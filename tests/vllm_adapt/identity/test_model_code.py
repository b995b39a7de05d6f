"""Code and files that compute a model besides vLLM: plugins, classes, weights, other files."""

import json
import re
import shutil
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
from vllm_kvpool.identity.weights import FOLDERS_OF_WEIGHTS, changed_ns, known_sample
from vllm_kvpool.vllm_adapt.identity.namespace import FOLDERS_OF_FILES, engine_namespace
from vllm_kvpool.vllm_adapt.weight_sources import OTHER_MODELS, sample_at_start

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
    """Return a folder on the import path, for packages that a test installs."""
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
    """A plugin may replace any part of vLLM."""
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


@pytest.mark.parametrize(
    "option", ["worker_cls", "worker_extension_cls", "distributed_executor_backend"]
)
def test_a_class_of_workers_counts_by_its_source_or_its_release(
    config: VllmConfig, packages: Path, option: str
) -> None:
    """A worker class may change the model that it runs in any way."""
    for own in ("mp", "vllm.v1.worker.cpu_worker.CPUWorker", "vllm_ascend.worker.NPUWorker"):
        setattr(config.parallel_config, option, own)
        names = [namespace(config)]
        setattr(config.parallel_config, option, "")
        assert names == [namespace(config)], own
    setattr(config.parallel_config, option, "stranger.workers.Worker")
    for text in ("one = 1", "one = 2", "one = 1"):
        write(packages, {"stranger/__init__.py": "", "stranger/workers.py": text})
        names.append(namespace(config))
    assert names[1] == names[3]
    for version in ("1.0", "1.1"):
        install(packages, "stranger", version, "vllm_kvpool.plugin:register")
        record = "stranger/__init__.py,,\nstranger/workers.py,,\n"
        (packages / "stranger-1.dist-info" / "RECORD").write_text(record)
        names.append(namespace(config))
    assert len(set(names)) == len(names) - 1


@pytest.fixture
def registry() -> Iterator[Any]:
    before = dict(ModelRegistry.models)
    yield ModelRegistry
    ModelRegistry.models.clear()
    ModelRegistry.models.update(before)


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("architecture", "is_imported"), [("LlamaForCausalLM", False), ("ClipVisionModel", True)]
)
@pytest.mark.parametrize(
    "changed",
    [
        *("stranger/model.py", "stranger/kernels/ops.so", "stranger_ops/__init__.py"),
        *("stranger_table.py", "stranger_scale/inner.py"),
    ],
)
def test_a_class_in_place_of_vllms_counts_by_its_source_and_what_it_imports(
    config: VllmConfig,
    packages: Path,
    registry: Any,
    is_imported: bool,
    architecture: str,
    changed: str,
) -> None:
    """The package may be imported or not. Classes for parts of models count, too."""
    names = [namespace(config)]
    registry.register_model(architecture, "stranger.model:ScaledLlama")
    write(
        packages,
        {
            "stranger/__init__.py": "",
            "stranger/model.py": "import json\nfrom stranger_ops import scale",
            "stranger/kernels/ops.so": "",
            "stranger_ops/__init__.py": "def scale():\n    import stranger_table, not_installed",
            "stranger_table.py": "try:\n    from stranger_scale.inner import *\nfinally: pass",
            "stranger_scale/__init__.py": "",
            "stranger_scale/inner.py": "",
        },
    )
    if is_imported:
        __import__("stranger")
    names += [namespace(config), namespace(config)]
    assert ("stranger" in sys.modules) is is_imported
    with (packages / changed).open("a") as file:
        file.write("\nSCALE = 2")
    names.append(namespace(config))
    assert names[1] == names[2]
    assert len(set(names)) == 3


def test_a_class_that_an_option_names_counts_by_its_source(
    config: VllmConfig, packages: Path
) -> None:
    config.model_config.model_class_overrides = {"LlamaForCausalLM": "stranger:Llama"}
    names = []
    for source in ("SCALE = 1", "SCALE = 2"):
        write(packages, {"stranger.py": source})
        names.append(namespace(config))
    assert names[0] != names[1]


def test_releases_that_a_class_imports_count_by_their_version(
    config: VllmConfig, packages: Path, registry: Any
) -> None:
    registry.register_model("LlamaForCausalLM", "stranger:Llama")
    write(packages, {"stranger.py": "import torch, strangers", "strangers/__init__.py": ""})
    names = []
    for release in ("1.0", "1.1", "1.0"):
        about = packages / "Strange_Rs-1.dist-info"
        write(
            about,
            {
                "METADATA": f"Metadata-Version: 2.1\nName: Strange_Rs\nVersion: {release}\n",
                "RECORD": "strangers/__init__.py,,\nStrange_Rs-1.dist-info/METADATA,,\n",
            },
        )
        names.append(namespace(config))
    (packages / "strangers" / "__init__.py").write_text("# as patched by nobody")
    assert names == [names[0], names[1], names[0]]
    assert names[0] != names[1]
    assert namespace(config) == names[0]
    (packages / "Strange_Rs-1.dist-info" / "RECORD").unlink()
    assert namespace(config) != names[0]


def test_a_class_whose_source_is_not_found_is_nobody_elses(
    config: VllmConfig, registry: Any, caplog: pytest.LogCaptureFixture
) -> None:
    registry.register_model("LlamaForCausalLM", "not_installed.model:Llama")
    names = [namespace(config)]
    config.instance_id = "another"
    assert namespace(config) != names[0]
    assert "shares nothing with others: the source of the package not_installed" in caplog.text


def test_a_plugin_in_development_counts_by_its_source(config: VllmConfig, packages: Path) -> None:
    """The plugin is installed as editable, so its version stays the same."""
    install(packages, "stranger", "1.0", "stranger.plugin:register")
    source = packages.parent / "source"
    write(source, {"stranger/__init__.py": "", "stranger/plugin.py": "import stranger_ops"})
    write(source, {"stranger_ops.py": ""})
    (packages / "stranger-1.dist-info" / "RECORD").write_text("stranger.pth,,\n")
    sys.path.append(str(source))
    try:
        names = [namespace(config)]
        for path in ("stranger/plugin.py", "stranger_ops.py"):
            with (source / path).open("a") as file:
                file.write("\nSCALE = 2")
            names.append(namespace(config))
    finally:
        sys.path.remove(str(source))
    assert len(set(names)) == 3


def test_a_class_that_is_imported_counts(config: VllmConfig, registry: Any) -> None:
    class OwnLlama(torch.nn.Module):
        __module__ = "kvpool_torchvision"

    before = namespace(config)
    registered = type("Registered", (), {"model_cls": OwnLlama})()
    registry.models["LlamaForCausalLM"] = registered
    assert namespace(config) != before


AUTO_MAP = {
    "config.json": {"AutoModel": "{}--model.Llama"},
    "preprocessor_config.json": {"AutoImageProcessor": "{}--images.Images"},
    "tokenizer_config.json": {"AutoTokenizer": [None, "{}--tokens.Tokens"]},
}


@pytest.mark.parametrize("is_trusted", [False, True])
@pytest.mark.parametrize("changed", ["model.py", "parts/deep/layers.py", *AUTO_MAP])
def test_code_of_a_model_counts_wherever_it_lies(
    config: VllmConfig, tmp_path: Path, is_trusted: bool, changed: str
) -> None:
    """The code lies in the directory, in its folders, or in repositories that the model names."""
    model, other = Path(config.model_config.model), tmp_path / "other"
    config.model_config.trust_remote_code = is_trusted
    write(model, {"model.py": "", "parts/deep/layers.py": ""})
    write(other, {"code.py": ""})
    path = model / changed
    if named := AUTO_MAP.get(changed):
        values = json.loads(path.read_text()) if path.exists() else {}
        text = json.dumps({**values, "auto_map": named}).replace("{}", str(other))
        path.write_text(text)
        path = other / "code.py"
    before = namespace(config)
    path.write_text("SCALE = 2")
    assert (namespace(config) != before) is is_trusted


def test_code_that_is_not_here_is_nobody_elses(
    config: VllmConfig, caplog: pytest.LogCaptureFixture
) -> None:
    config.model_config.trust_remote_code = True
    names = [namespace(config)]
    path = Path(config.model_config.model) / "preprocessor_config.json"
    path.write_text(json.dumps({"auto_map": {"AutoImageProcessor": "no/such--code.Images"}}))
    for engine in ("one", "another"):
        config.instance_id = engine
        names.append(namespace(config))
    assert len(set(names)) == 3
    assert caplog.text.count("it may run code of no/such, which is not in local files") == 2


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

# Files that vLLM's models read outside the model's directory, and where they count.
READERS_ELSEWHERE = {
    "clef_omni": "of the directory itself, for an output",
    "roberta": "of the directory itself, for an output",
    "kimi_audio": "a folder",
    "funaudiochat": "a folder",
    "mimo_audio": "a folder",
    "jina": "folders of adapters",
    "cosmos3": "folders, which it names by a pattern",
    "cosmos3_edge": "folders, which it names by a pattern",
    "fairseq2_llama": "of the directory itself, a file for each rank",
    "ultravox": "other models",
}
READS_ELSEWHERE = re.compile(
    r"secondary_weights\s*=|subfolder\s*=|allow_patterns_overrides\s*=|load_file\(|torch\.load\("
    r"|get_hf_file_bytes\("
)
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
        above, _, name = folder.rpartition("/")
        assert f'"{above}/' in text or not above, folder
        assert re.search(rf'"{name}["/]', text), folder
    for name in OTHER_MODELS:
        assert f"config.{name}" in text


@pytest.mark.parametrize("name", OTHER_MODELS)
def test_models_that_are_parts_of_a_model_count_by_content(
    config: VllmConfig, tmp_path: Path, name: str
) -> None:
    """Ultravox takes its language model from another directory."""
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
    path.mkdir(parents=True)
    (path / "preprocessor_config.json").write_text("{}")
    assert namespace(config) != before


def test_adapters_for_requests_in_the_models_directory_do_not_count(config: VllmConfig) -> None:
    """Adapters count where a request names them. Models merge the adapters of their own tasks."""
    before = namespace(config)
    directory = Path(config.model_config.model)
    shutil.copytree(directory, directory / "adapters" / "of-a-user")
    assert namespace(config) == before


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
    """The tokenizer may lie in another directory. Its processor has no other configuration."""
    model = config.model_config
    model.multimodal_config = MultiModalConfig() if has_media else None
    model.tokenizer_mode, model.tokenizer = mode, str(tmp_path)
    names = []
    for size in (16, 14):
        (tmp_path / "tekken.json").write_text(json.dumps({section: {"size": size}, "version": 3}))
        names.append(namespace(config))
    assert (names[0] != names[1]) is is_seen


# Weights that change while an engine starts


class EngineCore:
    """Has the name of vLLM's class of engines."""

    def __init__(self, began_ns: int) -> None:
        self.vllm_config = VllmConfig()
        assert abs(int(self.vllm_config.instance_id) - time.time_ns()) < CHILD_LIMIT_S * 10**9
        self.vllm_config.instance_id = str(began_ns)

    def sample(self, weights: Path) -> str | None:
        return sample_at_start(weights)


class EngineCoreProc(EngineCore):
    """Has the name of vLLM's class of engines in a process of their own."""


@pytest.mark.parametrize("kind", [EngineCore, EngineCoreProc])
def test_weights_written_after_an_engine_began_to_start_are_nobody_elses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: type[EngineCore]
) -> None:
    """The engine may have read the old files.

    The new namespace belongs to engines that read the new.
    """
    model = make_model(tmp_path, LlamaShape(layers=1))
    engines = [kind(changed_ns(model) - early) for early in (1, 2)]
    sampled = [engine.sample(model) for engine in engines]
    assert len({*sampled, known_sample(model), None}) == 4
    assert [engine.sample(model) for engine in engines] == sampled
    assert caplog.text.count("were written after this engine began to start") == 2
    assert sample_at_start(model) == known_sample(model)


@pytest.mark.parametrize("kind", [EngineCore, EngineCoreProc])
def test_weights_written_before_an_engine_began_to_start_are_its_own(
    tmp_path: Path, kind: type[EngineCore]
) -> None:
    """A trainer, for example, writes the files in the process in which the engine then starts."""
    model = make_model(tmp_path, LlamaShape(layers=1))
    assert kind(changed_ns(model) + 1).sample(model) == known_sample(model)
