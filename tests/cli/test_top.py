"""`kvpool top`: rates, means and ratios between two scrapes of a real exposition."""

import itertools
import json
import socket
import threading
from collections.abc import Iterator

import pytest
from click.testing import CliRunner

from tests.support.engine_metrics import Engine, served
from tests.support.http_answers import http_server
from vllm_kvpool.cli import main
from vllm_kvpool.cli.common.engine_metrics import Samples, scrape
from vllm_kvpool.cli.common.tables import show_live
from vllm_kvpool.cli.top import engine_state, tables, watch
from vllm_kvpool.errors import ConfigError


@pytest.fixture
def engine() -> Engine:
    engine = Engine()
    engine.series("kvpool_hit_tokens").inc(1000)
    engine.series("kvpool_miss_tokens", reason="absent").inc(5000)
    engine.series("kvpool_tier_up", tier="file").set(1)
    return engine


def work(engine: Engine) -> None:
    """Add an interval's work to the engine's metrics."""
    engine.series("kvpool_hit_tokens").inc(600)
    engine.series("kvpool_miss_tokens", reason="absent").inc(200)
    engine.series("kvpool_miss_tokens", reason="not_needed").inc(9000)
    engine.series("kvpool_lookups", outcome="answered").inc(4)
    engine.series("kvpool_lookup_seconds").inc(0.008)
    engine.series("kvpool_load_seconds").observe(0.1)
    engine.series("kvpool_load_seconds").observe(0.3)
    engine.series("kvpool_saved_tokens").inc(64)
    engine.series("kvpool_host_saved_tokens").inc(32)
    engine.series("kvpool_unsaved_tokens", reason="full").inc(512)
    engine.series("kvpool_failures", kind="load_missing").inc(2)
    engine.series("kvpool_tier_up", tier="file").set(0)
    load = {"direction": "load", "store": "file"}
    engine.series("kvpool_cells", **load, outcome="done").inc(10)
    engine.series("kvpool_cells", **load, outcome="failed").inc(4)
    engine.series("kvpool_bytes", **load).inc(4 << 20)
    engine.series("kvpool_op_seconds", lane="get", tier="file").observe(0.02)
    engine.series("kvpool_op_wait_seconds", lane="get", tier="file").observe(0.001)
    engine.series("kvpool_queue_cells", lane="get", tier="file").set(7)


def test_an_interval_s_rates_and_means(engine: Engine) -> None:
    before = engine.samples()
    work(engine)
    state = engine_state("e", before, engine.samples(), seconds=2.0)
    assert state.hit_ratio == 0.75
    assert (state.hit_tokens_per_s, state.missed) == (300, {"absent": 100})
    assert (state.saved_tokens_per_s, state.unsaved) == (48, {"full": 256})
    assert (state.lookup_s, state.load_s, state.save_s) == (0.002, pytest.approx(0.2), None)
    assert (state.failures, state.tiers_down) == ({"load_missing": 2}, ["file"])
    [store] = state.stores
    assert (store.store, store.bytes_per_s, store.cells_per_s) == ("file", 2 << 20, 7)
    assert store.failed_per_s == 2
    [lane] = state.lanes
    assert (lane.lane, lane.queued_cells, lane.batches_per_s) == ("get", 7, 0.5)
    assert (lane.wait_s, lane.batch_s) == (pytest.approx(0.001), pytest.approx(0.02))
    text = "\n".join(each.as_text() for each in tables([state]))
    for words in ("75.0 %", "tier file is away", "2 MiB/s", "missed 100 tok/s absent"):
        assert words in text


def test_an_engine_that_began_anew_and_one_that_rests(engine: Engine) -> None:
    before = engine.samples()
    again = Engine()
    again.series("kvpool_hit_tokens").inc(10)
    assert engine_state("e", before, again.samples(), 1.0).hit_tokens_per_s == 10
    rest = engine_state("e", before, before, 1.0)
    assert (rest.hit_ratio, rest.load_s, rest.missed) == (None, None, {})
    assert "-" in tables([rest])[0].as_text()


def test_data_parallel_ranks_add_up_and_one_bad_tier_counts(engine: Engine) -> None:
    engine.series("kvpool_hit_tokens", rank="1").inc(5)
    engine.series("kvpool_tier_up", rank="1", tier="file").set(0)
    for rank in "01":
        engine.series("kvpool_page_locked_share", rank=rank).set(0.5)
    values = {series.name: value for series, value in engine.samples().items()}
    assert (values["hit_tokens_total"], values["tier_up"]) == (1005, 0)
    assert values["page_locked_share"] == 0.5


