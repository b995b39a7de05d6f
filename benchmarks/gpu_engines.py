"""vLLM engines on one NVIDIA GPU: what a hit saves and what saving costs, beside vLLM's offloading.

    python benchmarks/gpu_engines.py [--quick] [--graphs]

A step of `scripts/gpu-report.sh --engines`: it prints the rows of a side as JSON when the side has
ended. Needs a GPU and a CUDA build of vLLM, and no network. The model has the shape of Llama 3 8B
in bfloat16 with random weights, so prompts are token ids and answers mean nothing. Each side is an
engine of its own in processes of its own, as a server has it: one after another, with as much host
memory for its KV.

* `prompt`: seconds to the first token of a new prompt, and of one that only the side's store still
  holds (`num_cached_tokens` is checked), for several lengths.
* `load`: seconds for many new prompts at once with answers of 64 tokens: all of it is saved.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import Row, Target

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HOST_GIB = 24
ANSWER, LOG = "answer.json", "engine.log"  # beside the model's configuration
LENGTHS = (2048, 8192, 32768)
BURST_TOKENS, BURST_ANSWER = 4096, 64
REPEATS, QUICK_REPEATS = 6, 2
SIDE_TIMEOUT_S, COMMIT_TIMEOUT_S = 300.0, 120.0
HIT_PART = 0.9  # of a prompt, that a hit has to have
SETTLE_S = 1.0  # until what was saved can be loaded
SETTLE_TIMEOUT_S = 20.0  # until no save holds a block
SPEED_WANTED, SLOWDOWN_WANTED = 1.0, 1.05

POOL = {"store": f"host://{HOST_GIB}GiB", "staging_bytes": "2GiB"}


def with_pool(options: dict[str, Any]) -> dict[str, Any]:
    connector = {"kv_connector": "KVPoolConnector", "kv_role": "kv_both"}
    return {"kv_transfer_config": {**connector, "kv_connector_extra_config": options}}


NOTHING, OURS, LAYERWISE, OFFLOADING, SIMPLE = (
    "nothing kept",
    "vllm-kvpool",
    "vllm-kvpool, layerwise",
    "OffloadingConnector",
    "SimpleCPUOffloadConnector",
)
SIDES: dict[str, dict[str, Any]] = {
    NOTHING: {},
    OURS: with_pool(POOL),
    OFFLOADING: {"kv_offloading_size": HOST_GIB},
    LAYERWISE: with_pool({**POOL, "layerwise": True}) | {"async_scheduling": False},
    SIMPLE: {"kv_offloading_size": HOST_GIB},
}
ENVIRONMENT = {
    LAYERWISE: {"VLLM_USE_V2_MODEL_RUNNER": "0"},
    SIMPLE: {"VLLM_USE_SIMPLE_KV_OFFLOAD": "1"},
}


class Side:
    """One engine, in this process."""

    def __init__(self, name: str, model: Path, *, graphs: bool) -> None:
        from vllm import LLM

        self._name = name
        self._llm = LLM(
            model=str(model),
            load_format="dummy",
            skip_tokenizer_init=True,
            enforce_eager=not graphs,
            max_model_len=LENGTHS[-1] + 512,
            max_num_seqs=64,
            max_num_batched_tokens=8192,
            gpu_memory_utilization=0.7,
            disable_log_stats=False,
            **SIDES[name],
        )
        self._seed = 0

    def close(self) -> None:
        """End the engine's process, and what it has of the GPU."""
        self._llm.llm_engine.engine_core.shutdown()

    def new_prompt(self, length: int) -> list[int]:
        self._seed += 1
        return random.Random(self._seed).choices(range(10, 100_000), k=length)

    def ask(self, *prompts: Sequence[int], answer: int = 1) -> list[Any]:
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0.0, max_tokens=answer, ignore_eos=True, detokenize=False
        )
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        return self._llm.generate(asked, sampling, use_tqdm=False)

    def rows(self, repeats: int) -> list[Row]:
        self.ask(self.new_prompt(512), answer=4)
        rows: list[Row] = []
        for length in LENGTHS[-2:] if repeats == QUICK_REPEATS else LENGTHS:
            times: dict[str, list[float]] = {"new": [], "again": []}
            for _ in range(repeats + 1):  # the first round warms up
                prompt = self.new_prompt(length)
                times["new"].append(self._first_token_s(prompt))
                if self._name == NOTHING:
                    continue
                self._settle()
                times["again"].append(self._first_token_s(prompt, hit=True))
            for what, seconds in times.items():
                if seconds:
                    rows.append(self._row("prompt", f"{length} tokens, {what}", seconds[1:]))
        bursts = []
        num_prompts = 8 * repeats
        for _ in range(repeats // 2 + 1):
            prompts = [self.new_prompt(BURST_TOKENS) for _ in range(num_prompts)]
            began = time.perf_counter()
            self.ask(*prompts, answer=BURST_ANSWER)
            bursts.append(time.perf_counter() - began)
            self._settle()
        what = f"{num_prompts} new prompts of {BURST_TOKENS} tokens"
        rows.append(self._row("load", what, bursts[1:]))
        return rows

    def _settle(self) -> None:
        """Have steps run in which saves are reported, and forget what is on the GPU."""
        start = time.monotonic()
        while time.monotonic() < start + SETTLE_S or not self._llm.reset_prefix_cache():
            self.ask(self.new_prompt(16))
            if time.monotonic() > start + SETTLE_TIMEOUT_S:
                raise RuntimeError(f"{self._name}: blocks are in use after {SETTLE_TIMEOUT_S:g} s")

    def _first_token_s(self, prompt: Sequence[int], *, hit: bool = False) -> float:
        began = time.perf_counter()
        (output,) = self.ask(prompt)
        seconds = time.perf_counter() - began
        cached = output.num_cached_tokens
        if hit and cached < HIT_PART * len(prompt):
            raise RuntimeError(f"{self._name}: {cached} of {len(prompt)} tokens were found")
        return seconds

    def _row(self, what: str, case: str, seconds: list[float]) -> Row:
        ms = [second * 1000 for second in seconds]
        return {
            "what": what,
            "case": case,
            "by": self._name,
            "mean_ms": round(statistics.fmean(ms), 2),
            "max_ms": round(max(ms), 2),
        }


def run_side(name: str, model: Path, repeats: int, *, graphs: bool) -> None:
    side = Side(name, model, graphs=graphs)
    if name in (OURS, LAYERWISE):  # memory that is not page-locked yet is copied slowly
        wait_for_line(model / LOG, "staging memory and host tier are committed")
    (model / ANSWER).write_text(json.dumps(side.rows(repeats)))
    side.close()


def wait_for_line(log: Path, line: str) -> None:
    deadline = time.monotonic() + COMMIT_TIMEOUT_S
    while line not in log.read_text(errors="replace"):
        if time.monotonic() > deadline:
            raise RuntimeError(f"no line {line!r} in {log} after {COMMIT_TIMEOUT_S:g} s")
        time.sleep(0.1)


def rows_of_side(name: str, directory: Path, repeats: int, *, graphs: bool) -> list[Row]:
    """The rows of one side; SubprocessError if there are none."""
    log = directory / LOG
    command = [sys.executable, __file__, "--side", name, "--model", str(directory)]
    command += ["--repeats", str(repeats), *(["--graphs"] if graphs else [])]
    settings = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    env = os.environ | settings | ENVIRONMENT.get(name, {})
    with log.open("wb") as output:
        try:
            subprocess.run(
                command, env=env, stdout=output, stderr=output, timeout=SIDE_TIMEOUT_S, check=True
            )
        except subprocess.SubprocessError:
            print(log.read_bytes()[-3000:].decode(errors="replace"), flush=True)
            raise
    rows: list[Row] = json.loads((directory / ANSWER).read_text())
    return rows


def targets(rows: Sequence[Row]) -> list[Target]:
    means: dict[tuple[object, object], float] = {
        (row["case"], row["by"]): float(str(row["mean_ms"])) for row in rows
    }
    found = []
    for (case, by), ms in means.items():
        if by != OURS:
            continue
        plain = means.get((case, NOTHING))
        peer = means.get((case, OFFLOADING))
        if str(case).endswith("again"):
            what = f"time to the first token, {case}, of OffloadingConnector's"
            value = ms / peer if peer else None
            found.append(Target(what, value, SPEED_WANTED, at_least=False))
        else:
            what = f"{case}: time with a pool that saves all, of that without"
            value = ms / plain if plain else None
            found.append(Target(what, value, SLOWDOWN_WANTED, at_least=False))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer repeats; to see that it runs")
    parser.add_argument("--graphs", action="store_true", help="with CUDA graphs")
    parser.add_argument("--sides", nargs="*", choices=SIDES, default=list(SIDES))
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--repeats", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        run_side(args.side, args.model, args.repeats, graphs=args.graphs)
        return
    import torch
    import vllm

    if not torch.cuda.is_available():
        sys.exit("gpu_engines: no NVIDIA GPU here, or torch is a build without CUDA")
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "vllm": vllm.__version__}), flush=True)
    rows: list[Row] = []
    failed = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "config.json").write_text(json.dumps(LLAMA_8B))
        for side in args.sides:
            try:
                repeats = QUICK_REPEATS if args.quick else REPEATS
                found = rows_of_side(side, directory, repeats, graphs=args.graphs)
            except subprocess.SubprocessError as error:
                failed.append(f"{side} could not be measured: {type(error).__name__}")
                continue
            rows += found
            for row in found:
                print(json.dumps(row), flush=True)
    for target in targets(rows):
        print(json.dumps({"target": str(target), "reached": target.reached}), flush=True)
    if failed:
        sys.exit("gpu_engines: " + "; ".join(failed))


if __name__ == "__main__":
    main()
