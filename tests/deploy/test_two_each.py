"""Two prefill and two decode engines behind a router: each is killed.

Four real engines on one machine take minutes; `make test-deploy` runs this, `make test` only
`test_one_each.py`.
"""

import concurrent.futures
from collections.abc import Callable, Iterator, Sequence

import pytest

from tests.support.deployment import START_TIMEOUT_S, Deployment, DeploymentSpec
from tests.support.stream_client import Told, chat, complete, once_at, words

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(900)]

TOKENS = 128


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    started = Deployment.start(
        DeploymentSpec(prefill=2, decode=2),
        tmp_path_factory.mktemp("deployment"),
    )
    yield started
    started.stop()


def busy(deployment: Deployment, role: str) -> str:
    """The replica of a role that has a request, or any of them."""
    rows = [each for each in deployment.state()["replicas"] if each["state"] == role]
    return str(max(rows, key=lambda each: each["decodes"] + each["prefills"])["id"])


def test_requests_are_spread_and_answered(deployment: Deployment) -> None:
    with concurrent.futures.ThreadPoolExecutor(8) as clients:
        asked = [
            clients.submit(complete, deployment.front, words(10 + n, 100), max_tokens=16)
            for n in range(16)
        ]
        told = [each.result() for each in asked]
    assert [(each.status, len(each.token_ids), each.is_done) for each in told] == [
        (200, 16, True)
    ] * 16


@pytest.mark.parametrize("number", range(2))
def test_each_decoder_is_killed_in_mid_stream(deployment: Deployment, number: int) -> None:
    deployment.wait_for_engines(2, 2)
    ask = (complete, chat)[number]
    prompts = [words(40 + 10 * number + n, 110) for n in range(4)]
    undisturbed = [ask(deployment.front, prompt, max_tokens=TOKENS) for prompt in prompts]
    kill = once_at(TOKENS // 3, lambda: deployment.kill_engine(busy(deployment, "decode")))
    told = told_while(kill, ask, deployment, prompts)
    assert [same(each) for each in told] == [same(each) for each in undisturbed]
    deployment.wait_for_engines(2, 2)


def told_while(
    kill: Callable[[Told], None],
    ask: Callable[..., Told],
    deployment: Deployment,
    prompts: Sequence[str],
) -> list[Told]:
    """Send all prompts at once and return the answers.

    `kill` is called as the first answer's tokens come, and picks the moment to kill an engine.
    """
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as clients:
        asked = [
            clients.submit(
                ask, deployment.front, prompt, kill if n == 0 else None, max_tokens=TOKENS
            )
            for n, prompt in enumerate(prompts)
        ]
        return [each.result() for each in asked]


def same(told: Told) -> tuple[object, ...]:
    assert told.usage is not None
    return (told.text, told.token_ids, told.finish, told.usage["completion_tokens"], told.is_done)


@pytest.mark.parametrize("number", range(2))
def test_each_prefill_engine_is_killed_under_load(deployment: Deployment, number: int) -> None:
    deployment.wait_for_engines(2, 2)
    with concurrent.futures.ThreadPoolExecutor(6) as clients:
        asked = [
            clients.submit(
                complete, deployment.front, words(80 + 10 * number + n, 120), max_tokens=8
            )
            for n in range(6)
        ]
        deployment.kill_engine(busy(deployment, "prefill"))
        told = [each.result() for each in asked]
    assert [(each.status, len(each.token_ids), each.error) for each in told] == [(200, 8, None)] * 6
    deployment.wait(
        lambda: list(deployment.states().values()).count("prefill") == 2, START_TIMEOUT_S
    )
