"""vLLM's configuration and pages -> our values.

`vllm_adapt/`, `connector.py` and `plugin.py` alone import vLLM; its types go no further down.
What cannot be shared correctly is refused here, by name, before the engine starts.
"""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed import parallel_state
from vllm.v1.kv_cache_interface import KVCacheConfig

from vllm_kvpool.config import KVPoolConfig, KVRole, LoadFailure
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.layout import page_formats
from vllm_kvpool.layout.pages import LayerPages
from vllm_kvpool.layout.topology import KVCacheGroup
from vllm_kvpool.scheduler.blocks import GroupTables
from vllm_kvpool.sides import ModelShape, RankPlace
from vllm_kvpool.staging.copier import Copier
from vllm_kvpool.staging.devices import Device, device_for
from vllm_kvpool.vllm_adapt import ascend, compat, page_specs, weights_version
from vllm_kvpool.vllm_adapt.compat import Defect, known_defects
from vllm_kvpool.vllm_adapt.layer_groups import (
    RankLayerGroup,
    groups_of,
    place_of,
    rank_layer_groups,
    shared_layer_groups,
)
from vllm_kvpool.vllm_adapt.namespace import UNNAMED, engine_namespace

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What the pool needs to know of an engine.

    The same on its scheduler's side and its ranks', but for the namespace and its values: ranks are
    told the one, and need not know the others. `defects`: what the engine is known to compute
    wrongly, and the pool leaves alone.
    """

    shape: ModelShape
    layer_groups: tuple[RankLayerGroup, ...]
    media_are_named: bool
    values: Mapping[str, Any] = field(default_factory=dict)
    defects: tuple[Defect, ...] = ()

    @property
    def saves_base(self) -> bool:
        """Whether what is computed for requests without an adapter may be saved."""
        return all(defect.saves_base for defect in self.defects)

    @property
    def reference_group(self) -> RankLayerGroup:
        """The layer group that stands for all in events: one whose blocks are all kept."""
        return next(
            (layer_group for layer_group in self.layer_groups if layer_group.window.is_full),
            self.layer_groups[0],
        )


def role_of(vllm_config: "VllmConfig") -> KVRole:
    """vLLM's `kv_role`."""
    assert vllm_config.kv_transfer_config is not None
    return KVRole(vllm_config.kv_transfer_config.kv_role)


def first_weights_version(vllm_config: "VllmConfig") -> str:
    """What the weights are that the engine starts with, as `weights_version.py` names it."""
    model = vllm_config.model_config
    if str(vllm_config.load_config.load_format) == "dummy":
        return ""
    return weights_version.first_weights_version(str(model.model), model.revision)


def extra_config(vllm_config: "VllmConfig") -> Mapping[str, Any]:
    """`kv_connector_extra_config` as the user wrote it."""
    assert vllm_config.kv_transfer_config is not None
    return vllm_config.kv_transfer_config.kv_connector_extra_config or {}


