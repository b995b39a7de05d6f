"""Random requests, faults, evictions, aborts and resets, in random order.

Every step is a step of vLLM's scheduler. Each row that is read is compared, and each step checks
the invariants of our bookkeeping. At the end every request has its answer, saved chunks are found
again, and no resource is held. A failure names its seed: the same seed makes the same choices, but
threads may run in another order.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import vllm

from tests.faults.audit import check_nothing_leaked, check_saves_are_found, check_threads
from tests.faults.model import STATES, WINDOWS, FakeModel
from tests.faults.rig import BLOCK, CHUNK, Rig, RigSpec
from tests.faults.scene import Library, tokens
from tests.faults.workshop import WITH_STATES, WITH_WINDOWS, Workshop
from tests.support.faults import Fault
from tests.support.invariants import check
from tests.support.memory_store import LruTable, MemoryStore
from tests.support.releases import NEWEST
from tests.support.seeds import seeds
from vllm_kvpool.storage.base import Buffer, ChunkRef

pytestmark = pytest.mark.slow

STEPS = 600
DELAYS_FREES = vllm.__version__ == NEWEST
"""Older releases mishandle tokens of steps in flight after a preemption, and reuse their blocks."""
DRAFTERS = ("", "eagle", "draft_model") if DELAYS_FREES else ("",)
MOST_LIVE = 6
MOST_DEATHS = 12  # fewer than threads that an executor starts anew
END_S = 30.0
AFTERWARDS = tokens(10**7, 4 * CHUNK + 1)

GET_FAULTS = (Fault.MISSING, Fault.FLIPPED, Fault.WRONG_SIZE, Fault.FAILED, Fault.SWAPPED)
PUT_FAULTS = (Fault.MISSING, Fault.FULL, Fault.FAILED, Fault.HALF)
CALL_FAULTS = (Fault.ERROR, Fault.UNREACHABLE, Fault.CRASH)
CALLS = ("exists", "get", "put", "remove", "remove_namespace")


def spec_of(rng: random.Random, model: FakeModel, blocks: Sequence[int]) -> RigSpec:
    options: dict[str, Any] = {
        "write_policy": rng.choice(["back", "through"]),
        "save_decode": rng.random() < 0.5,
        "prefetch": rng.random() < 0.7,
        "alias_tokens": rng.choice([0, 8]),
        "staging_bytes": rng.choice(["128KiB", "1MiB"]),
        # Short timeouts for hung calls, long ones for calls that a busy machine delays.
        "load_timeout_s": 0.3,
        "call_timeout_s": 0.3,
        "lookup_timeout_ms": 200,
    }
    return RigSpec(
        tp=rng.choice([1, 2]),
        num_blocks=rng.choice(blocks),
        plans_ahead=rng.random() < 0.5,
        drafter=rng.choice(DRAFTERS),
        model=model,
        options=options,
    )


# Arguments of a `Driver`, by kind of model. With windows the cache has blocks for any one request.
OF_STATES: dict[str, Any] = {"model": STATES, "chunk_tokens": BLOCK}
MODELS: dict[str, tuple[dict[str, Any], list[pytest.MarkDecorator]]] = {
    "attention": ({}, []),
    "windows": ({"model": WINDOWS, "blocks": (40, 96)}, [WITH_WINDOWS]),
    "states": (OF_STATES, [WITH_STATES]),
    "states and eagle": ({**OF_STATES, "drafter": "eagle"}, [WITH_STATES]),
    "states and draft model": ({**OF_STATES, "drafter": "draft_model"}, [WITH_STATES]),
}


class Prompts:
    """Random prompts: a path of a small tree, whose inner nodes are mostly whole chunks, and a
    tail."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def draw(self) -> list[int]:
        root, branch = self._rng.randrange(3), self._rng.randrange(3)
        prompt = tokens(root, 2 * CHUNK)
        if self._rng.random() < 0.8:
            prompt += tokens(10 * root + branch + 100, 2 * CHUNK)
        if self._rng.random() < 0.3:
            prompt = prompt[: self._rng.randrange(1, len(prompt))]
        # Now and then the same tail: the whole prompt is stored.
        tail = self._rng.choice([0, 0, 1, 20, 32, self._rng.randrange(40)])
        seed = 7 if self._rng.random() < 0.3 else self._rng.randrange(10**6)
        return prompt + tokens(seed, tail)


