"""Moments at which a fault begins, as values. Each drives an engine to its moment and beyond."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput

from tests.faults.audit import check_threads
from tests.faults.rig import CHUNK, Rig
from tests.faults.scene import BYSTANDER, READER, SHUTDOWN_S, STORED_CHUNKS, Scene

EXPECT_MS = 5_000
LONG = 60  # output tokens, more than the blocks of a prompt have room for


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A moment at which a fault begins. `play` runs the first round. `exact`: every request runs to
    its end once."""

    name: str
    play: Callable[[Scene], None]
    exact: bool = True


def arrive(rig: Rig) -> list[str]:
    """Add a reader and a bystander.

    The reader waits long for the stored prefix. Otherwise it would not load on a busy machine, and
    the moment would not come.
    """
    stored = {"expect_tokens": STORED_CHUNKS * CHUNK, "expect_timeout_ms": EXPECT_MS}
    return [rig.add(READER, **stored), rig.add(BYSTANDER)]


def finish(scene: Scene, ids: Sequence[str]) -> None:
    """Run on, and assert that these requests answer as without a pool."""
    seconds = scene.rig.run(scene.limit_s)
    assert seconds < scene.limit_s
    scene.rig.expect(ids)


def at_lookup(scene: Scene) -> None:
    scene.begin()
    finish(scene, [scene.rig.add(READER), scene.rig.add(BYSTANDER)])


def in_step(wanted: Callable[[Rig, SchedulerOutput], bool]) -> Callable[[Scene], None]:
    """Return a play whose fault begins between the scheduler's part of a step and the workers'
    part."""

    def play(scene: Scene) -> None:
        rig = scene.rig

        def look(output: SchedulerOutput) -> None:
            if wanted(rig, output):
                scene.begin()

        rig.on_scheduled.append(look)
        finish(scene, arrive(rig))

    return play


def has_loads(rig: Rig, output: SchedulerOutput) -> bool:
    metadata: Any = output.kv_connector_metadata
    return bool(metadata.plan.loads)


def runs_loaded(rig: Rig, output: SchedulerOutput) -> bool:
    """Return True if the step computes tokens of the reader."""
    return "r0" in output.num_scheduled_tokens


def in_call(method: str) -> Callable[[Scene], None]:
    """Return a play whose fault begins when a worker calls `method` of the store."""

    def play(scene: Scene) -> None:
        def look(store: str, called: str, keys: Sequence[str]) -> None:
            if called == method and "scheduler" not in store and store.startswith("rig"):
                scene.begin()

        scene.faults.on_call = look
        finish(scene, arrive(scene.rig))
        scene.wait(lambda: scene.begun)

    return play


def in_lane(lane: str) -> Callable[[Scene], None]:
    """Return a play whose fault begins when the lane gets its first batch."""

    def play(scene: Scene) -> None:
        def look(name: str) -> None:
            if name == lane:
                scene.begin()

        for executor in scene.rig.executors:
            executor.perform.on_batch = look
        finish(scene, arrive(scene.rig))
        scene.wait(lambda: scene.begun)

    return play


def at_preemption(scene: Scene) -> None:
    """Begin when the reader loses its blocks to a bystander that came into the batch before it.

    Once the reader runs, all free blocks are taken, however many drafts are accepted. The first
    request that needs a block preempts the reader.
    """
    rig = scene.rig
    free, taken = rig.scheduler.kv_cache_manager.block_pool, list[Any]()

    def look(output: SchedulerOutput) -> None:
        if output.preempted_req_ids:
            scene.begin()
            free.free_blocks(taken)
            taken.clear()
        elif runs_loaded(rig, output) and not scene.begun:
            taken.extend(free.get_new_blocks(free.get_num_free_blocks()))

    rig.on_scheduled.append(look)
    performs = [executor.perform for executor in rig.executors]
    for perform in performs:
        perform.hold("scatter")
    reader = rig.add(READER, LONG // 2)
    rig.run(scene.limit_s, until=lambda: all(perform.entered.is_set() for perform in performs))
    bystander = rig.add(BYSTANDER, LONG)
    rig.run(scene.limit_s, until=lambda: bool(rig.answers[bystander].tokens))
    for perform in performs:
        perform.release()
    scene.wait(lambda: all(executor.engine.loads.num_open == 0 for executor in rig.executors))
    finish(scene, [reader, bystander])


def at_abort(scene: Scene) -> None:
    """Abort the reader while its load is in flight."""
    rig = scene.rig
    first = rig.executors[0].perform
    first.hold("get-0")
    ids = arrive(rig)
    rig.run(scene.limit_s, until=first.entered.is_set)
    assert first.entered.is_set(), "no load was started"
    scene.begin()
    rig.abort(ids[0])
    first.release()
    finish(scene, ids[1:])


def at_finish(scene: Scene) -> None:
    """Begin when the reader has its last token, and its last chunks are not stored yet."""
    rig = scene.rig

    def look(output: SchedulerOutput) -> None:
        if rig.answers["r0"].ended:
            scene.begin()

    rig.on_stepped.append(look)
    finish(scene, arrive(rig))


def at_reset(scene: Scene) -> None:
    """Remove everything of the model from the pool while both requests run."""
    rig = scene.rig
    ids = arrive(rig)
    rig.run(scene.limit_s, until=lambda: bool(rig.answers["r0"].tokens))
    scene.begin()
    rig.reset(connector=True)
    finish(scene, ids)


def at_shutdown(scene: Scene) -> None:
    """Shut the engine down while saves run. Another engine follows after the fault."""
    rig = scene.rig
    for executor in rig.executors:
        executor.perform.hold("put-0")
    finish(scene, arrive(rig))
    scene.begin()
    for executor in rig.executors:
        executor.perform.release()
    leave(scene)
    scene.stop()
    scene.start_engine()
    scene.answer(READER)


def at_restart(scene: Scene) -> None:
    """Start another engine after the first has ended, while the fault lasts."""
    finish(scene, arrive(scene.rig))
    leave(scene)
    scene.begin()
    scene.start_engine()
    finish(scene, arrive(scene.rig))


def leave(scene: Scene) -> None:
    options = scene.rig.pool._config
    limit_s = options.shutdown_timeout_s + SHUTDOWN_S
    assert scene.time(scene.rig.shutdown) < limit_s, "the shutdown took too long"
    if scene.rival is None:
        check_threads(scene.workshop, scene.faults.num_blocked)


MOMENTS = {
    moment.name: moment
    for moment in (
        Moment(name="lookup", play=at_lookup),
        Moment(name="alloc", play=in_step(has_loads)),
        Moment(name="get", play=in_call("get")),
        Moment(name="scatter", play=in_lane("scatter")),
        Moment(name="loaded", play=in_step(runs_loaded)),
        Moment(name="gather", play=in_lane("gather")),
        Moment(name="put", play=in_call("put")),
        Moment(name="preemption", play=at_preemption, exact=False),
        Moment(name="abort", play=at_abort, exact=False),
        Moment(name="finish", play=at_finish),
        Moment(name="reset", play=at_reset, exact=False),
        Moment(name="shutdown", play=at_shutdown),
        Moment(name="restart", play=at_restart),
    )
}
