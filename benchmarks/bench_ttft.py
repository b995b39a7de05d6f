"""Time to the first token of a full hit, between two real engines.

    python benchmarks/bench_ttft.py --json ttft.json

One engine computes and saves prompts of 2,048 tokens, another one loads them, over Mooncake's TCP:
the writer's memory holds the data. Before every repeat the reader's own prefix cache is emptied;
the first load of each prompt is not counted (warm). `cold` is a prompt that nobody has stored.
Engines of this pool, of vLLM's MooncakeStoreConnector and of this pool over files (one engine)
take turns; `limited by` is about warm loads. The engines have one rank and a float32 model whose
prefill takes longer than loading: a Llama in blocks of 128 tokens (vLLM's default on CPU), and in
blocks of 256 an LFM2, two thirds of whose layers keep a recurrent state, and a Qwen3-Next
(bfloat16), three quarters of whose layers do.
vLLM's connector runs with its defaults.
"""

import contextlib
import json
import random
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import LIMITED_BY, DidNotFinish, Result, Row, Target, run_script, wait_until
from benchmarks.limits import Meter
from tests.e2e.engine import Engine, EngineError, EngineSpec, Prompt
from tests.support.models import Lfm2Shape, LlamaShape, Qwen3NextShape, make_model
from tests.support.mooncake_master import HOST, MooncakeMaster, free_port

SAME: dict[str, Any] = {"heads": 8, "head_dim": 64, "hidden": 512, "intermediate": 768}
PROMPT_TOKENS = 2048
SEGMENT = 2 << 30
PROMPTS, REPEATS, COLD_REPEATS = 2, 2, 1
QUICK_PROMPTS, QUICK_REPEATS = 1, 1
# Whatever takes longer is said not to finish.
LIMIT_S = 40.0
MAX_RATIO = 1.0


@dataclass(frozen=True)
class Case:
    """A model, and what its engines are started with."""

    name: str
    shape: LlamaShape
    block: int
    llm: Mapping[str, Any] = field(default_factory=dict)

    @property
    def full_hit(self) -> int:
        """A full hit computes at least the last token; vLLM's connector computes the last block,
        and a recurrent state is only at the end of one."""
        return PROMPT_TOKENS - self.block


# vLLM's rotary kernel for CPUs computes LFM2's queries wrong.
NO_KERNEL = {"compilation_config": {"custom_ops": ["all", "-rotary_embedding"]}}
CASES = (
    Case("Llama", LlamaShape(layers=16, kv_heads=8, **SAME), 128),
    Case("LFM2", Lfm2Shape(layers=18, kv_heads=8, **SAME), 256, NO_KERNEL),
    Case(
        "Qwen3-Next",
        Qwen3NextShape(layers=16, kv_heads=4, key_heads=4, value_heads=8, **SAME),
        256,
        NO_KERNEL | {"dtype": "bfloat16"},
    ),
)


@dataclass
class Side:
    """A writer and a reader; the same engine over files. `failure` says why it was given up."""

    name: str
    case: Case
    writer: Engine
    reader: Engine
    cold: list[float] = field(default_factory=list)
    warm: list[float] = field(default_factory=list)
    failure: str = ""

    def attempt(self, action: Any, *args: Any) -> None:
        """Run the action; one that hangs or breaks an engine ends this side's part."""
        if self.failure:
            return
        try:
            action(self, *args)
        except (EngineError, DidNotFinish) as error:
            self.failure = str(error).partition("\n")[0]
            self.close()

    def close(self) -> None:
        for engine in {id(e): e for e in (self.reader, self.writer)}.values():
            with contextlib.suppress(subprocess.TimeoutExpired):  # killed, though not yet gone
                engine.kill()


def prompt(seed: int) -> Prompt:
    ids = random.Random(seed).choices(range(3, CASES[0].shape.vocab), k=PROMPT_TOKENS)
    return Prompt(ids=ids, max_tokens=1, logprobs=None)


def time_to_first(engine: Engine, asked: Prompt) -> tuple[float, int]:
    """Seconds to the first token, and how many tokens were not computed."""
    wait_until(engine.reset_prefix_cache, LIMIT_S)
    (answer,) = engine.generate(asked, timeout_s=LIMIT_S)
    return answer.first_token_s, answer.cached_tokens


def is_found(side: Side, asked: Prompt) -> bool:
    return time_to_first(side.reader, asked)[1] >= side.case.full_hit


def write(side: Side, prompts: list[Prompt]) -> None:
    """Compute and save the prompts, until the reader finds them whole."""
    # The first pass of an engine is slow; how fast the writer is does not matter.
    side.reader.generate(prompt(-1), timeout_s=LIMIT_S)
    for asked in prompts:
        # Its cache is not emptied: vLLM's connector holds the last prompt's blocks until it steps.
        side.writer.generate(asked, timeout_s=LIMIT_S)
    for asked in prompts:
        wait_until(partial(is_found, side, asked), LIMIT_S)


def measure_warm(side: Side, asked: Prompt) -> None:
    seconds, cached = time_to_first(side.reader, asked)
    if cached < side.case.full_hit:
        raise DidNotFinish(f"only {cached} tokens were loaded")
    side.warm.append(seconds)


def measure_cold(side: Side, asked: Prompt) -> None:
    seconds, cached = time_to_first(side.reader, asked)
    if cached:
        raise DidNotFinish(f"{cached} tokens of a new prompt were cached")
    side.cold.append(seconds)


