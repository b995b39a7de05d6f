"""Engines of the published vLLM-Ascend on an emulated NPU, and CPU engines, on one store.

The emulated NPU runs its streams late and in a random order (`tests/emulated_npu`). So answers
change if the pool reads KV before it is computed, or frees KV before it is copied.
`make test-ascend` makes the environment: `KVPOOL_ASCEND_PYTHON` names its interpreter, `ASCEND` the
vLLM-Ascend release in it.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from tests.e2e.conftest import EngineShelf
from tests.e2e.engine import Engine, EngineError, EngineSpec, Image, Prompt
from tests.e2e.pool import expecting, files, fresh, pool, same, tokens
from tests.e2e.vision import about
from tests.support.faults import Fault, FaultControl
from tests.support.models import (
    DeepseekShape,
    LlamaShape,
    Qwen2VLShape,
    SlidingLlamaShape,
    make_model,
)
from tests.support.mooncake_master import MooncakeMaster

pytestmark = [pytest.mark.e2e, pytest.mark.ascend, pytest.mark.timeout(900)]

ROOT = Path(__file__).parent.parent.parent
RELEASE = os.environ.get("ASCEND", "0.23.0")
PYTHON = Path(os.environ.get("KVPOOL_ASCEND_PYTHON", ROOT / f".venv-ascend-{RELEASE}/bin/python"))
SHAPE = LlamaShape(kv_heads=2)
CHUNK = 32
COUNT = 620
STORED = COUNT // CHUNK * CHUNK
BLOCK = {"npu": 128, "cpu": 32}
FEW_BLOCKS = {"num_gpu_blocks_override": 22, "max_model_len": 1024}
"""Enough for the prompts of four requests, not for their answers."""
PREEMPTED_ANSWER = 40
BFLOAT16_TOLERANCE = 0.05  # of log-probabilities
UNDERFLOWS = {"0.23.0": False, "0.26.0rc1": True}
"""By release: True if vLLM-Ascend's `RecomputeCPUOffloadConnector` ends an engine at the first
preemption under asynchronous scheduling. In 0.26.0rc1 `Scheduler` marks outputs of preempted
requests as stale, and `AsyncRecomputeScheduler` counts them all the same."""

Llama = Callable[[LlamaShape], Path]
Start = Callable[..., Engine]


class Side(NamedTuple):
    """An engine's device and number of ranks."""

    device: str
    tp: int

    def __str__(self) -> str:
        return f"{self.device}{self.tp}"


@pytest.fixture
def start(llama: Llama, engines: EngineShelf) -> Start:
    """`start(side, kv_transfer_config, env, **llm)`: an engine, shared by tests."""
    assert PYTHON.exists(), f"no {PYTHON}: make test-ascend sets it up"

    def start(
        side: Side,
        config: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        **llm: Any,
    ) -> Engine:
        python = {"python": PYTHON} if side.device == "npu" else {}
        return engines.get(
            EngineSpec(
                model=llama(SHAPE),
                tp=side.tp,
                block_size=BLOCK[side.device],
                kv_transfer_config=config,
                env=dict(env or {}),
                llm=llm,
                **python,
            )
        )

    return start


def found(side: Side, stored: int = STORED) -> int:
    """So many of the stored tokens are whole blocks of an engine."""
    return stored // BLOCK[side.device] * BLOCK[side.device]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ascend")


CPU, NPU, NPU2 = Side("cpu", 1), Side("npu", 1), Side("npu", 2)


def test_an_npu_engine_without_a_pool_answers_as_a_cpu_engine(start: Start) -> None:
    """The emulated device computes rightly."""
    prompt = Prompt(ids=tokens(seed=801, count=COUNT))
    same(fresh(start(NPU), prompt), fresh(start(CPU), prompt))


PAIRS = [(NPU, NPU), (NPU, CPU), (CPU, NPU), (NPU2, NPU), (NPU, NPU2), (NPU2, CPU)]


@pytest.mark.parametrize(("writer", "reader"), PAIRS, ids=str)
def test_what_one_engine_computed_the_other_reuses(
    start: Start, store: Path, writer: Side, reader: Side
) -> None:
    prompt = Prompt(ids=tokens(seed=810 + PAIRS.index((writer, reader)), count=COUNT))
    expected = fresh(start(CPU), prompt)
    config = pool(files(store), chunk_tokens=CHUNK)
    written = fresh(start(writer, config), prompt)
    assert written.cached_tokens == 0
    same(written, expected)
    read = fresh(start(reader, config), expecting(prompt, STORED))
    assert read.cached_tokens == found(reader)
    same(read, expected)


