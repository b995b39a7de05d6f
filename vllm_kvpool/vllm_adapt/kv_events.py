"""The pool's content as vLLM's KV cache events, with vLLM's own block hashes.

Scheduler's thread; only where `kv_events_config.enable_kv_cache_events` is set. The blocks of one
layer group stand for all. A chunk is announced when the stores have every cell of every rank, or
every rank has its cells in host memory (`scheduler/kv_event_tracker.py`). vLLM publishes the events
at the end of a step; `has_pending` asks for a further one.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from vllm_kvpool.identity.keys import Namespace, chunk_id_of, with_weights
from vllm_kvpool.scheduler.kv_event_tracker import (
    Announcement,
    BlocksRemoved,
    BlocksStored,
    ChunkBlocks,
    Cleared,
    KVEventTracker,
    Medium,
)
from vllm_kvpool.scheduler.messages import StepPlan, StepReport
from vllm_kvpool.scheduler.prefix_search import HostCacheIndex
from vllm_kvpool.scheduler.save_outcomes import EndedSave
from vllm_kvpool.storage.base import Capabilities
from vllm_kvpool.transfer.ops import LoadPlan, PrefetchPlan, SavePlan
from vllm_kvpool.vllm_adapt import compat
from vllm_kvpool.vllm_adapt.kv_cache_specs.layer_groups import RankLayerGroup

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

LOCAL, REMOTE = "LOCAL", "REMOTE"
# vLLM's names, which older releases lack.
MEDIUM_CPU, MEDIUM_STORAGE = "CPU", "STORAGE"
HOST = Medium(MEDIUM_CPU, LOCAL)
MEDIA = {
    # A directory may be on this machine or not.
    "file": Medium(MEDIUM_STORAGE),
    "mooncake": Medium(MEDIUM_CPU, REMOTE),
    "s3": Medium(MEDIUM_STORAGE, REMOTE),
}


def are_on(vllm_config: "VllmConfig") -> bool:
    """Return True if KV events are on."""
    events = vllm_config.kv_events_config
    return events is not None and bool(events.enable_kv_cache_events)


@dataclass(frozen=True, slots=True)
class _EventPayload:
    """The content of a chunk's events besides block hashes."""

    parent: Any  # hash of the block before the first
    tokens: "array[int]"
    extra_keys: tuple[Any, ...]
    fields: dict[str, Any]


@dataclass(slots=True)
class _LiveRequest:
    """A request and the ids of its planned chunks, by index."""

    request: "Request"
    names: dict[int, str] = field(default_factory=dict)


