"""The exposed Prometheus metrics match the controller's state."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.router.scenes import Scene, busy_scene
from vllm_kvpool.metrics import MAX_TENANTS, MetricKind
from vllm_kvpool.router.control.events import Cancelled, Measured, Mode, Remove, Sample, SetMode
from vllm_kvpool.router.control.requests import RequestId
from vllm_kvpool.router.control.states import ReplicaId, Role
from vllm_kvpool.router.ops.metrics import PREFIX, ROUTER_METRICS, Telemetry
from vllm_kvpool.router.ops.request_log import Observation, RequestLog
from vllm_kvpool.router.ops.snapshot import OUTCOMES

Values = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(telemetry: Telemetry) -> Values:
    """Every sample, without the prefix."""
    return {
        (sample.name.removeprefix(PREFIX), frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(telemetry.expose()[1].decode())
        for sample in family.samples
    }


def of(values: Values, name: str, /, **labels: str) -> float:
    # `from` is no name in Python.
    named = {label.rstrip("_"): value for label, value in labels.items()}
    return values[name, frozenset(named.items())]


def ended(tenant: str, prompt_tokens: int, cached_tokens: int | None) -> RequestLog:
    """The log of an ended request, with what counts of its prompt."""
    return RequestLog(0.0, tenant, prompt_tokens=prompt_tokens, cached_tokens=cached_tokens)


def observing(observation: Observation) -> RequestLog:
    """The log of an ended request, with one value for a histogram."""
    return RequestLog(0.0, observed=[observation])


@pytest.fixture
def scene() -> Scene:
    return busy_scene()


@pytest.fixture
def telemetry(scene: Scene) -> Telemetry:
    return Telemetry(scene.controller, clock=scene.clock, max_age_s=0.0)


def test_every_row_of_the_table_is_exposed_with_its_kind_its_labels_and_its_help(
    scene: Scene, telemetry: Telemetry
) -> None:
    for number in range(100):
        scene.arrived(f"m{number}", 16_000)
    scene.step(Measured(ReplicaId("d1"), Sample(has_connector=False)))
    telemetry.count_request(observing(Observation("replica_first_token_seconds", 0.2, "d0")))
    telemetry.count_request(observing(Observation("replica_token_seconds", 0.02, "d0")))
    telemetry.count_request(ended("search", 10, 4))
    found = {
        family.name.removeprefix(PREFIX): family
        for family in text_string_to_metric_families(telemetry.expose()[1].decode())
    }
    assert found.keys() == ROUTER_METRICS.keys()
    for name, row in ROUTER_METRICS.items():
        assert (found[name].type, found[name].documentation) == (row.kind.value, row.help)
        assert found[name].samples, name
        for sample in found[name].samples:
            assert sample.labels.keys() - {"le"} == set(row.labels), sample


def test_the_content_type_is_that_of_the_text_form(telemetry: Telemetry) -> None:
    content_type, body = telemetry.expose()
    assert content_type == "text/plain; version=0.0.4; charset=utf-8"
    assert body.startswith(b"# HELP kvpool_router_")
    assert b"_created" not in body


def test_clients_are_told_of_no_replica_and_no_tenant(scene: Scene, telemetry: Telemetry) -> None:
    """Their address needs no key for its metrics."""
    telemetry.count_request(ended("search", 10, 4))
    names = {
        family.name.removeprefix(PREFIX)
        for family in text_string_to_metric_families(telemetry.expose(with_names=False)[1].decode())
    }
    named = {"replica", "tenant"}
    assert names == {name for name, row in ROUTER_METRICS.items() if named.isdisjoint(row.labels)}


@pytest.mark.parametrize(
    ("cached", "expected"),
    [
        (0, {"computed": 10, "cached": 0}),
        (4, {"computed": 6, "cached": 4}),
        (12, {"computed": 0, "cached": 10}),
        (None, {"unknown": 10}),
    ],
)
def test_prompt_tokens_are_counted_once_by_tenant_and_source(
    telemetry: Telemetry, cached: int | None, expected: dict[str, int]
) -> None:
    """An engine that finds more than the prompt has is wrong, and no count is below zero."""
    telemetry.count_request(ended("", 0, None))
    telemetry.count_request(ended("search", 10, cached))
    found = {
        dict(labels)["source"]: value
        for (name, labels), value in scrape(telemetry).items()
        if name == "prompt_tokens_total" and ("tenant", "search") in labels
    }
    assert found == expected


def test_prompt_tokens_beyond_64_tenants_share_a_label(telemetry: Telemetry) -> None:
    for number in range(100):
        telemetry.count_request(ended(f"tenant-{number}", 1, 0))
    telemetry.count_request(ended("", 1, 0))
    values = scrape(telemetry)
    tenants = {dict(labels)["tenant"] for name, labels in values if name == "prompt_tokens_total"}
    assert len(tenants) == MAX_TENANTS + 1
    assert of(values, "prompt_tokens_total", tenant="others", source="computed") == 37


def test_what_was_read_within_a_second_is_told_again(scene: Scene) -> None:
    telemetry = Telemetry(scene.controller, clock=scene.clock)
    first = telemetry.expose()[1]
    scene.serving("more", Role.DECODE)
    assert telemetry.expose()[1] is first
    scene.now += 1.0
    assert b'replica="more"' in telemetry.expose()[1]


def test_without_a_plan_nothing_is_wanted() -> None:
    scene = Scene()
    scene.serving("d0", Role.DECODE)
    values = scrape(Telemetry(scene.controller, clock=scene.clock))
    assert not any(name == "plan_wanted" for name, _ in values)


def test_requests_are_counted_by_how_they_have_ended(scene: Scene, telemetry: Telemetry) -> None:
    scene.step(Cancelled(RequestId("r1")))
    scene.measure_prefill()
    for number in range(100):
        scene.arrived(f"m{number}", 16_000)
    values = scrape(telemetry)
    ended = {outcome: of(values, "requests_total", outcome=outcome) for outcome in OUTCOMES}
    assert ended["cancelled"] == 7
    assert ended["shed"] > 0
    assert of(values, "arrivals_total") == 110
    assert sum(ended.values()) + of(values, "in_flight_requests") == 110
    refused = [of(values, "refusals_total", status=status) for status in ("429", "502", "503")]
    assert sum(refused) == ended["shed"]
    assert of(values, "queue_tokens") == 16_000 * of(values, "queue_requests") > 0


def test_refusals_are_0_before_the_first() -> None:
    scene = Scene()
    values = scrape(Telemetry(scene.controller, clock=scene.clock, max_age_s=0.0))
    assert [of(values, "refusals_total", status=status) for status in ("429", "502", "503")] == [
        0
    ] * 3


def test_the_plan_and_the_mode(scene: Scene, telemetry: Telemetry) -> None:
    scene.step(SetMode(Mode.DRY_RUN))
    scene.tick()
    values = scrape(telemetry)
    assert of(values, "plan_replicas", role="decode") == 2
    assert of(values, "plan_wanted", role="decode") >= 2
    assert of(values, "planner_mode", mode="dry_run") == 1
    assert of(values, "planner_mode", mode="manual") == 0
    assert of(values, "plan_held") == 0
    assert not [labels for name, labels in values if "prefill_tokens_per_s" in str(labels)]
    assert of(values, "rate", name="asked_tokens_per_s") > 0


def test_a_replica_that_has_left_leaves_no_series_behind(
    scene: Scene, telemetry: Telemetry
) -> None:
    scene.serving("gone", Role.DECODE)
    assert of(scrape(telemetry), "locked", replica="gone") == 0
    scene.step(Remove(ReplicaId("gone")))
    assert not any(("replica", "gone") in labels for _, labels in scrape(telemetry))


def test_what_is_told_falls_into_buckets(telemetry: Telemetry) -> None:
    telemetry.count_request(observing(Observation("first_token_seconds", 0.2)))
    telemetry.count_request(observing(Observation("first_token_seconds", 70.0)))
    telemetry.count_request(observing(Observation("added_seconds", 0.0004)))
    telemetry.count_request(observing(Observation("request_seconds", 3.0)))
    values = scrape(telemetry)
    assert of(values, "first_token_seconds_count") == 2
    assert of(values, "first_token_seconds_sum") == pytest.approx(70.2)
    assert of(values, "first_token_seconds_bucket", le="0.1") == 0
    assert of(values, "first_token_seconds_bucket", le="0.25") == 1
    assert of(values, "first_token_seconds_bucket", le="120.0") == 2
    assert of(values, "added_seconds_bucket", le="0.0005") == 1
    assert of(values, "request_seconds_bucket", le="2.5") == 0
    assert of(values, "request_seconds_bucket", le="5.0") == 1


def test_names_of_replicas_cannot_break_the_form() -> None:
    scene = Scene()
    scene.serving('a"b\\c\nkvpool_router_arrivals_total 9', Role.PREFILL)
    values = scrape(Telemetry(scene.controller, clock=scene.clock, max_age_s=0.0))
    assert of(values, "arrivals_total") == 0
    assert of(values, "locked", replica='a"b\\c\nkvpool_router_arrivals_total 9') == 0


def test_two_routers_of_a_process_do_not_share_their_metrics(telemetry: Telemetry) -> None:
    other = Telemetry(Scene().controller, clock=lambda: 0.0)
    telemetry.count_request(observing(Observation("request_seconds", 1.0)))
    assert of(scrape(other), "request_seconds_count") == 0


def test_names_end_in_their_units() -> None:
    for row in ROUTER_METRICS.values():
        assert not row.name.endswith("_total"), "Prometheus's readers add it to counters"
        if row.kind is MetricKind.HISTOGRAM:
            assert row.name.endswith("_seconds")
            assert list(row.bounds) == sorted(set(row.bounds))


def test_an_engines_own_times_go_with_it(scene: Scene, telemetry: Telemetry) -> None:
    scene.serving("gone", Role.DECODE)
    for replica, seconds in (("d0", 0.2), ("d0", 99.0), ("gone", 0.2)):
        telemetry.count_request(
            observing(Observation("replica_first_token_seconds", seconds, replica))
        )
    values = scrape(telemetry)
    name = "replica_first_token_seconds"
    assert of(values, f"{name}_bucket", replica="d0", le="0.1") == 0
    assert of(values, f"{name}_bucket", replica="d0", le="0.25") == 1
    assert of(values, f"{name}_bucket", replica="d0", le="+Inf") == 2
    assert of(values, f"{name}_sum", replica="d0") == 99.2
    assert of(values, f"{name}_count", replica="gone") == 1
    scene.step(Remove(ReplicaId("gone")))
    assert not any(("replica", "gone") in labels for _, labels in scrape(telemetry))
