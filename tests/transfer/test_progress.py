"""How far prompts are stored that are handed over: by saves, lost slabs and ends, in any order."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tests.support.invariants import check
from tests.transfer.engine_bench import PLACE, PLACES
from vllm_kvpool.storage.base import ChunkRef
from vllm_kvpool.transfer.ops import (
    HandOverEnd,
    HandOverProgress,
    JobId,
    SaveJob,
    SavePlan,
    Slab,
    SlabKind,
)
from vllm_kvpool.transfer.progress import SaveProgress

TOPIC, OTHER = b"t" * 20, b"o" * 20
SLABS = 2  # of a chunk, on this rank
KINDS = tuple(SlabKind((f"{number}-",), (1,), (PLACE,), f"/{number}") for number in range(SLABS))


def job(
    first: int,
    stop: int,
    request: str = "r",
    *,
    topic: bytes = TOPIC,
    found: int = 0,
    stored: bool = True,
    is_state: bool = False,
) -> SaveJob:
    slabs = tuple(
        Slab.of(kind, ChunkRef(str(chunk), "", chunk), "")._replace(stored=stored)
        for chunk in range(first, stop)
        for kind in KINDS
    )
    plan = SavePlan(
        *(JobId(1), request, first, (b"",) * (stop - first), ()),
        topic=topic,
        found=found,
        is_state=is_state,
    )
    return SaveJob(plan, slabs)


class Saves:
    """A progress, and what it has told last of each topic."""

    def __init__(self) -> None:
        self.progress = SaveProgress()
        self.told: dict[bytes, tuple[int, int | None]] = {}

    def take(self, news: list[HandOverProgress]) -> tuple[int, int | None] | None:
        check(self.progress)
        for topic, *state in news:
            self.told[topic] = (state[0], state[1])  # type: ignore[assignment]
        return (news[-1].stored, news[-1].ended) if news else None

    def plan(self, saved: SaveJob) -> tuple[int, int | None] | None:
        return self.take(self.progress.planned(saved))

    def record(
        self, saved: SaveJob, chunk: int, *, is_stored: bool = True, slabs: int = SLABS
    ) -> tuple[int, int | None] | None:
        said = None
        for slab in [each for each in saved.slabs if each.chunk.position == chunk][:slabs]:
            said = self.take(self.progress.recorded(saved, slab, is_stored=is_stored)) or said
        return said

    def end(self, chunks: int, found: int = 0, request: str = "r") -> tuple[int, int | None] | None:
        return self.take(self.progress.ends(HandOverEnd(request, TOPIC, found, chunks)))


def test_chunk_is_stored_with_its_last_slab() -> None:
    saves, saved = Saves(), job(0, 3)
    assert saves.plan(saved) == (0, None)
    assert saves.record(saved, 0, slabs=SLABS - 1) is None
    assert saves.take(saves.progress.recorded(saved, saved.slabs[1], is_stored=True)) == (1, None)


def test_only_chunks_without_a_gap_count() -> None:
    saves, saved = Saves(), job(0, 3)
    saves.plan(saved)
    assert saves.record(saved, 2) is None
    assert saves.record(saved, 0) == (1, None)
    assert saves.record(saved, 1) == (3, None)


def test_chunks_that_were_found_count_as_stored() -> None:
    saves, saved = Saves(), job(2, 3, found=2)
    assert saves.plan(saved) == (2, None)
    assert saves.record(saved, 2) == (3, None)
    assert saves.end(3, found=2) == (3, 3)
    assert not saves.progress.num_open


def test_prompt_that_was_found_whole_is_told_with_its_end() -> None:
    saves = Saves()
    assert saves.end(4, found=4) == (4, 4)
    assert not saves.progress.num_open


def test_later_save_of_a_request_counts_no_chunk_of_an_earlier_one() -> None:
    saves, first, second = Saves(), job(0, 2), job(2, 4)
    saves.plan(first)
    assert saves.plan(second) is None
    assert saves.record(second, 2) is None
    saves.record(first, 0)
    assert saves.record(first, 1) == (3, None)


def test_lost_chunk_behind_a_gap_makes_no_chunk_of_the_gap_stored() -> None:
    """A prompt's end is planned while the chunks before it wait for blocks."""
    saves, first, end = Saves(), job(0, 1), job(3, 4)
    saves.plan(first)
    saves.plan(end)
    saves.record(first, 0)
    assert saves.record(end, 3, is_stored=False) == (1, 3)


def test_lost_chunk_ends_the_hand_over_before_those_in_front_are_stored() -> None:
    saves, saved = Saves(), job(0, 4)
    saves.plan(saved)
    assert saves.record(saved, 2, is_stored=False) == (0, 2)
    assert saves.record(saved, 0) == (1, 2)
    assert saves.record(saved, 3) is None
    assert saves.record(saved, 1, is_stored=False) == (1, 1)
    saves.end(4)
    assert not saves.progress.num_open


