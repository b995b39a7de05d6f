"""A conversation about a long document, in two vLLM engines of different shape that share one pool.

Run it with `make demo`. A writer (one rank, blocks of 32 tokens) answers questions about
examples/demo_guide.md. Then it is gone, and a reader (three ranks, blocks of 64 tokens, another
PYTHONHASHSEED) has the same conversation twice: once told to leave the pool alone, once with the
pool. No server and no option: the pool is files in the cache directory, here a fresh one. The model
is SmolLM2-135M-Instruct from a package; where that cannot be had, or with --random, a model with
random weights and prompts that nobody can read. Ends with status 1 if an answer differs, or if
the pool gave nothing; leaves a picture in build/demo.svg.
"""

import html
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # for `tests`, which no installed package has

GUIDE = ROOT / "examples" / "demo_guide.md"
PICTURE = ROOT / "build" / "demo.svg"
QUESTIONS = (
    "What is the name of the ferry?",
    "How many steps does the lighthouse have?",
    "Who is the keeper of the lighthouse?",
    "When is the festival of lights?",
)
SYSTEM = "Answer questions about this guide in one short sentence.\n\n"
ANSWER_TOKENS = 24
# Of an engine that prints nothing; a loaded machine starts one in minutes.
ENGINE_SILENCE_S = 600.0
# Float32 rounding differs between one rank and three; it must not decide between two tokens.
LOGPROB_TOLERANCE = 2e-3
# Of the model with random weights.
RANDOM_VOCAB = 1920  # vLLM pads to a multiple of 64, which the reader divides by three
RANDOM_TOKENS = (1_500, 30)  # of the document and of a question

KV_TRANSFER = {"kv_connector": "KVPoolConnector", "kv_role": "kv_both"}
WITHOUT_POOL = {"kvpool": {"load": False, "save": False}}

# What an engine's process prints for people; the rest is vLLM's log, shown only if it fails.
PROGRESS = "demo: "
ANSWER = "answer: "

ENGINES = {
    "writer": {"tensor_parallel_size": 1, "block_size": 32},
    "reader": {"tensor_parallel_size": 3, "block_size": 64},
}
ENVIRONMENTS = {
    "writer": {"PYTHONHASHSEED": "1"},
    "reader": {"PYTHONHASHSEED": "2", "VLLM_CPU_OMP_THREADS_BIND": "0|1|0"},
}


BEGAN = time.monotonic()


def say(text: str) -> None:
    """Print a line with the seconds since the start."""
    print(f"[{time.monotonic() - BEGAN:3.0f}s] {text}", flush=True)


@dataclass(frozen=True)
class Conversation:
    """What is said to an engine, as tokens; its answer goes between one turn and the next."""

    model: Path
    turns: list[list[int]]
    warm_up: list[int]
    stop_token: int | None
    questions: tuple[str, ...]

    def text(self, tokens: list[int]) -> str:
        """Return an answer in words, or as numbers where the model has none."""
        if self.stop_token is None:
            return " ".join(map(str, tokens[:6])) + " …"
        from tokenizers import Tokenizer

        decoded = Tokenizer.from_file(str(self.model / "tokenizer.json")).decode(tokens)
        return str(decoded).strip()


def main(*arguments: str) -> int:
    """Run the writer, then the reader; return the exit status."""
    with tempfile.TemporaryDirectory(prefix="kvpool-demo-") as scratch_name:
        scratch = Path(scratch_name)
        conversation = choose(scratch, is_random="--random" in arguments)
        say("writer: one rank, blocks of 32")
        written = run_engine("writer", conversation, scratch)
        cells = [path for path in (scratch / "cache").rglob("*") if path.is_file()]
        size_mib = sum(path.stat().st_size for path in cells) / 2**20
        say(f"the writer has ended; it left {len(cells)} files, {size_mib:.0f} MiB")
        say("reader: three ranks, blocks of 64")
        read = run_engine("reader", conversation, scratch)
        say("done\n")
        return report(conversation, written, read)


def choose(scratch: Path, *, is_random: bool) -> Conversation:
    """Return the real model's conversation, or that of random weights if it cannot be had."""
    from tests.support.real_model import NAME, ModelUnavailable, real_model

    if not is_random:
        say(f"model: {NAME}")
        try:
            return about_guide(real_model(Path(sys.prefix) / "kvpool-demo", say))
        except ModelUnavailable as error:
            say(f"{NAME} cannot be had: {error}")
    say("model: random weights, 9 heads, 3 KV heads, 8 layers")
    return of_random_tokens(scratch)


