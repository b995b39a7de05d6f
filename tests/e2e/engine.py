"""A real vLLM engine in a child process, driven by JSON lines.

The parent half of `engine_child.py`. Every wait has a bound; the child leads its own process
group, which is killed whole, so that no worker process outlives its test. What the child prints
goes to a file, whose end is part of every error.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Self

from tests.e2e.nursery import Forked, NurseryError, needs_new_python, nursery_of

CHILD = Path(__file__).with_name("engine_child.py")

START_TIMEOUT_S = 110.0
CALL_TIMEOUT_S = 180.0  # ranks spin: those of two engines on two cores keep each other from running
STOP_TIMEOUT_S = 20.0
LOG_TAIL_BYTES = 6_000


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """Start options of an engine; `llm` holds further arguments of `vllm.LLM`.

    The release of vLLM is the one in the environment of `python`. For models of images, `images`
    is the maximum number of images in a prompt. With `encoder_raises` the vision encoder raises
    when it is called after the start.
    """

    model: Path
    tp: int = 1
    block_size: int = 32
    images: int = 0
    encoder_raises: bool = False
    kv_transfer_config: Mapping[str, Any] | None = None
    ec_transfer_config: Mapping[str, Any] | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    llm: Mapping[str, Any] = field(default_factory=dict)
    python: Path = Path(sys.executable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """A picture of squares of random colours, 14 pixels wide; equal values make equal pictures.

    A client may name it by a `uuid`, in place of vLLM's digest.
    """

    seed: int
    width: int = 56
    height: int = 56
    uuid: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedImage:
    """An image without pixels: the name and patch grid that a proxy sends to a consumer."""

    name: str
    grid: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A request; `embeds` names a .npy file of float32 [tokens, hidden] in place of ids.

    With `token_rows` the prompt is mixed: those rows are the tokens of `ids`.

    With `images` or `encoded`, the ids have one image token for each of them, in their order.
    """

    ids: Sequence[int] = ()
    max_tokens: int = 4
    logprobs: int | None = 5
    cache_salt: str | None = None
    lora: Path | None = None
    embeds: Path | None = None
    token_rows: Sequence[bool] = ()
    images: Sequence[Image] = ()
    encoded: Sequence[EncodedImage] = ()
    kv_transfer_params: Mapping[str, Any] | None = None
    ec_transfer_params: Mapping[str, Any] | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """An engine's answer; `logprobs` has one `{token id: value}` for each token.

    If `sampling` asks for `prompt_logprobs`, they have one value for each prompt token after the
    first computed one. Cached tokens have none.
    """

    token_ids: list[int]
    logprobs: list[dict[int, float]]
    prompt_logprobs: list[float]
    cached_tokens: int
    finish_reason: str | None
    first_token_s: float
    kv_transfer_params: dict[str, Any] | None
    ec_transfer_params: dict[str, Any] | None


class EngineError(AssertionError):
    """The child died, answered late or raised; carries the end of its log."""


