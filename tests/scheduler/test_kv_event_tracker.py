"""KV events follow the stored blocks: whole blocks, announced once each, withdrawn when they go."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.support.invariants import check
from vllm_kvpool.scheduler import kv_event_tracker as module
from vllm_kvpool.scheduler.kv_event_tracker import (
    Announcement,
    BlocksRemoved,
    BlocksStored,
    ChunkBlocks,
    Cleared,
    KVEventTracker,
    Medium,
)
from vllm_kvpool.scheduler.messages import Stored
from vllm_kvpool.transfer.ops import JobId

NEAR, FAR = Medium("CPU", "LOCAL"), Medium("STORAGE")
MEDIA = (NEAR, FAR)


def unit(prompt: str, chunk: int, chunk_tokens: int, block_size: int) -> ChunkBlocks:
    """Return the blocks that end in a chunk of a prompt.

    From chunk 1 on, names differ by prompt.
    """
    start = chunk * chunk_tokens
    first, stop = start // block_size, (start + chunk_tokens) // block_size
    needs = range(first * block_size // chunk_tokens, chunk) if stop > first else range(0)
    return ChunkBlocks(
        name(prompt, chunk),
        tuple(block_name(prompt, block, chunk_tokens, block_size) for block in range(first, stop)),
        tuple(name(prompt, each) for each in needs),
        None,
    )


def name(prompt: str, chunk: int) -> str:
    return f"{prompt if chunk else 'root'}{chunk}"


def block_name(prompt: str, block: int, chunk_tokens: int, block_size: int) -> str:
    """Return a block's name. The prompts share a chunk and one more token."""
    return f"{prompt if (block + 1) * block_size > chunk_tokens + 1 else 'root'}/{block}"


class Listener:
    """A listener that believes every event."""

    def __init__(self) -> None:
        self.blocks: set[tuple[Medium, object]] = set()

    def hear(self, told: Iterable[Announcement]) -> None:
        for each in told:
            match each:
                case BlocksStored(medium, of, start, stop):
                    assert start < stop
                    new = {(medium, block) for block in of.blocks[start:stop]}
                    assert not new & self.blocks, "told twice"
                    self.blocks |= new
                case BlocksRemoved(medium, blocks):
                    gone = {(medium, block) for block in blocks}
                    assert len(gone) == len(blocks)
                    assert gone <= self.blocks, "taken back what was never told"
                    self.blocks -= gone
                case Cleared():
                    self.blocks.clear()


class Machine(RuleBasedStateMachine):
    """Chunks of two prompts that share their first one come and go in two media."""

    @initialize(
        chunk_tokens=st.sampled_from([2, 4, 6]), block_size=st.sampled_from([1, 2, 3, 4, 8])
    )
    def begin(self, chunk_tokens: int, block_size: int) -> None:
        self.sizes = chunk_tokens, block_size
        self.announcer = KVEventTracker(MEDIA)
        self.listener = Listener()
        self.units: dict[str, ChunkBlocks] = {}
        for prompt in "ab":
            for chunk in range(6):
                each = unit(prompt, chunk, *self.sizes)
                self.units[each.chunk] = each
        self.present: set[tuple[Medium, str]] = set()

    @rule(medium=st.sampled_from(MEDIA), prompt=st.sampled_from("ab"), chunk=st.integers(0, 5))
    def stored(self, medium: Medium, prompt: str, chunk: int) -> None:
        each = self.units[name(prompt, chunk)]
        if not self.announcer.knows(each.chunk):
            self.announcer.learn(each)
        self.announcer.stored(each.chunk, medium)
        self.present.add((medium, each.chunk))

    @rule(medium=st.sampled_from(MEDIA), prompt=st.sampled_from("ab"), chunk=st.integers(0, 5))
    def gone(self, medium: Medium, prompt: str, chunk: int) -> None:
        self.announcer.gone(name(prompt, chunk), medium)
        self.present.discard((medium, name(prompt, chunk)))

    @rule()
    def clear(self) -> None:
        self.announcer.clear()
        self.present.clear()

    @rule()
    def all_forget(self) -> None:
        self.listener.hear(self.announcer.take())
        self.listener.blocks.clear()
        self.announcer.repeat()

    @invariant()
    def the_listener_knows_what_is_there(self) -> None:
        check(self.announcer)
        self.listener.hear(self.announcer.take())
        assert self.listener.blocks == {
            (medium, block)
            for medium, chunk in self.present
            for i, block in enumerate(self.units[chunk].blocks)
            if i or all((medium, need) in self.present for need in self.units[chunk].needs)
        }


TestMachine = Machine.TestCase


def simple(chunk: str) -> ChunkBlocks:
    return ChunkBlocks(chunk, (f"{chunk}0", f"{chunk}1"), (), None)


