"""vLLM's KV events of a pool: what a subscriber of a real engine is told."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from tests.e2e.engine import Engine, EngineSpec, Prompt
from tests.e2e.pool import files, pool, tokens
from tests.support.models import LlamaShape

pytestmark = pytest.mark.e2e

Llama = Callable[[LlamaShape], Path]
Event = dict[str, Any]
SHAPE = LlamaShape(kv_heads=2)
CHUNK = 64
PROMPT_TOKENS = 600
STORED_TOKENS = PROMPT_TOKENS // CHUNK * CHUNK
HOST, FILE = ("CPU", "LOCAL"), ("STORAGE", None)
MOST_STEPS = 50


class Subscriber:
    """Everything an engine has published so far, in order."""

    def __init__(self, endpoint: str) -> None:
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.subscribe(b"")
        self._socket.connect(endpoint)
        self.events: list[Event] = []

    def wait(self, timeout_ms: int) -> None:
        """Take what has come, or comes within the time."""
        while self._socket.poll(timeout_ms):
            _, _, batch = self._socket.recv_multipart()
            self.events += msgspec.msgpack.decode(batch)[1]
            timeout_ms = 0

    def close(self) -> None:
        self._socket.close(linger=0)

    def of(self, kind: str, medium: tuple[str, str | None]) -> list[Event]:
        return [
            event
            for event in self.events
            if event["type"] == kind and (event.get("medium"), event.get("locality")) == medium
        ]


@contextmanager
def told(spec: EngineSpec, directory: Path) -> Iterator[tuple[Engine, Subscriber]]:
    """An engine of the spec, and somebody who listens to it from its first event on."""
    endpoint = f"ipc://{directory}/events"
    config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}
    spec = replace(spec, llm={**spec.llm, "kv_events_config": config})
    subscriber = Subscriber(endpoint)
    try:
        with Engine(spec, directory / "engine.log") as engine:
            for seed in range(MOST_STEPS):  # until the connection is there
                engine.generate(
                    Prompt(
                        ids=tokens(1000 + seed, spec.block_size),
                        max_tokens=1,
                        kv_transfer_params={"kvpool": {"save": False}},
                    )
                )
                subscriber.wait(100)
                if subscriber.events:
                    break
            yield engine, subscriber
    finally:
        subscriber.close()


def until(engine: Engine, subscriber: Subscriber, done: Callable[[], bool]) -> None:
    """Let the engine take steps, with which events come, until `done`."""
    for _ in range(MOST_STEPS):
        subscriber.wait(100)
        if done():
            return
        engine.generate(Prompt(ids=[5, 6, 7], max_tokens=1))
    raise AssertionError(f"not told in time: {subscriber.events}")


def blocks_of(events: list[Event]) -> dict[bytes, tuple[bytes | None, tuple[int, ...], int]]:
    """Hash -> parent, tokens and size of each block; none may come twice."""
    blocks: dict[bytes, tuple[bytes | None, tuple[int, ...], int]] = {}
    for event in events:
        size, parent = event["block_size"], event["parent_block_hash"]
        ids = event["token_ids"]
        assert len(ids) == size * len(event["block_hashes"])
        for i, name in enumerate(event["block_hashes"]):
            assert name not in blocks, "a block was announced twice"
            blocks[name] = parent, tuple(ids[i * size : (i + 1) * size]), size
            parent = name
    return blocks


@pytest.mark.parametrize(("tp", "block_size"), [(1, 32), (2, 96)])
def test_what_is_stored_and_removed_is_told_with_vllms_own_hashes(
    llama: Llama, tmp_path: Path, tp: int, block_size: int
) -> None:
    """96 tokens are no multiple of a chunk: some blocks begin in one chunk and end in the next."""
    store = ["host://64MiB", files(tmp_path / "pool")]
    config = pool(store, chunk_tokens=CHUNK)
    spec = EngineSpec(model=llama(SHAPE), tp=tp, block_size=block_size, kv_transfer_config=config)
    ids = tokens(seed=1, count=PROMPT_TOKENS)
    count = STORED_TOKENS // block_size
    with told(spec, tmp_path) as (engine, subscriber):
        subscriber.events.clear()
        engine.generate(Prompt(ids=ids, max_tokens=1))

        def stored(medium: tuple[str, str | None]) -> list[Event]:
            return subscriber.of("BlockStored", medium)

        until(
            engine,
            subscriber,
            lambda: all(len(blocks_of(stored(each))) == count for each in (HOST, FILE)),
        )
        own = blocks_of(stored(("GPU", None)))
        wanted = dict(list(own.items())[:count])
        assert [ids_ for _, ids_, _ in wanted.values()] == [
            tuple(ids[i * block_size : (i + 1) * block_size]) for i in range(count)
        ]
        for medium in (HOST, FILE):
            assert blocks_of(stored(medium)) == wanted
            kinds = {(e["group_idx"], e["kv_cache_spec_kind"]) for e in stored(medium)}
            assert kinds == {
                (e["group_idx"], e["kv_cache_spec_kind"]) for e in stored(("GPU", None))
            }

        # What is stored already is not told again.
        assert engine.generate(Prompt(ids=[*ids[:400], 9, 9], max_tokens=1))[0].cached_tokens
        subscriber.wait(200)
        assert blocks_of(stored(FILE)) == wanted

        # vLLM has everybody forget all blocks, and so it is told once more.
        assert engine.reset_prefix_cache()
        subscriber.events.clear()
        until(engine, subscriber, lambda: blocks_of(stored(FILE)) == wanted)
        assert subscriber.events[0]["type"] == "AllBlocksCleared"
        before = engine.by_label("vllm:prompt_tokens_cached_by_source", "source")
        assert engine.generate(Prompt(ids=ids, max_tokens=1))[0].cached_tokens
        after = engine.by_label("vllm:prompt_tokens_cached_by_source", "source")
        grown = {source: after[source] - before[source] for source in after}
        assert grown == dict.fromkeys(after, 0) | {"host": count * block_size}

        def removed(medium: tuple[str, str | None]) -> Counter[bytes]:
            gone = subscriber.of("BlockRemoved", medium)
            return Counter(name for event in gone for name in event["block_hashes"])

        assert engine.reset_pool()
        until(engine, subscriber, lambda: bool(removed(HOST) and removed(FILE)))
        assert removed(HOST) == removed(FILE) == Counter(wanted.keys())