class KVEvents:
    """The events of an engine: `add`, `planned`, `apply` and `finished`, then `take`."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        kv_cache_config: "KVCacheConfig",
        layer_group: RankLayerGroup,
        namespace: Namespace,
        chunk_tokens: int,
        tiers: Sequence[Capabilities],
        host: HostCacheIndex,
    ) -> None:
        self._namespace = namespace
        self._chunk_tokens = chunk_tokens
        self._host = host
        self._layer_group = layer_group.name
        spec = layer_group.spec
        self._block_size = (
            spec.block_size * vllm_config.parallel_config.decode_context_parallel_size
        )
        _, self._hash_block_size = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
        self._common = {
            "block_size": self._block_size,
            "group_idx": layer_group.groups[0],
            "kv_cache_spec_kind": get_kv_cache_spec_kind(spec).value,
            "kv_cache_spec_sliding_window": get_kv_cache_spec_sliding_window(spec),
        }
        self._stored_fields = compat.event_fields(BlockStored)
        self._removed_fields = compat.event_fields(BlockRemoved)
        self._tracker = KVEventTracker([MEDIA[tier.name] for tier in tiers])
        self._requests: dict[str, _LiveRequest] = {}
        self._ended: list[str] = []  # their last save is planned in the next step
        self._weights_version = ""

    # Requests and plans

    def add(self, request: "Request") -> None:
        """Follow a request that has arrived."""
        self._requests[request.request_id] = _LiveRequest(request)

    def finished(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._ended.append(request_id)

    def planned(self, plan: StepPlan, weights_version: str) -> None:
        """Take a step's plan, whose saves are of `weights_version`."""
        if weights_version != self._weights_version:
            self.reset()
            self._weights_version = weights_version
        if self._host.num_ranks:
            for load in plan.loads:
                self._learn(load, load.first_chunk, but_last=load.is_last_other)
            for prefetch in plan.prefetches:
                self._learn(prefetch, 0)
        for save in plan.saves:
            if _is_told(save):
                self._learn(save, save.first_chunk)
                self._tracker.planned(save.job_id)
        for request_id in self._ended:
            self._requests.pop(request_id, None)
        self._ended.clear()

    def _name(self, chunk_hash: bytes) -> str:
        namespace = with_weights(self._namespace, self._weights_version)
        return chunk_id_of(namespace, chunk_hash.hex(), self._layer_group)

    def _learn(
        self, plan: SavePlan | LoadPlan | PrefetchPlan, first: int, *, but_last: bool = False
    ) -> None:
        """Learn the blocks of the plan's chunks, unless the plan is of other weights."""
        live = self._requests.get(plan.request_id)
        if live is None or plan.weights_version != self._weights_version:
            return
        hashes = plan.hashes[:-1] if but_last else plan.hashes
        for chunk, name in enumerate(map(self._name, hashes), first):
            live.names[chunk] = name
            if not self._tracker.knows(name):
                blocks = self._blocks_of(live, chunk)
                if blocks is not None:
                    self._tracker.learn(blocks)

    def _blocks_of(self, live: _LiveRequest, chunk: int) -> ChunkBlocks | None:
        """Return the blocks that end in a chunk; None if vLLM has not hashed them all.

        The first is left out if it begins in a chunk that this engine has not planned.
        """
        request, size = live.request, self._block_size
        start_token = chunk * self._chunk_tokens
        first, stop = start_token // size, (start_token + self._chunk_tokens) // size
        hashes = compat.block_hashes(request.block_hashes, self._hash_block_size, size)
        if len(hashes) < stop:
            return None
        needed = range(first * size // self._chunk_tokens, chunk) if stop > first else range(0)
        if not all(each in live.names for each in needed):
            needed, first = range(0), first + 1
        keys = []
        media_index = 0
        for block in range(first, stop):
            extra, media_index = generate_block_hash_extra_keys(
                request, block * size, (block + 1) * size, media_index
            )
            keys.append(extra)
        lora = request.lora_request
        about = _EventPayload(
            parent=maybe_convert_block_hash(hashes[first - 1]) if first else None,
            tokens=array("q", request.all_token_ids[first * size : stop * size]),
            extra_keys=tuple(keys),
            fields={
                "lora_id": lora.adapter_id if lora else None,
                "lora_name": lora.name if lora else None,
                "session_id": getattr(request, "session_id", None),
            },
        )
        return ChunkBlocks(
            chunk=live.names[chunk],
            blocks=tuple(maybe_convert_block_hash(hashes[i]) for i in range(first, stop)),
            needs=tuple(live.names[each] for each in needed),
            payload=about,
        )

    # Reports and resets

    def apply(self, report: StepReport, ended: Iterable[EndedSave]) -> None:
        """Take the workers' report and the saves that ended with it, after the scheduler part."""
        for plan, how, _ in ended:
            if _is_told(plan) and plan.weights_version == self._weights_version:
                names = list(map(self._name, plan.hashes))
                self._tracker.saved(plan.job_id, plan.first_chunk, names, how)
        for change in report.host.values():
            for chunk in change.added:
                if self._host.has(chunk):
                    self._tracker.stored(chunk, HOST)
            for chunk in change.removed:
                self._tracker.gone(chunk, HOST)

    def reset(self) -> None:
        """Forget all cells: this engine's namespace was removed, or its weights have changed."""
        self._tracker.clear()

    def own_cache_was_reset(self) -> None:
        """Announce all blocks again: vLLM has published that all are removed, in every medium."""
        self._tracker.repeat()

    # To vLLM

    @property
    def has_pending(self) -> bool:
        """True if events wait for a further step. The wait for saves is `is_awaited`."""
        return self._tracker.num_waiting > 0

    def take(self) -> list[Any]:
        """Return the events since the last call, in order."""
        return [self._event(each) for each in self._tracker.take()]

    def _event(self, event: Announcement) -> Any:
        match event:
            case BlocksStored():
                return self._stored(event)
            case BlocksRemoved(medium, blocks):
                fields = self._common | {"locality": medium.locality}
                return BlockRemoved(
                    block_hashes=list(blocks),
                    medium=medium.name,
                    **{k: v for k, v in fields.items() if k in self._removed_fields},
                )
            case Cleared():
                return AllBlocksCleared()

    def _stored(self, event: BlocksStored) -> Any:
        about: _EventPayload = event.of.payload
        start, stop, size = event.start, event.stop, self._block_size
        fields = self._common | about.fields | {"locality": event.medium.locality}
        return BlockStored(
            block_hashes=list(event.of.blocks[start:stop]),
            parent_block_hash=event.of.blocks[start - 1] if start else about.parent,
            token_ids=about.tokens[start * size : stop * size].tolist(),
            medium=event.medium.name,
            extra_keys=compat.event_extra_keys(list(about.extra_keys[start:stop])),
            **{k: v for k, v in fields.items() if k in self._stored_fields},
        )


def _is_told(plan: SavePlan) -> bool:
    """Return True if events tell of a save: they are of whole chunks of attention."""
    return not (plan.is_state or plan.end_tokens)
