"""Sharing values read from a start line, without an engine, equal the engine's own."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from huggingface_hub import constants

from tests.support.buffers import make_buffer
from tests.support.models import LlamaShape, make_model
from vllm_kvpool.cli import main
from vllm_kvpool.cli.common.start_line import engine_arguments
from vllm_kvpool.cli.doctor import Status
from vllm_kvpool.cli.sharing import examine_start_line
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.identity.keys import make_namespace, manifest_key
from vllm_kvpool.storage.base import ChunkRef
from vllm_kvpool.storage.contents.manifest import Manifest, write_manifest
from vllm_kvpool.storage.file.store import FileStore
from vllm_kvpool.vllm_adapt import start_line
from vllm_kvpool.vllm_adapt.start_line import models_of, read_start_line

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models"), LlamaShape())


def line(model: Path, *more: str, **options: object) -> list[str]:
    transfer = {
        "kv_connector": "KVPoolConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": options,
    }
    return [
        *("vllm", "serve", str(model), "--port", "8001", "--skip-tokenizer-init"),
        *("--dtype", "float32", "--kv-transfer-config", json.dumps(transfer), *more),
    ]


def test_a_line_has_the_values_of_the_engine(model: Path) -> None:
    planned = read_start_line(engine_arguments(line(model, chunk_tokens=128)))
    assert planned.model == model.name
    assert planned.values["chunk_tokens"] == 128
    assert planned.values["weights"].startswith("sample:")
    assert "kinds" not in planned.values
    other = line(model, "--block-size", "32", chunk_tokens=128)
    assert read_start_line(engine_arguments(other)) == planned


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no KVPoolConnector"),
        (["--tensor-paralel-size", "2"], "unrecognized arguments: --tensor-paralel-size"),
        (["--kv-transfer-config", "null"], "vLLM refuses it"),
        (["--tensor-parallel-size", "0"], "vLLM refuses it"),
    ],
)
def test_a_line_that_shares_nothing_is_named(model: Path, words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_start_line(["--model", str(model), "--skip-tokenizer-init", *words])


def test_the_hubs_models_of_a_line(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("model: some/model")
    drafter = '{"model": "some/drafter", "num_speculative_tokens": 2}'
    for words, found in (
        (["--model", "some/model"], ["some/model"]),
        (["--port", "8001", "some/model"], ["some/model"]),
        (["--config", str(file)], ["some/model"]),
        (["--model", str(model), "--speculative-config", drafter], ["some/drafter"]),
        (["--model", "s3://bucket/model"], []),
    ):
        assert models_of(words) == found
    for variable, found in (("False", ["some/model"]), ("True", [])):
        monkeypatch.setenv("VLLM_USE_MODELSCOPE", variable)
        assert models_of(["--model", "some/model"]) == found


def test_an_error_of_the_hubs_client_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(arguments: list[str]) -> None:
        raise LookupError("no route")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(start_line, "read_start_line", read)
    [finding] = examine_start_line(["--model", "some/model"], [])
    assert (finding.status, finding.text) == (Status.FAILED, "LookupError: no route")


def test_a_line_whose_layerwise_the_engine_refuses_is_refused(model: Path) -> None:
    words = engine_arguments(line(model, "--pipeline-parallel-size", "2", layerwise=True))
    with pytest.raises(ConfigError, match="layerwise needs "):
        read_start_line(words)


def test_the_command_compares_a_line_with_what_is_stored(model: Path, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/pool?size=100MiB"
    values = {**read_start_line(engine_arguments(line(model))).values, "kinds": []}
    same, other = (make_namespace(model.name, digit * 12) for digit in "ab")
    store = FileStore(str(tmp_path / "pool"), 100 << 20)
    for name, each in ((same, values), (other, {**values, "chunk_tokens": 64})):
        content = write_manifest(Manifest(name, name, "", each))
        buffer = make_buffer(len(content))
        buffer.view[:] = content
        store.put([manifest_key(name)], [buffer], [ChunkRef(manifest_key(name))])
    store.close()
    result = CliRunner().invoke(main, ["doctor", "--json", "--", *line(model, store=url)])
    assert result.exit_code == 0, result.output
    found = {each["text"]: each["status"] for each in json.loads(result.stdout)}
    assert found[f"shares with {same} where pages have one dtype and kv_cache_dtype"] == "ok"
    assert any(f"shares nothing with {other}: chunk_tokens is" in text for text in found)


CPU_LIMIT_S = 30.0
"""Of a line that takes 5 s on a free core, most of it the import of vLLM."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("is_by_name", [False, True])
def test_the_command_ends_soon_with_a_directory_and_with_a_name_without_network(
    model: Path, tmp_path: Path, is_by_name: bool
) -> None:
    """The limit is of processor time, to which other processes do not add."""
    words = line(Path("Qwen/Qwen3-0.6B") if is_by_name else model, store=f"file://{tmp_path}/pool")
    command = [sys.executable, "-m", "vllm_kvpool", "doctor", "--", *words]
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:1"}
    for name in ("HF_HUB_OFFLINE", "HTTP_PROXY", "http_proxy"):
        environment.pop(name, None)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=400, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < CPU_LIMIT_S
    assert "1 MiB put in" in done.stdout
    assert "Retrying" not in done.stderr
    last = done.stdout.splitlines()[-1]
    if is_by_name:
        assert "http://127.0.0.1:1 cannot be reached" in done.stdout
        assert (done.returncode, last.startswith("failed  start line: ")) == (1, True), last
    else:
        assert (done.returncode, "start line: is accepted" in done.stdout) == (0, True), last
