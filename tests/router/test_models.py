"""Several models behind one router: requests go to replicas that serve theirs."""

import pytest

from tests.support.router_steps import Steps
from vllm_kvpool.router.control.events import (
    Action,
    Decode,
    ModelsListed,
    Outcome,
    Prefill,
    PrefillEnded,
    Refuse,
)
from vllm_kvpool.router.control.overload import Shedder
from vllm_kvpool.router.control.requests import Phase, PromptPath, RequestId
from vllm_kvpool.router.control.settings import OverloadConfig, Settings
from vllm_kvpool.router.control.states import ReplicaId

ALL_IN = OverloadConfig(ttft_target_s=1000.0)


def cluster(settings: Settings | None = None, **models: str) -> Steps:
    """Replicas by name, with the models that they list: those named p... compute prompts."""
    steps = Steps(settings, overload=ALL_IN)
    for name in models:
        steps.fleet(**{"prefill" if name.startswith("p") else "decode": name})
    for name, listed in models.items():
        steps.step(ModelsListed(ReplicaId(name), frozenset(listed.split())))
    return steps


@pytest.mark.parametrize(
    ("model", "places"),
    [("a", {"d1", "d2"}), ("b", {"d3"}), ("adapter", {"d2"}), ("", {"d1", "d2", "d3"})],
)
def test_a_request_goes_to_a_replica_that_lists_its_model(model: str, places: set[str]) -> None:
    steps = cluster(d1="a", d2="a adapter", d3="b")
    calls = [steps.ask(f"r{number}", 20, model=model)[0] for number in range(9)]
    assert {each.replica for each in calls if isinstance(each, Decode)} == places


def test_both_stages_serve_the_model() -> None:
    steps = cluster(p1="a", p2="b", d1="a", d2="b")
    for number, (name, prefill, decode) in enumerate([("a", "p1", "d1"), ("b", "p2", "d2")] * 3):
        request = f"r{number}"
        assert steps.ask(request, model=name) == [Prefill(request, prefill)]
        assert steps.prefilled(request, prefill) == [Decode(request, decode, 0)]


def test_a_model_that_nobody_lists_is_for_an_engine_to_refuse() -> None:
    steps = cluster(d1="a", d2="b")
    assert isinstance(steps.ask("r", 20, model="unknown")[0], Decode)


def test_a_prompt_whose_model_no_prefill_replica_serves_is_computed_by_its_decoder() -> None:
    steps = cluster(p1="a", d1="a", d2="b")
    assert steps.ask("r", model="b") == [Decode("r", "d2", 0)]
    assert steps.controller.state.counts.prompts == {PromptPath.NO_PREFILL_REPLICA: 1}


def test_prompts_of_one_model_do_not_wait_for_those_of_another() -> None:
    settings = Settings(prefill_requests=1, decode_requests=1)
    steps = cluster(settings, p1="a", p2="b", d1="a", d2="b")
    steps.ask("a1", model="a")
    steps.ask("a2", model="a")
    assert steps.phase("a2") is Phase.QUEUED
    assert steps.ask("b1", model="b") == [Prefill("b1", "p2")]
    steps.prefilled("a1", "p1")
    steps.prefilled("a2", "p1")
    assert steps.phase("a2") is Phase.HANDING
    assert steps.prefilled("b1", "p2") == [Decode("b1", "d2", 0)]


def test_a_request_waits_for_its_model_while_others_are_idle() -> None:
    steps = cluster(Settings(decode_requests=1), d1="a", d2="b")
    steps.ask("a1", 20, model="a")
    assert steps.ask("a2", 20, model="a") == []
    assert steps.decoded("a1", "d1") == [Decode("a2", "d1", 0)]


def test_adapters_come_and_go() -> None:
    steps = cluster(d1="a", d2="a")
    steps.step(ModelsListed(ReplicaId("d2"), frozenset({"a", "new"})))
    assert steps.ask("r", 20, model="new") == [Decode("r", "d2", 0)]
    steps.step(ModelsListed(ReplicaId("d2"), frozenset({"a"})))
    steps.step(ModelsListed(ReplicaId("d1"), frozenset({"a", "new"})))
    assert steps.ask("s", 20, model="new") == [Decode("s", "d1", 0)]


