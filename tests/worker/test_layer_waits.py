"""Layers of a step wait for the loads that fill their pages."""

from vllm_kvpool.transfer.ops import CellOutcome, JobId, LoadDone, SpanLoaded
from vllm_kvpool.worker.layer_waits import LayerWaits

FIRST, SECOND = JobId(1), JobId(2)
SPANS = {"layers.0": 0, "layers.1": 0, "layers.2": 2}


def test_layer_of_two_loads_is_ready_once_both_have_loaded_its_span() -> None:
    waits = LayerWaits(SPANS)
    waits.start_load(FIRST)
    waits.start_load(SECOND)
    waits.note_reports([SpanLoaded(FIRST, 0)])
    assert not waits.ready("layers.0")
    waits.note_reports([SpanLoaded(SECOND, 0)])
    assert [waits.ready(name) for name in SPANS] == [True, True, False]


def test_layer_of_a_load_that_has_ended_is_ready() -> None:
    waits = LayerWaits(SPANS)
    waits.start_load(FIRST)
    waits.note_reports([LoadDone(FIRST, "r", 0, CellOutcome.TIMED_OUT)])
    assert waits.ready("layers.2")
    assert not waits.loading


def test_layer_that_has_no_cells_is_always_ready() -> None:
    waits = LayerWaits(SPANS)
    waits.start_load(FIRST)
    assert waits.ready("a layer that is not shared")


def test_layers_that_have_not_waited_are_those_of_the_present_loads() -> None:
    waits = LayerWaits(SPANS)
    waits.start_load(FIRST)
    waits.note_asked("layers.0")
    waits.start_load(SECOND)
    assert waits.unasked == {"layers.1", "layers.2"}
    waits.note_reports([LoadDone(job, "r", 0, CellOutcome.DONE) for job in (FIRST, SECOND)])
    waits.start_load(FIRST)
    assert waits.unasked == SPANS.keys()
