import pytest

from vllm_kvpool.router.control.events import Sample
from vllm_kvpool.router.control.fleet import Meters, Moved


def test_each_counter_is_a_flow_of_its_own() -> None:
    meters = Meters()
    meters.read(10.0, Sample())
    sample = Sample(bytes_in=20.0, bytes_out=40.0, prompt_tokens=60.0, generated_tokens=80.0)
    meters.read(12.0, sample)
    assert meters.per_second(12.0) == Moved(10.0, 20.0, 30.0, 40.0)


def test_an_engine_that_starts_again_has_not_taken_anything_back() -> None:
    meters = Meters()
    meters.read(0.0, Sample(bytes_in=1000.0))
    meters.read(1.0, Sample(bytes_in=1100.0))
    meters.read(2.0, Sample(bytes_in=30.0))
    assert meters.per_second(2.0).bytes_in == pytest.approx((100 + 30) / 2)


def test_nothing_flows_where_nobody_has_said_anything_for_a_while() -> None:
    meters = Meters()
    meters.read(0.0, Sample())
    meters.read(1.0, Sample(bytes_out=5.0))
    assert meters.per_second(1.0).bytes_out == 5.0
    assert meters.per_second(60.0) == Moved(0.0, 0.0, 0.0, 0.0)
