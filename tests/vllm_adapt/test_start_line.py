"""Sharing values read from a start line, without an engine, equal the engine's own."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.support.buffers import make_buffer
from tests.support.models import LlamaShape, make_model
from vllm_kvpool.cli import main
from vllm_kvpool.cli.common.start_line import engine_arguments
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.identity.keys import make_namespace, manifest_key
from vllm_kvpool.storage.base import ChunkRef
from vllm_kvpool.storage.contents.manifest import Manifest, write_manifest
from vllm_kvpool.storage.file.store import FileStore
from vllm_kvpool.vllm_adapt.start_line import read_start_line

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
