"""The run of `kvpool try`: a model in two engines, without and with the pool.

Both engines run at the same time and get the same requests in turns, so that a ratio compares
answers of the same minute. Halfway both are stopped and started again: this empties vLLM's own
caches and leaves the stores.
"""

import contextlib
import json
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any

import msgspec

from vllm_kvpool.cli.common.engine_metrics import Growth, Samples, scrape
from vllm_kvpool.cli.common.engine_server import EngineServer
from vllm_kvpool.cli.common.start_line import TRANSFER_CONFIG, option_of, without_option
from vllm_kvpool.cli.common.tokenizer import tokenize
from vllm_kvpool.cli.doctor import Status, examine_store
from vllm_kvpool.cli.try_report import (
    POOL,
    WITHOUT,
    PoolCounts,
    PoolSetup,
    TimedAnswer,
    TriedPrompt,
)
from vllm_kvpool.cli.try_workload import (
    TraceRequest,
    TrialRequest,
    Workload,
    conversations,
    of_trace,
)
from vllm_kvpool.config import LoadPolicy, environment, read_engine_config
from vllm_kvpool.direct_http import open_directly, read_whole
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.parsing import UNREADABLE
from vllm_kvpool.storage.tiers import tier_specs
from vllm_kvpool.storage.url import FileOptions

HOST = "127.0.0.1"
SERVER_MODULE = "vllm.entrypoints.openai.api_server"
API_KEY_VARIABLE = "VLLM_API_KEY"  # the engines are asked without a key
REQUEST_TIMEOUT_S = 600.0
MAX_ERROR_BYTES = 500
SETTLE_S = 1.0  # from the last answer until its saves have ended
SIDES = (WITHOUT, POOL)
EXITS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TEXT = (
    "The pool holds what one engine has computed, and another engine finds it there. A prompt is "
    "cut into chunks, and every chunk into cells. Who asks again about a long document, a week "
    "later and at another machine, need not wait until somebody has read all of it once more: "
    "lamp, river, nine, copper, winter, seven, harbour, yellow, garden, quiet, market, stone."
)


@dataclass(frozen=True)
class Trial:
    """A model to try: how its engines start, and the requests that they get."""

    model: str
    arguments: Sequence[str]
    """Options of both engines."""
    transfer_config: str
    """`--kv-transfer-config` of the engine with the pool."""
    chunk_tokens: int
    trace: Sequence[TraceRequest]
    """Requests to replay; empty: conversations."""

    def command(self, side: str, port: int) -> list[str]:
        """Return the start line of one engine."""
        pool = (TRANSFER_CONFIG, self.transfer_config) if side == POOL else ()
        return [
            *(sys.executable, "-m", SERVER_MODULE, *self.arguments, *pool),
            *("--enable-prompt-tokens-details", "--model", self.model),
            *("--host", HOST, "--port", str(port)),
        ]


def split_pool(
    engine: Sequence[str], urls: Sequence[str], own_store: str
) -> tuple[Sequence[str], str]:
    """Return the options of both engines, and the `--kv-transfer-config` of one."""
    given = option_of(engine, TRANSFER_CONFIG)
    if given is not None:
        if urls:
            raise ConfigError(f"give --store, or {TRANSFER_CONFIG} behind --, not both")
        return without_option(engine, TRANSFER_CONFIG), given
    if any(each.startswith(f"{TRANSFER_CONFIG}.") for each in engine):
        raise ConfigError(f"write {TRANSFER_CONFIG} in one piece, as JSON")
    config = {
        "kv_connector": "KVPoolConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"store": list(urls) or [own_store]},
    }
    return engine, json.dumps(config)


def examine_pool(transfer_config: str, say: Callable[[str], None]) -> PoolSetup:
    """Open each store of the pool once; ConfigError if one cannot be used."""
    config = read_engine_config(transfer_config)
    tiers = tier_specs(config)
    for spec in tiers.stores:
        for finding in examine_store(spec):
            if finding.status is Status.FAILED:
                raise ConfigError(f"{finding.check}: {finding.text}")
            say(f"{finding.check}: {finding.text}")
    files = [spec.options for spec in tiers.stores if isinstance(spec.options, FileOptions)]
    return PoolSetup(
        config.chunk_tokens,
        is_auto=config.load_policy is LoadPolicy.AUTO,
        has_stores=bool(tiers.stores),
        file_bytes=sum(each.size_bytes for each in files),
    )


