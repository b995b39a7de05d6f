"""The pool as a child of vLLM's MultiConnector, beside a connector of vLLM's own.

vLLM loads from the first child with a hit, and saves to all. The other child here is vLLM's
`ExampleConnector`. It keeps files, loads within the step, and hits only on equal whole prompts.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import IS_NEWEST, EngineShelf
from tests.e2e.engine import Engine, EngineError, EngineSpec, Prompt
from tests.e2e.pool import expecting, files, fresh, pool, same, tokens
from tests.e2e.test_events import FILE, blocks_of, told, until
from tests.support.faults import Fault, FaultControl
from tests.support.models import LlamaShape
from tests.support.releases import KV_EVENTS, since

pytestmark = pytest.mark.e2e

Llama = Callable[[LlamaShape], Path]
SHAPE = LlamaShape(kv_heads=2)
BLOCK, CHUNK = 32, 64
COUNT = 600
OURS = COUNT // CHUNK * CHUNK
THEIRS = (COUNT - 1) // BLOCK * BLOCK


@dataclass(frozen=True)
class Order:
    """The order of MultiConnector's children, and its policy for failed loads."""

    ours_first: bool
    policy: str

    @property
    def hit(self) -> int:
        return OURS if self.ours_first else THEIRS


ORDERS = [Order(True, "recompute"), Order(False, "fail")]


def multi(order: Order, directory: Path, **extra: object) -> Mapping[str, Any]:
    ours = {
        **pool(files(directory / "pool"), chunk_tokens=CHUNK, **extra),
        "kv_connector_module_path": "tests.support.faulty",
    }
    theirs = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(directory / "example")},
    }
    children = [ours, theirs] if order.ours_first else [theirs, ours]
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": order.policy,
        "kv_connector_extra_config": {"connectors": children},
    }


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_beside_another_connector(
    llama: Llama, engines: EngineShelf, tmp_path: Path, order: Order
) -> None:
    model = llama(SHAPE)
    control = FaultControl(tmp_path)
    whole = Prompt(ids=tokens(seed=1, count=COUNT))
    # Only the pool has a part of a prompt.
    part = Prompt(ids=[*whole.ids[:OURS], *tokens(seed=2, count=100)])
    other = Prompt(ids=[*whole.ids[:OURS], *tokens(seed=3, count=100)])
    plain = engines.get(EngineSpec(model=model))
    expected = plain.generate(whole, part, other)
    spec = EngineSpec(
        model=model,
        block_size=BLOCK,
        kv_transfer_config=multi(order, tmp_path),
        env={"KVPOOL_FAULTS": str(tmp_path)},
    )
    with told(spec, tmp_path) as (engine, subscriber):
        publishes = since(KV_EVENTS, engine.release())
        (computed,) = engine.generate(whole)
        same(computed, expected[0])
        assert computed.cached_tokens == 0
        assert computed.kv_transfer_params == {"kvpool": {"tokens": OURS}}

        # Both have saved: the first child serves the whole prompt, the pool alone a part of it.
        again = fresh(engine, expecting(whole, OURS))
        assert again.cached_tokens == order.hit
        same(again, expected[0])
        read = fresh(engine, expecting(part, OURS))
        assert read.cached_tokens == OURS
        same(read, expected[1])

        # Numbers and events of a child come through its parent.
        hits = OURS * (2 if order.ours_first else 1)
        if IS_NEWEST:  # whose numbers come with a later step; it counts no sources
            assert engine.metrics()["vllm:kvpool_hit_tokens"] == hits
            sources = engine.by_label("vllm:prompt_tokens_cached_by_source", "source")
            assert sources["disk"] == hits
        if publishes:
            until(engine, subscriber, lambda: bool(subscriber.of("BlockStored", FILE)))

        # What happens to a request whose load fails is the parent's to say.
        control.inject(Fault.FLIPPED, "get")
        failed = fresh(engine, expecting(other, OURS))
        control.heal()
        assert not IS_NEWEST or engine.metrics()["vllm:kvpool_failures"] > 0
        if order.policy == "recompute":
            same(failed, expected[2])
        else:
            assert failed.finish_reason == "error"
        same(fresh(engine, other), expected[2])

        assert engine.reset_pool()
        if publishes:
            until(engine, subscriber, lambda: bool(subscriber.of("BlockRemoved", FILE)))
        gone = Prompt(ids=[*whole.ids[:OURS], *tokens(seed=4, count=100)])
        assert fresh(engine, gone).cached_tokens == 0
    if publishes:
        stored = subscriber.of("BlockStored", FILE)
        assert all(event["block_size"] == BLOCK for event in stored)
        assert blocks_of(stored[:1])


def test_layer_by_layer_does_not_go_with_another_connector(llama: Llama, tmp_path: Path) -> None:
    """The other child would keep what a step computes before a load is known to have failed."""
    spec = EngineSpec(
        model=llama(SHAPE),
        block_size=BLOCK,
        kv_transfer_config=multi(ORDERS[0], tmp_path, layerwise=True),
        env={"KVPOOL_FAULTS": str(tmp_path)},
    )
    with pytest.raises(EngineError, match=r"layerwise (does not work with other|needs a release)"):
        Engine(spec, tmp_path / "engine.log")
