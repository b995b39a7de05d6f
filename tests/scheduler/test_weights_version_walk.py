"""Weights that change at any time: a cell's name always tells the weights it was computed with.

In place of KV, every token has the set of epochs in which it and all tokens before it were
computed: attention mixes them. The walk plays vLLM's scheduler, its own prefix cache, the workers
and the store. The scheduler side and the lookup service are the package's own. All prompts begin
alike, so that requests of all epochs want the same chunks.
"""

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from tests.scheduler.scheduler_bench import CHUNK, NAMES, Bench, View, put_cells
from tests.support.invariants import check
from vllm_kvpool.config import KVPoolConfig, RequestOptions
from vllm_kvpool.scheduler.blocks import all_blocks
from vllm_kvpool.scheduler.messages import StepReport
from vllm_kvpool.transfer.ops import HostCacheChange, LoadPlan, SavePlan

BLOCK = 16
VERSIONS = ("", "sample:b", "drawn:c")
MAX_TOKENS = 200
MAX_LIVE = 4
NUM_MOVES = 400
Tags = frozenset[str]


@dataclass
class Live:
    """A request as the engine keeps it; `kv` has a set of epochs for each computed token."""

    view: View
    state: str = "waiting"  # waiting, loading, running
    kv: list[Tags] = field(default_factory=list)
    load: LoadPlan | None = None


@dataclass
class Save:
    """A save that is not stored yet, with the pages' content when they were final."""

    plan: SavePlan
    content: list[list[Tags]]
    is_gathered: bool = False


