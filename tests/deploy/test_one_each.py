"""The router in front of a real prefill and a real decode engine, each in its own process.

Both are killed here, one after the other, with `kill -9` in mid-stream: what a client reads must be
what it would have read anyhow.
"""

import concurrent.futures
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from tests.support.deployment import MODEL, START_TIMEOUT_S, TOKEN, Deployment, DeploymentSpec
from tests.support.engine_control import is_running
from tests.support.metrics_page import MetricsPage, wait_for_metrics
from tests.support.stream_client import Told, chat, complete, words
from vllm_kvpool.cli import main

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

TOKENS = 128
BLOCK = 32
EXPECT_MS = 60_000
"""Long enough that a test fails if a decoder waits in vain."""
HITS, RUNNING = "vllm:kvpool_hit_tokens_total", "vllm:num_requests_running"
INFO = "vllm:kvpool_info"
PROMPT_TOKENS, IN_FLIGHT = "kvpool_router_prompt_tokens_total", "kvpool_router_in_flight_requests"
PREFILL, DECODE = "here-{0}", "here-{1}"


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    started = Deployment.start(
        # Every prompt is worth a separate prefill here, however short.
        DeploymentSpec(is_lean=True, sections={"front": {"expect_timeout_ms": EXPECT_MS}}),
        tmp_path_factory.mktemp("deployment"),
    )
    yield started
    started.stop()


def replica_in(deployment: Deployment, state: str) -> str:
    return next(name for name, each in deployment.states().items() if each == state)


def url_in(deployment: Deployment, state: str) -> str:
    """The URL of the replica in a state."""
    return next(each["url"] for each in deployment.state()["replicas"] if each["state"] == state)


def test_a_prompt_is_computed_on_one_engine_and_decoded_on_the_other(
    deployment: Deployment,
) -> None:
    prefill, decode = url_in(deployment, "prefill"), url_in(deployment, "decode")
    began = time.monotonic()

    def knows_endpoints() -> bool:
        return all((each["sampled_at"] or 0) > began for each in deployment.state()["replicas"])

    deployment.wait(knows_endpoints, 30)
    hits = wait_for_metrics(decode, lambda page: page.total(RUNNING) == 0).total(HITS)
    told = complete(deployment.front, words(1, 150), max_tokens=8)
    assert (told.status, told.finish, told.is_done) == (200, "length", True)
    assert len(told.token_ids) == 8
    assert told.usage is not None
    assert told.usage["completion_tokens"] == 8
    prompt = told.usage["prompt_tokens"]
    page = wait_for_metrics(decode, lambda page: page.total(HITS) > hits)
    assert page.total(HITS) - hits == prompt - 1, "the prompt's end, too"
    wait_for_metrics(
        decode,
        lambda page: (
            page.total("vllm:kvpool_notices_total") > 0
            and page.total("vllm:kvpool_expected_prompts_total") == 1
        ),
    )
    page = wait_for_metrics(prefill, lambda page: page.total("vllm:prompt_tokens_total") >= prompt)
    assert page.labels("vllm:kvpool_pending_save_tokens"), "the router waits for it before a stop"

    def outcomes(page: MetricsPage) -> dict[str, float]:
        return page.by("kvpool_router_handovers_total", "outcome")

    page = wait_for_metrics(deployment.front, lambda page: outcomes(page).get("found", 0) > 0)
    assert outcomes(page)["missing"] == 0


