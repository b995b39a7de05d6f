"""Turns plans of the scheduler part into jobs of slabs for one rank (pure; the engine thread's)."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self

from vllm_kvpool.identity.keys import KeyMaker, Namespace, around_hash, of_drafter
from vllm_kvpool.layout.topology import NO_CONTEXT, Context, LocalCell, ReplicaRank
from vllm_kvpool.storage.base import NO_RETENTION, ChunkRef, Retention
from vllm_kvpool.storage.contents.cell_format import HEADER_BYTES
from vllm_kvpool.transfer.ops import (
    NO_SLABS,
    NULL_BLOCK,
    JobPages,
    LoadJob,
    LoadPlan,
    PrefetchJob,
    PrefetchPlan,
    SaveJob,
    SavePlan,
    Slab,
    SlabKind,
)

PART_BYTES = 64 << 20  # of a plan's slabs that are named at a time: 1.2 ms of a GPU's link
VERSIONS_KEPT = 4  # saves planned before the weights change still carry the version before


class _NamedSlab(NamedTuple):
    """A slab that every chunk has: its names without the chunk's hash, and its size."""

    kind: SlabKind
    cell: LocalCell  # one of its cells, which all have the same windows and replicas
    groups: tuple[int, ...]  # KV cache groups of its pages
    layer_group: int  # which of `_Names.layer_groups`
    nbytes: int
    fetchers: tuple[int | None, ...]  # of chunk i: the one at i modulo the length; None: this rank


class _LayerGroup(NamedTuple):
    """The names of chunks in one layer group, and which chunk comes before which."""

    prefix: str
    suffix: str
    needs_parent: bool  # its attention reads the whole prompt, not only a window or a state
    steps: tuple[int, ...]
    """Distance of chunk i to the last chunk of its fetcher, at i modulo the length."""

    def ref(self, hashes: Sequence[str], place: int, index: int) -> ChunkRef:
        """Return the reference of chunk `index`, whose hash is `hashes[place]`."""

        def id_of(place: int) -> str:
            return self.prefix + hashes[place] + self.suffix if place >= 0 else ""

        if not self.needs_parent:
            return ChunkRef(id_of(place), "", index)
        step = self.steps[index % len(self.steps)]
        in_host = id_of(place - step) if step > 1 else ""
        return ChunkRef(id_of(place), id_of(place - 1), index, in_host)


class _Names(NamedTuple):
    """The names of this rank's slabs under one version of the weights."""

    slabs: tuple[_NamedSlab, ...]
    layer_groups: tuple[_LayerGroup, ...]

    def chunks(
        self,
        hashes: Sequence[bytes],
        first: int,
        before: Sequence[bytes] = (),
        tenant: str = "",
        retention: Retention = NO_RETENTION,
        part: slice = slice(None),
    ) -> Iterator[tuple[int, str, list[ChunkRef]]]:
        """Yield each chunk's index, its hash in hexadecimal, and its references.

        There is a reference for each layer group. `part` says of which of `hashes`.
        """
        is_plain = not tenant and retention == NO_RETENTION
        start, stop, _ = part.indices(len(hashes))
        most_before = max((max(group.steps) for group in self.layer_groups), default=0)
        num_before = min(len(before) + start, most_before)
        from_place = len(before) + start - num_before
        every = [each.hex() for each in (*before, *hashes)[from_place : len(before) + stop]]
        for place, index in enumerate(range(first + start, first + stop), num_before):
            refs = [layer_group.ref(every, place, index) for layer_group in self.layer_groups]
            if not is_plain:
                refs = [ref._replace(tenant=tenant, retention=retention) for ref in refs]
            yield index, every[place], refs


