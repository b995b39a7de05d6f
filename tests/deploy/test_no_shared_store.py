"""Real engines that each keep files of their own, behind a router that hands prompts over."""

import time
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from tests.support.deployment import ENGINE_ARGS, Deployment, DeploymentSpec
from tests.support.metrics_page import MetricsPage, wait_for_metrics
from tests.support.stream_client import complete, words
from vllm_kvpool.router.control.handovers import APART_AFTER

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

EXPECT_MS = 3000
PROMPTS = 8


class Counts(NamedTuple):
    """Prompts by the router's metrics: by path, and those that decoders found or missed."""

    paths: dict[str, float]
    outcomes: dict[str, float]


def counts_of(page: MetricsPage) -> Counts:
    return Counts(
        page.by("kvpool_router_prompts_total", "path"),
        page.by("kvpool_router_handovers_total", "outcome"),
    )


def wait_until_counted(deployment: Deployment, num_prompts: int) -> Counts:
    """Return the counts once the path of every prompt and the outcome of each hand-over is known.

    The router counts a path after the answer, and a miss when it next samples the decoder's
    metrics.
    """

    def are_counted(page: MetricsPage) -> bool:
        paths, outcomes = counts_of(page)
        is_known = sum(outcomes.values()) >= paths["handed_over"]
        return is_known and sum(paths.values()) == num_prompts

    return counts_of(wait_for_metrics(deployment.front, are_counted))


def wait_until_sampled(deployment: Deployment) -> None:
    """Wait for a first sample of each engine: misses that it has counted before are not known."""

    def are_sampled() -> bool:
        return all(each["sampled_at"] is not None for each in deployment.state()["replicas"])

    deployment.wait(are_sampled, 30)


def test_engines_with_files_of_their_own_stop_waiting_for_each_other(tmp_path: Path) -> None:
    """Every prompt waited for the whole time, and nothing was said; the engines tell no cached
    tokens in their answers. A decoder that hears what prefill has stored, and finds none of it,
    waits no longer; the first ones may be asked before notices are known."""
    details = "--enable-prompt-tokens-details"
    deployment = Deployment.start(
        DeploymentSpec(
            is_lean=True,
            shares=False,
            engine_args=tuple(each for each in ENGINE_ARGS if each != details),
            sections={"front": {"expect_timeout_ms": EXPECT_MS}},
        ),
        tmp_path,
    )
    try:
        wait_until_sampled(deployment)
        waits: list[float] = []
        for number in range(PROMPTS):
            began = time.monotonic()
            told = complete(deployment.front, words(number, 150), max_tokens=2)
            waits.append(time.monotonic() - began)
            assert (told.status, told.is_done) == (200, True)
            paths, outcomes = wait_until_counted(deployment, number + 1)
        assert sum(each >= EXPECT_MS / 1000 for each in waits) <= APART_AFTER, waits
        health = httpx.get(f"{deployment.front}/health", timeout=30).json()
        assert health["status"] == "degraded"
        assert list(health["mismatches"].values()) == ["no_shared_store"]
        assert outcomes == {"found": 0, "missing": APART_AFTER}, (paths, waits)
        assert paths["handed_over"] == APART_AFTER, (paths, waits)
        assert "share no store" in (tmp_path / "router.log").read_text()
    finally:
        deployment.stop()