def wait_for_prompt_tokens(
    deployment: Deployment, is_so: Callable[[MetricsPage], bool]
) -> dict[str, float]:
    """Return the router's count of prompt tokens by source, from a page for which `is_so` holds."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    page = wait_for_metrics(deployment.admin, is_so, headers)
    return page.by(PROMPT_TOKENS, "source", tenant="-")


@pytest.mark.parametrize("streams", [True, False])
def test_usage_tells_what_the_cluster_found_of_a_prompt_and_what_it_computed(
    deployment: Deployment, streams: bool
) -> None:
    """The decoder finds nearly all of a prompt that prefill has just computed, and creates little.

    The same chat again is found. A longer chat is found as far as the first one goes.
    """
    told: list[tuple[int, int]] = []

    def counts(content: str) -> tuple[int, int, int]:
        if streams:
            usage = chat(deployment.front, content, max_tokens=16).usage
        else:
            messages = [{"role": "user", "content": content}]
            body = {"model": MODEL, "messages": messages, "max_tokens": 16}
            url = f"{deployment.front}/v1/chat/completions"
            usage = httpx.post(url, json=body, timeout=60).json()["usage"]
        assert usage is not None
        details = usage["prompt_tokens_details"]
        told.append((usage["prompt_tokens"], details["cached_tokens"]))
        return usage["prompt_tokens"], details["cached_tokens"], details["created_cache_tokens"]

    def handed_over() -> int:
        return int(deployment.state()["prompts"]["handed_over"])

    apart = handed_over()
    before = wait_for_prompt_tokens(deployment, lambda page: page.total(IN_FLIGHT) == 0)
    for number in range(10):
        # Whether a hand-over pays depends on the rates of this machine; for long prompts it does.
        text = words(70 + 20 * streams + number, 150 + 60 * number)
        prompt, cached, created = counts(text)
        assert cached < BLOCK
        assert created + cached == prompt // BLOCK * BLOCK
        if handed_over() > apart:
            break
    assert handed_over() > apart, "none was computed apart"
    again = counts(text)
    assert again == (prompt, (prompt - 1) // BLOCK * BLOCK, 0)
    longer = counts(text + " " + words(110 + streams, 60))
    assert 0 < prompt - longer[1] <= 2 * deployment.spec.chunk_tokens
    assert longer[0] - longer[1] - longer[2] < BLOCK
    whole = sum(before.values()) + sum(tokens for tokens, _ in told)
    after = wait_for_prompt_tokens(deployment, lambda page: page.total(PROMPT_TOKENS) >= whole)
    found = sum(each for _, each in told)
    assert after["cached"] - before.get("cached", 0) == found
    assert after["computed"] - before.get("computed", 0) == sum(n for n, _ in told) - found


def test_the_kit_shows_what_an_engine_has_loaded_from_each_tier(deployment: Deployment) -> None:
    complete(deployment.front, words(3, 150), max_tokens=2)
    url = url_in(deployment, "decode")
    wait_for_metrics(url, lambda page: page.total(HITS) > 0)
    result = CliRunner().invoke(
        main, ["inspect", "--json", "--store", "host://1GiB", "--engine", url]
    )
    assert result.exit_code == 0, result.output
    [found] = json.loads(result.stdout)
    assert sum(each["hits"] for each in found["tiers"]) > 0, found
    assert all("@fmt:" in each["namespace"] for each in found["tiers"])
    watched = CliRunner().invoke(main, ["top", "--count", "1", "--every", "0.2", "--json", url])
    assert watched.exit_code == 0, watched.output
    assert not json.loads(watched.stdout)[0]["error"]


def test_engines_say_what_their_cells_are_called_and_fit_each_other(
    deployment: Deployment,
) -> None:
    complete(deployment.front, words(9, 150), max_tokens=2)
    urls = [each["url"] for each in deployment.state()["replicas"]]
    told = set()
    for url in urls:
        page = wait_for_metrics(url, lambda page: page.total(INFO) == 1)
        (labels,) = page.labels(INFO)
        told.add((labels["chunk_tokens"], labels["namespace"]))
    ((chunk_tokens, namespace),) = told
    assert chunk_tokens == str(deployment.spec.chunk_tokens)
    assert "@fmt:" in namespace
    health = httpx.get(f"{deployment.front}/health", timeout=30).json()
    assert (health["status"], health["mismatches"]) == ("ok", {})


def test_what_is_not_streamed_and_chats_pass(deployment: Deployment) -> None:
    body = {"model": MODEL, "prompt": words(2, 100), "max_tokens": 4, "temperature": 0}
    answer = httpx.post(f"{deployment.front}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 4
    told = chat(deployment.front, words(3, 100), max_tokens=4)
    assert (told.status, told.finish, told.is_done) == (200, "length", True)
    models = httpx.get(f"{deployment.front}/v1/models", timeout=30).json()
    assert [each["id"] for each in models["data"]] == [MODEL]
    unknown = httpx.post(
        f"{deployment.front}/v1/completions", json={**body, "model": "other"}, timeout=60
    )
    assert unknown.status_code == 404


WHOLE: dict[str, Any] = {
    "plain": {},
    "choices": {"n": 2, "temperature": 0.8, "seed": 3},
    "ids": {"return_token_ids": True},
    "stop": {"max_tokens": 60, "stop": ["e", "a"]},
    "seeded": {"temperature": 0.9, "seed": 7},
}


@pytest.mark.parametrize("is_chat", [False, True], ids=["completion", "chat"])
def test_answers_in_one_piece_are_those_of_the_engine(
    deployment: Deployment, is_chat: bool
) -> None:
    """Field by field, in their order; less what differs from one request to the next."""
    replica = replica_in(deployment, "decode")
    urls = {each["id"]: each["url"] for each in deployment.state()["replicas"]}
    path, text = "/v1/chat/completions" if is_chat else "/v1/completions", words(9, 60)
    prompt = {"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": text}
    logprobs = {"logprobs": True, "top_logprobs": 2} if is_chat else {"logprobs": 2}
    for name, more in {**WHOLE, "logprobs": logprobs}.items():
        body = {"model": MODEL, "max_tokens": 12, "temperature": 0, **prompt, **more}
        answers = []
        for url in (deployment.front, urls[replica]):
            answer = httpx.post(url + path, json=body, timeout=60)
            assert answer.status_code == 200, (name, answer.text)
            assert answer.headers["content-type"] == "application/json"
            own = {"id": "", "created": 0, "kv_transfer_params": None}
            said = answer.json() | own
            # Each finds cached what the one before has computed.
            del said["usage"]["prompt_tokens_details"]
            answers.append(said)
        through, direct = answers
        assert json.dumps(through) == json.dumps(direct), name


class AtAll:
    """Does something when each of several streams has brought so many chunks."""

    def __init__(self, num_streams: int, chunk: int, do: Callable[[], None]) -> None:
        self._chunks = [0] * num_streams
        self._chunk, self._do = chunk, do
        self._lock = threading.Lock()
        self.is_done = False

    def of(self, stream: int) -> Callable[[Told], None]:
        def look(told: Told) -> None:
            with self._lock:
                self._chunks[stream] = told.chunks
                if not self.is_done and min(self._chunks) >= self._chunk:
                    self.is_done = True
                    self._do()

        return look


def whole(deployment: Deployment, prompt: str) -> tuple[Any, ...]:
    """The text of an answer in one piece, how it ends, and its tokens."""
    body = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": TOKENS}
    body["ignore_eos"] = True
    answer = httpx.post(f"{deployment.front}/v1/completions", json=body, timeout=180)
    assert answer.status_code == 200, answer.text
    [choice] = answer.json()["choices"]
    return choice["text"], choice["finish_reason"], answer.json()["usage"]["completion_tokens"]


@pytest.mark.small
def test_decode_is_killed_in_mid_stream(deployment: Deployment) -> None:
    """A completion, a chat and an answer in one piece go on; the router starts the engine again."""
    deployment.wait_for_engines(1, 1)
    asks = [(complete, words(4, 120)), (chat, words(5, 120))]
    undisturbed = [ask(deployment.front, prompt, max_tokens=TOKENS) for ask, prompt in asks]
    decode = replica_in(deployment, "decode")
    killed = deployment.engine_pid(decode)
    in_one_piece = whole(deployment, words(6, 120))
    kill = AtAll(len(asks), TOKENS // 8, lambda: deployment.kill_engine(decode))
    with concurrent.futures.ThreadPoolExecutor(len(asks) + 1) as clients:
        piece = clients.submit(whole, deployment, words(6, 120))
        streams = [
            clients.submit(ask, deployment.front, prompt, kill.of(number), max_tokens=TOKENS)
            for number, (ask, prompt) in enumerate(asks)
        ]
        answers = [stream.result() for stream in streams]
    assert kill.is_done
    assert piece.result() == in_one_piece
    for told, calm in zip(answers, undisturbed, strict=True):
        assert (told.text, told.token_ids) == (calm.text, calm.token_ids)
        assert told.usage is not None
        assert (told.finish, told.usage["completion_tokens"]) == ("length", TOKENS)
        assert (told.is_done, told.error) == (True, None)
    deployment.wait(lambda: deployment.is_back(decode, killed, "decode"), START_TIMEOUT_S)


@pytest.mark.deploy
@pytest.mark.parametrize("moment", ["before", "during", "after"])
def test_prefill_is_killed_around_its_answer_and_the_client_gets_its_own(
    deployment: Deployment, moment: str
) -> None:
    """The decoder computes what is missing, and does not wait for what will not come."""
    deployment.wait_for_engines(1, 1)
    prefill = replica_in(deployment, "prefill")
    killed = deployment.engine_pid(prefill)

    def has_prompt() -> bool:
        [found] = (each for each in deployment.state()["replicas"] if each["id"] == prefill)
        return bool(found["prefills"])

    def ask(prompt: str) -> Told:
        return complete(deployment.front, prompt, max_tokens=16)

    if moment == "before":
        deployment.kill_engine(prefill)
    is_killed = moment == "before"
    with concurrent.futures.ThreadPoolExecutor(1) as client:
        for number in range(20):  # some are computed by the decoder, some too fast to be seen
            prompt = words(60 + 20 * len(moment) + number, 130)
            began = time.monotonic()
            answer = client.submit(ask, prompt)
            while not (answer.done() or is_killed):
                if not has_prompt():
                    continue
                while moment == "after" and has_prompt():
                    pass
                deployment.kill_engine(prefill)
                is_killed = True
            told = answer.result()
            if is_killed:
                break
    assert is_killed
    assert time.monotonic() - began < EXPECT_MS / 1000 / 2
    assert (told.status, told.finish, told.is_done, told.error) == (200, "length", True, None)
    deployment.wait(lambda: deployment.is_back(prefill, killed, "prefill"), START_TIMEOUT_S)
    calm = ask(prompt)
    assert (told.text, told.token_ids) == (calm.text, calm.token_ids)


def test_the_router_is_killed_and_finds_its_engines_again(deployment: Deployment) -> None:
    deployment.wait_for_engines(1, 1)
    names = set(deployment.states())
    pids = {name: deployment.engine_pid(name) for name in names}
    deployment.kill_router()
    deployment.start_router()
    began = time.monotonic()
    deployment.wait_for_engines(1, 1)
    assert time.monotonic() - began < 30
    assert {name: deployment.engine_pid(name) for name in deployment.states()} == pids
    told = complete(deployment.front, words(7, 100), max_tokens=4)
    assert (told.status, len(told.token_ids)) == (200, 4)


def test_roles_are_exchanged_without_a_restart(deployment: Deployment) -> None:
    deployment.wait_for_engines(1, 1)
    prefill, decode = replica_in(deployment, "prefill"), replica_in(deployment, "decode")
    pids = {name: deployment.engine_pid(name) for name in (prefill, decode)}
    deployment.order("POST", f"/replicas/{prefill}/role?force=true", {"role": "decode"})
    deployment.wait(lambda: deployment.states()[prefill] == "decode", 60)
    deployment.order("POST", f"/replicas/{decode}/role", {"role": "prefill"})
    deployment.wait(lambda: deployment.states()[decode] == "prefill", 60)
    told = complete(deployment.front, words(8, 120), max_tokens=8)
    assert (told.status, len(told.token_ids)) == (200, 8)
    assert {name: deployment.engine_pid(name) for name in (prefill, decode)} == pids


def test_engines_end_with_the_deployment(deployment: Deployment) -> None:
    pids = [deployment.engine_pid(name) for name in deployment.states()]
    assert all(pids)
    deployment.stop()
    assert not list(filter(is_running, pids))
