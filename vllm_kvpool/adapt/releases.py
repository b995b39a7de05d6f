"""What differs between releases of vLLM (0.27.1 to 0.32), behind one name each.

Nothing else asks which release runs: what is missing is looked for by name, so that releases
between and after those two work as long as the names do.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


def row_bytes(spec: Any) -> int:
    """Bytes of one token's K and V (or latent) of one head in one layer."""
    content = getattr(spec, "state_content_size_bytes", None)
    if content is not None:
        return int(content)
    rows = spec.block_size // getattr(spec, "compress_ratio", 1) * spec.num_kv_heads
    nbytes, rest = divmod(spec.real_page_size_bytes, rows)
    assert rest == 0, spec
    return int(nbytes)


def has_own_content(spec: Any) -> bool:
    """Whether a row is laid out by the backend, so that K and V cannot be told apart."""
    return bool(getattr(spec, "state_content_bytes", None))


def packs_heads(spec: Any) -> bool:
    """Whether the backend keeps several KV heads as one."""
    return getattr(spec, "num_head_slots", None) is not None or bool(spec.kv_quant_mode.is_nvfp4)


def tokens_per_state(spec: Any) -> int:
    """How many tokens share one row."""
    ratio = getattr(spec, "tokens_per_state", None)
    return int(ratio if ratio is not None else getattr(spec, "compress_ratio", 1))


def hit_source(names: Sequence[str]) -> Any:
    """What vLLM calls the place that hits come from, or None where it does not ask."""
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:
        return None
    sources = {
        "host": CacheHitSource.HOST,
        "memory": CacheHitSource.HOST,
        "file": CacheHitSource.DISK,
    }
    known = {sources.get(name, CacheHitSource.EXTERNAL_UNSPECIFIED) for name in names}
    return known.pop() if len(known) == 1 else CacheHitSource.EXTERNAL_UNSPECIFIED


class BlockTables:
    """The block tables of the requests of a step. Scheduler's thread.

    Newer releases resolve them on demand; for older ones they are put together from what each step
    says, until `forget`.
    """

    def __init__(self) -> None:
        self._tables: dict[str, list[int]] = {}

    def of_step(self, output: "SchedulerOutput") -> Callable[[str], Sequence[int]]:
        """Tables of the requests scheduled in the step, by request."""
        if not hasattr(output, "kv_connector_block_state"):
            self._take(output)
            return self._table
        state = output.kv_connector_block_state
        assert state is not None

        def resolve(request_id: str) -> Sequence[int]:
            block_ids = state.get_block_ids(request_id)
            return () if block_ids is None else block_ids[0]

        return resolve

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._tables.pop(request_id, None)

    def _table(self, request_id: str) -> Sequence[int]:
        return self._tables.get(request_id, ())

    def _take(self, output: "SchedulerOutput") -> None:
        for new in output.scheduled_new_reqs:
            self._tables[new.req_id] = list(new.block_ids[0])
        cached = output.scheduled_cached_reqs
        for request_id, new_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if request_id in cached.resumed_req_ids:
                self._tables[request_id] = list(new_ids[0]) if new_ids is not None else []
            elif new_ids is not None:
                self._tables.setdefault(request_id, []).extend(new_ids[0])
