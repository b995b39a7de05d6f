"""What differs between releases of vLLM (0.27.1 to 0.32), behind one name each.

Nothing else asks which release runs: what is missing is looked for by name, so that releases
between and after those two work as long as the names do.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1.outputs import KVConnectorOutput

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

_TransferResults: Any = getattr(base, "KVConnectorTransferResults", None)


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


def value_head_size(spec: Any) -> int:
    """Elements of a row of V; older specs without the field have rows like K's."""
    return int(getattr(spec, "head_size_v", spec.head_size))


def tokens_per_state(spec: Any) -> int:
    """How many tokens share one row."""
    ratio = getattr(spec, "tokens_per_state", None)
    return int(ratio if ratio is not None else getattr(spec, "compress_ratio", 1))


def device_type() -> str:
    """What vLLM calls the device that it runs on: "cpu", "cuda", "npu" and so on."""
    from vllm.platforms import current_platform

    return str(current_platform.device_type)


def reports_failed_loads_by_request() -> bool:
    """Whether workers can say which requests' loads have failed, instead of which blocks.

    Models with several KV cache groups need it: there one block id means several pages, and a vLLM
    without it raises when any block of such a model is reported.
    """
    return "failed_recving" in {field.name for field in fields(KVConnectorOutput)}


def stops_at_first() -> bool:
    """Whether requests that have loaded wait behind one that there are no blocks for.

    Releases that do not have a line of their own for requests that hold blocks.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    return "kv_holding_waiting" not in Scheduler.__init__.__code__.co_names


def has_loads_within_steps() -> bool:
    """Whether a step says that it waits for loads of its own.

    In releases that do, a request whose load has failed in the step goes back by itself.
    """
    from vllm.v1.core.sched.output import SchedulerOutput

    return "has_sync_kv_loads" in {field.name for field in fields(SchedulerOutput)}


def forms_of_layers(kv_cache_config: Any) -> dict[str, int]:
    """The layers that pages are allocated for, on this rank; of a KV cache group those with equal
    values have equal specs.

    Newer releases describe such layers together, older ones give each layer a tensor of its size.
    """
    return {
        name: number if hasattr(tensor, "layers") else tensor.size
        for number, tensor in enumerate(kv_cache_config.kv_cache_tensors)
        for name in (tensor.layers if hasattr(tensor, "layers") else tensor.shared_by)
    }


def hit_source(kinds: Sequence[str]) -> Any:
    """What vLLM calls hits that may come from any of these kinds of store.

    None where it does not ask.
    """
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:
        return None
    sources = {
        "host": CacheHitSource.HOST,
        "memory": CacheHitSource.HOST,
        "file": CacheHitSource.DISK,
    }
    known = {sources.get(kind, CacheHitSource.EXTERNAL_UNSPECIFIED) for kind in kinds}
    return known.pop() if len(known) == 1 else CacheHitSource.EXTERNAL_UNSPECIFIED


def transfer_results(loaded: Iterable[str], failed: Iterable[str]) -> Any:
    """What newer releases ask a worker for after a step."""
    assert _TransferResults is not None
    return _TransferResults(finished_recving=set(loaded), failed_recving=set(failed))


def merges_answers() -> bool:
    """Whether several connectors of a MultiConnector may answer the same finished request.

    vLLM-Ascend's own MultiConnector takes one answer, whatever the release.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    return hasattr(MultiConnector, "_aggregate_request_finished")


def event_fields(event: type) -> frozenset[str]:
    """The fields that a KV event has in this release."""
    fields: tuple[str, ...] = event.__struct_fields__  # type: ignore[attr-defined]
    return frozenset(fields)


def event_extra_keys(keys: list[Any]) -> Any:
    """Extra keys of blocks as events carry them; newer releases tag them in hashes alone."""
    try:
        from vllm.v1.core.kv_cache_utils import to_event_extra_keys
    except ImportError:
        return keys or None
    return to_event_extra_keys(keys)


class BlockTables:
    """The block tables of the requests of a step. Scheduler's thread.

    Newer releases resolve them on demand; for older ones they are put together from what each step
    says, until `forget`.
    """

    def __init__(self) -> None:
        self._tables: dict[str, list[list[int]]] = {}

    def of_step(self, output: "SchedulerOutput") -> Callable[[str], Sequence[Sequence[int]]]:
        """Tables of the requests scheduled in the step, by request: one for each KV cache group.

        Of older releases they still name blocks that were let go since they were allocated.
        """
        if not hasattr(output, "kv_connector_block_state"):
            self._take(output)
            return self._table
        state = output.kv_connector_block_state
        assert state is not None

        def resolve(request_id: str) -> Sequence[Sequence[int]]:
            block_ids = state.get_block_ids(request_id)
            return () if block_ids is None else block_ids

        return resolve

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._tables.pop(request_id, None)

    def _table(self, request_id: str) -> Sequence[Sequence[int]]:
        return self._tables.get(request_id, ())

    def _take(self, output: "SchedulerOutput") -> None:
        for new in output.scheduled_new_reqs:
            self._tables[new.req_id] = [list(ids) for ids in new.block_ids]
        cached = output.scheduled_cached_reqs
        for request_id, new_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if request_id in cached.resumed_req_ids or request_id not in self._tables:
                self._tables[request_id] = [list(ids) for ids in new_ids or ()]
            elif new_ids is not None:
                for table, ids in zip(self._tables[request_id], new_ids, strict=True):
                    table.extend(ids)