def test_engines_are_watched_and_one_that_is_gone_is_named(engine: Engine) -> None:
    now = itertools.count()

    def read(url: str) -> Samples:
        if url == "gone":
            raise ConfigError("refused")
        if url == "other":
            return {}
        engine.series("kvpool_hit_tokens").inc(8)
        return engine.samples()

    watched = watch(["e", "gone", "other"], 1.0, read, lambda: float(next(now)), lambda s: None)
    for states in itertools.islice(watched, 2):
        assert [each.hit_tokens_per_s for each in states] == [2, 0, 0]
        assert [each.error for each in states][1] == "refused"
        assert "KVPoolConnector" in states[2].error
    show_live([tables(states)])


def test_an_engine_that_comes_is_no_error_and_has_not_grown(engine: Engine) -> None:
    now = itertools.count()

    def read(url: str) -> Samples:
        if next(reads) == 0:
            raise ConfigError("refused")
        engine.series("kvpool_hit_tokens").inc(8)
        return engine.samples()

    reads = itertools.count()
    watched = watch(["e"], 1.0, read, lambda: float(next(now)), lambda s: None)
    states = [state for [state] in itertools.islice(watched, 2)]
    assert [(each.error, each.hit_tokens_per_s) for each in states] == [("", 0), ("", 8)]


@pytest.fixture
def url(engine: Engine) -> Iterator[str]:
    with served(engine, on_scrape=work) as url:
        yield url


def test_the_command_prints_tables_or_lines_of_json(url: str) -> None:
    options = ("top", url, "--every", "0.1", "--count", "1")
    text = CliRunner().invoke(main, options)
    assert "75.0 %" in text.output, text.output
    [state] = json.loads(CliRunner().invoke(main, [*options, "--json"]).output)
    assert (state["engine"], state["hit_ratio"]) == (url, 0.75)
    gone = CliRunner().invoke(main, ["top", "http://127.0.0.1:1", *options[2:]])
    assert "refused" in gone.output
    assert gone.exit_code == 1
    both = CliRunner().invoke(main, ["top", "http://127.0.0.1:1", *options[1:]])
    assert both.exit_code == 0, "one of them was read"


@pytest.mark.parametrize(
    "given", ["engine-0:8000", "htp://e:1", "http://", "http://e:x", "http://e:0"]
)
@pytest.mark.parametrize(
    "command", [("top", "--count", "1"), ("inspect", "--store", "host://1GiB", "--engine")]
)
def test_what_is_no_url_of_an_engine_is_named_at_once(given: str, command: tuple[str, ...]) -> None:
    result = CliRunner().invoke(main, [*command, given])
    assert result.exit_code == 1
    assert f"{given}: write the URL of an engine's server, http://HOST:PORT" in result.output


FOREIGN = "\n".join(
    f"vllm:kvpool_{sample}"
    for sample in (
        "queue_cells{lane='get'} 5",
        "queue_cells{lane='get',tier='file'} +Inf",
        "hit_tokens_total NaN",
        "miss_tokens_total{cause='absent'} 5",
        "failures_total 5",
        "tier_up 0",
        "hit_cells_total 5",
        "host_bytes{state='clean'} NaN",
        "cells_total{store='file'} 5",
        "info{namespace='m@fmt:aaaaaaaaaaaa'} 1",
        "of_a_later_release_total 7",
    )
).replace("'", '"')


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (("top", "--every", "0.1", "--count", "1"), "no metrics of the pool"),
        (("inspect", "--store", "host://1GiB", "--engine"), "no metric kvpool_info"),
        (("doctor", "--store", "host://1MiB"), "no metric kvpool_info"),
    ],
)
def test_metrics_of_another_release_and_no_numbers_are_left_out(
    command: tuple[str, ...], says: str
) -> None:
    with http_server(lambda path, body: (200, f"{FOREIGN}\n".encode())) as url:
        result = CliRunner().invoke(main, [*command, url])
    assert isinstance(result.exception, SystemExit) or result.exit_code == 0, result.exception
    assert says in result.output


def test_what_answers_with_no_metrics_is_no_engine() -> None:
    with http_server(lambda path, body: (200, b"garbage {{{")) as url:
        result = CliRunner().invoke(main, ["top", url, "--every", "0.1", "--count", "1"])
    assert result.exit_code == 1
    assert "is not what Prometheus reads" in result.output


def test_what_does_not_speak_http_is_no_engine() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"no HTTP\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"{url}: /metrics is not what Prometheus reads"):
            scrape(url)
        thread.join()