@pytest.mark.parametrize("seed", [1, 2])
def test_any_order_of_the_streams_gives_the_same_answers(
    start: Start, tmp_path: Path, seed: int
) -> None:
    prompts = [Prompt(ids=tokens(seed=830 + i, count=COUNT - 50 * i)) for i in range(3)]
    expected = start(CPU).generate(*prompts)
    config = pool(files(tmp_path), chunk_tokens=CHUNK)
    engine = start(NPU, config, {"NPU_SEED": str(seed)})
    for actual, wanted in zip(engine.generate(*prompts), expected, strict=True):
        same(actual, wanted)
    for prompt, wanted in zip(prompts, expected, strict=True):
        read = fresh(engine, expecting(prompt, len(prompt.ids) // CHUNK * CHUNK))
        assert read.cached_tokens > 0
        same(read, wanted)


def test_prefill_and_decode_share_under_the_options_of_the_guide(
    start: Start, tmp_path: Path
) -> None:
    """The shipped configurations: `kv_producer` at TP 2, `kv_consumer` at TP 1, each with its own
    `additional_config`. The emulated device has no graphs, so both are eager here."""
    prompt = Prompt(ids=tokens(seed=850, count=COUNT))
    expected = fresh(start(CPU), prompt)
    prefill = start_shipped(start, "ascend_prefill.yaml", NPU2, tmp_path)
    same(fresh(prefill, prompt), expected)
    decode = start_shipped(start, "ascend_decode.yaml", NPU, tmp_path)
    read = fresh(decode, expecting(prompt, STORED))
    assert read.cached_tokens == found(NPU)
    same(read, expected)


def test_balance_scheduling_shares_with_kv_both(start: Start, tmp_path: Path) -> None:
    prompt = Prompt(ids=tokens(seed=855, count=COUNT))
    expected = fresh(start(CPU), prompt)
    engine = start_shipped(start, "ascend_both.yaml", NPU, tmp_path)
    same(fresh(engine, prompt), expected)
    read = fresh(engine, expecting(prompt, STORED))
    assert read.cached_tokens == found(NPU)
    same(read, expected)


def test_a_cpu_a_producer_and_a_consumer_with_graphs_have_one_namespace(llama: Llama) -> None:
    """Under the shipped configurations, as each platform completes them. The emulated device cannot
    start an engine with graphs, so no engine is started here."""
    engines = []
    for name in ("prefill", "decode"):
        config = shipped(f"ascend_{name}.yaml", "file:///nowhere")
        engines.append(
            {
                "enforce_eager": config.get("enforce-eager", False),
                "additional_config": config["additional-config"],
                "kv_transfer_config": config["kv-transfer-config"],
            }
        )
    assert [each["enforce_eager"] for each in engines] == [True, False]
    names = {
        *namespaces_of(PYTHON, llama(SHAPE), *engines),
        *namespaces_of(Path(sys.executable), llama(SHAPE), {}),
    }
    assert len(names) == 1


def namespaces_of(python: Path, model: Path, *engines: Mapping[str, Any]) -> list[str]:
    """The namespace of each engine, configured in the environment of `python`."""
    command = [str(python), "-m", "tests.e2e.namespaces_of", str(model), json.dumps(engines)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    names: list[str] = json.loads(done.stdout.splitlines()[-1])
    return names


def start_shipped(start: Start, name: str, side: Side, directory: Path) -> Engine:
    """An engine of a file below `configs/`, at a size of this machine."""
    config = shipped(name, files(directory))
    transfer, additional = config["kv-transfer-config"], config["additional-config"]
    return start(side, transfer, additional_config=additional)


def shipped(name: str, store: str) -> dict[str, Any]:
    """A file below `configs/`, with a store of this machine."""
    config: dict[str, Any] = yaml.safe_load((ROOT / "configs" / name).read_text())
    config["kv-transfer-config"]["kv_connector_extra_config"] |= {
        "store": store,
        "chunk_tokens": CHUNK,
        "lookup_timeout_ms": 20_000,
    }
    return config


@pytest.mark.parametrize("fault", [Fault.FLIPPED, Fault.FAILED], ids=lambda fault: fault.name)
@pytest.mark.parametrize("side", [NPU, NPU2], ids=str)
def test_a_load_that_fails_is_computed(
    start: Start, tmp_path: Path, side: Side, fault: Fault
) -> None:
    prompt = Prompt(ids=tokens(seed=860, count=COUNT))
    expected = fresh(start(CPU), prompt)
    control = FaultControl(tmp_path)
    config = {
        **pool(files(tmp_path / "pool"), chunk_tokens=CHUNK),
        "kv_connector_module_path": "tests.support.faulty",
    }
    engine = start(side, config, {"KVPOOL_FAULTS": str(tmp_path)})
    same(fresh(engine, prompt), expected)
    control.inject(fault, "get")
    same(fresh(engine, expecting(prompt, STORED)), expected)
    control.heal()
    read = fresh(engine, expecting(prompt, STORED))
    same(read, expected)


def test_requests_that_are_preempted_load_what_they_saved(start: Start, tmp_path: Path) -> None:
    """Twice: while everything is computed and saved, and while it is loaded."""
    prompts = [
        Prompt(ids=tokens(seed=880 + i, count=COUNT), max_tokens=PREEMPTED_ANSWER) for i in range(4)
    ]
    expected = start(CPU).generate(*prompts)
    engine = start(NPU, pool(files(tmp_path), chunk_tokens=CHUNK), **FEW_BLOCKS)
    for _ in range(2):
        assert engine.reset_prefix_cache()
        for actual, wanted in zip(engine.generate(*prompts), expected, strict=True):
            same(actual, wanted)
    counted = engine.metrics()
    assert counted["vllm:num_preemptions"] > 0
    assert counted["vllm:kvpool_hit_tokens"] > 0


def test_a_reset_of_the_pool_forgets_its_cells(start: Start, store: Path) -> None:
    prompt = Prompt(ids=tokens(seed=890, count=COUNT))
    expected = fresh(start(CPU), prompt)
    engine = start(NPU, pool(files(store), chunk_tokens=CHUNK))
    same(fresh(engine, prompt), expected)
    assert fresh(engine, expecting(prompt, STORED)).cached_tokens == found(NPU)
    assert engine.reset_pool()
    computed = fresh(engine, prompt)
    assert computed.cached_tokens == 0
    same(computed, expected)
    read = fresh(engine, expecting(prompt, STORED))
    assert read.cached_tokens == found(NPU)
    same(read, expected)


@pytest.fixture(scope="module")
def master() -> Iterator[MooncakeMaster]:
    with MooncakeMaster() as running:
        yield running


@pytest.mark.parametrize(("writer", "reader"), [(NPU2, NPU), (NPU, NPU2)], ids=str)
def test_npus_share_through_mooncake_over_ascend(
    start: Start, master: MooncakeMaster, writer: Side, reader: Side
) -> None:
    """Mooncake's published wheel for NPUs, on the engine of vLLM-Ascend's own connectors. Each rank
    gives a segment, and gets cells out of other ranks' memory."""
    store = f"mooncake://{master.address}?protocol=ascend&segment=1GiB"
    config = pool(store, chunk_tokens=CHUNK)
    prompt = Prompt(ids=tokens(seed=895 + reader.tp, count=COUNT))
    expected = fresh(start(CPU), prompt)
    first = start(writer, config)
    same(fresh(first, prompt), expected)
    second = start(reader, config)
    read = fresh(second, expecting(prompt, STORED))
    assert read.cached_tokens == found(reader)
    same(read, expected)
    assert "evicted as a group" in second.log.read_text()


def test_layer_by_layer_is_refused_by_name(start: Start, tmp_path: Path) -> None:
    """vLLM before 0.29 knows no loads within a step, and vLLM-Ascend ends at 0.26."""
    with pytest.raises(EngineError, match="layerwise needs a release of vLLM that knows loads"):
        start(NPU, pool(files(tmp_path), layerwise=True), async_scheduling=False)


@pytest.mark.parametrize("full_every", [100, 3], ids=["windows alone", "windows and full"])
def test_layers_with_a_sliding_window_are_computed_again(
    engines: EngineShelf, tmp_path: Path, full_every: int
) -> None:
    """vLLM 0.23.0 and 0.26.0 would not survive a failed load of a window, on any device
    (`compat.reports_failed_loads_by_request`), so the pool loads nothing and says so.

    `Scheduler._update_requests_with_invalid_blocks` unpacks the blocks of one KV cache group and
    raises with more. A model of windows alone has one group. But a request resumes at the first
    failed block, and the window before that block was not loaded."""
    model = make_model(tmp_path, SlidingLlamaShape(full_every=full_every))
    config = pool(files(tmp_path / "pool"), chunk_tokens=CHUNK)
    npu = {"block_size": BLOCK["npu"], "python": PYTHON}
    prompt = Prompt(ids=tokens(seed=900 + full_every, count=COUNT))
    expected = fresh(engines.get(EngineSpec(model=model, **npu)), prompt)
    pooled = engines.get(EngineSpec(model=model, kv_transfer_config=config, **npu))
    assert "kvpool: nothing is loaded" in pooled.log.read_text()
    for asked in (prompt, expecting(prompt, STORED)):
        computed = fresh(pooled, asked)
        assert computed.cached_tokens == 0
        same(computed, expected)


def test_latents_are_shared_by_npus_of_any_number_of_ranks(
    engines: EngineShelf, tmp_path: Path
) -> None:
    """MLA. vLLM-Ascend attends in bfloat16 here. CPU engines without AMX compute other values
    (`compat.DEFECTS`), so transformers says what is right."""
    model = make_model(tmp_path, DeepseekShape())
    config = pool(files(tmp_path / "pool"), chunk_tokens=CHUNK)
    npu = {"block_size": BLOCK["npu"], "python": PYTHON}
    ranks = {
        tp: engines.get(EngineSpec(model=model, tp=tp, kv_transfer_config=config, **npu))
        for tp in (1, 2)
    }
    for seed, writer, reader in ((920, 1, 2), (921, 2, 1)):
        prompt = Prompt(ids=tokens(seed=seed, count=COUNT))
        expected = answer_of_transformers(model, prompt)
        written = fresh(ranks[writer], prompt)
        assert written.cached_tokens == 0
        read = fresh(ranks[reader], expecting(prompt, STORED))
        assert read.cached_tokens == found(NPU)
        for actual in (written, read):
            assert actual.token_ids == list(expected)
            chosen = [each[i] for each, i in zip(actual.logprobs, expected, strict=True)]
            assert chosen == pytest.approx(list(expected.values()), abs=BFLOAT16_TOLERANCE)


def answer_of_transformers(path: Path, prompt: Prompt) -> dict[int, float]:
    """The tokens of the answer, each once, with their log-probabilities in float32."""
    # Here, or each process that collects tests would import them.
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    answer: dict[int, float] = {}
    for _ in range(prompt.max_tokens):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt.ids, *answer]])).logits[0, -1]
        value, index = logits.log_softmax(-1).max(-1)
        answer[int(index)] = float(value)
    return answer


