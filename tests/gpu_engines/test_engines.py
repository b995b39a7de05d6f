"""vLLM engines on a GPU: what one computed, another reads, whatever its block size and kernels.

    make gpu-test-engines

Needs a GPU and a CUDA build of vLLM. The engines of a test share the GPU.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.compare import LOGPROB_TOLERANCE, logprob_distance
from tests.e2e.engine import Completion, Engine, EngineSpec, Prompt
from tests.e2e.pool import expecting, files, pool, tokens
from tests.support.models import DeepseekShape, FalconH1Shape, LlamaShape, make_model

pytestmark = pytest.mark.gpu

CHUNK = 256
HEAD_TOKENS, PROMPT_TOKENS = 4 * CHUNK, 1264
GPU_PART = 0.08  # of the GPU's memory, for each engine
# Without torch.compile, whose first run takes a minute; attention is in the graphs all the same.
GRAPHS = {
    "enforce_eager": False,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL", "cudagraph_capture_sizes": [1, 8]},
}
# A new Python for each engine: a process that has used CUDA cannot be forked.
NEW_PYTHON = {"PYTHONHASHSEED": "0"}


@dataclass(frozen=True)
class Case:
    """A model, how engines compute it, and how far their log-probabilities may differ.

    `blocks`: the block sizes of the engine that saves and of the one that loads.
    """

    shape: LlamaShape
    llm: Mapping[str, Any]
    tolerance: float
    blocks: tuple[int, int] = (16, 64)
    options: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)


# In bfloat16 sums of other sizes of blocks round otherwise.
CASES = {
    "float32": Case(LlamaShape(kv_heads=2), {"dtype": "float32"}, LOGPROB_TOLERANCE),
    "old runner": Case(
        LlamaShape(kv_heads=2),
        {"dtype": "float32"},
        LOGPROB_TOLERANCE,
        env={"VLLM_USE_V2_MODEL_RUNNER": "0"},
    ),
    "graphs": Case(LlamaShape(head_dim=64), {"dtype": "bfloat16"} | GRAPHS, 0.05),
    "layerwise": Case(
        LlamaShape(head_dim=64, layers=8),
        {"dtype": "bfloat16", "async_scheduling": False},
        0.05,
        options={"layerwise": True},
        env={"VLLM_USE_V2_MODEL_RUNNER": "0"},
    ),
    "latents": Case(DeepseekShape(), {"dtype": "bfloat16"}, 0.05, blocks=(64, 64)),
    "states": Case(
        FalconH1Shape(),
        {"dtype": "float32", "enable_prefix_caching": True},
        LOGPROB_TOLERANCE,
        blocks=(256, 512),
    ),
}


class Engines:
    """Starts the engines of one case."""

    def __init__(self, case: Case, directory: Path) -> None:
        self._case, self._directory = case, directory
        self._model = make_model(directory, case.shape)
        self._store = files(directory / "pool")
        self._count = 0

    def start(self, block_size: int, *, pooled: bool = True, **llm: Any) -> Engine:
        self._count += 1
        spec = EngineSpec(
            model=self._model,
            block_size=block_size,
            kv_transfer_config=pool(self._store, **self._case.options) if pooled else None,
            env=NEW_PYTHON | dict(self._case.env),
            llm={"gpu_memory_utilization": GPU_PART} | dict(self._case.llm) | llm,
        )
        return Engine(spec, self._directory / f"engine{self._count}.log")

    def same(self, actual: Completion, expected: Completion) -> None:
        distance = logprob_distance(actual, expected)
        print(f"{self._directory.name}: {distance:.6f}, {actual.cached_tokens} tokens cached")
        assert distance < self._case.tolerance
        assert actual.token_ids == expected.token_ids


@pytest.fixture(params=CASES)
def engines(request: pytest.FixtureRequest, tmp_path: Path) -> Engines:
    return Engines(CASES[request.param], tmp_path)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def test_an_engine_with_other_blocks_reads(
    request: pytest.FixtureRequest, engines: Engines, stack: ExitStack
) -> None:
    """Each engine computes the prompt's head first, so all engines compute the same remainder."""
    case = CASES[request.node.callspec.params["engines"]]
    ids = tokens(seed=1, count=PROMPT_TOKENS)
    head, prompt = Prompt(ids=ids[:HEAD_TOKENS], max_tokens=1), Prompt(ids=ids, max_tokens=8)
    writing, reading = case.blocks
    plain = stack.enter_context(engines.start(writing, pooled=False))
    plain.generate(head)
    (expected,) = plain.generate(prompt)
    writer = stack.enter_context(engines.start(writing))
    assert writer.generate(head)[0].cached_tokens == 0
    (written,) = writer.generate(prompt)
    engines.same(written, expected)
    reader = stack.enter_context(engines.start(reading))
    (read,) = reader.generate(expecting(prompt, HEAD_TOKENS))
    assert read.cached_tokens == HEAD_TOKENS
    engines.same(read, expected)


@pytest.mark.parametrize("engines", ["float32", "old runner", "graphs", "layerwise"], indirect=True)
def test_blocks_are_saved_before_other_requests_take_them(
    engines: Engines, stack: ExitStack
) -> None:
    """A writer whose few blocks are used again at once, and a reader of all that it saved."""
    prompts = [Prompt(ids=tokens(seed=100 + i, count=3 * CHUNK + 40)) for i in range(40)]
    plain = stack.enter_context(engines.start(16, pooled=False))
    expected = [plain.generate(prompt)[0] for prompt in prompts]
    few = {"num_gpu_blocks_override": 4 * (3 * CHUNK + 64) // 16, "max_model_len": 2 * HEAD_TOKENS}
    writer = stack.enter_context(engines.start(16, **few))
    writer.generate(*prompts)
    reader = stack.enter_context(engines.start(64))
    hits = 0
    for prompt, wanted in zip(prompts, expected, strict=True):
        (read,) = reader.generate(expecting(prompt, 3 * CHUNK))
        hits += read.cached_tokens
        engines.same(read, wanted)
    assert hits == len(prompts) * 3 * CHUNK
