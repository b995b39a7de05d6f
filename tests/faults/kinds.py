"""Kinds of faults, as values: how a fault begins, how it ends, and which counters must show it.

`start` may be called in any thread: it changes rules of stores, objects and flags, never a rig.
"""

import functools
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import xxhash

from tests.faults.rig import CHUNK, RigSpec
from tests.faults.scene import BAD_CHUNK, BYSTANDER, IMPATIENT, READER, STORED_CHUNKS, Scene
from tests.support.faults import Fault
from vllm_kvpool.storage.contents import cell_format
from vllm_kvpool.storage.file import store as file_store
from vllm_kvpool.storage.file.store import FileStore
from vllm_kvpool.vllm_adapt.identity import namespace

DAY_S = 86_400
ALL = STORED_CHUNKS * CHUNK
BEFORE_BAD = BAD_CHUNK * CHUNK
SLOW_S = 0.1  # more than an impatient engine waits for an answer
LANES = ("get-0", "check", "scatter", "gather", "seal", "put-0", "remove-0")
CALLS = ("exists", "put", "get", "remove", "remove_namespace")


def nothing(scene: Scene) -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of fault.

    `prepare` is called before the first engine starts, with a monkeypatch; `attend` is called after
    the start. `seen`: parts of labels in the engines' counters, at least one of which must have
    grown; () if the engine cannot notice the fault. `persists`: the fault strikes until it is
    stopped. Other faults are damages that an engine meets once at most.
    """

    name: str
    start: Callable[[Scene], None]
    stop: Callable[[Scene], None] = lambda scene: scene.faults.heal()
    prepare: Callable[[Scene, pytest.MonkeyPatch], None] = lambda scene, patch: None
    attend: Callable[[Scene], None] = nothing
    seen: tuple[str, ...] = ()
    seen_at: tuple[str, ...] | None = None
    """Moments at which the engine must notice the fault; None: all."""
    options: dict[str, Any] = field(default_factory=dict)
    persists: bool = True
    files: bool = False
    keeps: int = 0
    """Minimum of stored tokens that are found while the fault lasts."""


def injecting(
    *faults: tuple[Fault, str], keys: Callable[[Scene], Sequence[str]] = lambda scene: [""]
) -> Callable[[Scene], None]:
    def start(scene: Scene) -> None:
        for fault, method in faults:
            for key in keys(scene):
                scene.faults.inject(fault, method, key)

    return start


def every_call(fault: Fault) -> Callable[[Scene], None]:
    return injecting(*((fault, method) for method in CALLS))


def damaging(change: Callable[[Scene, bytes], bytes]) -> Callable[[Scene], None]:
    """Return a `start` that changes bad objects in the store."""

    def start(scene: Scene) -> None:
        for key in scene.bad_keys():
            scene.write(key, change(scene, scene.library.objects[key]))

    return start


def flip(scene: Scene, data: bytes) -> bytes:
    return data[:-7] + bytes([data[-7] ^ 4]) + data[-6:]


def swap(scene: Scene, data: bytes) -> bytes:
    """Return another cell of the same size: of another chunk, or for states of another head."""
    return scene.library.objects[scene.library.stranger]


def old_format(scene: Scene, data: bytes) -> bytes:
    """Return the object with an intact header of another version."""
    fields = bytearray(data[: cell_format._FIELDS.size])
    struct.pack_into("<H", fields, len(cell_format.MAGIC), cell_format.FORMAT_VERSION + 1)
    checksum = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(fields)))
    return bytes(fields) + checksum + data[len(fields) + len(checksum) :]


def evict(scene: Scene) -> None:
    scene.store.remove(scene.bad_keys())


def be_slow(scene: Scene) -> None:
    scene.workshop.slow_s = SLOW_S
    every_call(Fault.SLOW)(scene)


def kill_lanes(scene: Scene) -> None:
    for executor in scene.rig.executors:
        for lane in LANES:
            executor.perform.kill(lane)


def spare_lanes(scene: Scene) -> None:
    for executor in scene.rig.executors:
        executor.perform.spare()


def joined_by(change: Callable[[RigSpec], RigSpec]) -> Callable[[Scene], None]:
    """Return an `attend` that adds an engine with the same requests over the same store. The engine
    takes no step before the fault begins."""

    def attend(scene: Scene) -> None:
        rival = scene.workshop.rig(change(scene.spec), scene.url, "rival")
        rival.add(READER)
        rival.add(BYSTANDER)
        scene.rival = rival

    return attend


def let_rival_go(scene: Scene) -> None:
    assert scene.rival is not None
    scene.rig.companions.append(scene.rival)


def stranger(**fields: Any) -> Callable[[RigSpec], RigSpec]:
    """Return a change to another model or other options, with which an engine must share
    nothing."""
    options = fields.pop("options", {})

    def change(spec: RigSpec) -> RigSpec:
        model = replace(spec.model, **fields)
        return replace(spec, model=model, options={**spec.options, **options})

    return change


def other_version(scene: Scene) -> None:
    """Add an engine of another format version, which only its namespace tells apart."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (cell_format, namespace):
            patch.setattr(module, "FORMAT_VERSION", cell_format.FORMAT_VERSION + 1)
        joined_by(lambda spec: spec)(scene)


