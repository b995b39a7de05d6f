"""Workers of several engines with real sockets, windows and threads, without models."""

import json
import threading
import weakref
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from tests.embeds.engines import BUSY, Engine, embeddings, wait_for
from tests.support.server_process import free_ports
from vllm_kvpool.config import EmbedsConfig, Transport
from vllm_kvpool.embeds.protocol.messages import PeerRole
from vllm_kvpool.embeds.scheduler import FIRST_WEIGHTS
from vllm_kvpool.embeds.worker import WorkerIdentity
from vllm_kvpool.errors import ConfigError

ROW_BYTES = 64 * 4


@pytest.fixture(params=[Transport.LOCAL, Transport.MOONCAKE], ids=lambda each: each.value)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Engine, Engine]]:
    """A producer and a consumer whose window holds three rows."""
    options = {"transport": request.param, "arena_bytes": 3 * ROW_BYTES}
    with (
        Engine(PeerRole.PRODUCER, **options) as producer,
        Engine(PeerRole.CONSUMER, **options) as consumer,
    ):
        yield producer, consumer


def test_an_item_is_pushed_through_a_window_of_three_rows(pair: tuple[Engine, Engine]) -> None:
    producer, consumer = pair
    sent = embeddings(50)
    producer.encode("image", sent, to=(consumer.endpoint,))
    (got,) = consumer.receive("image", 50)
    assert torch.equal(got, sent)
    assert consumer.counts()["rounds"] >= 17


def test_an_item_is_wanted_from_a_named_encoder(pair: tuple[Engine, Engine]) -> None:
    producer, consumer = pair
    sent = embeddings(10)
    producer.encode("image", sent)
    (got,) = consumer.receive("image", 10, peers=(producer.endpoint,))
    assert torch.equal(got, sent)


def test_a_request_may_come_before_its_item(pair: tuple[Engine, Engine]) -> None:
    producer, consumer = pair
    view = consumer.request("early", ("image", 10), peers=(producer.endpoint,))
    consumer.awaits(view)
    producer.encode("image", embeddings(10))
    wait_for(lambda: consumer.may_go(view))
    (got,) = consumer.get("image")
    assert torch.equal(got, embeddings(10))


def test_ranks_of_different_speed_and_window_get_the_same() -> None:
    windows = [6 * ROW_BYTES, 7 * ROW_BYTES, ROW_BYTES, 1 << 20]
    configs = [
        EmbedsConfig(transport=Transport.LOCAL, arena_bytes=each, heartbeat_s=0.3)
        for each in windows
    ]
    with (
        Engine(PeerRole.PRODUCER) as producer,
        Engine(PeerRole.CONSUMER, ranks=4, configs=configs) as consumer,
    ):
        sent = embeddings(40)
        producer.encode("image", sent, to=(consumer.endpoint,))
        for got in consumer.receive("image", 40):
            assert torch.equal(got, sent)
        rounds = [consumer.counts(rank)["rounds"] for rank in range(4)]
        assert rounds[2] > rounds[0] > rounds[3]