def test_lost_optional_slab_ends_no_hand_over() -> None:
    saves, saved = Saves(), job(0, 1)
    first, last = saved.slabs
    optional = last._replace(kind=replace(last.kind, cells=(PLACES["?"],)))
    saved = saved._replace(slabs=(first, optional))
    saves.plan(saved)
    assert saves.take(saves.progress.recorded(saved, first, is_stored=True)) is None
    assert saves.take(saves.progress.recorded(saved, optional, is_stored=False)) == (1, None)


def test_end_is_told_at_once_and_saves_on_their_way_are_told_later() -> None:
    saves, saved = Saves(), job(0, 2)
    saves.plan(saved)
    assert saves.end(2) == (0, 2)
    saves.record(saved, 0)
    assert saves.record(saved, 1) == (2, 2)
    assert not saves.progress.num_open


def test_end_before_its_last_save_waits_for_it() -> None:
    """The end comes with the plan of a request's last save, or a step before it."""
    saves, saved = Saves(), job(0, 2)
    assert saves.end(2) == (0, 2)
    assert saves.plan(saved) is None
    saves.record(saved, 0)
    assert saves.record(saved, 1) == (2, 2)


def test_save_that_is_dropped_ends_the_hand_over_where_it_begins() -> None:
    saves = Saves()
    assert saves.end(2) == (0, 2)
    assert saves.end(0) == (0, 0)
    assert not saves.progress.num_open


def test_prompt_end_behind_chunks_that_had_no_room_does_not_count() -> None:
    """A prompt's end may be saved before whole chunks that wait for blocks."""
    saves, chunks, end = Saves(), job(1, 3, found=1), job(3, 4, found=1)
    assert saves.plan(end) == (1, None)
    assert saves.record(end, 3) is None
    saves.plan(chunks)
    saves.record(chunks, 1)
    assert saves.record(chunks, 2) == (4, None)


def test_rank_that_puts_no_slab_of_a_chunk_has_stored_it() -> None:
    """Ranks with the same KV take turns."""
    saves = Saves()
    assert saves.plan(job(0, 2, stored=False)) == (2, None)


def test_recurrent_states_alone_count_once_the_request_has_ended() -> None:
    saves, saved = Saves(), job(3, 4, is_state=True)
    assert saves.plan(saved) == (0, None)
    assert saves.record(saved, 3) is None
    assert saves.end(4, found=4) == (4, 4)


def test_recurrent_state_of_a_chunk_is_waited_for() -> None:
    saves, state, attention = Saves(), job(1, 2, is_state=True), job(0, 2)
    saves.plan(state)
    saves.plan(attention)
    saves.record(attention, 0)
    assert saves.record(attention, 1) is None
    assert saves.record(state, 1) == (2, None)


def test_other_request_of_the_same_prompt_goes_on() -> None:
    saves, one, two = Saves(), job(0, 2, "one"), job(0, 2, "two")
    saves.plan(one)
    saves.plan(two)
    assert saves.record(one, 0, is_stored=False) is None, "the other one may store it"
    assert saves.end(2, request="one") is None
    assert saves.record(two, 0) == (1, None)
    saves.record(two, 1)
    assert saves.end(2, request="two") == (2, 2)
    assert saves.record(one, 1) is None
    assert not saves.progress.num_open


def test_topics_do_not_meet() -> None:
    saves, one, two = Saves(), job(0, 1), job(0, 1, topic=OTHER)
    saves.plan(one)
    saves.plan(two)
    saves.record(two, 0)
    assert saves.told == {TOPIC: (0, None), OTHER: (1, None)}


@given(st.data())
def test_last_word_is_the_first_chunk_that_is_not_stored(data: st.DataObject) -> None:
    """Whatever the order of plans, slabs, losses and the end: what is told only grows, the end is
    not before it, and at last both are what is really stored."""
    found = data.draw(st.integers(0, 2))
    sizes = data.draw(st.lists(st.integers(1, 3), max_size=3))
    jobs, at = [], found
    for size in sizes:
        jobs.append(job(at, at + size, found=found))
        at += size
    lost = data.draw(st.sets(st.sampled_from(range(found, at)))) if at > found else set()
    saves, waiting, todo = Saves(), list(jobs), []
    is_ended = False
    stored = 0
    while waiting or todo or not is_ended:
        steps = [*(["plan"] if waiting else []), *(["slab"] if todo else [])]
        steps += ["end"] if not is_ended and len(waiting) <= 1 else []
        match data.draw(st.sampled_from(steps)):
            case "plan":
                planned = waiting.pop(0)
                saves.plan(planned)
                todo += [(planned, slab) for slab in planned.slabs]
            case "slab":
                saved, slab = todo.pop(data.draw(st.integers(0, len(todo) - 1)))
                is_stored = slab.chunk.position not in lost
                saves.take(saves.progress.recorded(saved, slab, is_stored=is_stored))
            case _:
                is_ended = True
                saves.end(at, found=found)
        if TOPIC in saves.told:
            now, ended = saves.told[TOPIC]
            assert now >= stored
            assert ended is None or ended >= now
            stored = now
    assert saves.told[TOPIC] == (min(lost, default=at),) * 2
    assert not saves.progress.num_open