class Clock:
    """A time of day that may jump. The engines measure durations with another clock."""

    offset_s = 0
    now_s = staticmethod(time.time)
    now_ns = staticmethod(time.time_ns)


def clock(offset_s: int) -> dict[str, Any]:
    def prepare(scene: Scene, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(Clock, "offset_s", 0)
        patch.setattr(time, "time", lambda: Clock.now_s() + Clock.offset_s)
        ticks = lambda: Clock.now_ns() + Clock.offset_s * 10**9  # noqa: E731
        patch.setattr(file_store, "FileStore", functools.partial(FileStore, clock_ns=ticks))

    def start(scene: Scene) -> None:
        Clock.offset_s = offset_s

    def stop(scene: Scene) -> None:
        Clock.offset_s = 0

    return {"prepare": prepare, "start": start, "stop": stop, "files": True, "keeps": ALL}


def _kinds() -> list[Kind]:
    bad = {"keys": lambda scene: scene.bad_keys()}
    damage: dict[str, Any] = {"stop": nothing, "persists": False, "keeps": BEFORE_BAD}
    strangers: dict[str, Any] = {"start": let_rival_go, "stop": nothing, "keeps": ALL}
    gone = ("store_unreachable", "store_error", "outcome=unreachable")
    late = ("timed_out", *gone)
    puts: dict[str, Any] = {"keeps": ALL}
    gets: dict[str, Any] = {"keeps": BEFORE_BAD}
    return [
        Kind(name="dead", start=injecting((Fault.UNREACHABLE, "")), stop=nothing, seen=gone),
        Kind(name="away", start=injecting((Fault.UNREACHABLE, "")), seen=gone),
        Kind(name="error", start=every_call(Fault.ERROR), seen=gone),
        Kind(
            name="crash",
            start=every_call(Fault.CRASH),
            seen=("load_failed", *gone),
            seen_at=("lookup", "alloc", "get", "restart"),
        ),
        Kind(name="slow", start=be_slow, options=IMPATIENT, seen=late),
        Kind(name="stuck", start=every_call(Fault.BLOCKED), options=IMPATIENT, seen=late),
        Kind(name="cut", start=damaging(lambda _, d: d[:-8]), seen=("cell_length",), **damage),
        Kind(name="flipped", start=damaging(flip), seen=("cell_checksum",), **damage),
        Kind(name="swapped", start=damaging(swap), seen=("cell_key",), **damage),
        Kind(name="old-format", start=damaging(old_format), seen=("cell_version",), **damage),
        Kind(name="evicted", start=evict, seen=("load_missing",), seen_at=("alloc",), **damage),
        Kind(
            name="missing",
            start=injecting((Fault.MISSING, "get"), **bad),
            seen=("load_missing",),
            **gets,
        ),
        Kind(
            name="get-failed",
            start=injecting((Fault.FAILED, "get"), **bad),
            seen=("load_failed",),
            **gets,
        ),
        Kind(name="put-failed", start=injecting((Fault.FAILED, "put")), seen=("failed",), **puts),
        Kind(name="put-full", start=injecting((Fault.FULL, "put")), seen=("full",), **puts),
        Kind(name="put-lies", start=injecting((Fault.MISSING, "put")), **puts),
        Kind(name="put-half", start=injecting((Fault.HALF, "put")), seen=("failed",), **puts),
        Kind(name="lanes-die", start=kill_lanes, stop=spare_lanes, seen=("kind=lane",)),
        Kind(name="day-later", **clock(DAY_S)),
        Kind(name="day-earlier", **clock(-DAY_S)),
        Kind(name="rival", attend=joined_by(lambda spec: spec), **strangers),
        Kind(name="namesake", attend=joined_by(stranger(seed=7)), **strangers),
        Kind(name="other-dtype", attend=joined_by(stranger(dtype="float16")), **strangers),
        Kind(
            name="other-chunks",
            attend=joined_by(stranger(options={"chunk_tokens": 64})),
            **strangers,
        ),
        Kind(name="other-version", attend=other_version, **strangers),
    ]


KINDS = {kind.name: kind for kind in _kinds()}
DAMAGES = frozenset(name for name, kind in KINDS.items() if not kind.persists)
STRANGERS = frozenset({"namesake", "other-dtype", "other-chunks", "other-version"})