def engine(
    directory: Path, name: str, case: Case, transfer: Mapping[str, Any], env: Mapping[str, str]
) -> Engine:
    spec = EngineSpec(
        model=make_model(directory, case.shape),
        block_size=case.block,
        kv_transfer_config=transfer,
        env={"VLLM_HOST_IP": HOST, **env},
        llm={
            "kv_cache_memory_bytes": 512 << 20,
            "max_num_batched_tokens": PROMPT_TOKENS,
            **case.llm,
        },
    )
    return Engine(spec, directory / f"{name}.log")


def pool_transfer(url: str, role: str) -> dict[str, Any]:
    extra = {"store": url, "lookup_timeout_ms": 5000}
    return {
        "kv_connector": "KVPoolConnector",
        "kv_role": role,
        "kv_connector_extra_config": extra,
    }


def pool_side(directory: Path, case: Case, master: str) -> Side:
    url = f"mooncake://{master}?segment="
    return Side(
        "kvpool",
        case,
        engine(directory, "writer", case, pool_transfer(f"{url}{SEGMENT}", "kv_both"), {}),
        engine(directory, "reader", case, pool_transfer(f"{url}0", "kv_consumer"), {}),
    )


def file_side(directory: Path, case: Case) -> Side:
    transfer = pool_transfer(f"file://{directory}/pool?size=4GiB", "kv_both")
    both = engine(directory, "files", case, transfer, {})
    return Side("kvpool, files", case, both, both)


def in_tree_side(directory: Path, case: Case, master: str) -> Side:
    def start(role: str, mode: str, segment: int) -> Engine:
        config = {
            "mode": mode,
            "metadata_server": "P2PHANDSHAKE",
            "master_server_address": master,
            "protocol": "tcp",
            "device_name": "",
            "global_segment_size": segment,
            "local_buffer_size": 256 << 20,
        }
        path = directory / f"{role}.json"
        path.write_text(json.dumps(config))
        transfer = {
            "kv_connector": "MooncakeStoreConnector",
            "kv_role": role,
            # Two engines of one machine would listen at one address.
            "kv_connector_extra_config": {"lookup_rpc_port": free_port()},
        }
        env = {
            "MOONCAKE_CONFIG_PATH": str(path),
            "VLLM_RPC_BASE_PATH": str(directory),
        }
        return engine(directory, f"in-tree-{role}", case, transfer, env)

    # Only an engine that owns no memory of the cluster reads all of it over TCP.
    return Side(
        "in-tree",
        case,
        start("kv_producer", "embedded", SEGMENT),
        start("kv_consumer", "standalone-store", 0),
    )


def measure(quick: bool) -> Result:
    result = Result()
    for case in CASES[: 1 if quick else None]:
        measure_case(case, quick, result)
    return result


def measure_case(case: Case, quick: bool, result: Result) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="bench") as name,
        MooncakeMaster() as ours,
        MooncakeMaster() as theirs,
        contextlib.ExitStack() as stack,
    ):
        directory = Path(name)
        sides = []
        makers = [
            lambda: pool_side(directory, case, ours.address),
            lambda: in_tree_side(directory, case, theirs.address),
            lambda: file_side(directory, case),
        ]
        for make in makers[: 2 if quick else None]:
            sides.append(make())
            stack.callback(sides[-1].close)
        meter = Meter()
        run(sides, quick, meter)
        report(case, sides, meter, result)


def run(sides: list[Side], quick: bool, meter: Meter) -> None:
    """All sides in turn, a prompt at a time."""
    prompts = [prompt(seed) for seed in range(QUICK_PROMPTS if quick else PROMPTS)]
    for side in sides:
        side.attempt(write, prompts)
    for repeat in range(QUICK_REPEATS if quick else REPEATS):
        for asked in prompts:
            for side in sides:
                with meter.of(side.name):
                    side.attempt(measure_warm, asked)
        for side in sides if repeat < COLD_REPEATS else ():
            side.attempt(measure_cold, prompt(1000 + repeat))


def report(case: Case, sides: list[Side], meter: Meter, result: Result) -> None:
    for side in sides:
        row: Row = {
            **{"model": case.name, "side": side.name},
            **{"tokens": PROMPT_TOKENS, "loads": len(side.warm)},
        }
        if side.cold:
            row["cold ms"] = 1e3 * median(side.cold)
        if side.warm:
            row |= {"warm ms": 1e3 * median(side.warm), "warm max ms": 1e3 * max(side.warm)}
        if side.cold and side.warm:
            row["cold / warm"] = median(side.cold) / median(side.warm)
        if side.failure:
            row["gave up"] = side.failure
        row[LIMITED_BY] = meter.limited_by(side.name)
        result.rows.append(row)
    by_name = {side.name: side.warm for side in sides}
    ours, theirs = by_name["kvpool"], by_name["in-tree"]
    if not theirs:
        text = f"{case.name}: in-tree did not finish in {LIMIT_S:g} s: nothing to compare with"
        result.notes.append(text)
    else:
        ratio = median(ours) / median(theirs) if ours else None
        what = f"{case.name}: warm full hit, ours over in-tree's"
        result.targets.append(Target(what, ratio, MAX_RATIO, False))


if __name__ == "__main__":
    run_script(__doc__, measure)