def told(announcer: KVEventTracker) -> list[str]:
    """Return announcements in words: `+a0 a1 STORAGE`, `-a0 a1 STORAGE`, `cleared`."""
    words = []
    for each in announcer.take():
        match each:
            case BlocksStored(medium, of, start, stop):
                words.append(f"+{' '.join(map(str, of.blocks[start:stop]))} {medium.name}")
            case BlocksRemoved(medium, blocks):
                words.append(f"-{' '.join(map(str, blocks))} {medium.name}")
            case Cleared():
                words.append("cleared")
    return words


def with_chunks(chunks: str) -> KVEventTracker:
    announcer = KVEventTracker(MEDIA)
    for chunk in chunks:
        announcer.learn(simple(chunk))
    return announcer


def stored(*tiers: int, missed: tuple[int, ...] = ()) -> Stored:
    return Stored(1, frozenset(tiers), frozenset(missed))


def test_a_chunk_that_one_rank_could_not_store_is_not_announced() -> None:
    announcer = with_chunks("abc")
    announcer.planned(JobId(1))
    announcer.saved(JobId(1), 5, "abc", stored(1, missed=(6,)))
    assert told(announcer) == ["+a0 a1 STORAGE", "+c0 c1 STORAGE"]


@pytest.mark.parametrize(
    ("tiers", "wanted"), [((), []), ((0,), ["+a0 a1 CPU"]), ((0, 1), ["+a0 a1 STORAGE"])]
)
def test_cells_in_several_tiers_are_no_nearer_than_the_farthest(
    tiers: tuple[int, ...], wanted: list[str]
) -> None:
    announcer = with_chunks("a")
    announcer.planned(JobId(1))
    announcer.saved(JobId(1), 0, "a", stored(*tiers))
    assert told(announcer) == wanted


def test_a_save_of_before_a_reset_announces_nothing() -> None:
    announcer = with_chunks("a")
    announcer.planned(JobId(1))
    announcer.clear()
    announcer.learn(simple("a"))
    announcer.saved(JobId(1), 0, "a", stored(1))
    assert told(announcer) == []
    announcer.planned(JobId(2))
    announcer.saved(JobId(2), 0, "a", stored(1))
    assert told(announcer) == ["+a0 a1 STORAGE"]


def test_what_is_forgotten_is_made_up_for_by_clearing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CHUNKS", 2)
    announcer = with_chunks("ab")
    announcer.stored("a", FAR)
    assert announcer.knows("a")  # and is the newest now
    announcer.learn(simple("c"))
    assert not announcer.knows("b")
    announcer.learn(simple("d"))
    check(announcer)
    assert told(announcer) == ["+a0 a1 STORAGE"]
    announcer.gone("a", FAR)
    assert told(announcer) == []
    announcer.clear()
    assert told(announcer) == ["cleared"]


def test_a_block_is_forgotten_with_the_chunk_that_it_begins_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_CHUNKS", 2)
    announcer = with_chunks("a")
    announcer.learn(ChunkBlocks("b", ("ab", "b1"), ("a",), None))
    announcer.stored("a", FAR)
    announcer.stored("b", FAR)
    announcer.learn(simple("c"))
    check(announcer)
    assert told(announcer) == ["+a0 a1 STORAGE", "+ab b1 STORAGE"]
    announcer.gone("b", FAR)
    check(announcer)
    assert told(announcer) == ["-b1 STORAGE"]
    announcer.clear()
    assert told(announcer) == ["cleared"]


def test_a_queue_that_nobody_takes_ends_in_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 3)
    announcer = with_chunks("abcde")
    for chunk in "abcd":
        announcer.stored(chunk, FAR)
    check(announcer)
    assert told(announcer) == ["cleared"]
    announcer.stored("a", FAR)  # nobody knows of it any more
    assert told(announcer) == ["+a0 a1 STORAGE"]


def test_blocks_announced_behind_a_full_queue_are_removed_when_they_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    announcer, listener = with_chunks("abcde"), Listener()
    for chunk in "abcde":
        announcer.stored(chunk, NEAR)
    announcer.take()  # receivers have dropped these by the time of `repeat`
    monkeypatch.setattr(module, "MAX_WAITING", 3)
    announcer.repeat()
    listener.hear(announcer.take())
    for chunk in "abcde":
        announcer.gone(chunk, NEAR)
        listener.hear(announcer.take())
    assert listener.blocks == set()


@given(st.lists(st.sampled_from("abc"), max_size=8))
def test_a_chunk_is_announced_once_per_medium(chunks: list[str]) -> None:
    announcer = with_chunks("abc")
    for chunk in chunks:
        announcer.stored(chunk, FAR)
    assert sorted(told(announcer)) == [f"+{c}0 {c}1 STORAGE" for c in sorted(set(chunks))]
