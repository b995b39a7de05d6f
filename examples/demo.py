"""Two vLLM engines of different shape share one pool of KV cache. Run it with `make demo`.

A writer (one rank, blocks of 32 tokens) computes a few prompts. Then it is gone, and a reader (two
ranks, blocks of 64 tokens, another PYTHONHASHSEED) answers the same prompts twice: once told to
leave the pool alone, once with the pool. No server, no network and no option: the pool is files in
the cache directory, here a fresh one. Ends with status 1 if an answer differs, or if the
pool gave nothing.
"""

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

NUM_PROMPTS = 4
PROMPT_TOKENS = 3_000
ANSWER_TOKENS = 8
ENGINE_TIMEOUT_S = 300
# Float32 rounding differs between one rank and two; it must not decide between two tokens.
LOGPROB_TOLERANCE = 2e-3

KV_TRANSFER = {"kv_connector": "KVPoolConnector", "kv_role": "kv_both"}
WITHOUT_POOL = {"kvpool": {"load": False, "save": False}}

# What an engine's process prints for people; the rest is vLLM's log, shown only if it fails.
PROGRESS = "demo: "

ENGINES = {
    "writer": {"tensor_parallel_size": 1, "block_size": 32},
    "reader": {"tensor_parallel_size": 2, "block_size": 64},
}
ENVIRONMENTS = {
    "writer": {"PYTHONHASHSEED": "1"},
    "reader": {"PYTHONHASHSEED": "2", "VLLM_CPU_OMP_THREADS_BIND": "0|1"},
}


BEGAN = time.monotonic()


def say(text: str) -> None:
    print(f"[{time.monotonic() - BEGAN:3.0f}s] {text}", flush=True)


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="kvpool-demo-") as scratch_name:
        scratch = Path(scratch_name)
        say("making a small model with random weights")
        model = demo_model(scratch)
        say(f"writer: one rank, blocks of 32, computes {NUM_PROMPTS} prompts (about 30 s)")
        written = run_engine("writer", model, scratch)
        cells = [path for path in (scratch / "cache").rglob("*") if path.is_file()]
        size_mib = sum(path.stat().st_size for path in cells) / 2**20
        say(f"the writer has ended; it left {len(cells)} files, {size_mib:.0f} MiB")
        say("reader: two ranks, blocks of 64, answers them again (about 30 s)")
        read = run_engine("reader", model, scratch)
        say("done\n")
    return report(written, read)


def demo_model(scratch: Path) -> Path:
    """A model just large enough that computing a prompt takes longer than reading it."""
    sys.path.insert(0, str(Path(__file__).parents[1]))  # also where the package is installed
    from tests.support.models import LlamaShape, make_model

    shape = LlamaShape(
        hidden=512, intermediate=1536, layers=8, heads=8, kv_heads=4, head_dim=64, vocab=2048
    )
    return make_model(scratch, shape)


def run_engine(name: str, model: Path, scratch: Path) -> dict[str, Any]:
    """Run this file as one engine in a process of its own; its answers come back as a file."""
    log, answers = scratch / f"{name}.log", scratch / f"{name}.json"
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
    command = [sys.executable, __file__, name, str(model), str(answers)]
    with (
        log.open("w") as rest,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env, text=True
        ) as process,
    ):
        guard = threading.Timer(ENGINE_TIMEOUT_S, process.kill)
        guard.start()
        for line in process.stdout or ():
            if line.startswith(PROGRESS):
                say("  " + line.removeprefix(PROGRESS).strip())
            else:
                rest.write(line)
        guard.cancel()
    if process.returncode != 0 or not answers.exists():
        sys.exit(f"the {name} failed:\n{log.read_text(errors='replace')[-4000:]}")
    return json.loads(answers.read_text())


def engine_main(name: str, model: str, answers: str) -> None:
    """What the child process does."""
    from vllm import LLM

    llm = LLM(
        model=model,
        kv_transfer_config=KV_TRANSFER,
        dtype="float32",
        max_model_len=4096,
        kv_cache_memory_bytes=512 << 20,
        enforce_eager=True,
        skip_tokenizer_init=True,
        disable_log_stats=False,
        **ENGINES[name],
    )
    print(PROGRESS + "engine started", flush=True)
    rng = random.Random(0)
    prompts = [rng.choices(range(3, 2048), k=PROMPT_TOKENS) for _ in range(NUM_PROMPTS + 1)]
    warm_up, shared = prompts[0], prompts[1:]
    ask(llm, warm_up, WITHOUT_POOL)
    print(PROGRESS + "warmed up with another prompt", flush=True)
    result: dict[str, Any] = {}
    if name == "reader":
        result["without"] = [ask(llm, prompt, WITHOUT_POOL) for prompt in shared]
        print(PROGRESS + f"answered {NUM_PROMPTS} prompts without the pool", flush=True)
    result["with"] = [ask(llm, prompt, None) for prompt in shared]
    print(PROGRESS + f"answered {NUM_PROMPTS} prompts with the pool", flush=True)
    llm.llm_engine.engine_core.shutdown()
    Path(answers).write_text(json.dumps(result))


def ask(llm: Any, prompt: list[int], kv_transfer_params: dict[str, Any] | None) -> dict[str, Any]:
    """Answer one prompt with nothing left in the engine's own cache from before."""
    from vllm import SamplingParams

    assert llm.reset_prefix_cache()
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=ANSWER_TOKENS,
        ignore_eos=True,
        detokenize=False,
        logprobs=1,
        extra_args={"kv_transfer_params": kv_transfer_params},
    )
    (output,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
    best = output.outputs[0]
    return {
        "tokens": list(best.token_ids),
        "logprobs": [
            step[token].logprob for token, step in zip(best.token_ids, best.logprobs, strict=True)
        ],
        "from_pool": output.num_cached_tokens,
        "first_token_s": output.metrics.first_token_latency,
    }


def report(written: dict[str, Any], read: dict[str, Any]) -> int:
    """Print the table and say whether the pool did what it is for."""
    print("prompt tokens  from the pool  first token without / with pool  same output")
    good = True
    rows = list(zip(written["with"], read["without"], read["with"], strict=True))
    for writer, without, with_pool in rows:
        same = agree(with_pool, without) and agree(with_pool, writer)
        good = good and same and with_pool["from_pool"] > 0 and without["from_pool"] == 0
        print(
            f"{PROMPT_TOKENS:13}  {with_pool['from_pool']:13}  "
            f"{without['first_token_s'] * 1e3:14.0f} ms / {with_pool['first_token_s'] * 1e3:.0f} ms"
            f"  {'yes' if same else 'NO':>17}"
        )
    without_ms, with_ms = (
        statistics.median(answer["first_token_s"] for answer in read[kind]) * 1e3
        for kind in ("without", "with")
    )
    print(
        f"\nmedian time to the first token: {without_ms:.0f} ms without the pool, {with_ms:.0f} ms "
        f"with it ({without_ms / with_ms:.1f} times faster)"
    )
    print("the pool works" if good else "FAILED: an answer differs, or the pool gave nothing")
    return 0 if good else 1


def agree(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two answers have the same tokens with the same probabilities."""
    return one["tokens"] == other["tokens"] and all(
        abs(a - b) < LOGPROB_TOLERANCE
        for a, b in zip(one["logprobs"], other["logprobs"], strict=True)
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        engine_main(*sys.argv[1:])
    else:
        sys.exit(main())