def about_guide(model: Path) -> Conversation:
    """Questions about the guide, in the words of SmolLM2's template."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    turns = []
    for question in QUESTIONS:
        asked = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        # What the template puts between an answer, which ends with <|im_end|>, and what follows.
        before = "\n" if turns else f"<|im_start|>system\n{SYSTEM}{GUIDE.read_text()}<|im_end|>\n"
        turns.append(tokenizer.encode(before + asked, add_special_tokens=False).ids)
    stop_token = tokenizer.token_to_id("<|im_end|>")
    return Conversation(model, turns, turns[0][::-1], stop_token, QUESTIONS)


def of_random_tokens(scratch: Path) -> Conversation:
    """Return turns of random tokens, for a model that takes a while to compute them."""
    from tests.support.models import LlamaShape, make_model

    shape = LlamaShape(
        hidden=576,
        intermediate=1536,
        layers=8,
        heads=9,
        kv_heads=3,
        head_dim=64,
        vocab=RANDOM_VOCAB,
    )
    rng = random.Random(0)
    document, question = RANDOM_TOKENS
    lengths = [document, *[question] * (len(QUESTIONS) - 1)]
    turns = [rng.choices(range(3, RANDOM_VOCAB), k=length) for length in lengths]
    named = tuple(f"{length} random tokens" for length in lengths)
    return Conversation(make_model(scratch, shape), turns, turns[0][::-1], None, named)


def run_engine(name: str, conversation: Conversation, scratch: Path) -> dict[str, Any]:
    """Run this file as one engine in a process of its own; its answers come back as a file."""
    log, task = scratch / f"{name}.log", scratch / f"{name}.json"
    answers = scratch / f"{name}-answers.json"
    task.write_text(
        json.dumps(
            {
                "model": str(conversation.model),
                "turns": conversation.turns,
                "warm_up": conversation.warm_up,
                "stop_token": conversation.stop_token,
            }
        )
    )
    say("  starting the engine (usually 20 s)")
    env = os.environ | ENVIRONMENTS[name]
    env |= {
        "XDG_CACHE_HOME": str(scratch / "cache"),
        # Starts faster, and needs no C++ compiler.
        "TORCH_COMPILE_DISABLE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    # Only the defaults are shown here.
    for variable in [v for v in env if v.startswith("KVPOOL_")]:
        del env[variable]
    command = [sys.executable, __file__, "--engine", name, str(task), str(answers)]
    with (
        log.open("w") as rest,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env, text=True
        ) as process,
    ):
        for line in lines_of(process, ENGINE_SILENCE_S):
            if line.startswith(ANSWER):
                answer = json.loads(line.removeprefix(ANSWER))
                question = conversation.questions[answer["turn"]]
                say(f"  {question} {conversation.text(answer['tokens'])}")
            elif line.startswith(PROGRESS):
                say("  " + line.removeprefix(PROGRESS).strip())
            else:
                rest.write(line)
    if process.returncode != 0 or not answers.exists():
        sys.exit(f"the {name} failed:\n{log.read_text(errors='replace')[-4000:]}")
    result: dict[str, Any] = json.loads(answers.read_text())
    return result


def lines_of(process: subprocess.Popen[str], silence_s: float) -> Iterator[str]:
    """Yield each line that a process prints; kill the process after a silence of `silence_s`."""

    def give_up() -> None:
        say(f"  ended: the engine printed nothing for {silence_s:g} s")
        process.kill()

    assert process.stdout is not None
    while True:
        guard = threading.Timer(silence_s, give_up)
        guard.start()
        line = process.stdout.readline()
        guard.cancel()
        if not line:
            return
        yield line


def engine_main(name: str, task_path: str, answers: str) -> None:
    """Run an engine on the conversation, in the child process, and write its answers."""
    from vllm import LLM

    task = json.loads(Path(task_path).read_text())
    llm = LLM(
        model=task["model"],
        kv_transfer_config=KV_TRANSFER,
        dtype="float32",
        max_model_len=4096,
        kv_cache_memory_bytes=512 << 20,
        enforce_eager=True,
        skip_tokenizer_init=True,
        disable_log_stats=False,
        **ENGINES[name],
    )
    ask(llm, task["warm_up"], task["stop_token"], WITHOUT_POOL)
    print(PROGRESS + "warmed up with another prompt", flush=True)
    result: dict[str, Any] = {}
    if name == "reader":
        print(PROGRESS + "the conversation without the pool", flush=True)
        result["without"] = converse(llm, task, WITHOUT_POOL)
        print(PROGRESS + "the conversation with the pool", flush=True)
    result["with"] = converse(llm, task, None)
    llm.llm_engine.engine_core.shutdown()
    Path(answers).write_text(json.dumps(result))


def converse(
    llm: Any, task: dict[str, Any], kv_transfer_params: dict[str, Any] | None
) -> list[dict[str, Any]]:
    """Ask one turn after the other, each with all that was said before; print each answer."""
    said: list[int] = []
    answers = []
    for index, turn in enumerate(task["turns"]):
        said += turn
        answers.append(ask(llm, said, task["stop_token"], kv_transfer_params))
        said += answers[-1]["tokens"]
        answer = {"turn": index, "tokens": answers[-1]["tokens"]}
        print(ANSWER + json.dumps(answer), flush=True)
    return answers


def ask(
    llm: Any, prompt: list[int], stop_token: int | None, kv_transfer_params: dict[str, Any] | None
) -> dict[str, Any]:
    """Answer one prompt with nothing left in the engine's own cache from before."""
    from vllm import SamplingParams

    assert llm.reset_prefix_cache()
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=ANSWER_TOKENS,
        ignore_eos=stop_token is None,
        stop_token_ids=None if stop_token is None else [stop_token],
        detokenize=False,
        logprobs=1,
        extra_args={"kv_transfer_params": kv_transfer_params},
    )
    (output,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
    best = output.outputs[0]
    return {
        "prompt_tokens": len(prompt),
        "tokens": list(best.token_ids),
        "logprobs": [
            step[token].logprob for token, step in zip(best.token_ids, best.logprobs, strict=True)
        ],
        "from_pool": output.num_cached_tokens,
        "first_token_s": output.metrics.first_token_latency,
    }


@dataclass(frozen=True)
class Turn:
    """One turn as all three had it."""

    question: str
    answer: str
    prompt_tokens: int
    from_pool: int
    without_s: float
    with_s: float
    is_good: bool


def compare(
    conversation: Conversation, written: dict[str, Any], read: dict[str, Any]
) -> list[Turn]:
    """Each turn of the writer beside the two of the reader."""
    rows = zip(conversation.questions, written["with"], read["without"], read["with"], strict=True)
    return [
        Turn(
            question,
            conversation.text(with_pool["tokens"]),
            with_pool["prompt_tokens"],
            with_pool["from_pool"],
            without["first_token_s"],
            with_pool["first_token_s"],
            agree(with_pool, without)
            and agree(with_pool, writer)
            and with_pool["from_pool"] > 0
            and without["from_pool"] == 0,
        )
        for question, writer, without, with_pool in rows
    ]


def agree(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two answers have the same tokens with the same probabilities."""
    return one["tokens"] == other["tokens"] and all(
        abs(a - b) < LOGPROB_TOLERANCE
        for a, b in zip(one["logprobs"], other["logprobs"], strict=True)
    )


def report(conversation: Conversation, written: dict[str, Any], read: dict[str, Any]) -> int:
    """Print the conversation with its times, draw it, and say whether the pool did its work."""
    turns = compare(conversation, written, read)
    width = max(len(turn.question) for turn in turns)
    print(f"{'question':{width}}  prompt  from pool  first token: without, with pool  same answer")
    for turn in turns:
        print(
            f"{turn.question:{width}}  {turn.prompt_tokens:6}  {turn.from_pool:9}  "
            f"{turn.without_s * 1e3:17.0f} ms, {turn.with_s * 1e3:5.0f} ms   "
            f"{'yes' if turn.is_good else 'NO':>11}\n    {turn.answer}"
        )
    without_ms = statistics.median(turn.without_s for turn in turns) * 1e3
    with_ms = statistics.median(turn.with_s for turn in turns) * 1e3
    print(
        f"\nmedian time to the first token: {without_ms:.0f} ms without the pool, {with_ms:.0f} ms "
        f"with it ({without_ms / with_ms:.1f} times faster)"
    )
    draw(turns, PICTURE)
    print(f"picture: {PICTURE}")
    is_good = all(turn.is_good for turn in turns)
    print("the pool works" if is_good else "FAILED: an answer differs, or the pool gave nothing")
    return 0 if is_good else 1


def draw(turns: list[Turn], path: Path) -> None:
    """Write an SVG: a title, and two bars a turn below its question and answer."""
    row_px, bar_px, bars_px = 76, 20, 420
    scale = bars_px / max(turn.without_s for turn in turns)
    shapes = [_text(20, 32, "Time to the first token: computed, and with the pool", "bold 17px")]
    for row, turn in enumerate(turns):
        top = 56 + row * row_px
        shapes.append(_text(20, top + 13, f"{turn.question}  {turn.answer}", "bold 13px"))
        bars = (
            (turn.without_s, "computed", "#b0b4ba"),
            (
                turn.with_s,
                f"{turn.from_pool} of {turn.prompt_tokens} tokens from the pool",
                "#1f6fb4",
            ),
        )
        for place, (seconds, label, colour) in enumerate(bars):
            y, width = top + 20 + place * bar_px, seconds * scale
            bar = (
                f'<rect x="20" y="{y}" width="{width:.0f}" height="{bar_px - 3}" fill="{colour}"/>'
            )
            label = f"{seconds * 1e3:.0f} ms: {label}"
            shapes += [bar, _text(28 + round(width), y + 13, label, "12px")]
    height = 80 + len(turns) * row_px
    below = "The pool was written by an engine with one rank, and is read by an engine with three."
    shapes.append(_text(20, height - 14, below, "12px"))
    size = f'width="900" height="{height}" viewBox="0 0 900 {height}"'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n'
        '<rect width="100%" height="100%" fill="white"/>\n' + "\n".join(shapes) + "\n</svg>\n"
    )


def _text(x: int, y: int, words: str, font: str) -> str:
    return f'<text x="{x}" y="{y}" style="font: {font} sans-serif">{html.escape(words)}</text>'


if __name__ == "__main__":
    if sys.argv[1:2] == ["--engine"]:
        engine_main(*sys.argv[2:])
    else:
        sys.exit(main(*sys.argv[1:]))
