import io

from rich.console import Console

from vllm_kvpool.router.load import Progress, Target
from vllm_kvpool.router.load_stats import (
    BacklogView,
    LoadResult,
    Outcome,
    PlanView,
    ReplicaView,
    RequestResult,
    RouterView,
    StateSample,
    WantedView,
)
from vllm_kvpool.router.load_trace import LoadSpec
from vllm_kvpool.router.load_view import MAX_REPLICA_ROWS, line, render, report, spark


def request(end_s: float, outcome: Outcome = Outcome.COMPLETED, **more: object) -> RequestResult:
    return RequestResult(at_s=end_s - 1, end_s=end_s, outcome=outcome, prefix=0, **more)  # type: ignore[arg-type]


def router(num_replicas: int = 2) -> StateSample:
    replicas = (
        ReplicaView("engine-0", state="prefill", role="prefill", used_blocks=5, total_blocks=10),
        *(
            ReplicaView(f"engine-{n}", state="decode", role="decode", locked=True, running=7)
            for n in range(1, num_replicas)
        ),
    )
    backlog = BacklogView(3, 1200)
    return StateSample(
        19.0,
        RouterView(
            20.0, replicas, backlog, plan=PlanView(WantedView(1), WantedView(1), "[x] enough")
        ),
    )


def progress(*states: StateSample) -> Progress:
    results = [
        request(2.0, Outcome.FAILED),
        request(12.0, ttft_s=0.050, output_tokens=30),
        request(15.0, ttft_s=0.250, output_tokens=50),
        request(18.0, Outcome.SHED, status=429),
    ]
    target = Target("http://127.0.0.1:8000")
    return Progress(
        LoadSpec(), target, now_s=20.0, in_flight=2, sent=6, results=results, states=list(states)
    )


def shown(progress: Progress, width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(render(progress))
    return console.export_text()


def test_a_line_says_it_all_of_the_last_seconds() -> None:
    assert line(progress()) == (
        "  20.0 s  sent 6  in flight 2  done 0.2/s  ttft p50 50 ms p99 250 ms  shed 1  failed 0"
    )
    assert line(progress(router())).endswith("failed 0  replicas Pd queue 3")


def test_the_view_fits_a_small_terminal() -> None:
    text = shown(progress(router()))
    assert "…" not in text
    rows = [" ".join(row.split()) for row in text.splitlines()]
    assert "last 10 s 0.2 8 50 ms 250 ms - 1 0 0 ms" in rows
    assert "last minute 0.1 4 50 ms 250 ms - 1 1 0 ms" in rows
    (locked,) = [row for row in rows if row.startswith("engine-1 ")]
    assert locked.startswith("engine-1 decode decode locked ")
    assert locked.endswith(" 0/0 7 0")
    assert " queue 3 (1200 tokens)   migration 0 (0 tokens)" in text
    assert " plan 1P 1D: [x] enough" in text


def test_without_a_router_there_are_no_replicas() -> None:
    text = shown(progress())
    assert "replica" not in text
    assert "queue" not in text


def test_a_router_that_is_silent_is_said_to_be() -> None:
    silent = progress(router())
    silent.is_state_stale = True
    assert "admin address does not answer" in shown(silent)


def test_many_replicas_do_not_fill_the_screen() -> None:
    text = shown(progress(router(100)))
    assert f"engine-{MAX_REPLICA_ROWS - 1} " in text
    assert f"engine-{MAX_REPLICA_ROWS} " not in text
    assert f"and {100 - MAX_REPLICA_ROWS} more" in text


def test_the_burst_shows() -> None:
    burst = progress()
    assert "2 requests/s" in shown(burst)
    burst.now_s = 17.0
    assert "10 requests/s" in shown(burst)
    burst.now_s = 61.0
    assert "0 requests/s" in shown(burst)


def test_a_row_of_bars() -> None:
    assert spark([0, 1, 2, 4, 8]) == " ▁▂▄█"
    assert spark([0, 0]) == "  "
    assert spark([]) == ""


def test_what_a_load_has_brought() -> None:
    results = (
        *progress().results,
        request(3.0, Outcome.FAILED, why="no such model"),
        request(4.0, Outcome.FAILED, why="no such model"),
        request(5.0, Outcome.SHED, why="busy"),
    )
    result = LoadResult(
        spec=LoadSpec(), url="u", model="m", began_at=0.0, seconds=20.0, requests=results
    )
    lines = report(result).splitlines()
    assert lines[0] == "7 requests in 20.0 s: 2 completed, 2 shed, 3 failed"
    assert lines[1] == "completed 0.10/s, 4 tokens/s, 0% of prompt tokens cached"
    assert lines[-1] == "2 times: no such model"