class Driver:
    """A rig, and the random actions on it between its steps, of one seed."""

    def __init__(
        self,
        workshop: Workshop,
        seed: int,
        runner: str = "first",
        model: FakeModel | None = None,
        blocks: Sequence[int] = (24, 40, 96),
        drafter: str | None = None,
        **options: Any,
    ) -> None:
        self.rng = random.Random(seed)
        self.workshop = workshop
        self.faults = workshop.faults
        url = workshop.memory()
        host = ["host://1MiB"] if self.rng.random() < 0.5 else []
        store = workshop.plain_store(url)
        assert isinstance(store, MemoryStore)
        self.store: MemoryStore = store
        self.shelf: LruTable = store._table
        spec = spec_of(self.rng, model or FakeModel(), blocks)
        spec = replace(spec, runner=runner, options={**spec.options, **options})
        if drafter is not None:
            spec = replace(spec, drafter=drafter)
        self.rig: Rig = workshop.rig(spec, [*host, url])
        self.prompts = Prompts(self.rng)
        self.dead_for = 0
        self.num_deaths = 0
        self.doings: list[tuple[float, Callable[[], None]]] = [
            (0.25, self.arrive),
            (0.02, self.abort),
            (0.08, self.spoil_gets),
            (0.06, self.spoil_puts),
            (0.04, self.spoil_calls),
            (0.012, self.die),
            (0.009, self.hang),
            (0.006, self.kill_lane),
            (0.08, self.evict),
            (0.04, self.damage),
            (0.05, self.forget),
            (0.03, self.preempt_all),
            (0.012, self.reset_pool),
            (0.012, self.sleep),
        ]

    def live(self) -> list[str]:
        return [request_id for request_id, a in self.rig.answers.items() if not a.ended]

    def arrive(self) -> None:
        if len(self.live()) < MOST_LIVE:
            self.rig.add(
                self.prompts.draw(), self.rng.choice([1, 2, 8, 40]), **dict(self._wishes())
            )

    def _wishes(self) -> Iterator[tuple[str, Any]]:
        if self.rng.random() < 0.1:
            yield "save", False
        if self.rng.random() < 0.1:
            yield "load", False
        if self.rng.random() < 0.1:
            yield "expect_tokens", self.rng.choice([CHUNK, 4 * CHUNK, 1 << 30])
            yield "expect_timeout_ms", self.rng.choice([0, 5, 50])
        if self.rng.random() < 0.3:
            yield "hand_over", True

    def abort(self) -> None:
        if live := self.live():
            self.rig.abort(self.rng.choice(live))

    def spoil_gets(self) -> None:
        keys = self.shelf.list_keys()
        if keys:
            fault, key = self.rng.choice(GET_FAULTS), self.rng.choice(keys)
            times = self.rng.randrange(1, 4)
            self.faults.inject(fault, "get", key, times, self.rng.choice(keys))

    def spoil_puts(self) -> None:
        letter = self.rng.choice("0123456789abcdef")
        times = self.rng.randrange(1, 6)
        self.faults.inject(self.rng.choice(PUT_FAULTS), "put", letter, times)

    def spoil_calls(self) -> None:
        fault, method = self.rng.choice(CALL_FAULTS), self.rng.choice(CALLS)
        self.faults.inject(fault, method, times=self.rng.randrange(1, 4))

    def die(self) -> None:
        if not self.dead_for:
            self.dead_for = self.rng.randrange(1, 40)
            self.faults.inject(Fault.UNREACHABLE)

    def hang(self) -> None:
        if not self.dead_for:
            self.dead_for = self.rng.randrange(1, 40)
            method = self.rng.choice(("exists", "get", "put"))
            self.faults.inject(Fault.BLOCKED, method, times=self.rng.randrange(1, 3))

    def kill_lane(self) -> None:
        if self.num_deaths < MOST_DEATHS:
            self.num_deaths += 1
            lane = self.rng.choice(("get-0", "put-0", "check", "scatter", "gather", "seal"))
            self.rng.choice(self.rig.executors).perform.kill(lane)

    def evict(self) -> None:
        keys = self.shelf.list_keys()
        self.store.remove(self.rng.sample(keys, min(len(keys), self.rng.randrange(1, 5))))

    def damage(self) -> None:
        keys = self.shelf.list_keys()
        if keys and (data := self.shelf.take(key := self.rng.choice(keys))):
            at = self.rng.randrange(len(data))
            bad = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
            self.store.remove([key])
            self.store.put([key], [Buffer(0, memoryview(bytearray(bad)))], [ChunkRef(key)])

    def forget(self) -> None:
        self.rig.reset()

    def preempt_all(self) -> None:
        if not DELAYS_FREES or self.rng.random() < 0.5:
            self.rig.drain()
        with suppress(RuntimeError):  # loads, saves or planned steps hold blocks
            self.rig.reset(running=True, connector=self.rng.random() < 0.3)

    def sleep(self) -> None:
        with suppress(RuntimeError):  # likewise
            self.rig.sleep()
        for _ in range(self.rng.randrange(3)):
            self.arrive()
            self.rig.step()
        self.rig.wake_up()

    def reset_pool(self) -> None:
        self.rig.reset(connector=True)

    def step(self) -> None:
        for chance, do in self.doings:
            if self.rng.random() < chance:
                do()
        if self.dead_for:
            self.dead_for -= 1
            if not self.dead_for:
                self.faults.heal()
        self.rig.step()
        check(self.rig.pool)

    def finish(self) -> None:
        """End all faults, run to the end, and assert that all requests end well and nothing
        leaks."""
        self.faults.heal()
        for executor_ in self.rig.executors:
            executor_.perform.spare()
        self.rig.run(END_S)
        self.rig.settle()
        check_saves_are_found(self.rig, AFTERWARDS)
        self.rig.expect(r for r, answer in self.rig.answers.items() if answer.ended != "abort")
        check_nothing_leaked(self.rig)
        self.rig.shutdown()
        check_threads(self.workshop)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("seed", seeds(4, 12))
@pytest.mark.parametrize(
    "options",
    [pytest.param(options, id=name, marks=marks) for name, (options, marks) in MODELS.items()],
)
def test_random_steps(
    options: dict[str, Any], seed: int, workshop: Workshop, library: Library
) -> None:
    driver = Driver(workshop, seed, **options)
    try:
        for _ in range(STEPS):
            driver.step()
        driver.finish()
    except BaseException:
        print(f"{driver.rig.spec}, step {driver.rig.num_steps}")
        raise
    if driver.rig.spec.model.states:
        assert driver.rig.count("kvpool_saved_states") > 0