def measure(
    trial: Trial, directory: Path, say: Callable[[str], None]
) -> tuple[list[TriedPrompt], PoolCounts]:
    """Start both engines, ask them, start both again, and ask about the same documents.

    Args:
        trial: The engines, their model and the pool's options.
        directory: An empty directory for logs.
        say: Called with each step as it begins or ends.

    Raises:
        ConfigError: An engine failed (EngineFailed), or the trial does not suit the model.
    """
    workload: Workload | None = None
    turns: list[TriedPrompt] = []
    lives: list[Samples] = []
    stories: dict[str, dict[int, list[int]]] = {side: {} for side in SIDES}
    seed = random.SystemRandom().getrandbits(64)  # no store has prompts of this run
    for life in range(2):
        with _engines(trial, directory, say) as engines:
            if workload is None:
                workload = _workload(trial, engines[WITHOUT], seed, say)
                warm_up = workload.before[0].new_tokens[::-1]
                total = len(workload.before) + len(workload.after)
            for engine in engines.values():
                engine.ask(warm_up, answer_tokens=2)  # the first pass of an engine is slow
            time.sleep(SETTLE_S)
            for request in workload[life]:
                order = SIDES[::-1] if len(turns) % 2 else SIDES
                turn = _take_turn(engines, request, stories, order)
                turns.append(turn)
                say(
                    f"prompt {len(turns)} of {total} ({request.kind.value}): first token after "
                    f"{turn.without.ttft_s:.2f} s ({WITHOUT}), {turn.pool.ttft_s:.2f} s ({POOL})"
                )
            time.sleep(SETTLE_S)
            lives.append(scrape(engines[POOL].url))
        if not life:
            say("both engines were stopped; their own caches are gone, the stores are not")
    return turns, _counts(lives)


class _Engine(EngineServer):
    """A server of vLLM that answers prompts of token ids."""

    _name = ""
    max_tokens = 0
    """The model's longest sequence, once `read_model` has read it."""

    def read_model(self) -> None:
        """Read the served model's name, which `ask` needs, and its longest sequence."""
        [card, *_] = self._call("/v1/models", None)["data"]
        self._name, self.max_tokens = card["id"], int(card["max_model_len"])

    def ask(self, prompt: Sequence[int], answer_tokens: int) -> tuple[TimedAnswer, list[int]]:
        """Return an answer without its CPU time, and its tokens. Blocks.

        Raises:
            EngineFailed: The engine refused the request, or broke off.
        """
        body = {
            **{"model": self._name, "prompt": list(prompt), "max_tokens": answer_tokens},
            **{"temperature": 0, "ignore_eos": True, "return_token_ids": True, "stream": True},
            "stream_options": {"include_usage": True},
        }
        tokens: list[int] = []
        times: list[float] = []
        usage: Mapping[str, Any] | None = None
        began = time.monotonic()
        with self._errors(), self._open("/v1/completions", body) as answer:
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    raise HTTPException(str(event["error"]))
                new = [token for choice in event["choices"] for token in choice["token_ids"] or ()]
                if new:
                    times.append(time.monotonic())
                    tokens += new
                usage = event.get("usage") or usage
        if not times or usage is None:
            raise self.failure("an answer of the engine ended without tokens or without usage")
        found = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        speed = (len(tokens) - 1) / (times[-1] - times[0]) if len(times) > 1 else None
        return TimedAnswer(times[0] - began, speed, found), tokens

    def _call(self, path: str, body: Mapping[str, Any] | None) -> Any:
        with self._errors(), self._open(path, body) as answer:
            return json.loads(read_whole(answer, REQUEST_TIMEOUT_S))

    def _open(self, path: str, body: Mapping[str, Any] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}{path}", data, headers)
        return open_directly(request, REQUEST_TIMEOUT_S)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except urllib.error.HTTPError as error:
            with error:
                detail = error.read(MAX_ERROR_BYTES).decode(errors="replace")
            raise self.failure(f"the engine refused a request: {error} {detail}") from None
        except (OSError, HTTPException, LookupError, *UNREADABLE) as error:
            raise self.failure(f"a request to the engine failed: {error!r}") from None


