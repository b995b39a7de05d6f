"""What differs between releases of vLLM (0.27.1 to 0.32), behind one name each; known defects.

Nothing else asks which release runs: what is missing is looked for by name, so that releases
between and after those two work as long as the names do.

`DEFECTS` has the combinations that vLLM is known to compute wrongly, and what the pool leaves alone
for each: such an engine must not hand wrong values to others, nor be given what makes it compute
them. docs/failures.md and tests have the same rows.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1.outputs import KVConnectorOutput

if TYPE_CHECKING:
    from vllm.config import VllmConfig
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


def environment_variables() -> Mapping[str, Callable[[], Any]]:
    """vLLM's readers of its environment variables, by name."""
    from vllm import envs

    known: Mapping[str, Callable[[], Any]] = envs.environment_variables
    return known


def own_adapter_name(request: Any) -> Hashable:
    """What vLLM's own prefix cache knows a request's LoRA adapter by: until 0.32 only its name."""
    from vllm.v1.core import kv_cache_utils

    read = getattr(kv_cache_utils, "_gen_lora_extra_hash_keys", None)
    return tuple(read(request)) if read is not None else request.lora_request.lora_name


def shuffles_pages() -> bool:
    """Whether AITER's attention on ROCm keeps the tokens of a block interleaved."""
    return bool(environment_variables()["VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT"]())


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

    Releases without a separate queue for requests that hold blocks.
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


@dataclass(frozen=True, slots=True)
class Defect:
    """A combination, by name, and whether an engine's configuration has it.

    `loads`: what is computed after a loaded prefix is right. `saves_base`: what is computed for
    requests without an adapter is right. `warning` says what is wrong and what is not done.
    """

    name: str
    applies: Callable[["VllmConfig"], bool]
    warning: str
    loads: bool = True
    saves_base: bool = True


def known_defects(vllm_config: "VllmConfig") -> tuple[Defect, ...]:
    """The rows that an engine of this configuration has."""
    return tuple(defect for defect in DEFECTS if defect.applies(vllm_config))


def _is_mla_without_prefixes(vllm_config: "VllmConfig") -> bool:
    """MLA on a CPU without AMX, for which the platform turns both of these off."""
    of_cpu = device_type() == "cpu" and vllm_config.model_config.use_mla
    chunks = vllm_config.scheduler_config.enable_chunked_prefill
    return of_cpu and not (chunks or vllm_config.cache_config.enable_prefix_caching)


def _needs_every_token(vllm_config: "VllmConfig") -> bool:
    return not vllm_config.model_config.is_prefix_caching_supported


def _adapts_base_requests(vllm_config: "VllmConfig") -> bool:
    return vllm_config.lora_config is not None and _torch_kernels_adapt_base_tokens()


def _torch_kernels_adapt_base_tokens() -> bool:
    """Whether LoRA runs by vLLM's kernels in plain torch, and these give an adapter's values to
    tokens without one: tried, so that a release that does not is known as such."""
    from vllm.lora.ops.torch_ops import sgmv_expand
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
    from vllm.platforms import current_platform
    from vllm.utils.import_utils import resolve_obj_by_qualname

    wrapper = resolve_obj_by_qualname(current_platform.get_punica_wrapper())
    if not issubclass(wrapper, PunicaWrapperCPU):
        return False
    # One token without an adapter (-1), then one with the only one (0).
    adapters, ones = torch.tensor([-1, 0]), torch.ones(2, 1)
    values, starts, lengths = torch.zeros(2, 1), torch.tensor([0, 1]), torch.tensor([1, 1])
    sgmv_expand(ones, torch.ones(1, 1, 1, 1), values, starts, lengths, adapters, 2, 1, 2, True)
    return bool(values[0, 0] != 0)


DEFECTS = (
    Defect(
        "MLA on a CPU without AMX",
        _is_mla_without_prefixes,
        "vLLM's CPU backend for MLA computes wrong values after a prefix that it is given, and "
        "turns its own prefix caching off, so nothing is loaded; what is computed is saved for "
        "others",
        loads=False,
    ),
    Defect(
        "models of which vLLM caches no prefixes",
        _needs_every_token,
        "vLLM caches no prefixes for this model (pooling by mean, for example, needs every "
        "token's output), so nothing is loaded; what is computed is saved for others",
        loads=False,
    ),
    Defect(
        "LoRA by vLLM's kernels in plain torch (CPU)",
        _adapts_base_requests,
        "vLLM's LoRA kernels for CPUs give requests without an adapter the values of one that "
        "runs in the same step, so only requests with an adapter are saved; all are loaded. Run "
        "the base model in an engine without enable_lora to save its requests too",
        saves_base=False,
    ),
)