def test_who_has_the_prompt_of_an_adapter_that_it_serves_no_more_is_passed_over() -> None:
    steps = cluster(d1="a new", d2="a new")
    known = {"model": "new", "prefix": (1, 2, 3), "prefix_tokens": 4}
    assert steps.ask("r", 20, **known) == [Decode("r", "d1", 0)]
    steps.decoded("r", "d1")
    steps.step(ModelsListed(ReplicaId("d1"), frozenset({"a"})))
    assert steps.ask("s", 20, **known) == [Decode("s", "d2", 0)]


def loaded(**models: str) -> Steps:
    """As `cluster`, with rates that are measured: 10,000 tokens a second for each that computes."""
    steps = cluster(**models)
    steps.controller.admission.shedder = Shedder(OverloadConfig(ttft_target_s=5.0))
    for number in range(20):
        for name, listed in models.items():
            if name.startswith("p"):
                request, model = f"warm-{name}-{number}", listed.split()[0]
                (call,) = steps.ask(request, 10_000, model=model)
                assert isinstance(call, Prefill)
                steps.now += 1.0
                said = {"prompt_tokens": 10_000, "replica": call.replica, "outcome": Outcome.OK}
                steps.step(PrefillEnded(request_id=RequestId(request), **said))
                steps.cancel(request)
    return steps


def refusal(actions: list[Action]) -> Refuse | None:
    return next((each for each in actions if isinstance(each, Refuse)), None)


def test_a_request_is_admitted_by_what_waits_for_replicas_that_serve_its_model() -> None:
    steps = loaded(p1="a", p2="b", d1="a", d2="b")
    number = 0
    while refusal(steps.ask(f"a{number}", 10_000, model="a")) is None:
        number += 1
        assert number < 100
    assert number < 7, "one replica serves it: 5 s are 5 prompts"
    assert refusal(steps.ask("b", 10_000, model="b")) is None, "nothing waits for its replicas"


def test_what_waits_for_an_adapter_counts_where_its_replicas_serve_others_too() -> None:
    steps = loaded(p1="a adapter", p2="a", d1="a adapter", d2="a")
    number = 0
    while refusal(steps.ask(f"x{number}", 10_000, model="adapter")) is None:
        number += 1
    assert number < 7
    state = steps.controller.state
    assert state.fleet.share_of("a", "adapter") == 1.0
    assert state.fleet.share_of("adapter", "a") == 0.5
    assert (
        steps.controller.admission.pressure("a").queued_tokens
        == steps.controller.admission.pressure("adapter").queued_tokens
    )
    assert refusal(steps.ask("a", 10_000, model="a")) is None, "it has two replicas"


def test_a_model_on_prefill_replicas_alone_is_refused_at_once_with_the_reason() -> None:
    steps = cluster(p1="a b", d1="a")
    refused = refusal(steps.ask("b", 1000, model="b"))
    assert refused is not None
    assert refused.status == 503
    assert refused.why == "no decode replica serves: b has 1 prefill and no decode replicas"
    assert refusal(steps.ask("a", 1000, model="a")) is None


def test_a_decoder_is_not_locked_for_being_fuller_than_those_of_other_models() -> None:
    steps = cluster(d1="a", d2="b", d3="b", d4="b")
    steps.measure("d1", used=700)
    for _ in range(3):
        steps.tick()
    assert steps.controller.state.overload.locked == frozenset()
    assert steps.ask("r", 20, model="a") == [Decode("r", "d1", 0)]


def test_starts_of_one_model_say_nothing_of_another() -> None:
    steps = cluster(Settings(decode_requests=1), d1="a", d2="b")
    steps.ask("a1", 20, model="a")
    steps.ask("a2", 20, model="a")
    assert steps.controller.admission.pressure("a").is_waiting_for_decoder
    assert not steps.controller.admission.pressure("b").is_waiting_for_decoder
    for number in range(40):
        steps.ask(f"b{number}", 20, model="b")
        steps.now += 0.01
        steps.began(f"b{number}")
        steps.decoded(f"b{number}", "d2")
    assert steps.controller.admission.pressure("a").starts_per_s == float("inf"), "not one was seen"