@pytest.mark.parametrize("tensor", [torch.empty(0, 4), torch.zeros(3, 4, dtype=torch.complex64)])
def test_an_output_that_cannot_be_sent_does_not_end_the_engine(
    tensor: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    """Each step that reuses it comes to that again; the log has one line."""
    with Engine(PeerRole.PRODUCER) as producer:
        for _ in range(3):
            producer.workers[0].cached({"odd": tensor}, ("odd",), FIRST_WEIGHTS)
        wait_for(lambda: producer.counts().get("unsendable_outputs") == 3)
        assert caplog.text.count("item odd is not sent to other engines") == 1
        producer.encode("image", embeddings(4))
        wait_for(lambda: producer.gauges()["encoded_items"] == 1)


def test_the_same_image_for_many_requests_travels_once() -> None:
    with Engine(PeerRole.PRODUCER) as producer, Engine(PeerRole.CONSUMER) as consumer:
        views = [consumer.request(f"r{number}", ("logo", 20)) for number in range(8)]
        for view in views:
            consumer.awaits(view)
        consumer.scheduler.finished(views[3])
        producer.encode("logo", embeddings(20), to=(consumer.endpoint,))
        for number, view in enumerate(views):
            if number != 3:
                wait_for(lambda view=view: consumer.may_go(view))  # type: ignore[misc]
        assert consumer.counts()["rows"] == 20


def test_another_model_is_refused_and_the_request_goes_on_without() -> None:
    with (
        Engine(PeerRole.PRODUCER, fingerprint="one") as producer,
        Engine(PeerRole.CONSUMER, fingerprint="two", bootstrap_timeout_s=1.0) as consumer,
    ):
        producer.encode("image", embeddings(5), to=(consumer.endpoint,))
        with_media = consumer.request("media", ("image", 5), has_media=True)
        wait_for(lambda: consumer.may_go(with_media))
        assert not consumer.scheduler.has("image")
        without = consumer.request("none", ("image", 5))
        wait_for(
            lambda: not consumer.may_go(without) and "none" in consumer.scheduler.take_unavailable()
        )


def test_new_weights_on_both_sides_send_new_items() -> None:
    with Engine(PeerRole.PRODUCER) as producer, Engine(PeerRole.CONSUMER) as consumer:
        producer.encode("image", embeddings(8), to=(consumer.endpoint,))
        consumer.receive("image", 8)
        for engine in (producer, consumer):
            engine.scheduler.weights_changed("version 2")
        new = embeddings(8, seed=9)
        producer.encode("image", new, to=(consumer.endpoint,))
        (got,) = consumer.receive("image", 8, "after")
        assert torch.equal(got, new)


def test_item_of_a_planned_load_stays_until_its_step_when_weights_change() -> None:
    """vLLM may have sent the step to its workers and not have run it: the engine would end."""
    with Engine(PeerRole.PRODUCER) as producer, Engine(PeerRole.CONSUMER) as consumer:
        producer.encode("image", embeddings(8), to=(consumer.endpoint,))
        first = consumer.request("first", ("image", 8))
        wait_for(lambda: consumer.may_go(first))
        assert consumer.scheduler.has("image")
        consumer.scheduler.allocated("image")
        (load,) = consumer.scheduler.plan((), **BUSY).loads
        for engine in (producer, consumer):
            engine.scheduler.weights_changed("version 2")
        (worker,) = consumer.workers
        wait_for(lambda: worker._control.weights_version == 1)
        taken = worker.take(load.name)
        assert taken is not None
        assert torch.equal(taken, embeddings(8))
        consumer.scheduler.finished(first)
        consumer.scheduler.plan(("image",), **BUSY)
        new = embeddings(8, seed=9)
        producer.encode("image", new, to=(consumer.endpoint,))
        (got,) = consumer.receive("image", 8, "after")
        assert torch.equal(got, new)


def test_an_item_that_is_taken_and_let_go_of_is_kept_by_nobody() -> None:
    with Engine(PeerRole.PRODUCER) as producer, Engine(PeerRole.CONSUMER) as consumer:
        producer.encode("image", embeddings(30), to=(consumer.endpoint,))
        (got,) = consumer.receive("image", 30)
        is_gone = threading.Event()
        weakref.finalize(got, is_gone.set)
        del got
        wait_for(is_gone.is_set)


def test_back_pressure_defers_the_encoder() -> None:
    with (
        Engine(PeerRole.PRODUCER, retain_bytes=20 * ROW_BYTES) as producer,
        Engine(PeerRole.CONSUMER) as consumer,
    ):
        for number in range(3):
            producer.encode(f"image{number}", embeddings(10, seed=number))
        view = producer.request("late", ("image9", 10))
        wait_for(lambda: not producer.may_go(view))
        for number in range(3):
            peers = (producer.endpoint,)
            (got,) = consumer.receive(f"image{number}", 10, peers=peers)
            assert torch.equal(got, embeddings(10, seed=number))
        wait_for(lambda: producer.may_go(view))


def test_engines_that_do_both_take_from_each_other_and_wait_for_nobody() -> None:
    (port, other), both = free_ports(2), PeerRole.BOTH
    endpoints = [f"tcp://127.0.0.1:{each}" for each in (port, other)]
    with (
        Engine(both, ports=[port], peers=(endpoints[1],)) as first,
        Engine(both, ports=[other], peers=(endpoints[0],)) as second,
    ):
        unheard = second.request("alone", ("new", 4), has_media=True, is_sent=False)
        wait_for(lambda: second.may_go(unheard))
        assert not second.scheduler.has("new"), "it encodes what nobody has"
        first.workers[0].produced("image", embeddings(12), FIRST_WEIGHTS)
        wait_for(lambda: first.workers[0]._producer.gauges()["held_bytes"] > 0)  # type: ignore[union-attr]
        (got,) = second.receive("image", 12, has_media=True, is_sent=False)
        assert torch.equal(got, embeddings(12))
        second.workers[0].produced("sound", embeddings(7, seed=3), FIRST_WEIGHTS)
        wait_for(lambda: second.workers[0]._producer.gauges()["held_bytes"] > 0)  # type: ignore[union-attr]
        (got,) = first.receive("sound", 7, has_media=True, is_sent=False)
        assert torch.equal(got, embeddings(7, seed=3))


def test_counters_are_written_while_it_runs(tmp_path: Path) -> None:
    """A process that is killed has left them."""
    written = tmp_path / "stats.ec.worker.0"
    with (
        Engine(PeerRole.PRODUCER) as producer,
        Engine(PeerRole.CONSUMER, stats_file=str(tmp_path / "stats")) as consumer,
    ):
        producer.encode("image", embeddings(9), to=(consumer.endpoint,))
        consumer.receive("image", 9)
        name = "kvpool_ec_events{side=consumer,event=rows}"
        wait_for(lambda: written.exists() and json.loads(written.read_text()).get(name) == 9)


def test_counters_of_the_last_moment_are_written(tmp_path: Path) -> None:
    stats = str(tmp_path / "stats")
    with (
        Engine(PeerRole.PRODUCER) as producer,
        Engine(PeerRole.CONSUMER, stats_file=stats) as consumer,
    ):
        producer.encode("image", embeddings(9), to=(consumer.endpoint,))
        consumer.receive("image", 9)
    written = json.loads((tmp_path / "stats.ec.worker.0").read_text())
    assert written["kvpool_ec_events{side=consumer,event=rows}"] == 9


def test_a_worker_whose_counters_cannot_be_written_ends_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Engine(PeerRole.CONSUMER, stats_file=str(tmp_path / "no directory" / "stats")):
        pass
    assert sum("No such file" in each.getMessage() for each in caplog.records) == 1


SIZES = [each.name for each in fields(EmbedsConfig) if each.name.endswith("_bytes")]
PART_OF_ANOTHER = {"max_item_bytes": "max_landing_bytes"}  # an item lies within it


@pytest.mark.parametrize("option", SIZES)
def test_size_that_this_host_has_no_memory_for_is_named_at_start(
    option: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Memory allocated at start is refused; memory that may grow to this size logs a warning."""
    sizes = {"arena_bytes": "1MiB", option: "900TiB"}
    if option == "arena_bytes":
        with pytest.raises(ConfigError, match=r"killed.*Lower arena_bytes"):
            Engine(PeerRole.BOTH, **sizes)
    else:
        Engine(PeerRole.BOTH, **sizes).close()
        is_named = f"lower {option}" in caplog.text
        assert is_named is (option not in PART_OF_ANOTHER)


def test_workers_of_data_parallel_engines_are_numbered_through() -> None:
    """Each counts its own ranks from 0, and all are configured alike."""
    ports = ("tcp://127.0.0.1:1", "tcp://127.0.0.1:2")
    places = [
        WorkerIdentity(PeerRole.BOTH, "model", rank, ports, ports, "127.0.0.1", dp_rank)
        for dp_rank in range(3)
        for rank in range(2)
    ]
    assert [each.number for each in places] == list(range(6))
