"""Each kind of mismatch is named by one command."""

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.support.buffers import make_buffer
from tests.support.models import LlamaShape, make_model
from vllm_kvpool.cli import doctor, main
from vllm_kvpool.cli.common.start_line import engine_arguments
from vllm_kvpool.identity.chunk_hash import ChunkChain, RequestIdentity
from vllm_kvpool.identity.keys import make_namespace, manifest_key
from vllm_kvpool.layout.description import described
from vllm_kvpool.layout.topology import LayerGroup, Topology
from vllm_kvpool.scheduler.prefix_search import CellNames
from vllm_kvpool.storage.base import ChunkRef
from vllm_kvpool.storage.contents.manifest import REMEDIES, Manifest, write_manifest
from vllm_kvpool.storage.file.store import FileStore
from vllm_kvpool.vllm_adapt.start_line import read_start_line

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

CHUNK = 256
GROUPS = [LayerGroup(Topology(num_heads=2, tp_size=1, stages=((0, 4),), layer_span=4), 64)]
PROMPT = list(range(1000))
OTHER_TEMPLATE = [7, *PROMPT]  # one token more before the same text


class Place:
    """A model, and a store with a prompt that an engine of this model has saved."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.model = make_model(directory, LlamaShape())
        self.url = f"file://{directory}/pool?size=100MiB"
        values = {**read_start_line(engine_arguments(self.line())).values, "kinds": []}
        self.namespace = make_namespace(self.model.name, "a" * 12)
        manifest = Manifest(self.namespace, self.namespace, "", values, described(GROUPS))
        content = write_manifest(manifest)
        buffer = make_buffer(len(content))
        buffer.view[:] = content
        chain = ChunkChain(CHUNK, RequestIdentity())
        chain.extend(PROMPT)
        names = CellNames(self.namespace, GROUPS)
        keys = [key for each in chain.hashes for key in names.of_chunk(each)]
        store = FileStore(str(directory / "pool"), 100 << 20)
        store.put([manifest_key(self.namespace)], [buffer], [ChunkRef("manifest")])
        store.put(keys, [make_buffer(100)] * len(keys), [ChunkRef("")] * len(keys))
        store.close()

    def line(self, *more: str, **options: object) -> list[str]:
        extra = {"store": self.url, "chunk_tokens": CHUNK, **options}
        transfer = {
            "kv_connector": "KVPoolConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
        given = ("--skip-tokenizer-init", "--kv-transfer-config", json.dumps(transfer))
        return ["vllm", "serve", str(self.model), "--dtype", "float32", *given, *more]

    def starting(self, *more: str, **options: object) -> list[str]:
        return ["doctor", "--", *self.line(*more, **options)]

    def prompt(self, tokens: list[int], *more: str) -> list[str]:
        path = self.directory / "prompt.json"
        path.write_text(json.dumps(tokens))
        return ["explain", self.namespace, "--tokens", str(path), "--store", self.url, *more]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("mismatches"))


MISMATCHES: dict[str, tuple[Callable[[Place], list[str]], str]] = {
    "none": (lambda place: place.starting(), "shares with "),
    "other block size": (lambda place: place.starting("--block-size", "64"), "shares with "),
    "other quantisation": (
        lambda place: place.starting("--dtype", "bfloat16", "--quantization", "fp8"),
        "shares nothing with .*quantization",
    ),
    "an adapter": (
        lambda place: place.starting("--enable-lora"),
        "only requests with a LoRA adapter are saved",
    ),
    "other chunk size": (
        lambda place: place.starting(chunk_tokens=64),
        "chunk_tokens is 64 here and 256 there",
    ),
    "other weights": (
        lambda place: place.starting(weights_id="tuned"),
        "weights is .* here and sample:.* there .load the same weights",
    ),
    "cells that are encrypted": (
        lambda place: place.starting(encryption_key_file="/none"),
        "encrypted_cells is true here and .absent. there .give both engines encryption_key_file",
    ),
    "a missing file of keys": (
        lambda place: place.starting(encryption_key_file="/none"),
        "failed  encryption: encryption_key_file /none cannot be read: No such file",
    ),
    "same prompt": (lambda place: place.prompt(PROMPT), "can load the first 768 tokens"),
    "other template": (
        lambda place: place.prompt(OTHER_TEMPLATE),
        "its first 256 tokens differ from what was saved .another chat template",
    ),
    "other salt": (
        lambda place: place.prompt(PROMPT, "--cache-salt", "x"),
        "without --cache-salt the first 768 are stored",
    ),
    "a store that no engine has used": (
        lambda place: ["explain", place.namespace, "--store", f"file://{place.model}"],
        "Nothing was saved there, the engine's store is another",
    ),
    "wrong store": (
        lambda place: ["doctor", "--store", f"file://{place.model}/config.json/pool"],
        "cannot be used|Not a directory",
    ),
    "full disk": (
        lambda place: ["doctor", "--store", place.url.replace("100MiB", "900TiB")],
        "the disk is smaller than size=",
    ),
}


@pytest.mark.parametrize("kind", MISMATCHES)
def test_each_mismatch_is_named_by_one_command(place: Place, kind: str) -> None:
    command, said = MISMATCHES[kind]
    output = CliRunner().invoke(main, command(place)).output
    found = [line for line in output.splitlines() if "shares with engines of" not in line]
    assert re.search(said, "\n".join(found)), output


def test_every_value_that_may_differ_has_a_remedy(place: Place) -> None:
    options = {"namespace": "blue", "per_head_storage": False, "encryption_key_file": "/none"}
    values = read_start_line(engine_arguments(place.line(**options))).values
    assert {"rank_cells_of_tp", "encrypted_cells"} < set(values)
    assert set(values) - set(REMEDIES) == set()


def test_a_clock_that_is_wrong_is_named(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = time.time

    class Clock:
        perf_counter = staticmethod(time.perf_counter)

        @staticmethod
        def time() -> float:
            return ahead() + 60

    monkeypatch.setattr(doctor, "time", Clock)
    output = CliRunner().invoke(main, ["doctor", "--store", place.url]).output
    assert "the file system's clock is -60" in output
