"""Windows of which only the end of a chunk is stored, as in DeepSeek V4.

vLLM's real scheduler and KV cache manager run. Every step compares all rows that a window reaches
(`rig.py`).
"""

import random
from dataclasses import replace
from typing import Any

import pytest
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from tests.faults.audit import (
    LIMIT_S,
    end,
    serve,
)
from tests.faults.model import FakeModel
from tests.faults.rig import BLOCK, RigSpec
from tests.faults.workshop import Workshop
from tests.support.memory_store import MemoryStore
from vllm_kvpool.vllm_adapt.kv_cache_specs import deepseek_v4

CHANCE = random.Random(2)
CHUNK = 64
PROMPT = CHANCE.choices(range(3, 1000), k=300)
OTHERS = [CHANCE.choices(range(3, 1000), k=250) for _ in range(6)]
HIT = len(PROMPT) // CHUNK * CHUNK
# Windows of one block and of two blocks, beside layers with full attention.
MODEL = FakeModel(layers=6, windows=(16, 32, 0, 16, 32, 0))
SPEC = RigSpec(model=MODEL, num_blocks=300, options={"chunk_tokens": CHUNK})


def keeps_ends(spec: Any) -> bool:
    return isinstance(spec, SlidingWindowSpec)


@pytest.fixture(autouse=True)
def windows_keep_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepseek_v4, "keeps_ends", keeps_ends)


def test_a_full_hit_leaves_one_token(workshop: Workshop) -> None:
    """The last token's window reaches back exactly as far as the stored cell."""
    store = workshop.memory()
    writer, reader = workshop.rig(SPEC, store), workshop.rig(SPEC, store)
    serve(writer, PROMPT)
    assert serve(reader, PROMPT[:HIT]) == HIT - 1
    end(workshop, writer, reader)


def test_cells_hold_no_more_than_a_window(workshop: Workshop) -> None:
    store = workshop.memory()
    writer = workshop.rig(SPEC, store)
    serve(writer, PROMPT)
    writer.settle()
    groups = writer.pool._service.core._names.layer_groups
    assert sorted((each.window.sliding, each.tail_tokens) for each in groups) == [
        (0, 0),
        (16, 16),
        (32, 32),
    ]
    plain = workshop.plain_store(store)
    assert isinstance(plain, MemoryStore)
    sizes: dict[str, set[int]] = {"full": set(), "window16": set(), "window32": set()}
    for key in plain._table.list_keys():
        if "@kind:" not in key:  # the manifest
            continue
        kind = next(kind for kind in sizes if f"@kind:{kind}" in key)
        sizes[kind].add(len(plain._table.take(key) or b""))
    [full], [small], [large] = sizes.values()
    assert 0 < full - small == 3 * (large - small)  # 64, 32 and 16 tokens, and a header each
    end(workshop, writer)


def test_a_prompt_that_begins_alike_is_loaded_up_to_the_end_of_a_chunk(workshop: Workshop) -> None:
    store = workshop.memory()
    writer, reader = workshop.rig(SPEC, store), workshop.rig(SPEC, store)
    serve(writer, PROMPT)
    assert serve(reader, PROMPT[:200] + OTHERS[0]) == 200 // CHUNK * CHUNK
    # The engine's own cache has no windows before the last hit's end.
    assert serve(reader, PROMPT[: 2 * CHUNK + 5] + OTHERS[1]) == 2 * CHUNK
    end(workshop, writer, reader)


def test_answers_are_saved_and_loaded(workshop: Workshop) -> None:
    """Decoding fills a chunk token by token, and windows free its first blocks before it is
    full."""
    store = workshop.memory()
    spec = replace(SPEC, options={**SPEC.options, "save_decode": True})
    writer, reader = workshop.rig(spec, store), workshop.rig(spec, store)
    request = writer.add(PROMPT, 90)
    writer.run(LIMIT_S)
    longer = PROMPT + writer.answers[request].tokens
    assert serve(reader, [*longer, 5]) == (len(longer) - 1) // CHUNK * CHUNK
    end(workshop, writer, reader)


def test_no_block_is_held_before_the_end_of_its_chunk(workshop: Workshop) -> None:
    """The prompt is computed in steps of less than a chunk."""
    rig = workshop.rig(replace(SPEC, max_batched_tokens=24), workshop.memory())
    rig.add(PROMPT)
    held = [0]
    rig.on_stepped.append(lambda _: held.append(rig.pool.saves.ledger.num_held))
    rig.run(LIMIT_S)
    assert max(held) <= 2 * (1 + 2) * 2  # two windows, in groups of up to two layers each
    assert BLOCK < CHUNK
    end(workshop, rig)