class Walk:
    """A walk of random moves; the same seed makes the same choices."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        host_tier = self.random.random() < 0.5
        self.bench = Bench(
            BLOCK,
            max_pinned=CHUNK // BLOCK + self.random.randint(1, 8),
            config=KVPoolConfig(save_decode=self.random.random() < 0.5),
            host_tier=host_tier,
        )
        self.seen: Counter[str] = Counter()
        self.host_tier = host_tier
        self.weights_version = ""
        self.live: dict[str, Live] = {}
        self.own: list[list[Tags]] = []  # the engine's own cache: blocks of the prompts' beginning
        self.ended: dict[str, list[Tags]] = {}  # of requests whose last save is not planned yet
        self.saves: list[Save] = []
        self.cells: dict[str, list[Tags]] = {}
        self.host: dict[str, list[Tags]] = {}
        self.arrived = 0

    def named(self, *states: str) -> list[str]:
        return sorted(r for r, live in self.live.items() if live.state in states)

    def pick(self, *states: str) -> str:
        return self.random.choice(self.named(*states))

    # The engine

    def arrive(self) -> None:
        if len(self.live) >= MAX_LIVE:
            return
        self.arrived += 1
        length = self.random.choice((MAX_TOKENS, 100, 2 * CHUNK, CHUNK + 1, 3))
        request_id = f"r{self.arrived}"
        self.live[request_id] = Live(self.bench.add(request_id, length, RequestOptions()))

    def admit(self) -> None:
        if not self.named("waiting"):
            return
        request_id = self.pick("waiting")
        live = self.live[request_id]
        view = live.view
        local = min(len(self.own), (view.num_tokens - 1) // BLOCK) * BLOCK
        count, _ = self.bench.match(request_id, local)
        assert count is not None
        if self.random.random() < 0.2:  # no room for it
            return
        live.kv = [tags for block in self.own[: local // BLOCK] for tags in block]
        self.bench.allocate(request_id, local, count)
        live.state = "running"
        if count:
            live.state, live.load = "loading", self.bench.scheduler.load_of(request_id)
            assert live.load.weights_version == self.weights_version, "an offer of other weights"

    def step(self) -> None:
        scheduled = {}
        for request_id in self.named("running"):
            view = self.live[request_id].view
            left = view.num_tokens - view.num_computed_tokens
            count = min(left, self.random.choice((MAX_TOKENS, CHUNK + BLOCK, CHUNK, 1, 0)))
            if count:
                scheduled[request_id] = count
        for request_id, count in scheduled.items():
            live = self.live[request_id]
            before = live.kv[-1] if live.kv else frozenset()
            live.kv += [before | {self.weights_version}] * count
        self.plan(scheduled)
        for request_id in scheduled:
            live = self.live[request_id]
            for number in range(len(self.own), len(live.kv) // BLOCK):
                self.own.append(live.kv[number * BLOCK : (number + 1) * BLOCK])
            if live.view.num_computed_tokens == live.view.num_tokens < MAX_TOKENS:
                live.view.output.append(live.view.num_tokens)

    def plan(self, scheduled: dict[str, int] | None = None) -> None:
        for save in self.bench.step(**(scheduled or {})).saves:
            live = self.live.get(save.request_id)
            kv = self.ended[save.request_id] if live is None else live.kv
            start = save.first_chunk * CHUNK
            stop = start + len(save.hashes) * CHUNK
            assert stop <= len(kv), "tokens that are not computed"
            self.saves.append(Save(save, [kv[at : at + CHUNK] for at in range(start, stop, CHUNK)]))

    def preempt(self) -> None:
        if self.named("running"):
            self.put_back(self.pick("running"))

    def put_back(self, request_id: str) -> None:
        live = self.live[request_id]
        live.view.preempt()
        live.state, live.kv = "waiting", []
        self.bench.tables[request_id] = []

    def finish(self) -> None:
        if not self.live:
            return
        request_id = self.random.choice(sorted(self.live))
        self.ended[request_id] = self.live.pop(request_id).kv
        self.bench.finish(request_id)

    # The workers

    def load(self) -> None:
        """End a planned load with the cells that the store or host memory has by now."""
        if not self.named("loading"):
            return
        request_id = self.pick("loading")
        live = self.live[request_id]
        self.plan()  # the load is told at the latest now
        load, view = live.load, live.view
        assert load is not None
        names = NAMES.with_weights(load.weights_version)
        stop, kv = load.token_start, list(live.kv)
        for chunk, chunk_hash in enumerate(load.hashes, load.first_chunk):
            [key] = names.of_chunk(chunk_hash)
            found = self.cells.get(key, self.host.get(names.chunk_id(chunk_hash)))
            if found is None:
                break
            stop = min((chunk + 1) * CHUNK, load.token_stop)
            before = kv[-1] if kv else frozenset()
            kv += [tags | before for tags in found[len(kv) - chunk * CHUNK : stop - chunk * CHUNK]]
        live.load, live.state = None, "running"
        self.seen[f"loaded of {load.weights_version}"] += 1
        if stop == load.token_stop:
            self.bench.scheduler.load_ended(request_id)
            live.kv = kv
            return
        self.bench.load_stops(request_id, stop)
        live.kv = kv[: view.num_computed_tokens]
        if not view.num_computed_tokens:
            live.state, self.bench.tables[request_id] = "waiting", []

    def end_save(self) -> None:
        """Gather a save now, and store it now or later."""
        if not self.saves:
            return
        save = self.random.choice(self.saves)
        plan = save.plan
        if not save.is_gathered:
            save.is_gathered = True
            self.bench.scheduler.apply(StepReport(gathered={plan.job_id: 1}))
            if self.random.random() < 0.5:
                return
        self.saves.remove(save)
        names = NAMES.with_weights(plan.weights_version)
        for chunk_hash, content in zip(plan.hashes, save.content, strict=True):
            for tags in content:
                assert tags == {plan.weights_version}, (
                    f"{set(tags)} saved as {plan.weights_version!r}"
                )
            keys = names.of_chunk(chunk_hash)
            put_cells(self.bench.memory, keys)
            self.cells |= dict.fromkeys(keys, content)
            self.seen[f"saved as {plan.weights_version}"] += 1
            if self.host_tier:
                group = names.chunk_id(chunk_hash)
                self.host[group] = content
                self.bench.scheduler.apply(StepReport(host={0: HostCacheChange((group,), ())}))

    def evict(self) -> None:
        if not self.cells:
            return
        key = self.random.choice(sorted(self.cells))
        del self.cells[key]
        self.bench.memory.remove([key])

    # The user

    def change_weights(self) -> None:
        self.weights_version = self.random.choice(VERSIONS)
        self.bench.scheduler.weights_changed(self.weights_version)

    def empty_own_cache(self) -> None:
        """Empty the cache as vLLM does around a change of weights: running requests start anew."""
        if self.named("loading"):
            return
        for request_id in self.named("running"):
            self.put_back(request_id)
        if not self.bench.scheduler.saves.has_pins:  # else vLLM refuses
            self.own.clear()
            self.bench.scheduler.own_cache_was_reset()

    def reset(self) -> None:
        assert self.bench.scheduler.reset()
        gone = NAMES.with_weights(self.weights_version).namespace
        self.cells = {k: v for k, v in self.cells.items() if not k.startswith(f"{gone}@")}
        self.plan()
        # Workers drop cells that they have not put, and forget their host memory.
        for save in self.saves:
            if not save.is_gathered:
                self.bench.scheduler.apply(StepReport(gathered={save.plan.job_id: 1}))
        self.saves.clear()
        self.host.clear()
        self.bench.end_reset()

    def names_are_true(self) -> None:
        check(self.bench.scheduler)
        self.bench.pins.check()
        stored = self.bench.memory._table.list_keys()
        assert sorted(stored) == sorted(self.cells)
        waiting = [save.plan for save in self.saves if not save.is_gathered]
        waiting += self.bench.scheduler.saves._late
        held = [block for plan in waiting for block in all_blocks(plan.pages)]
        assert sorted(self.bench.pins.references.elements()) == sorted(held)

    def end(self) -> None:
        for request_id in sorted(self.live):
            self.ended[request_id] = self.live.pop(request_id).kv
            self.bench.finish(request_id)
        self.plan()
        for save in self.saves:
            if not save.is_gathered:
                self.bench.scheduler.apply(StepReport(gathered={save.plan.job_id: 1}))
        assert self.bench.pins.references == {}
        assert not self.bench.scheduler.saves.has_pending


MOVES = {
    Walk.arrive: 4,
    Walk.admit: 8,
    Walk.step: 12,
    Walk.preempt: 1,
    Walk.finish: 2,
    Walk.load: 4,
    Walk.end_save: 8,
    Walk.evict: 1,
    Walk.change_weights: 2,
    Walk.empty_own_cache: 2,
    Walk.reset: 0.3,
}


def walk(seed: int) -> Counter[str]:
    """Run a walk and return the number of each event. An error names the seed."""
    it = Walk(seed)
    try:
        for _ in range(NUM_MOVES):
            [move] = it.random.choices(list(MOVES), list(MOVES.values()))
            move(it)
            it.names_are_true()
        it.end()
    except AssertionError as error:
        error.add_note(f"seed {seed}")
        raise
    finally:
        it.bench.lookups.close()
    return it.seen


@pytest.mark.parametrize("first", range(0, 16, 8))
def test_no_cell_is_of_other_weights_than_its_name_says(first: int) -> None:
    seen = Counter[str]()
    for seed in range(first, first + 8):
        seen += walk(seed)
    # Most single walks see all of this.
    assert set(seen) == {f"{what} {e}" for what in ("saved as", "loaded of") for e in VERSIONS}
