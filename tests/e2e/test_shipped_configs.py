"""Every configuration that is shipped starts, and shares with its partner.

Replaced is only what belongs to a machine: addresses, paths, sizes, and RDMA.
"""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.conftest import EngineShelf
from tests.e2e.engine import Engine, EngineSpec, Image, Prompt
from tests.e2e.pool import expecting, same, tokens
from tests.e2e.vision import about
from tests.support.models import LlamaShape, LlavaShape, Qwen3NextShape, make_model
from tests.support.mooncake_master import MooncakeMaster
from tests.support.object_server import ObjectServer
from tests.support.server_process import free_ports
from vllm_kvpool.config import read_embeds_config
from vllm_kvpool.network.allowed_peers import Allowed, AllowedPeers

pytestmark = [pytest.mark.e2e, pytest.mark.mooncake, pytest.mark.s3]

CONFIGS = Path(__file__).parents[2] / "configs"
PROMPT_TOKENS = 1264
STORED = PROMPT_TOKENS // 256 * 256
BUCKET = "kvpool-cells"
KEYS = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "secret"}


TEXT = LlamaShape(kv_heads=2)
DTYPE = {"qwen3_next": {"dtype": "bfloat16"}}


@dataclass(frozen=True)
class Pair:
    """The engine that computes a prompt, and the one that finds it: files below `configs/`."""

    writer: str
    reader: str
    shape: LlamaShape = TEXT
    ends_first: bool = True
    """True if the writer ends before the reader starts. False if its memory is part of the pool."""


PAIRS = [
    Pair("embedded.json", "embedded.json"),
    Pair("files.json", "files.json"),
    Pair("tiers.json", "tiers.json"),
    Pair("hybrid.yaml", "hybrid.yaml", Qwen3NextShape()),
    Pair("mooncake_prefill.json", "mooncake_decode.json", ends_first=False),
    Pair("kubernetes/00-namespace.yaml", "helm/kvpool/values.yaml", ends_first=False),
    Pair("systemd/README.md", "mooncake_decode.json", ends_first=False),
]
EMBEDDINGS = ("embeddings_encoder.json", "embeddings_engine.json")
ELSEWHERE = {
    "ascend_both.yaml": "needs an NPU: test_ascend.py",
    "ascend_prefill.yaml": "needs an NPU: test_ascend.py",
    "ascend_decode.yaml": "needs an NPU: test_ascend.py",
    "router.toml": "starts no engine: tests/router/test_shipped_router.py",
    "kubernetes/30-router.yaml": "starts no engine: tests/router/test_shipped_router.py",
    "helm/kvpool/templates/router.yaml": "renders to the manifest: tests/deploy/test_chart.py",
    "helm/kvpool/templates/engines-config.yaml": "the store is in values.yaml",
}


def text_of(name: str) -> str:
    return (CONFIGS / name).read_text()


def shipped(name: str) -> dict[str, Any]:
    """Return the `kv_transfer_config` or `ec_transfer_config` in a shipped file."""
    text = text_of(name)
    match name.rpartition("/")[2]:
        case "hybrid.yaml":
            found = yaml.safe_load(text)["kv-transfer-config"]
        case "values.yaml":
            extra = yaml.safe_load(text)["pool"]
            template = text_of("helm/kvpool/templates/engines-config.yaml")
            connector = re.search(r'"kv_connector" "(\w+)"', template)
            role = re.search(r'"kv_role" "(\w+)"', template)
            assert connector is not None
            assert role is not None
            found = {
                "kv_connector": connector[1],
                "kv_role": role[1],
                "kv_connector_extra_config": extra,
            }
        case "00-namespace.yaml":
            (data,) = (
                each["data"]["kv-transfer-config"]
                for each in yaml.safe_load_all(text)
                if "kv-transfer-config" in each.get("data", {})
            )
            found = json.loads(data)
        case "README.md":
            line = re.search(r"^KV_TRANSFER_CONFIG='(.*)'$", text, re.MULTILINE)
            assert line is not None
            found = json.loads(line[1])
        case _:
            found = json.loads(text)
    assert isinstance(found, dict)
    return found


def block_size_of(name: str) -> int:
    """Return an engine's block size: from hybrid.yaml, else 32."""
    if not name.endswith("hybrid.yaml"):
        return 32
    return int(yaml.safe_load(text_of(name))["block-size"])