def npu_with_images(directory: Path) -> EngineSpec:
    return EngineSpec(
        model=make_model(directory, Qwen2VLShape()),
        block_size=BLOCK["npu"],
        python=PYTHON,
        images=1,
        llm={"limit_mm_per_prompt": {"image": 1, "video": 0}},
    )


def test_images_are_shared_by_their_content(engines: EngineShelf, tmp_path: Path) -> None:
    """A vision encoder runs on the NPU, too."""
    config = pool(files(tmp_path / "pool"), chunk_tokens=CHUNK)
    spec = npu_with_images(tmp_path)
    prompt, other = (about(Image(seed=seed, width=280, height=336)) for seed in (1, 2))
    alone = engines.get(spec)
    pooled = engines.get(replace(spec, kv_transfer_config=config))
    expected = fresh(alone, prompt)
    same(fresh(pooled, prompt), expected)
    read = fresh(pooled, expecting(prompt, BLOCK["npu"]))
    assert read.cached_tokens == BLOCK["npu"]
    same(read, expected)
    computed = fresh(pooled, other)
    assert computed.cached_tokens == 0
    same(computed, fresh(alone, other))


def test_embeddings_are_refused_by_name(engines: EngineShelf, tmp_path: Path) -> None:
    """The encoder is not the obstacle (`test_images_are_shared_by_their_content`). vLLM 0.23.0 and
    0.26.0 have no `start_worker_services` and no `take_unavailable_requests` of connectors, and
    requests of 0.23.0 have no `ec_transfer_params`."""
    config = {"ec_connector": "KVPoolECConnector", "ec_role": "ec_producer"}
    spec = replace(npu_with_images(tmp_path), ec_transfer_config=config)
    with pytest.raises(EngineError, match=r"KVPoolECConnector needs vLLM 0\.32 or newer"):
        engines.get(spec)