def read_engine(
    vllm_config: "VllmConfig",
    kv_cache_config: KVCacheConfig,
    config: KVPoolConfig,
    *,
    with_namespace: bool = True,
) -> EngineFacts:
    """Check that this engine can share, and gather what the pool must know of it.

    The namespace is read from the model's files, a sample of its weights among them. Raises
    ConfigError, and OSError if those cannot be read.
    """
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise ConfigError(
            "calculate_kv_scales computes scales at run time that other engines cannot know; use "
            "a checkpoint with static scales or another kv_cache_dtype"
        )
    if compat.shuffles_pages():
        raise ConfigError(
            "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT interleaves the tokens of a block, so its pages "
            "cannot be cut by token; unset it"
        )
    layer_groups = rank_layer_groups(vllm_config, kv_cache_config)
    shared = shared_layer_groups(vllm_config, layer_groups, config)
    context = shared[0].topology.context
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size * context.pcp_size
    groups = groups_of(kv_cache_config, layer_groups, context)
    if config.layerwise:
        refuse_layerwise(vllm_config, layer_groups, groups)
    loads = GroupTables(groups).resumes or compat.reports_failed_loads_by_request()
    if not loads:
        logger.warning(
            "kvpool: this release of vLLM does not survive a failed load of a model with sliding "
            "window or chunked local attention, or with several KV cache groups, so nothing is "
            "loaded; what is computed is saved for others"
        )
    defects = known_defects(vllm_config)
    identity = UNNAMED
    if with_namespace:
        identity = engine_namespace(
            vllm_config, config, [layer_group.spec for layer_group in layer_groups], shared
        )
    shape = ModelShape(
        namespace=identity.namespace,
        layer_groups=shared,
        groups=groups,
        num_blocks=kv_cache_config.num_blocks,
        num_ranks=ranks,
        loads=loads and all(defect.loads for defect in defects),
        stops_at_first=compat.stops_at_first(),
        in_lockstep=parallel.data_parallel_size > 1,
    )
    media_are_named = bool(cache.enable_prefix_caching) or _processor_cache_gb(vllm_config) > 0
    return EngineFacts(shape, layer_groups, media_are_named, identity.values, defects)


def refuse_layerwise(
    vllm_config: "VllmConfig",
    layer_groups: Sequence[RankLayerGroup],
    groups: Sequence[KVCacheGroup],
) -> None:
    """ConfigError where a layer's load that fails in the middle of a step would do harm."""
    if len(layer_groups) > 1 or not GroupTables(groups).resumes:
        raise ConfigError(
            "layerwise needs a model whose layers are all in one KV cache group, of one form, and "
            "all attend to the whole prompt, for vLLM cannot take a step back in others; leave "
            "layerwise out"
        )
    # In both a request's next step is planned before it is known that its load has failed.
    if vllm_config.scheduler_config.async_scheduling:
        raise ConfigError(
            "layerwise needs steps that are planned one after another; set async_scheduling to "
            "false (--no-async-scheduling), or leave layerwise out"
        )
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        raise ConfigError(
            "layerwise needs steps that are planned one after another; set "
            "pipeline_parallel_size to 1, or leave layerwise out"
        )
    # Workers are set up within their engine's configuration, of which a child has a part.
    engine, own = get_current_vllm_config_or_none(), vllm_config.kv_transfer_config
    whole = engine.kv_transfer_config if engine is not None else None
    if whole is not None and own is not None and whole.kv_connector != own.kv_connector:
        raise ConfigError(
            f"layerwise does not go with other connectors ({whole.kv_connector}): what a step "
            "computes before a load is known to have failed they would keep; leave layerwise out"
        )
    if compat.device_type() == "npu":
        raise ConfigError("layerwise has not been tried on Ascend NPUs; leave it out")
    if not compat.has_loads_within_steps():
        raise ConfigError(
            "layerwise has not been tried with this release of vLLM, whose steps do not say that "
            "they wait for loads; use vLLM 0.32, or leave layerwise out"
        )


def layer_spans(facts: EngineFacts, vllm_config: "VllmConfig") -> Mapping[str, int]:
    """The layers of this rank by name -> the first layer of their cells, for layered loads."""
    names = [name for name, _ in facts.layer_groups[0].layers]
    place = rank_place(vllm_config)
    cells = facts.shape.layer_groups[0].topology.local_cells(place.tp_rank, place.pp_rank)
    return {
        name: cell.layer_start
        for cell in cells
        for name in names[cell.layer_start : cell.layer_stop]
    }


def _processor_cache_gb(vllm_config: "VllmConfig") -> float:
    media = vllm_config.model_config.multimodal_config
    return float(media.mm_processor_cache_gb) if media is not None else 0.0


# Pages


