"""What the two sides tell each other: merged over ranks, whatever the order."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvpool.pool.metadata import StepPlan, StepReport
from vllm_kvpool.transfer.ops import JobId, LoadPlan, SavePlan

reports = st.builds(
    StepReport,
    st.dictionaries(st.integers(0, 3).map(JobId), st.integers(1, 3), max_size=3),
    st.dictionaries(st.sampled_from("abc"), st.integers(0, 1000), max_size=3),
    st.integers(0, 1000).map(float),
    st.integers(0, 1000).map(float),
    st.integers(0, 3),
)


def test_ranks_add_up_and_the_shortest_load_counts() -> None:
    one = StepReport({JobId(1): 1, JobId(2): 1}, {"a": 512, "b": 256}, 100, 2, 1)
    other = StepReport({JobId(2): 1, JobId(3): 2}, {"a": 256, "c": 0}, 50, 1, 1)
    assert one.merged(other) == StepReport(
        {JobId(1): 1, JobId(2): 2, JobId(3): 2}, {"a": 256, "b": 256, "c": 0}, 150, 3, 2
    )
    assert one.gathered == {JobId(1): 1, JobId(2): 1}  # a report never changes


@given(reports, reports, reports)
def test_the_order_of_ranks_does_not_matter(a: StepReport, b: StepReport, c: StepReport) -> None:
    assert a.merged(b) == b.merged(a)
    assert a.merged(b).merged(c) == a.merged(b.merged(c))
    assert a.merged(StepReport()) == a


@pytest.mark.parametrize(
    "report",
    [
        StepReport(gathered={JobId(1): 1}),
        StepReport(load_stops={"a": 0}),
        StepReport(load_tokens=1, load_seconds=0.1),
        StepReport(generation_acks=1),
    ],
)
def test_only_a_report_of_nothing_is_empty(report: StepReport) -> None:
    assert StepReport().empty
    assert not report.empty


def test_both_survive_the_way_between_processes() -> None:
    plan = StepPlan(
        (LoadPlan(JobId(1), "a", 0, (b"x",), (1, 2), 0, 3, 30),),
        (SavePlan(JobId(2), "b", 1, (b"y",), (3,), 16),),
        idle=True,
        generation=2,
    )
    report = StepReport({JobId(1): 1}, {"a": 5}, 1.0, 2.0, 3)
    assert pickle.loads(pickle.dumps((plan, report))) == (plan, report)