def test_beneath_ascends_multi_connector_both_children_load(start: Start, store: Path) -> None:
    """`RecomputeCPUOffloadConnector` of the wheel keeps what vLLM-Ascend's scheduler preempts in
    host memory, down to a part of a block; the pool has what an engine has computed before. The
    first answer is of requests that the other child restores, the second of those that the pool
    has loaded before."""
    prompts = [
        Prompt(ids=tokens(seed=910 + i, count=COUNT), max_tokens=PREEMPTED_ANSWER) for i in range(4)
    ]
    expected = start(CPU).generate(*prompts)
    writer = start(NPU, pool(files(store), chunk_tokens=CHUNK))
    ours = pool(files(store), role="kv_consumer", chunk_tokens=CHUNK)
    engine = start_recomputing(start, ours, async_scheduling=not UNDERFLOWS[RELEASE])
    for actual, wanted in zip(engine.generate(*prompts), expected, strict=True):
        same(actual, wanted)
    writer.generate(*prompts)
    assert engine.reset_prefix_cache()
    wished = [expecting(prompt, STORED) for prompt in prompts]
    for actual, wanted in zip(engine.generate(*wished), expected, strict=True):
        assert actual.cached_tokens >= found(NPU)
        same(actual, wanted)
    assert engine.metrics()["vllm:num_preemptions"] > 0
    log = engine.log.read_text()
    assert "Recompute preemption offload enabled" in log
    assert "falls back without offload" not in log


