"""The items that a producer keeps in its process, and how long each (pure; control thread).

An item is here from when it was encoded. It stays while somebody takes it, then as long as there is
room; one that nobody has taken stays until it is too old. What has been forgotten is begun with no
more, and released once no transfer has it and nothing reads it.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from vllm_kvpool.embeds.rows import ItemShape


@dataclass(slots=True)
class Source:
    """An item's rows in this process."""

    sid: int
    mm_hash: str
    shape: ItemShape
    aux: bytes
    since: float  # it is here, or somebody last took it
    digest: str = ""  # empty until it is prepared
    transfers: set[int] = field(default_factory=set)
    taken: bool = False  # by at least one consumer
    readers: int = 0  # writes, and the preparation, that read it now
    held_bytes: int = 0  # its part of what the producer holds for others

    @property
    def is_spare(self) -> bool:
        """Whether nobody needs it now."""
        return self.taken and not self.transfers


class Shelf:
    """See the module docstring. `release(sid)` is told that nothing of a source is needed."""

    def __init__(self, retain_bytes: int, max_gone: int, release: Callable[[int], None]) -> None:
        self._retain_bytes = retain_bytes
        self._max_gone = max_gone
        self._release = release
        self._sources: OrderedDict[str, Source] = OrderedDict()  # least recently taken first
        self._untaken: dict[str, Source] = {}  # of these, what nobody has taken yet
        self._read: dict[int, Source] = {}  # all that are not released, by number
        self._gone: OrderedDict[str, None] = OrderedDict()
        self._kept_bytes = 0
        self._next_sid = 1
        self.held_bytes = 0
        """Bytes of sources that somebody is still to take."""

    def __len__(self) -> int:
        return len(self._sources)

    def __contains__(self, mm_hash: str) -> bool:
        return mm_hash in self._sources

    def __iter__(self) -> Iterator[Source]:
        return iter(list(self._sources.values()))

    def get(self, mm_hash: str) -> Source | None:
        """The source that is here now."""
        return self._sources.get(mm_hash)

    def numbered(self, sid: int) -> Source:
        """A source that is not released yet, forgotten or not."""
        return self._read[sid]

    def holds(self, source: Source) -> bool:
        """Whether it has not been forgotten."""
        return self._sources.get(source.mm_hash) is source

    def was_here(self, mm_hash: str) -> bool:
        """Whether an item was forgotten not long ago."""
        return mm_hash in self._gone

    def add(self, mm_hash: str, shape: ItemShape, aux: bytes, now: float) -> Source:
        """An item that is not here has been encoded; its preparation reads it."""
        assert mm_hash not in self._sources
        source = Source(self._next_sid, mm_hash, shape, aux, now, readers=1)
        self._next_sid += 1
        self._sources[mm_hash] = self._untaken[mm_hash] = self._read[source.sid] = source
        self._kept_bytes += shape.nbytes
        self._weigh(source)
        self._gone.pop(mm_hash, None)
        return source

    def begin(self, source: Source, tid: int) -> None:
        """A transfer of it begins."""
        source.transfers.add(tid)
        self._weigh(source)
        self._sources.move_to_end(source.mm_hash)

    def note_taken(self, source: Source, now: float) -> None:
        """A consumer has all of it."""
        source.taken, source.since = True, now
        if self._untaken.get(source.mm_hash) is source:
            del self._untaken[source.mm_hash]

    def end(self, source: Source, tid: int, now: float) -> None:
        """A transfer has ended, and nothing of it is written any more."""
        source.transfers.remove(tid)
        self._weigh(source)
        source.since = now
        if self.holds(source):
            self.make_room()
        else:
            self.let_go(source)

    def too_old(self, now: float, timeout_s: float) -> list[Source]:
        """What nobody has taken for so long, and nobody is about to."""
        return [
            each
            for each in self._untaken.values()
            if not each.transfers and not each.readers and now - each.since > timeout_s
        ]

    def make_room(self) -> None:
        """Drop what all have taken, the longest ago first, while more is kept than may be."""
        while self._kept_bytes > self._retain_bytes:
            source = next((each for each in self._sources.values() if each.is_spare), None)
            if source is None:
                return
            self.forget(source)

    def forget(self, source: Source) -> None:
        """No new transfer begins from it; it goes when nothing reads it any more."""
        del self._sources[source.mm_hash]
        self._untaken.pop(source.mm_hash, None)
        self._kept_bytes -= source.shape.nbytes
        self._weigh(source)
        self._gone[source.mm_hash] = None
        while len(self._gone) > self._max_gone:
            self._gone.popitem(last=False)
        self.let_go(source)

    def forget_what_was_here(self) -> None:
        """What was forgotten may come again."""
        self._gone.clear()

    def let_go(self, source: Source) -> None:
        """Release a forgotten source once nothing reads it."""
        if not source.transfers and not source.readers:
            del self._read[source.sid]
            self._release(source.sid)

    def _weigh(self, source: Source) -> None:
        """A source has come, has gone, or is needed by more or by fewer."""
        is_held = self.holds(source) and not source.is_spare
        nbytes = source.shape.nbytes if is_held else 0
        self.held_bytes += nbytes - source.held_bytes
        source.held_bytes = nbytes

    def check(self, transfers: set[int]) -> None:
        """What always holds; `transfers` are those that there are."""
        for sid, source in self._read.items():
            assert sid == source.sid
            assert source.transfers <= transfers
            assert source.readers >= 0
            assert source.transfers or source.readers or source.mm_hash in self._sources
        held = (each for each in self._sources.values() if not each.is_spare)
        assert self.held_bytes == sum(each.shape.nbytes for each in held)
        assert self._kept_bytes == sum(each.shape.nbytes for each in self._sources.values())
        untaken = {mm_hash: each for mm_hash, each in self._sources.items() if not each.taken}
        assert self._untaken == untaken
