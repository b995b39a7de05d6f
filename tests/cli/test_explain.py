"""`kvpool explain --request`: a paragraph from what an engine has logged of a request."""

import json
from pathlib import Path
from typing import cast

import pytest
from click.testing import CliRunner

from tests.support.buffers import make_buffer
from vllm_kvpool.cli import main
from vllm_kvpool.cli.common.stores import NamedStore
from vllm_kvpool.cli.explain import (
    REASONS,
    RequestReport,
    explanations,
    explanations_text,
    reports,
    requests_text,
)
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.identity.keys import Namespace, make_namespace, manifest_key
from vllm_kvpool.storage.base import ChunkRef, PutOutcome, Store
from vllm_kvpool.storage.contents.manifest import MANIFEST_BYTES, Manifest, write_manifest
from vllm_kvpool.storage.file.store import FileStore

LOG = """
INFO 11-25 12:00:00 [loggers.py:1] Engine 000: Avg prompt throughput
INFO 11-25 kvpool: request cmpl-7-0-ab: prompt=1000 to_load=512 absent=256 short=232
INFO 11-25 kvpool: request cmpl-8-0-cd: prompt=900 to_load=0 timed_out=900
INFO 11-25 kvpool: request cmpl-7-0-ab: loaded=256 load_failed=256
INFO 11-25 kvpool: request cmpl-9-0-ef: prompt=600 to_load=512 short=88
"""


def test_a_request_s_lines_are_one_report() -> None:
    [report] = reports(LOG.splitlines(), "cmpl-7")
    missed = {"absent": 256, "short": 232, "load_failed": 256}
    assert report == RequestReport("cmpl-7-0-ab", 1000, 512, 256, missed)
    text = requests_text([report])
    assert text.startswith(
        "cmpl-7-0-ab has a prompt of 1000 tokens. 256 were loaded from the pool."
    )
    assert f"256 {REASONS['load_failed']}" in text
    assert "\n" not in text


def test_a_request_that_took_nothing_and_one_that_still_loads() -> None:
    nothing, loading = (reports(LOG.splitlines(), name)[0] for name in ("cmpl-8", "cmpl-9"))
    assert "None were loaded from the pool. 900 were not known in time" in requests_text([nothing])
    assert loading.loaded is None
    assert "512 were found; the log does not have the end" in requests_text([loading])


def test_a_part_of_an_id_may_name_many() -> None:
    assert len(reports(LOG.splitlines(), "cmpl-")) == 3
    many = [f"kvpool: request r{i}: prompt=1 to_load=0 short=1" for i in range(30)]
    assert requests_text(reports(many, "r")).endswith("10 more; give more of the id")
    with pytest.raises(ConfigError, match="log_requests=true"):
        reports(LOG.splitlines(), "other")


def test_the_command_reads_a_log(tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    path.write_text(LOG)
    options = ("explain", "--request", "cmpl-7", "--log", str(path))
    assert "256 were loaded" in CliRunner().invoke(main, options).output
    [report] = json.loads(CliRunner().invoke(main, [*options, "--json"]).output)
    assert report["missed"]["absent"] == 256
    assert "belong together" in CliRunner().invoke(main, options[:3]).output
    piped = CliRunner().invoke(main, [*options[:4], "-"], input="nothing")
    assert (piped.exit_code, "log_requests" in piped.output) == (1, True)


def test_every_reason_of_a_miss_is_explained() -> None:
    documented = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text()
    for reason in REASONS:
        assert f"| `{reason}` |" in documented


# Without two namespaces to compare


class Blind:
    """A store that cannot list."""


def written(tmp_path: Path, *names: str) -> NamedStore:
    store = FileStore(str(tmp_path / "pool"), 1 << 24)
    buffer = make_buffer(MANIFEST_BYTES)
    store.register(buffer)
    for name in map(Namespace, names):
        buffer.view[:] = write_manifest(Manifest(name, name, "", {}))
        key = manifest_key(name)
        assert store.put([key], [buffer], [ChunkRef(key)]) == [PutOutcome.STORED]
    return NamedStore("file:///pool", store)


ONE, TWO = make_namespace("llama", "a" * 12), make_namespace("qwen", "b" * 12)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ((), "it is empty: no engine has saved there"),
        ((ONE,), f"all its engines have one namespace, {ONE}, and share"),
        ((ONE, TWO), "each model has one namespace there"),
    ],
)
def test_a_store_without_a_pair_says_whether_that_is_well(
    names: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    named = written(tmp_path, *names)
    assert words in explanations_text(explanations([named], []), [named])
    named.store.close()


def test_a_store_that_cannot_list_is_named() -> None:
    blind = NamedStore("mooncake://m:1", cast("Store", Blind()))
    assert "mooncake://m:1: it cannot list" in explanations_text([], [blind])


def test_without_a_pair_json_is_empty_and_the_reason_goes_to_stderr(tmp_path: Path) -> None:
    written(tmp_path, ONE).store.close()
    options = ["explain", "--json", "--store", f"file://{tmp_path}/pool"]
    result = CliRunner().invoke(main, options)
    assert (result.exit_code, json.loads(result.stdout)) == (0, [])
    assert "all its engines have one namespace" in result.stderr