class Engine:
    """Owns one child process. Not thread-safe: one call at a time."""

    def __init__(self, spec: EngineSpec, log: Path) -> None:
        """Start the child and wait until it is ready."""
        self.spec = spec
        self.log = log
        began = time.monotonic()
        self._replies, reply_write = os.pipe()
        try:
            with log.open("wb") as output:
                self._process = _process(spec, output, reply_write)
        except NurseryError as error:
            os.close(self._replies)
            raise EngineError(self._story(str(error))) from None
        finally:
            os.close(reply_write)
        self._buffer = b""
        try:
            self._call("start", _llm_arguments(spec), START_TIMEOUT_S)
            if spec.images:
                self._call("watch_encoder", spec.encoder_raises, CALL_TIMEOUT_S)
        except EngineError:
            self.kill()
            raise
        self.start_s = time.monotonic() - began

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def alive(self) -> bool:
        """True if the engine takes calls: not closed, killed or dead."""
        return self._replies >= 0 and self._process.poll() is None

    @property
    def pid(self) -> int:
        """ID of the engine's process, which leads its own process group."""
        return self._process.pid

    def release(self) -> str:
        """The release of vLLM that runs."""
        return str(self._call("release", None, CALL_TIMEOUT_S))

    def generate(self, *prompts: Prompt, timeout_s: float = CALL_TIMEOUT_S) -> list[Completion]:
        """Run the prompts as one batch; answers come in their order."""
        answers = self._call("generate", [_plain(prompt) for prompt in prompts], timeout_s)
        return [_completion(answer) for answer in answers]

    def reset_prefix_cache(self) -> bool:
        """Forget the engine's own cache (never the pool); False while blocks are in use."""
        return bool(self._call("reset_prefix_cache", None, CALL_TIMEOUT_S))

    def reset_encoder_cache(self) -> None:
        """Forget the encoded images that the engine itself keeps."""
        self._call("reset_encoder_cache", None, CALL_TIMEOUT_S)

    def images_encoded(self) -> int:
        """Return the number of images that each rank's encoder has encoded since the start."""
        (count,) = set(self._call("images_encoded", None, CALL_TIMEOUT_S))
        return int(count)

    def watch_drafts(self, loaded: int) -> None:
        """Fill the drafter's pages with NaN, and count what it draws.

        The next request loads so many tokens; of the engine's own cache it has none.
        """
        self._call("watch_drafts", loaded, CALL_TIMEOUT_S)

    def draft_probabilities(self) -> dict[str, int]:
        """Return the drafts that vLLM has drawn since: of finite probabilities, and others."""
        (counts,) = self._call("draft_probabilities", None, CALL_TIMEOUT_S)
        return dict(counts)

    def reset_pool(self) -> bool:
        """Forget the engine's own cache and its namespace of the pool."""
        return bool(self._call("reset_pool", None, CALL_TIMEOUT_S))

    def rpc(self, method: str, **kwargs: Any) -> None:
        """Have all workers run one of their methods."""
        self._call("rpc", [method, kwargs], CALL_TIMEOUT_S)

    def set_weights(self, how: str, model: Path) -> None:
        """Change the weights to another model's, in one of the ways of `engine_child.py`."""
        self._call("set_weights", [how, str(model)], CALL_TIMEOUT_S)

    def sleep(self, level: int) -> None:
        """Put the engine to sleep, as `LLM.sleep` does."""
        self._call("sleep", level, CALL_TIMEOUT_S)

    def wake_up(self, *tags: str) -> None:
        """Wake it up, in parts if there are tags."""
        self._call("wake_up", list(tags) or None, CALL_TIMEOUT_S)

    def metrics(self) -> dict[str, float]:
        """Counters and gauges by name (vLLM's Prometheus names), summed over labels."""
        return dict(self._call("metrics", None, CALL_TIMEOUT_S))

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Return a metric's values by one label, summed over its other labels."""
        return dict(self._call("by_label", [name, label], CALL_TIMEOUT_S))

    def close(self, *, teardown: bool = True) -> None:
        """Let the engine shut down in order, then kill whatever is left of its group.

        Without `teardown` a forked process ends after its threads and exit handlers. It skips the
        teardown of modules and libraries, which takes 2 s of a core. Raises EngineError if the
        engine did not end by itself with status 0.
        """
        if self._process.stdin is None or self._process.stdin.closed:
            return
        if not teardown and isinstance(self._process, Forked) and self.alive:
            self._call("skip_teardown", None, CALL_TIMEOUT_S)
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            status = self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            status = None
        self.kill()
        if status != 0:
            raise EngineError(self._story(f"engine ended with status {status}"))

    def kill(self) -> None:
        """Kill the whole group at once, as a crash would."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(STOP_TIMEOUT_S)
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        if self._replies >= 0:
            os.close(self._replies)
            self._replies = -1

    def _call(self, op: str, argument: object, timeout_s: float) -> Any:
        assert self._process.stdin is not None
        deadline = time.monotonic() + timeout_s
        try:
            self._process.stdin.write(json.dumps([op, argument]).encode() + b"\n")
            self._process.stdin.flush()
            outcome, value = json.loads(self._read_line(deadline, op))
        except (BrokenPipeError, TimeoutError, EOFError) as error:
            self.kill()
            raise EngineError(self._story(f"{op}: {error}")) from None
        if outcome == "error":
            raise EngineError(self._story(f"{op}: {value}"))
        return value

    def _read_line(self, deadline: float, op: str) -> bytes:
        while b"\n" not in self._buffer:
            left_s = max(0.0, deadline - time.monotonic())
            if not select.select([self._replies], [], [], left_s)[0]:
                raise TimeoutError(f"no answer to {op} in time")
            data = os.read(self._replies, 1 << 20)
            if not data:
                raise EOFError("the engine's process ended")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _story(self, what: str) -> str:
        tail = self.log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
        return f"{what}\n--- end of {self.log} ---\n{tail}"


def _process(spec: EngineSpec, log: IO[bytes], replies: int) -> subprocess.Popen[bytes] | Forked:
    env = _environment(spec)
    if not needs_new_python(spec.env):
        deadline = time.monotonic() + START_TIMEOUT_S
        nursery = nursery_of(spec.python, _common_environment(), log)
        return nursery.fork(env, log, replies, deadline)
    return subprocess.Popen(
        [str(spec.python), str(CHILD), str(replies)],
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=env,
        pass_fds=[replies],
        start_new_session=True,
    )


def _common_environment() -> dict[str, str]:
    """A child's environment: ours, minus what would leak in, plus what makes CPU engines work."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    return env | {
        # The scheduler runs in the child itself: one process less to start, and worker
        # processes exist only where there is more than one rank.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # Sampling has a few compiled functions; compiling them costs 10 s and a C++ compiler.
        "TORCH_COMPILE_DISABLE": "1",
        # Models are tiny, and engines stand beside others: two threads of one wait for each other,
        # or rather for what else takes the cores, a hundred times a step.
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }


