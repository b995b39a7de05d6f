"""The window lent out: which grants there are, and what becomes of their memory (pure).

Memory that a producer may write comes back when certainly nobody writes it any more; where nobody
can say, it is in quarantine until whoever might has given up.
"""

from collections.abc import Callable, Iterator

from vllm_kvpool.embeds import credit
from vllm_kvpool.embeds.arena import Arena
from vllm_kvpool.embeds.items import Granted, Item, Source
from vllm_kvpool.embeds.protocol import MAX_EXTENTS, Grant
from vllm_kvpool.embeds.rows import Extent
from vllm_kvpool.embeds.states import GRANT_TABLE, GrantEvent, GrantState


class Lending:
    """See the module docstring. `ended` is told of each grant that ends, after its memory."""

    def __init__(
        self,
        nbytes: int,
        *,
        ttl_s: float,
        quarantine_s: float,
        ended: Callable[[Granted, float], None],
    ) -> None:
        self._arena = Arena(nbytes)
        self._ttl_s = ttl_s
        self._quarantine_s = quarantine_s
        self._on_end = ended
        self._grants: dict[int, Granted] = {}  # all but released and quarantined
        self._doubtful: dict[int, Granted] = {}  # in quarantine, and its producer can tell
        self._next_gid = 1

    def __iter__(self) -> Iterator[Granted]:
        return iter(tuple(self._grants.values()))

    def __getitem__(self, gid: int) -> Granted:
        return self._grants[gid]

    @property
    def nbytes(self) -> int:
        """Of the window."""
        return self._arena.nbytes

    @property
    def has_room(self) -> bool:
        """Whether any byte is free."""
        return self._arena.free_bytes > 0

    def of(self, source: Source, gid: int) -> Granted | None:
        """A grant, if it was given to this source."""
        granted = self._grants.get(gid)
        return granted if granted is not None and granted.source == source else None

    def take(self, rows: int, row_bytes: int) -> tuple[Extent, ...]:
        """Memory for so many rows, or fewer; none if too little is free to be worth a round."""
        wanted = rows * row_bytes
        extents = self._arena.take(wanted, row_bytes, MAX_EXTENTS)
        if len(extents) == 1 and extents[0].nbytes == wanted:
            return extents
        got = sum(extent.nbytes for extent in extents)
        is_idle = not self._grants
        if extents and not credit.is_worth_it(got, wanted, self.nbytes, is_idle):
            self._arena.free(extents)
            return ()
        return extents

    def lend(
        self,
        item: Item,
        source: Source,
        row: int,
        rows: int,
        extents: tuple[Extent, ...],
        now: float,
    ) -> Granted:
        """A new grant of taken memory."""
        granted = Granted(self._next_gid, item.mm_hash, source, row, rows, extents, now, now)
        granted.generation, granted.digest = item.generation, item.digest
        self._next_gid += 1
        self._grants[granted.gid] = item.live[granted.gid] = granted
        return granted

    def message(self, granted: Granted) -> Grant:
        """How a grant is told."""
        return Grant(
            granted.source[1],
            granted.gid,
            granted.row,
            granted.rows,
            granted.extents,
            self._ttl_s,
        )

    def end(self, granted: Granted, event: GrantEvent, now: float) -> None:
        """A grant ends; its memory is free, or in quarantine."""
        granted.state = GRANT_TABLE.after(granted.state, event)
        del self._grants[granted.gid]
        if granted.state is GrantState.QUARANTINED:
            granted.until = now + self._quarantine_s
            self._arena.quarantine(granted.extents, granted.until)
        else:
            self._arena.free(granted.extents)
        self._on_end(granted, now)

    def end_all(self, event: GrantEvent, now: float, *, source: Source) -> None:
        """Those of a source end, but for what is being drained: its writer has ended before."""
        for granted in self:
            if granted.source == source and granted.state is not GrantState.DRAINING:
                self.end(granted, event, now)
        if event is GrantEvent.QUIET:
            for gid in tuple(self._doubtful):
                self.cleared(source, gid)

    def end_all_of(self, peer: str, now: float, *, quiet: bool) -> None:
        """The same of a peer that is gone."""
        for granted in self:
            if granted.source[0] == peer and granted.state is not GrantState.DRAINING:
                if quiet:
                    self.end(granted, GrantEvent.QUIET, now)
                else:
                    self.doubt(granted, now)

    def doubt(self, granted: Granted, now: float) -> None:
        """Nobody has said what became of a grant; who it was given to may still do so."""
        self.end(granted, GrantEvent.UNSURE, now)
        if granted.source[1]:
            self._doubtful[granted.gid] = granted

    def doubtful(self, now: float) -> list[Granted]:
        """Grants in quarantine of which somebody may know more."""
        for gid in [gid for gid, each in self._doubtful.items() if each.until < now]:
            del self._doubtful[gid]
        return list(self._doubtful.values())

    def forget_doubt(self, source: Source, gid: int) -> None:
        """Who it was given to does not know either."""
        granted = self._doubtful.get(gid)
        if granted is not None and granted.source == source:
            del self._doubtful[gid]

    def cleared(self, source: Source, gid: int) -> bool:
        """Nothing is written any more to what was in quarantine; whether it was."""
        granted = self._doubtful.get(gid)
        if granted is None or granted.source != source:
            return False
        del self._doubtful[gid]
        granted.state = GRANT_TABLE.after(granted.state, GrantEvent.QUIET)
        self._arena.release(granted.extents)
        return True

    def tick(self, now: float) -> None:
        """End quarantines that are over."""
        self._arena.tick(now)

    def gauges(self) -> dict[str, float]:
        """Levels."""
        quarantined = self._arena.quarantined_bytes
        return {
            "granted_bytes": self.nbytes - self._arena.free_bytes - quarantined,
            "quarantined_bytes": quarantined,
        }

    def check(self) -> None:
        """Every byte of the window is in one place."""
        self._arena.check(extent for granted in self for extent in granted.extents)
        assert all(each.state is GrantState.QUARANTINED for each in self._doubtful.values())