@contextlib.contextmanager
def _engines(
    trial: Trial, directory: Path, say: Callable[[str], None]
) -> Iterator[dict[str, _Engine]]:
    """Start both engines, one after the other; stop both at the end, also after an error."""
    with contextlib.ExitStack() as stack:
        engines = {}
        for number, side in enumerate(SIDES):
            text = f"{side}: starting the engine"
            say(text)
            engines[side] = _start(trial, side, directory / f"engine-{number}.log", stack)
            engines[side].wait_ready(partial(_say_wait, say, text))
            engines[side].read_model()
        yield engines
        say("stopping both engines")


def _say_wait(say: Callable[[str], None], text: str, waited_s: float) -> None:
    say(f"{text}, {waited_s:.0f} s so far")


def _start(trial: Trial, side: str, log: Path, stack: contextlib.ExitStack) -> _Engine:
    """Start one engine, which `stack` stops."""
    with socket.create_server((HOST, 0)) as free:
        port = free.getsockname()[1]
    env = {name: value for name, value in environment().items() if name != API_KEY_VARIABLE}
    with log.open("wb") as output, _exits_held():
        process = subprocess.Popen(
            trial.command(side, port),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=env,
            start_new_session=True,
        )
        engine = _Engine(process.pid, lambda: process.poll() is None, f"http://{HOST}:{port}", log)
        stack.callback(engine.stop)
    return engine


@contextlib.contextmanager
def _exits_held() -> Iterator[None]:
    """Deliver signals that end this process after the block.

    Between the start of an engine and its entry in the stack that stops it, an exit would leave
    the engine behind.
    """
    held: list[int] = []
    before = {each: signal.signal(each, lambda number, _: held.append(number)) for each in EXITS}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        for number in held:
            signal.raise_signal(number)


def _workload(trial: Trial, engine: _Engine, seed: int, say: Callable[[str], None]) -> Workload:
    longest = engine.max_tokens
    words = sorted(set(tokenize(TEXT, engine.url)))
    if not trial.trace:
        return conversations(words, longest, trial.chunk_tokens, random.Random(seed))
    workload = of_trace(trial.trace, words, longest, seed)
    left_out = len(trial.trace) - sum(map(len, workload))
    if left_out:
        say(f"{left_out} requests of the trace are left out: longer than --max-model-len {longest}")
    return workload


def _take_turn(
    engines: Mapping[str, _Engine],
    request: TrialRequest,
    stories: Mapping[str, dict[int, list[int]]],
    order: Sequence[str],
) -> TriedPrompt:
    """Ask both engines, in an order; `stories` are the tokens of each session, by side."""
    cpu = {side: engine.cpu_seconds() for side, engine in engines.items()}
    answers, prompt_tokens, known_tokens = {}, 0, request.known_tokens
    for side in order:
        story = stories[side].setdefault(request.session, [])
        known_tokens = max(known_tokens, len(story))
        story += request.new_tokens
        prompt_tokens = len(story)
        answers[side], tokens = engines[side].ask(story, request.answer_tokens)
        story += tokens
    without, pool = (
        msgspec.structs.replace(answers[side], cpu_s=engines[side].cpu_seconds() - cpu[side])
        for side in SIDES
    )
    return TriedPrompt(request.kind, prompt_tokens, known_tokens, without, pool, order[0])


def _counts(lives: Sequence[Samples]) -> PoolCounts:
    """Add up the counters of the pool at the end of each life of its engine."""
    grown = [Growth({}, samples, 1.0) for samples in lives]

    def total(name: str, **labels: str) -> float:
        return sum(each.total(f"{name}_total", **labels) for each in grown)

    def by(name: str, label: str) -> dict[str, float]:
        labels = {value for each in grown for value in each.by(f"{name}_total", label)}
        return {value: total(name, **{label: value}) for value in sorted(labels)}

    missed = grown[-1].by("miss_tokens_total", "reason")
    return PoolCounts(
        total("saved_tokens") + total("host_saved_tokens"),
        total("bytes", direction="save", store="file"),
        {reason: tokens for reason, tokens in missed.items() if reason != "not_needed"},
        by("unsaved_tokens", "reason"),
        by("failures", "kind"),
    )
