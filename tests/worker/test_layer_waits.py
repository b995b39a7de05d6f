"""Layers of a step wait for the loads that fill their pages."""

from vllm_kvpool.transfer.ops import CellOutcome, JobId, LoadDone, SpanLoaded
from vllm_kvpool.worker.layer_waits import LayerWaits

FIRST, SECOND = JobId(1), JobId(2)
SPANS = {"layers.0": 0, "layers.1": 0, "layers.2": 2}


def test_layer_of_two_loads_is_ready_once_both_have_loaded_its_span() -> None:
    waits = LayerWaits(SPANS)
    waits.begin(FIRST)
    waits.begin(SECOND)
    waits.take([SpanLoaded(FIRST, 0)])
    assert not waits.ready("layers.0")
    waits.take([SpanLoaded(SECOND, 0)])
    assert [waits.ready(name) for name in SPANS] == [True, True, False]


def test_layer_of_a_load_that_has_ended_is_ready() -> None:
    waits = LayerWaits(SPANS)
    waits.begin(FIRST)
    waits.take([LoadDone(FIRST, "r", 0, CellOutcome.TIMED_OUT)])
    assert waits.ready("layers.2")
    assert not waits.loading


def test_layer_that_has_no_cells_is_always_ready() -> None:
    waits = LayerWaits(SPANS)
    waits.begin(FIRST)
    assert waits.ready("a layer that is not shared")


def test_layers_that_have_not_waited_are_those_of_the_present_loads() -> None:
    waits = LayerWaits(SPANS)
    waits.begin(FIRST)
    waits.asked("layers.0")
    waits.begin(SECOND)
    assert waits.unasked == {"layers.1", "layers.2"}
    waits.take([LoadDone(job, "r", 0, CellOutcome.DONE) for job in (FIRST, SECOND)])
    waits.begin(FIRST)
    assert waits.unasked == SPANS.keys()
