"""`kvpool doctor` of an engine: what it shares, from its metrics and the manifests in stores."""

import json
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
from click.testing import CliRunner
from huggingface_hub import close_session, constants

from tests.support.buffers import make_buffer
from tests.support.engine_metrics import Engine, served
from vllm_kvpool.cli import main
from vllm_kvpool.cli.common.stores import NamedStore
from vllm_kvpool.cli.doctor import Status
from vllm_kvpool.cli.sharing import (
    MOST_NAMESPACES,
    UNSAVED,
    beside,
    examine_engine,
    examine_hub,
    of_metrics,
    of_values,
)
from vllm_kvpool.identity.keys import Namespace, make_namespace, manifest_key
from vllm_kvpool.storage.base import ChunkRef, Store
from vllm_kvpool.storage.contents.manifest import Manifest, write_manifest
from vllm_kvpool.storage.file.store import FileStore
from vllm_kvpool.transfer.ops import STORED, CellOutcome

NAMESPACE = make_namespace("model", "a" * 12)
VALUES = {"chunk_tokens": 256, "weights": "sample:0", "engine": {"CacheConfig": {"dtype": "auto"}}}


def running(**more: float) -> Engine:
    """An engine that has saved; `more` are tokens that it has missed, by reason."""
    engine = Engine()
    engine.series("kvpool_info", namespace=NAMESPACE, chunk_tokens="256").set(1)
    engine.series("kvpool_tier_up", tier="file").set(1)
    engine.series("kvpool_saved_tokens").inc(512)
    for reason, tokens in more.items():
        engine.series("kvpool_miss_tokens", reason=reason).inc(tokens)
    return engine


def told(engine: Engine) -> list[tuple[Status, str]]:
    _, findings = of_metrics("e", engine.samples())
    return [(each.status, each.text) for each in findings]


def test_an_engine_without_the_connector_is_named() -> None:
    namespace, [finding] = of_metrics("e", Engine().samples())
    assert namespace is None
    assert finding.status is Status.FAILED
    assert "KVPoolConnector" in finding.text


def test_what_metrics_say_comes_with_the_option_to_change() -> None:
    well = told(running(absent=10))
    assert {status for status, _ in well} == {Status.OK}
    assert "chunk_tokens=256" in well[0][1]
    engine = running(timed_out=20, unshareable=30)
    engine.series("kvpool_tier_up", tier="mooncake").set(0)
    engine.series("kvpool_tier_writable", tier="s3").set(0)
    engine.series("kvpool_failures", kind="store_error").inc(3)
    bad = [text for status, text in told(engine) if status is not Status.OK]
    for text, word in zip(
        bad,
        (
            "tier mooncake is away from its workers",
            "tier s3 takes no writes",
            "lookup_timeout_ms",
            "media without identifiers",
            "store_error 3",
        ),
        strict=True,
    ):
        assert word in text


def test_an_engine_that_saves_nothing_is_named() -> None:
    engine = Engine()
    engine.series("kvpool_info", namespace=NAMESPACE, chunk_tokens="256").set(1)
    assert any("kv_role is kv_consumer" in text for _, text in told(engine))


def test_saves_that_were_dropped_are_named_and_not_counted_as_saved() -> None:
    engine = Engine()
    engine.series("kvpool_info", namespace=NAMESPACE, chunk_tokens="256").set(1)
    engine.series("kvpool_unsaved_tokens", reason="unreachable").inc(512)
    found = told(engine)
    assert any("512 tokens were to be saved and were not" in text for _, text in found)
    assert not any("saved in stores" in text or "kv_consumer" in text for _, text in found)
    engine.series("kvpool_host_saved_tokens").inc(256)
    assert any("0 saved in stores, 256 in host memory alone" in text for _, text in told(engine))


def test_every_reason_of_a_dropped_save_has_words() -> None:
    could_be = set(CellOutcome) - STORED - {CellOutcome.MISSING, CellOutcome.CORRUPT}  # of loads
    assert {each.value for each in could_be} == UNSAVED.keys()


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"alone": ["x"]}, "shares with no other engine"),
        ({"rank_cells_of_tp": 2}, "per_head_storage"),
        ({"weights": "dummy:0:tp1"}, "random"),
        ({"weights": "name:m@None"}, "weights_id"),
        ({"namespace": "blue"}, "namespace='blue'"),
        ({"encrypted_cells": True}, "encryption keys"),
    ],
)
def test_values_that_limit_sharing(values: Mapping[str, Any], word: str) -> None:
    [finding] = of_values("e", {**VALUES, **values})
    assert word in finding.text


def test_values_that_limit_nothing() -> None:
    assert not list(of_values("e", VALUES))


def manifest(digit: str, **values: Any) -> Manifest:
    name = make_namespace("model", digit * 12)
    return Manifest(name, name, "", {**VALUES, **values})


