"""Progress of handed-over prompts: saves, lost slabs and ends, in any order."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.support import scripts
from tests.support.invariants import check
from tests.support.scripts import Example
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
from vllm_kvpool.transfer.progress import SaveProgress, newest

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
    """A progress, and its last report for each topic."""

    def __init__(self, verb: str = "saves") -> None:
        assert verb == "saves"
        self.progress = SaveProgress()
        self.told: dict[bytes, tuple[int, int | None]] = {}
        self.named: dict[str, SaveJob] = {}  # by scripts

    def take(self, news: list[HandOverProgress]) -> list[str]:
        """Take the news, and return the last: chunks stored "of" the prompt's end, or "of ?"."""
        check(self.progress)
        for topic, stored, ended in news:
            self.told[topic] = (stored, ended)
        return [
            f"{each.stored} of {'?' if each.ended is None else each.ended}" for each in news[-1:]
        ]

    def plan(self, saved: SaveJob) -> list[str]:
        return self.take(self.progress.planned(saved))

    def plan_named(self, name: str, first: str, stop: str, **more: Any) -> list[str]:
        """`plan s 0 3`: the save `s` of chunks 0 to 2."""
        optional = more.pop("optional", False)
        saved = self.named[name] = job(int(first), int(stop), **more)
        if optional:
            *before, last = saved.slabs
            last = last._replace(kind=replace(last.kind, cells=(PLACES["?"],)))
            saved = self.named[name] = saved._replace(slabs=(*before, last))
        return self.plan(saved)

    def record(self, name: str, chunk: str, *slabs: str, is_stored: bool) -> list[str]:
        """Record slabs of a chunk of a named save as stored or lost: all slabs, or those with these
        numbers."""
        said: list[str] = []
        saved = self.named[name]
        found = [each for each in saved.slabs if each.chunk.position == int(chunk)]
        for slab in [found[int(each)] for each in slabs] or found:
            said = self.take(self.progress.recorded(saved, slab, is_stored=is_stored)) or said
        return said

    def end(self, chunks: int | str, found: int = 0, request: str = "r") -> list[str]:
        return self.take(self.progress.ends(HandOverEnd(request, TOPIC, found, int(chunks))))

    def over(self) -> None:
        assert not self.progress._hand_overs


VERBS: dict[str, Callable[..., Any]] = {
    "plan": Saves.plan_named,
    "stored": partial(Saves.record, is_stored=True),
    "lost": partial(Saves.record, is_stored=False),
    "end": Saves.end,
    "over": Saves.over,
}


@scripts.examples(
    """
chunk is stored with its last slab
    saves; plan s 0 3 -> 0 of ?; stored s 0 0 -> nothing; stored s 0 1 -> 1 of ?
only chunks without a gap count
    saves; plan s 0 3; stored s 2 -> nothing; stored s 0 -> 1 of ?; stored s 1 -> 3 of ?
chunks that were found count as stored
    saves; plan s 2 3 found=2 -> 2 of ?; stored s 2 -> 3 of ?; end 3 found=2 -> 3 of 3; over
prompt that was found whole is told with its end
    saves; end 4 found=4 -> 4 of 4; over
later save of a request counts no chunk of an earlier one
    saves; plan s 0 2; plan t 2 4 -> nothing; stored t 2 -> nothing; stored s 0
    stored s 1 -> 3 of ?
lost chunk behind a gap makes no chunk of the gap stored
    # A prompt's end is planned while the chunks before it wait for blocks.
    saves; plan s 0 1; plan end 3 4; stored s 0; lost end 3 -> 1 of 3
lost chunk ends the hand-over before those in front are stored
    saves; plan s 0 4; lost s 2 -> 0 of 2; stored s 0 -> 1 of 2; stored s 3 -> nothing
    lost s 1 -> 1 of 1; end 4; over
lost optional slab ends no hand-over
    saves; plan s 0 1 optional=True; stored s 0 0 -> nothing; lost s 0 1 -> 1 of ?
end is told at once and saves on their way are told later
    saves; plan s 0 2; end 2 -> 0 of 2; stored s 0; stored s 1 -> 2 of 2; over
end before its last save waits for it
    # The end comes with the plan of a request's last save, or a step before it.
    saves; end 2 -> 0 of 2; plan s 0 2 -> nothing; stored s 0; stored s 1 -> 2 of 2
save that is dropped ends the hand-over where it begins
    saves; end 2 -> 0 of 2; end 0 -> 0 of 0; over
prompt's end behind chunks that had no room does not count
    # A prompt's end may be saved before whole chunks that wait for blocks.
    saves; plan end 3 4 found=1 -> 1 of ?; stored end 3 -> nothing; plan s 1 3 found=1
    stored s 1; stored s 2 -> 4 of ?
rank that puts no slab of a chunk has stored it
    # Ranks with the same KV take turns.
    saves; plan s 0 2 stored=False -> 2 of ?
recurrent states alone count once the request has ended
    saves; plan s 3 4 is_state=True -> 0 of ?; stored s 3 -> nothing; end 4 found=4 -> 4 of 4
recurrent state of a chunk is waited for
    saves; plan state 1 2 is_state=True; plan s 0 2; stored s 0; stored s 1 -> nothing
    stored state 1 -> 2 of ?
other request of the same prompt goes on
    # It may store what the first has lost.
    saves; plan s 0 2 request=one; plan t 0 2 request=two; lost s 0 -> nothing
    end 2 request=one -> nothing; stored t 0 -> 1 of ?; stored t 1
    end 2 request=two -> 2 of 2; stored s 1 -> nothing; over
""",
    Saves,
    VERBS,
)
def test_progress_of_a_hand_over(example: Example) -> None:
    example.play()


def test_topics_do_not_meet() -> None:
    saves, one, two = Saves(), job(0, 1), job(0, 1, topic=OTHER)
    saves.plan(one)
    saves.plan(two)
    saves.named["two"] = two
    saves.record("two", "0", is_stored=True)
    assert saves.told == {TOPIC: (0, None), OTHER: (1, None)}


@given(st.data())
def test_last_word_is_the_first_chunk_that_is_not_stored(data: st.DataObject) -> None:
    """Plans, slabs, losses and the end come in any order. The reported progress only grows and
    never exceeds the end. The last report is what is really stored."""
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
    assert not saves.progress._hand_overs


def test_newest_progress_of_each_prompt_is_told_and_an_end_before_another_request() -> None:
    def told(*progress: tuple[bytes, int, int | None]) -> list[HandOverProgress]:
        return newest([HandOverProgress(*each) for each in progress])

    a, b = TOPIC, OTHER
    assert told((a, 1, None), (b, 1, None), (a, 2, None)) == [(b, 1, None), (a, 2, None)]
    assert told((a, 1, None), (a, 2, 2)) == [(a, 2, 2)]
    assert told((a, 5, None), (a, 5, 5), (a, 0, None), (a, 1, None)) == [(a, 5, 5), (a, 1, None)]
    assert told((a, 5, 5), (a, 0, None), (a, 6, 6)) == [(a, 6, 6)]