def layer_pages(
    kv_caches: Mapping[str, Any],
    facts: EngineFacts,
    vllm_config: "VllmConfig",
    device: Device | None = None,
) -> tuple[LayerPages, ...]:
    """The page format of every local layer, group by group, in model order."""
    stage = rank_place(vllm_config).pp_rank
    device = device_of(kv_caches) if device is None else device
    ascend.refuse_options(vllm_config.additional_config)
    pages = []
    for layer_group, shared in zip(facts.layer_groups, facts.shape.layer_groups, strict=True):
        start, stop = shared.topology.stages[stage]
        if tuple(place_of(name) for name, _ in layer_group.layers) != shared.layers[start:stop]:
            raise ConfigError(
                f"{len(layer_group.layers)} of {stop - start} layers of this pipeline stage "
                "have KV of their own, or other layers than expected; such a model can be shared "
                "without pipeline parallelism only"
            )
        expected = ascend.Expected(
            num_blocks=facts.shape.num_blocks,
            block_size=layer_group.spec.block_size,
            num_heads=shared.topology.heads_per_rank,
            key_bytes=layer_group.key_bytes,
            value_bytes=layer_group.row_bytes - layer_group.key_bytes,
            is_latent=layer_group.is_latent,
        )
        for each in layer_group.groups:  # layers of several groups lie in the same memory
            names = [name for name, group in layer_group.layers if group == each]
            ascend.refuse_repeated(names, kv_caches)
        for name, group in layer_group.layers:
            layer = _pages_of(name, kv_caches[name], expected, vllm_config, device)
            pages.append(replace(layer, group=group))
    return tuple(pages)


def _pages_of(
    name: str,
    value: Any,
    expected: ascend.Expected,
    vllm_config: "VllmConfig",
    device: Device,
) -> LayerPages:
    if not ascend.is_vllm_tensor(value):
        return ascend.from_registered(name, value, expected, device)
    # Pages may be cut finer for the attention kernel than the scheduler's blocks.
    ratio = expected.block_size // value.shape[2]
    if value.device.type != "cpu" or expected.is_latent:
        return page_formats.from_token_content(value, blocks_per_id=ratio)
    return page_specs.cpu_layer_pages(
        value, expected.key_bytes, expected.value_bytes, vllm_config, blocks_per_id=ratio
    )


class PoolPins:
    """References on blocks of vLLM's pool. Scheduler thread.

    `let_go` is called before vLLM empties the pool's prefix cache, which it does only when no
    block is held; `on_reset` is told afterwards whether it has.
    """

    def __init__(
        self,
        pool: "BlockPool",
        on_reset: Callable[[bool], None],
        let_go: Callable[[], None] = lambda: None,
    ) -> None:
        self._pool = pool
        reset = pool.reset_prefix_cache

        @functools.wraps(reset)
        def reset_prefix_cache() -> bool:
            let_go()
            done = bool(reset())
            on_reset(done)
            return done

        pool.reset_prefix_cache = reset_prefix_cache

    def pin(self, block_ids: Sequence[int]) -> None:
        """Keep blocks from reuse."""
        self._pool.touch([self._pool.blocks[i] for i in block_ids])

    def unpin(self, block_ids: Sequence[int]) -> None:
        """Drop the references; last block first, so that a prefix is evicted last."""
        self._pool.free_blocks(self._pool.blocks[i] for i in reversed(block_ids))

    def forget(self, block_ids: Sequence[int]) -> None:
        """Take blocks out of the prefix cache; who holds them keeps them."""
        self._pool.evict_blocks(set(block_ids))


# Ranks, devices and policies