def test_every_shipped_file_with_a_connector_is_started_here() -> None:
    found = {
        str(path.relative_to(CONFIGS))
        for path in CONFIGS.rglob("*")
        if path.is_file()
        and re.search(r"KVPool(EC)?Connector|\[\[replicas|\[discovery", path.read_text())
    }
    started = {name for pair in PAIRS for name in (pair.writer, pair.reader)} | {*EMBEDDINGS}
    assert found - started == ELSEWHERE.keys()


def on_this_machine(config: dict[str, Any], **places: str) -> dict[str, Any]:
    """The same configuration with addresses, paths and sizes of a test."""
    text = json.dumps(config)
    for pattern, place in (
        (r"mooncake://[\w.:-]+", f"mooncake://{places.get('master')}"),
        (r"file:///(nvme|var/cache)/kvpool", f"file://{places.get('directory')}/kvpool"),
        (rf"s3://{BUCKET}/prod\?region=[\w-]+", f"s3://{BUCKET}/prod?endpoint={places.get('s3')}"),
        (r"protocol=rdma", "protocol=tcp"),
        (r"\b\d+[GT]iB", "128MiB"),
    ):
        text = re.sub(pattern, place, text)
    found: dict[str, Any] = json.loads(text)
    return found


@pytest.fixture(scope="module")
def places() -> Iterator[dict[str, str]]:
    """The servers that stores name, each started once."""
    with MooncakeMaster() as master, ObjectServer() as server:
        server.make_bucket(BUCKET)
        yield {"master": master.address, "s3": server.endpoint}


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair.writer}-{pair.reader}")
def test_shipped_engine_finds_what_its_partner_has_computed(
    pair: Pair, places: dict[str, str], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = make_model(tmp_path_factory.getbasetemp(), pair.shape)
    env = {**KEYS, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    writer, reader = (
        EngineSpec(
            model=model,
            kv_transfer_config=on_this_machine(shipped(name), directory=str(tmp_path), **places),
            env=env,
            block_size=block_size_of(name),
            llm=DTYPE.get(pair.shape.kind, {}),
        )
        for name in (pair.writer, pair.reader)
    )
    prompt = Prompt(ids=tokens(seed=hash_of(pair), count=PROMPT_TOKENS))
    with ExitStack() as engines:
        first = engines.enter_context(Engine(writer, tmp_path / "writer.log"))
        (expected,) = first.generate(prompt)
        assert expected.cached_tokens == 0
        if pair.ends_first:
            first.close()
        second = engines.enter_context(Engine(reader, tmp_path / "reader.log"))
        (read,) = second.generate(expecting(prompt, STORED))
    assert read.cached_tokens == STORED
    same(read, expected)


def hash_of(pair: Pair) -> int:
    """A seed of its own for each pair: some share one master."""
    return 9_000 + PAIRS.index(pair)


def test_shipped_encoder_and_engine_exchange_an_image(
    llava: Callable[[LlavaShape], Path], engines: EngineShelf, tmp_path: Path
) -> None:
    alone = EngineSpec(model=llava(LlavaShape()), images=4)
    prompt = about(Image(seed=71))
    (expected,) = engines.get(alone).generate(prompt)
    encoder, engine = (
        EngineSpec(
            model=alone.model,
            images=4,
            encoder_raises=config["ec_role"] == "ec_consumer",
            ec_transfer_config={**on_this_machine(config), "ec_ip": "127.0.0.1", "ec_port": port},
        )
        for config, port in zip(map(shipped, EMBEDDINGS), free_ports(2), strict=True)
    )
    (sent,) = engines.get(encoder).generate(about(Image(seed=71), max_tokens=1))
    asked = about(Image(seed=71), ec_transfer_params=sent.ec_transfer_params)
    (actual,) = engines.get(engine).generate(asked)
    same(actual, expected)
    assert engines.get(engine).images_encoded() == 0


@pytest.mark.parametrize(("own", "partner"), [EMBEDDINGS, EMBEDDINGS[::-1]])
def test_shipped_encoder_and_engine_allow_each_others_host(own: str, partner: str) -> None:
    """On one machine all hosts are allowed, so the addresses are judged as on two."""
    ours, theirs = shipped(own), shipped(partner)
    config = read_embeds_config(ours["ec_connector_extra_config"], env={})
    allowed = AllowedPeers(
        config.allowed_peers, config.peers, lambda address: str(address) == ours["ec_ip"]
    )
    assert isinstance(allowed.judge(f"tcp://{theirs['ec_ip']}:{theirs['ec_port']}"), Allowed)
    assert allowed.allows_address(theirs["ec_ip"])
    assert allowed.allows_host(theirs["ec_ip"])