def _environment(spec: EngineSpec) -> dict[str, str]:
    env = _common_environment()
    if spec.tp > 1:
        # A core for each rank, as far as there are; vLLM's own choice wants a NUMA node for each.
        cores = [str(rank % (os.cpu_count() or 1)) for rank in range(spec.tp)]
        env["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(cores)
    return env | dict(spec.env)


def _llm_arguments(spec: EngineSpec) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "model": str(spec.model),
        "tensor_parallel_size": spec.tp,
        "block_size": spec.block_size,
        "dtype": "float32",
        "seed": 0,
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 4096,
        "max_num_seqs": 8,
        # With the size given, vLLM skips its warm-up pass.
        "kv_cache_memory_bytes": 256 << 20,
        # Needed for the time to the first token and for `metrics`.
        "disable_log_stats": False,
    }
    if spec.images:
        # The processor of images reads its prompts with the tokenizer.
        arguments["skip_tokenizer_init"] = False
        arguments["limit_mm_per_prompt"] = {"image": spec.images}
    for name in ("kv_transfer_config", "ec_transfer_config"):
        config = getattr(spec, name)
        if config is not None:
            arguments[name] = dict(config)
    return arguments | dict(spec.llm)


def _plain(prompt: Prompt) -> dict[str, Any]:
    plain = asdict(prompt)
    for name in ("lora", "embeds"):
        plain[name] = plain[name] and str(plain[name])
    return plain


def _completion(answer: dict[str, Any]) -> Completion:
    logprobs = [{int(token): value for token, value in step.items()} for step in answer["logprobs"]]
    return Completion(**answer | {"logprobs": logprobs})