@dataclass(frozen=True, slots=True)
class Planner:
    """Expands plans. Plans count all tokens of a request, jobs those that this rank holds.

    `chunk_tokens` counts the tokens on all context-parallel ranks; `block_sizes` are those of the
    KV cache groups on this rank. `keeps_all`: there is a host tier, which keeps this rank's cells
    of every chunk that it fetches, not only of those that it stores. `siblings` are the replicas of
    this rank on its host, by their number in the set (`replicas.py`). A slab has at most
    `slab_cells` cells and `slab_bytes` of payload, but for one cell that is larger; `by_span`: and
    the layers of one span.
    """

    cells: tuple[LocalCell, ...]
    keys: KeyMaker
    chunk_tokens: int
    load_timeout_s: float
    keeps_all: bool = False
    block_sizes: tuple[int, ...] = ()
    context: Context = NO_CONTEXT
    siblings: Mapping[ReplicaRank, int] = field(default_factory=dict)
    slab_cells: int = 64
    slab_bytes: int = 16 << 20
    by_span: bool = False
    _names: dict[str, _Names] = field(default_factory=dict, init=False, repr=False, compare=False)
    """By version of the weights, the last `VERSIONS_KEPT`."""
    _slabs: list[tuple[LocalCell, ...]] = field(
        default_factory=list, init=False, repr=False, compare=False
    )
    """The cells of each slab of a chunk on this rank. All versions share the tuples, since lanes
    keep tables of a slab's pages by its tuple."""

    def named(self, namespace: Namespace, drafter: str = "") -> Self:
        """Return a planner of the same cells in another namespace; drafts are by this drafter."""
        cells = [
            replace(
                cell,
                span=replace(cell.span, layer_group=of_drafter(cell.span.layer_group, drafter)),
            )
            for cell in self.cells
        ]
        return replace(self, cells=tuple(cells), keys=KeyMaker(namespace, self.keys.context))

    @property
    def local_chunk_tokens(self) -> int:
        """The tokens of a chunk that this rank holds."""
        return self.chunk_tokens // self.context.dcp_size

    def max_cell_bytes(self) -> int:
        """Return the bytes of this rank's largest cell, header and payload."""
        return max(self._cell_bytes(cell) for cell in self.cells)

    def begin_load(self, plan: LoadPlan) -> LoadJob:
        """Return the job of a plan with its first slabs; the engine asks for the others."""
        # The slabs of a layered load are sorted over the whole plan.
        return self.load(plan, is_cut=not plan.layered)

    def begin_save(self, plan: SavePlan) -> SaveJob:
        """Return the job of a plan with its first slabs, as `begin_load`."""
        # How far a prompt is stored is counted over all slabs of its plan.
        return self.save(plan, is_cut=not plan.topic)

    def _parts(self, plan: LoadPlan | SavePlan, *, is_cut: bool) -> list[slice]:
        """Return the places of a plan's chunks, cut into parts of `PART_BYTES` each, or a chunk."""
        num_chunks = len(plan.hashes)
        step = -(-PART_BYTES // max(1, sum(map(self._cell_bytes, self.cells))))
        if not is_cut or num_chunks <= step:
            return [slice(0, num_chunks)]
        return [slice(start, start + step) for start in range(0, num_chunks, step)]

    def load(self, plan: LoadPlan, *, is_cut: bool = False) -> LoadJob:
        """Return this rank's slabs of the plan's chunks that a KV cache group needs.

        In the order of chunks; of a layered plan, in the order in which the model reads layers.
        """
        parts = self._parts(plan, is_cut=is_cut)
        named = self._load(plan, parts)
        first, rest = next(named), named if parts[1:] else NO_SLABS
        return LoadJob(plan, first, self.load_timeout_s, rest=rest)

    def _load(self, plan: LoadPlan, parts: Sequence[slice]) -> Iterator[tuple[Slab, ...]]:
        """Yield the slabs of each part of a plan."""
        pages = self._local(plan.pages)
        names = self._with_weights(plan.weights_version)
        tokens = self.local_chunk_tokens
        for part in parts:
            slabs: list[Slab] = []
            for chunk, chunk_hex, refs in names.chunks(
                plan.hashes, plan.first_chunk, plan.before, plan.tenant, part=part
            ):
                end_tokens = plan.end_tokens if chunk == plan.stop_chunk - 1 else 0
                for named in names.slabs:
                    start = chunk * tokens - named.cell.lookahead
                    stop = start + tokens
                    if any(
                        start < pages[group].token_stop and stop > pages[group].token_start
                        for group in named.groups
                    ):
                        fetcher = named.fetchers[chunk % len(named.fetchers)]
                        slabs.append(
                            self._slab(named, chunk_hex, refs, pages, end_tokens, fetcher=fetcher)
                        )
            if plan.layered:
                slabs.sort(key=lambda slab: slab.kind.first_layer)
            yield tuple(slabs)

    def save(self, plan: SavePlan, *, is_cut: bool = False) -> SaveJob:
        """Return this rank's slabs of the chunks that it stores or keeps, without those with gaps.

        A slab of recurrent states is whole if every KV cache group of its layers has a page. A
        drafter's slab is whole if its chunk is before the plan's `draft_stop`. For a hand-over a
        slab with gaps has no pages: host memory may have it.
        """
        parts = self._parts(plan, is_cut=is_cut)
        named = self._save(plan, parts)
        return SaveJob(plan, next(named), rest=named if parts[1:] else NO_SLABS)

    def _save(self, plan: SavePlan, parts: Sequence[slice]) -> Iterator[tuple[Slab, ...]]:
        """Yield the slabs of each part of a plan."""
        pages = self._local(plan.pages)
        has_gaps = [NULL_BLOCK in each.block_ids for each in pages]
        names = self._with_weights(plan.weights_version)
        for part in parts:
            slabs = []
            for chunk, chunk_hex, refs in names.chunks(
                *(plan.hashes, plan.first_chunk, plan.before, plan.tenant, plan.retention), part
            ):
                for named in names.slabs:
                    cell = named.cell
                    if cell.is_state is not plan.is_state:
                        continue
                    if cell.is_draft and plan.draft_stop is not None and chunk >= plan.draft_stop:
                        continue
                    stored = cell.writes_chunk(chunk)
                    keeps = self.keeps_all and named.fetchers[chunk % len(named.fetchers)] is None
                    if not (stored or keeps):
                        continue
                    own = pages
                    if plan.is_state:
                        if not all(pages[group].block_ids for group in named.groups):
                            continue
                    elif pages and any(
                        has_gaps[group]
                        and not self._is_whole(
                            cell, chunk, pages[group], self.block_sizes[group], plan.end_tokens
                        )
                        for group in named.groups
                    ):
                        if not plan.topic:
                            continue
                        own = ()
                    slabs.append(
                        self._slab(named, chunk_hex, refs, own, plan.end_tokens, stored=stored)
                    )
            yield tuple(slabs)

    def prefetch(self, plan: PrefetchPlan) -> PrefetchJob:
        """Return this rank's slabs of the plan's chunks that it fetches.

        Layer groups with a window need the last chunks only, wherever in the last one a load ends;
        recurrent states, and windows of which a chunk's end is stored, the last chunk.
        """
        names = self._with_weights(plan.weights_version)
        stop = (len(plan.hashes) - 1) * self.chunk_tokens
        slabs: list[Slab] = []
        for chunk, chunk_hex, refs in names.chunks(plan.hashes, 0, tenant=plan.tenant):
            slabs += [
                self._slab(named, chunk_hex, refs)
                for named in names.slabs
                if (
                    chunk == len(plan.hashes) - 1
                    if named.cell.is_state or named.cell.tail_tokens
                    else (chunk + 1) * self.chunk_tokens > named.cell.window.first_read(stop)
                )
                and named.fetchers[chunk % len(named.fetchers)] is None
            ]
        return PrefetchJob(plan, tuple(slabs))

    def _slab(
        self,
        named: _NamedSlab,
        chunk_hex: str,
        refs: Sequence[ChunkRef],
        pages: tuple[JobPages, ...] = (),
        end_tokens: int = 0,
        *,
        stored: bool = True,
        fetcher: int | None = None,
    ) -> Slab:
        kind, nbytes = named.kind, named.nbytes
        ref, sizes = refs[named.layer_group], kind.sizes
        if end_tokens:
            sizes = tuple(self._cell_bytes(cell, end_tokens) for cell in kind.cells)
            nbytes = sum(sizes)
        return Slab(
            *(ref.id + kind.part, kind, ref, chunk_hex, sizes, nbytes, pages, stored, fetcher),
            end_tokens=end_tokens,
        )

    @property
    def slabs_per_chunk(self) -> Mapping[str, int]:
        """The number of slabs in a chunk of each layer group."""
        return Counter(cells[0].span.layer_group for cells in self._cut())

    def _cut(self) -> list[tuple[LocalCell, ...]]:
        """Cut this rank's cells of a chunk into slabs."""
        if self._slabs:
            return self._slabs
        slabs: list[list[LocalCell]] = []
        open_in: dict[object, tuple[list[LocalCell], int]] = {}
        for cell in self.cells:
            group = cell.span.layer_group, cell.span.start if self.by_span else 0
            slab, nbytes = open_in.get(group, ([], 0))
            nbytes += cell.payload_bytes(self.local_chunk_tokens)
            if not slab or len(slab) == self.slab_cells or nbytes > self.slab_bytes:
                slab, nbytes = [], cell.payload_bytes(self.local_chunk_tokens)
                slabs.append(slab)
            slab.append(cell)
            open_in[group] = slab, nbytes
        self._slabs.extend(map(tuple, slabs))
        return self._slabs

    def _with_weights(self, weights_version: str) -> _Names:
        names = self._names.get(weights_version)
        if names is None:
            assert self.keys.namespace, "a plan came before the namespace"
            if len(self._names) >= VERSIONS_KEPT:
                del self._names[next(iter(self._names))]
            keys = self.keys.with_weights(weights_version)
            layer_groups = {cell.span.layer_group: cell for cell in self.cells}
            numbers = {layer_group: number for number, layer_group in enumerate(layer_groups)}
            seen: Counter[str] = Counter()
            slabs = []
            for cells in self._cut():
                layer_group = cells[0].span.layer_group
                part, seen[layer_group] = seen[layer_group], seen[layer_group] + 1
                sizes = tuple(map(self._cell_bytes, cells))
                kind = SlabKind(
                    key_prefixes=tuple(keys.key_prefix(cell.shard, cell.span) for cell in cells),
                    sizes=sizes,
                    cells=cells,
                    part=f"/{part}" if part else "",
                )
                groups = dict.fromkeys(piece.group for cell in cells for piece in cell.pieces)
                slabs.append(
                    _NamedSlab(
                        *(kind, cells[0], tuple(groups), numbers[layer_group], sum(sizes)),
                        fetchers=self._fetchers_of(cells[0]),
                    )
                )
            names = self._names[weights_version] = _Names(
                tuple(slabs),
                tuple(
                    _LayerGroup(
                        *around_hash(keys.namespace, layer_group),
                        cell.window.is_full and not cell.is_state,
                        _steps(self._fetchers_of(cell)),
                    )
                    for layer_group, cell in layer_groups.items()
                ),
            )
        return names

    def _fetchers_of(self, cell: LocalCell) -> tuple[int | None, ...]:
        if not (cell.replicas and self.siblings):
            return (None,)
        here = {cell.replicas[cell.replica_index], *self.siblings}
        return tuple(map(self.siblings.get, cell.fetchers(here))) or (None,)

    def _local(self, pages: Sequence[JobPages]) -> tuple[JobPages, ...]:
        """Return the pages counted in tokens of this context-parallel rank."""
        if self.context.dcp_size == 1:
            return tuple(pages)
        return tuple(
            JobPages(
                block_ids,
                table_start // self.context.dcp_size,
                self.context.held(self.keys.context, start),
                self.context.held(self.keys.context, stop),
            )
            for block_ids, table_start, start, stop in pages
        )

    def _is_whole(
        self, cell: LocalCell, chunk: int, pages: JobPages, block_size: int, end_tokens: int
    ) -> bool:
        """Return True if every block of the chunk is allocated.

        For groups that store only a chunk's tail, only the tail's blocks count. A prompt's end has
        `end_tokens` tokens; 0 stands for a whole chunk.
        """
        start, tokens = chunk * self.local_chunk_tokens, end_tokens or self.local_chunk_tokens
        end = start + tokens - cell.lookahead - pages.table_start
        first = max(0, end - (cell.tail_tokens or tokens)) // block_size
        stop = -(-end // block_size)
        return NULL_BLOCK not in pages.block_ids[first:stop]

    def _cell_bytes(self, cell: LocalCell, end_tokens: int = 0) -> int:
        return HEADER_BYTES + cell.payload_bytes(end_tokens or self.local_chunk_tokens)


def _steps(fetchers: Sequence[int | None]) -> tuple[int, ...]:
    """Return the distance of chunk i to its fetcher's last chunk, at i modulo the length."""
    num = len(fetchers)
    return tuple(
        next(step for step in range(1, num + 1) if fetchers[index - step] == fetcher)
        for index, fetcher in enumerate(fetchers)
    )