def rank_place(vllm_config: "VllmConfig") -> RankPlace:
    """Which worker this process is: ranks run over tensor parallelism first.

    Then over prefill context parallelism, then over the pipeline.
    """
    parallel = vllm_config.parallel_config
    tp_size, pp_size = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    pcp_size, rank = parallel.prefill_context_parallel_size, parallel.rank
    stage = rank // (tp_size * pcp_size) % pp_size
    # Not `data_parallel_rank`, which is 0 in every engine of a model without experts.
    dp_rank = parallel.data_parallel_index
    return RankPlace(rank % tp_size, stage, rank, rank // tp_size % pcp_size, dp_rank)


def gather_in_stage(data: bytes) -> list[bytes]:
    """The bytes of every rank of this pipeline stage, in one order for all of them.

    A collective of vLLM's CPU groups: every rank calls it, with as many bytes. Alone where there
    are no groups, since then there is no other rank.
    """
    if not parallel_state.model_parallel_is_initialized():
        return [data]
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    for group in (parallel_state.get_tp_group(), parallel_state.get_pcp_group()):
        if group.world_size > 1:
            every = [torch.empty_like(mine) for _ in range(group.world_size)]
            torch.distributed.all_gather(every, mine, group=group.cpu_group)
            mine = torch.cat(every)
    return [bytes(part.numpy()) for part in mine.view(-1, len(data))]


def device_of(kv_caches: Mapping[str, Any]) -> Device:
    """The device that the pages lie on: one for all of a rank's layers."""
    places = {t.device for value in kv_caches.values() for t in ascend.tensors_of(value)}
    if len(places) != 1:
        found = ", ".join(sorted(map(str, places))) or "no tensors"
        raise ConfigError(f"the KV cache of a rank must lie on one device, found {found}")
    return device_for(places.pop())


def scheduler_device() -> Device:
    """The device that the scheduler's stores work with, where they work with one at all.

    It holds no pages. On NPUs it is the first card that the process sees, as for vLLM-Ascend's
    own pool.
    """
    name = compat.device_type()
    return device_for(torch.device(name, 0) if name == "npu" else torch.device("cpu"))


def make_copier(pages: Sequence[LayerPages], device: Device | None = None) -> Copier:
    """The copier for the device that the pages are on."""
    place = pages[0].owner[0].device
    device = device_for(place) if device is None else device
    if device.is_host:
        from vllm_kvpool.staging.copy_cpu import CpuCopier

        copier = CpuCopier(pages)
        copier.warm_up()
        return copier
    if place.type == "cuda" and triton_is_here():
        from vllm_kvpool.staging.copy_triton import CudaStreams, TritonCopier

        on_gpu = TritonCopier(pages, CudaStreams(place))
        on_gpu.warm_up()
        return on_gpu
    from vllm_kvpool.staging.copy_torch import TorchCopier

    return TorchCopier(pages, device)


def may_answer(request: "Request") -> bool:
    """Whether a finished request may be answered: where a MultiConnector takes one answer alone,
    a request that speaks to another connector is left to that one."""
    spoken_to = set(request.kv_transfer_params or ()) - {"kvpool"}
    return not spoken_to or (compat.merges_answers() and compat.device_type() != "npu")


@functools.cache
def triton_is_here() -> bool:
    """Whether GPU kernels can be had; says so once if not."""
    from vllm.triton_utils import HAS_TRITON

    if not HAS_TRITON:
        logger.warning(
            "kvpool: Triton is not installed; pages are copied by torch, with many small operations"
        )
        return False
    return True


def preferred_layout(vllm_config: "VllmConfig") -> str | None:
    """Head-major pages, where heads exist. A preference: vLLM may resolve another."""
    if vllm_config.model_config is None or vllm_config.model_config.use_mla:
        return None
    return "LBHNC"


def prefer_recompute(vllm_config: "VllmConfig", config: KVPoolConfig) -> None:
    """Make failed loads be computed instead of failing their request, unless that is asked for.

    vLLM's own default is "fail", and whether a user has written it cannot be told from it having
    been left out; `load_failure: fail` in our configuration asks for it.
    """
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    if config.load_failure is not None:
        transfer.kv_load_failure_policy = config.load_failure.value
    elif transfer.kv_load_failure_policy != LoadFailure.RECOMPUTE.value:
        logger.info(
            "kvpool: kv_load_failure_policy is %r, which is vLLM's default; what cannot be loaded "
            "is computed instead. load_failure: fail in kv_connector_extra_config ends such "
            "requests with an error",
            transfer.kv_load_failure_policy,
        )
        transfer.kv_load_failure_policy = LoadFailure.RECOMPUTE.value
