import pytest

from tests.support.router_steps import spec
from vllm_kvpool.router.control.events import Sample
from vllm_kvpool.router.control.fleet import Replica


def flows(replica: Replica, now: float) -> dict[str, float]:
    return {name: meter.per_second(now) for name, meter in replica.meters.items()}


def test_each_counter_is_a_flow_of_its_own() -> None:
    replica = Replica(spec("a"))
    replica.measured(Sample(), 10.0)
    counted = {"bytes_in": 20, "bytes_out": 40, "prompt_tokens": 60, "generated_tokens": 80}
    replica.measured(Sample(**counted), 12.0)
    assert flows(replica, 12.0) == {name: number / 2 for name, number in counted.items()}


def test_an_engine_that_starts_again_has_not_taken_anything_back() -> None:
    replica = Replica(spec("a"))
    for now, counter in enumerate((1000.0, 1100.0, 30.0)):
        replica.measured(Sample(bytes_in=counter), now)
    assert flows(replica, 2.0)["bytes_in"] == pytest.approx((100 + 30) / 2)


def test_nothing_flows_where_nobody_has_said_anything_for_a_while() -> None:
    replica = Replica(spec("a"))
    replica.measured(Sample(), 0.0)
    replica.measured(Sample(bytes_out=5.0), 1.0)
    assert flows(replica, 1.0)["bytes_out"] == 5.0
    assert set(flows(replica, 60.0).values()) == {0.0}