def test_other_namespaces_are_told_nearest_first() -> None:
    one = manifest("a")
    near = manifest("b", chunk_tokens=128)
    far = manifest("c", chunk_tokens=128, weights="sample:1", rope=1, files={}, environment={})
    other = Manifest(*(make_namespace("other", "d" * 12),) * 2, "", {})
    found = [each.text for each in beside("e", one, [far, other, one, near])]
    assert [near.namespace in found[0], far.namespace in found[1], len(found)] == [True, True, 2]
    assert "chunk_tokens is 256 here and 128 there (set chunk_tokens" in found[0]
    assert "2 more, by `kvpool explain`" in found[1]
    many = [manifest(digit, rope=1) for digit in "0123456789"]
    *_, last = beside("e", one, many)
    assert f"{len(many) - MOST_NAMESPACES} more namespaces" in last.text


def put_manifest(directory: Path, namespace: Namespace, values: Mapping[str, Any]) -> None:
    store = FileStore(str(directory), 100 << 20)
    content = write_manifest(Manifest(namespace, namespace, "", values))
    buffer = make_buffer(len(content))
    buffer.view[:] = content
    key = manifest_key(namespace)
    store.put([key], [buffer], [ChunkRef(key)])
    store.close()


def test_the_command_asks_a_running_engine_and_its_store(tmp_path: Path) -> None:
    store = f"file://{tmp_path}/pool?size=100MiB"
    other = f"file://{tmp_path}/other?size=100MiB"
    put_manifest(tmp_path / "pool", NAMESPACE, VALUES)
    put_manifest(
        tmp_path / "pool", make_namespace("model", "b" * 12), {**VALUES, "chunk_tokens": 128}
    )
    with served(running()) as url:
        good = CliRunner().invoke(main, ["doctor", url, "--store", store, "--json"])
        wrong = CliRunner().invoke(main, ["doctor", url, "--store", other])
    assert good.exit_code == 0, good.output
    texts = [each["text"] for each in json.loads(good.output) if each["check"] == url]
    assert any("chunk_tokens is 256 here and 128 there" in text for text in texts)
    assert "these stores hold nothing of its namespace" in wrong.output
    gone = CliRunner().invoke(main, ["doctor", url, "--store", store])
    assert (gone.exit_code, "refused" in gone.output) == (1, True)


class CannotList:
    """Gets cells by key and cannot list keys, like Mooncake."""

    def __init__(self, store: FileStore) -> None:
        self.register, self.unregister = store.register, store.unregister
        self.exists, self.get, self.close = store.exists, store.get, store.close


def test_a_store_that_cannot_list_is_asked_for_the_engines_own_manifest(tmp_path: Path) -> None:
    put_manifest(tmp_path, NAMESPACE, VALUES)
    store = CannotList(FileStore(str(tmp_path), 100 << 20))
    named = NamedStore("mooncake://10.0.0.1:50051", cast("Store", store))
    with served(running()) as url:
        findings = list(examine_engine(url, [named]))
    store.close()
    assert {each.status for each in findings} == {Status.OK}
    assert any("cannot list" in each.text for each in findings)


def silent() -> tuple[str, socket.socket]:
    """Return the address of a server that accepts connections and never answers."""
    server = socket.create_server(("127.0.0.1", 0))
    return f"http://127.0.0.1:{server.getsockname()[1]}", server


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """The hub's client as in a new process without variables; what a test sets goes at its end."""
    for name in ("HF_HUB_OFFLINE", *PROXIES, *(each.lower() for each in PROXIES)):
        monkeypatch.setenv(name, "")  # restored afterwards, also where the code sets it
        monkeypatch.delenv(name)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    close_session()
    yield monkeypatch
    close_session()


PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
MODELS = ["Qwen/Qwen3-0.6B"]


@pytest.mark.parametrize("is_silent", [True, False])
def test_a_hub_that_cannot_be_reached_is_named_and_left_alone(
    hub: pytest.MonkeyPatch, is_silent: bool
) -> None:
    url, server = silent()
    if not is_silent:
        server.close()
    hub.setattr(constants, "ENDPOINT", url)
    with server:
        [finding] = examine_hub(MODELS, limit_s=0.5)
    assert finding.status is Status.WARNING
    assert f"{url} cannot be reached (" in finding.text
    assert "Qwen/Qwen3-0.6B is sought in Hugging Face's cache" in finding.text
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert constants.HF_HUB_OFFLINE
    assert not list(examine_hub(MODELS)), "it is asked once"


def test_a_hub_that_answers_with_an_error_is_reachable(hub: pytest.MonkeyPatch) -> None:
    with served(running()) as url:
        hub.setattr(constants, "ENDPOINT", url)
        assert not list(examine_hub(MODELS))
    assert not constants.HF_HUB_OFFLINE


def test_the_hub_is_asked_through_the_proxies_of_its_client(hub: pytest.MonkeyPatch) -> None:
    hub.setattr(constants, "ENDPOINT", "http://hub.invalid")
    with served(running()) as url:
        hub.setenv("ALL_PROXY", url)
        assert not list(examine_hub(MODELS))


def test_the_hub_is_not_asked_for_no_model(hub: pytest.MonkeyPatch) -> None:
    hub.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    assert not list(examine_hub([]))
