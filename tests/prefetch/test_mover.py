"""Named cells come near, those that are sound and no others."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.prefetch.cells import fill, is_held, keys_of, names_of, put, sealed
from tests.support.buffers import make_buffer
from tests.support.faults import Fault, FaultyStore
from tests.support.memory_store import MemoryStore
from vllm_kvpool import prefetch as mover_module
from vllm_kvpool.errors import ConfigError, StoreError
from vllm_kvpool.prefetch import BATCH_CELLS, MAX_CELL_BYTES, Brought, Mover, PromptCells, bring
from vllm_kvpool.storage.base import Buffer, GetOutcome, Store
from vllm_kvpool.storage.contents.cell_format import HEADER_BYTES
from vllm_kvpool.storage.contents.encryption import CellCipher

PLENTY = 1 << 40


def always() -> bool:
    return True


def bench(far: int = 1) -> tuple[FaultyStore, list[FaultyStore]]:
    return FaultyStore(MemoryStore("", 1 << 26)), [
        FaultyStore(MemoryStore("", 1 << 26)) for _ in range(far)
    ]


def held(store: Store, names: PromptCells) -> list[str]:
    return [key for key, nbytes in keys_of(names).items() if is_held(store, key, nbytes)]


def move(
    near: Store,
    far: list[FaultyStore],
    names: PromptCells,
    max_bytes: int = PLENTY,
    may_go_on: Callable[[], bool] = always,
) -> Brought:
    return sum(batches(near, far, names, max_bytes, may_go_on), Brought())


def batches(
    near: Store,
    far: list[FaultyStore],
    names: PromptCells,
    max_bytes: int = PLENTY,
    may_go_on: Callable[[], bool] = always,
) -> list[Brought]:
    """Return the outcome of each batch."""
    mover = Mover(near, far, names, max_bytes)
    done = list(mover.batches(may_go_on))
    mover.close()
    return done


def test_cells_come_near() -> None:
    near, far = bench()
    names = names_of(100)
    fill(far[0], names)
    keys = keys_of(names)
    assert move(near, far, names) == Brought(brought=200, nbytes=sum(keys.values()))
    assert held(near, names) == list(keys)
    # They cross the network once.
    far[0].faults.inject(Fault.UNREACHABLE)
    assert move(near, far, names) == Brought(near=200)


@given(st.data())
def test_what_is_sound_somewhere_comes_near_and_nothing_else(data: st.DataObject) -> None:
    near, far = bench(2)
    names = names_of(data.draw(st.integers(1, 12)), heads=data.draw(st.integers(1, 3)))
    state = {}
    for key, nbytes in keys_of(names).items():
        # Where the cell is, and in which state: near, and in each far tier.
        is_near = data.draw(st.booleans())
        kinds = [data.draw(st.sampled_from(["none", "sound", "damaged", "short"])) for _ in far]
        state[key] = is_near, kinds
        if is_near:
            put(near, [(key, sealed(key, nbytes))])
        for store, kind in zip(far, kinds, strict=True):
            if kind != "none":
                buffer = sealed(key, nbytes - (kind == "short"))
                buffer.view[-1] ^= kind == "damaged"
                put(store, [(key, buffer)])
    done = move(near, far, names)
    sound = [key for key, (is_near, kinds) in state.items() if is_near or "sound" in kinds]
    nothing = not any(is_near or "sound" in kinds for is_near, kinds in state.values())
    assert held(near, names) == sound
    assert done.near == sum(is_near for is_near, _ in state.values())
    assert done.brought + done.near == len(sound)
    assert done.missing == len(state) - len(sound)
    assert done.unkept == done.unwritten == 0
    assert done.num_cells == len(state)
    before_sound = [
        kinds[: kinds.index("sound")] if "sound" in kinds else kinds
        for is_near, kinds in state.values()
        if not is_near
    ]
    assert done.bad == sum(kinds.count("damaged") for kinds in before_sound)
    assert (done.nbytes > 0) or nothing or not done.brought


def test_a_cell_in_anothers_place_is_not_taken() -> None:
    near, far = bench()
    names = names_of(1)
    (one, nbytes), (other, more) = keys_of(names).items()
    swapped = PromptCells(((names.key_prefixes[0][0], more),), names.chunks)
    put(far[0], [(one, sealed(other, more))])
    assert move(near, far, swapped) == Brought(nbytes=more, bad=1, missing=1)
    assert near.exists([one]) == [False]
    assert nbytes != more


def test_encrypted_cells_come_near_without_a_key() -> None:
    near, far = bench()
    names = names_of(2, heads=1)
    (first, nbytes), (second, _) = keys_of(names).items()
    cipher = CellCipher([bytes(32)])
    cells = {key: make_buffer(nbytes) for key in (first, second)}
    for key, buffer in cells.items():
        cipher.encrypt(key, sealed(key, nbytes).view, buffer.view)
    cells[second].view[20] ^= 1  # in its header
    put(far[0], cells.items())
    assert move(near, far, names) == Brought(brought=1, nbytes=2 * nbytes, bad=1, missing=1)
    got = make_buffer(nbytes)
    assert near.get([first], [got]) == [GetOutcome.OK]
    assert got.view == cells[first].view


def test_a_prompt_that_the_pool_has_no_further_is_not_asked_for_to_its_end() -> None:
    near, far = bench()
    names = names_of(20 * BATCH_CELLS, heads=1)
    fill(far[0], PromptCells(names.key_prefixes, names.chunks[: BATCH_CELLS + 1]))
    done = move(near, far, names)
    assert done.brought == BATCH_CELLS + 1
    assert far[0].faults.calls["get"] == 3


def test_states_after_chunks_without_states_come_near() -> None:
    near, far = bench()
    names = names_of(4 * BATCH_CELLS, heads=1)
    fill(far[0], names._replace(chunks=[names.chunks[0], names.chunks[-1]]))
    assert move(near, far, names._replace(has_gaps=True)).brought == 2


def test_no_more_bytes_than_allowed_but_for_the_last_batch() -> None:
    near, far = bench()
    names = names_of(4 * BATCH_CELLS, heads=1)
    fill(far[0], names)
    nbytes = names.key_prefixes[0][1]
    assert move(near, far, names, nbytes * BATCH_CELLS + 1).brought == 2 * BATCH_CELLS


def test_it_stops_between_two_batches() -> None:
    near, far = bench()
    names = names_of(4 * BATCH_CELLS, heads=1)
    fill(far[0], names)
    answers = iter([True, False])
    assert move(near, far, names, may_go_on=lambda: next(answers)).brought == BATCH_CELLS


def test_each_batch_is_reported() -> None:
    near, far = bench()
    names = names_of(2 * BATCH_CELLS, heads=1)
    fill(far[0], names)
    assert [each.brought for each in batches(near, far, names)] == [BATCH_CELLS] * 2


def test_large_cells_come_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mover_module, "BATCH_BYTES", 10_000)
    near, far = bench()
    names = names_of(3, heads=2, nbytes=HEADER_BYTES + 600_000)
    fill(far[0], names)
    assert move(near, far, names).brought == 6
    assert far[0].faults.calls["get"] == 6


def test_a_far_tier_that_is_away_is_passed_by() -> None:
    near, far = bench(2)
    names = names_of(3)
    fill(far[1], names)
    far[0].faults.inject(Fault.UNREACHABLE, "get")
    assert move(near, far, names).brought == 6
    far[1].faults.inject(Fault.UNREACHABLE, "get")
    other = names_of(2)
    assert move(near, far, other) == Brought(failed=4)


def test_cells_that_one_far_tier_lacks_and_another_cannot_read_have_failed() -> None:
    near, far = bench(2)
    names = names_of(3)
    fill(far[0], names._replace(chunks=names.chunks[:1]))
    far[1].faults.inject(Fault.FAILED, "get", key="head:1")
    assert move(near, far, names) == Brought(
        brought=2, nbytes=sum(keys_of(names).values()) // 3, missing=2, failed=2
    )


def test_nothing_more_comes_where_nothing_is_kept() -> None:
    near, far = bench()
    names = names_of(4 * BATCH_CELLS, heads=1)
    fill(far[0], names)
    near.faults.inject(Fault.FULL, "put")
    assert move(near, far, names).unkept == BATCH_CELLS


def test_a_near_tier_that_is_full_or_away() -> None:
    near, far = bench()
    names = names_of(3)
    fill(far[0], names)
    near.faults.inject(Fault.FULL, "put", key="head:1", times=1)
    done = move(near, far, names)
    assert (done.brought, done.unkept) == (3, 3)
    near.faults.inject(Fault.FAILED, "put", times=1)
    done = move(near, far, names)
    assert (done.near, done.unkept, done.unwritten) == (3, 0, 3)
    near.faults.inject(Fault.UNREACHABLE, "exists")
    with pytest.raises(StoreError):
        move(near, far, names)


FAILURES = [  # what fails, how, and what `bring` raises
    ("exists", Fault.UNREACHABLE, StoreError),
    ("exists", Fault.CRASH, RuntimeError),
    ("get", Fault.CRASH, RuntimeError),
    ("put", Fault.CRASH, RuntimeError),
    ("report", None, KeyboardInterrupt),
]


class RegisteringStore(FaultyStore):
    """Counts the registered buffers."""

    num_registered = 0

    def register(self, buffer: Buffer) -> None:
        super().register(buffer)
        self.num_registered += 1

    def unregister(self, buffer: Buffer) -> None:
        super().unregister(buffer)
        self.num_registered -= 1


@pytest.mark.parametrize(("what", "fault", "raised"), FAILURES)
def test_failure_of_the_thread_is_raised_and_its_memory_is_given_back(
    what: str, fault: Fault | None, raised: type[BaseException]
) -> None:
    near, far = (RegisteringStore(MemoryStore("", 1 << 26)) for _ in range(2))
    names = names_of(3)
    fill(far, names)
    if fault is not None:
        (far if what == "get" else near).faults.inject(fault, what)

    def report(done: Brought) -> None:
        if what == "report":
            raise KeyboardInterrupt

    with pytest.raises(raised):
        bring(near, [far], names, PLENTY, 60.0, report)
    assert near.num_registered == far.num_registered == 0


GOOD = names_of(2)


@pytest.mark.parametrize("nbytes", [HEADER_BYTES, MAX_CELL_BYTES + 1, -1, 1 << 70])
def test_cells_of_an_impossible_size_touch_no_store(nbytes: int) -> None:
    """A manifest in a shared store says how large cells are."""
    near, far = bench()
    names = GOOD._replace(key_prefixes=(*GOOD.key_prefixes, ("other@", nbytes)))
    with pytest.raises(ConfigError, match=f"cells of {nbytes} bytes"):
        move(near, far, names)
    assert not near.faults.calls
    assert not far[0].faults.calls


@pytest.mark.parametrize(
    "names", [PromptCells((), ()), PromptCells((), GOOD.chunks), PromptCells(GOOD.key_prefixes, ())]
)
def test_nothing_named_is_nothing_done(names: PromptCells) -> None:
    near, far = bench()
    assert move(near, far, names) == Brought()