def start_recomputing(start: Start, *others: Mapping[str, Any], async_scheduling: bool) -> Engine:
    """Return an engine of few blocks that keeps what it preempts in host memory, with connectors
    beside the one that does so."""
    theirs = {
        "kv_connector": "RecomputeCPUOffloadConnector",
        "kv_role": "kv_consumer",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 256 << 20},
    }
    config = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_consumer",
        "kv_connector_extra_config": {"connectors": [theirs, *others]},
    }
    return start(
        NPU,
        config,
        additional_config={"recompute_scheduler_enable": True},
        async_scheduling=async_scheduling,
        **FEW_BLOCKS,
    )


def test_offload_of_vllm_ascend_alone_ends_engines_of_releases_that_underflow(start: Start) -> None:
    """Without the pool, so the pool is not the cause. Other releases answer."""
    prompts = [
        Prompt(ids=tokens(seed=915 + i, count=COUNT), max_tokens=PREEMPTED_ANSWER) for i in range(4)
    ]
    engine = start_recomputing(start, async_scheduling=True)
    if UNDERFLOWS[RELEASE]:
        with pytest.raises(EngineError, match=r"assert request\.num_output_placeholders >= 0"):
            engine.generate(*prompts)
        return
    for actual, wanted in zip(
        engine.generate(*prompts), start(CPU).generate(*prompts), strict=True
    ):
        same(actual, wanted)


def test_bfloat16_answers_are_those_without_a_pool(start: Start, tmp_path: Path) -> None:
    prompt = Prompt(ids=tokens(seed=870, count=COUNT))
    expected = fresh(start(NPU, dtype="bfloat16"), prompt)
    engine = start(NPU, pool(files(tmp_path), chunk_tokens=CHUNK), dtype="bfloat16")
    same(fresh(engine, prompt), expected)
    read = fresh(engine, expecting(prompt, STORED))
    assert read.cached_tokens == found(NPU)
    assert read.token_ids == expected.token_ids


def test_the_first_run_on_a_card_reports_a_hit_and_equal_answers(llama: Llama) -> None:
    """The script that a person with a card runs, on the emulated one."""
    script = ROOT / "examples" / "ascend" / "first_run.py"
    command = [str(PYTHON), str(script), str(llama(SHAPE))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "OK: 768 of 1000 tokens were loaded, and all answers are equal." in done.stdout
    assert f'"vllm-ascend": "{RELEASE}"' in done.stdout
