"""Helpers of the pool's end-to-end tests."""

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.e2e.compare import LOGPROB_TOLERANCE, logprob_distance
from tests.e2e.engine import Completion, Engine, Prompt
from vllm_kvpool.storage.file.space import FORMAT_DIR

VOCAB = 1024
MOST_STEPS = 50


def pool(store: str | list[str], *, role: str = "kv_both", **options: Any) -> Mapping[str, Any]:
    """A `kv_transfer_config` of the connector, by its class name alone."""
    return {
        "kv_connector": "KVPoolConnector",
        "kv_role": role,
        # A busy test machine must not turn a hit into a miss.
        "kv_connector_extra_config": {"store": store, "lookup_timeout_ms": 20_000, **options},
    }


def files(directory: Path) -> str:
    """The URL of a file store."""
    return f"file://{directory}?size=256MiB"


def cell_files(directory: Path) -> list[Path]:
    """The files of the cells in such a store, in one order; some may be removed meanwhile."""
    return sorted(filter(_is_cell, (directory / FORMAT_DIR / "objects").rglob("*")))


def num_aliases(directory: Path) -> int:
    """Return the number of aliases in a store's directory."""
    return sum(b"@kind:alias@" in path.read_bytes() for path in cell_files(directory))


def _is_cell(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return b'{"kvpool_manifest"' not in file.read(4096)
    except (FileNotFoundError, IsADirectoryError):
        return False


def tokens(seed: int, count: int, vocab: int = VOCAB) -> list[int]:
    """A prompt that no other seed shares a chunk with."""
    return random.Random(seed).choices(range(3, vocab), k=count)


def same(actual: Completion, expected: Completion) -> None:
    """Both outputs are what one model says, up to rounding."""
    assert actual.token_ids == expected.token_ids
    assert logprob_distance(actual, expected) < LOGPROB_TOLERANCE


def expecting(prompt: Prompt, count: int) -> Prompt:
    """The same prompt, waiting for so many tokens: an engine's puts end after its answer."""
    wish = {"kvpool": {"expect_tokens": count, "expect_timeout_ms": 20_000}}
    return replace(prompt, kv_transfer_params=wish)


def unpooled(prompt: Prompt) -> Prompt:
    """The same prompt, which neither loads nor saves."""
    return replace(prompt, kv_transfer_params={"kvpool": {"load": False, "save": False}})


def fresh(engine: Engine, prompt: Prompt) -> Completion:
    """The answer of an engine that has forgotten what it computed itself."""
    assert engine.reset_prefix_cache()
    return engine.generate(prompt)[0]


def counts_once(
    engine: Engine, is_so: Callable[[Mapping[str, float]], bool]
) -> Mapping[str, float]:
    """Return an engine's metrics once `is_so` holds: outcomes of puts come with later steps."""
    for _ in range(MOST_STEPS):
        counts = engine.metrics()
        if is_so(counts):
            return counts
        engine.generate(Prompt(ids=[5, 6, 7], max_tokens=1))
    raise AssertionError(f"not counted in {MOST_STEPS} steps: {counts}")
