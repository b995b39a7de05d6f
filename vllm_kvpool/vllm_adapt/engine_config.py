"""Reads vLLM's configuration and pages into the pool's own values.

Only `vllm_adapt/`, `connector.py` and `plugin.py` import vLLM; its types go no further down. An
engine whose KV cannot be shared correctly is refused before it starts (ConfigError).
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

from vllm_kvpool.config import NO_NOTICES, Drafts, KVPoolConfig, KVRole, LoadFailure
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.handover.producer import NoticePlace
from vllm_kvpool.identity.keys import of_drafter
from vllm_kvpool.layout.engine_shape import ModelShape, RankPlace
from vllm_kvpool.layout.pages import LayerPages
from vllm_kvpool.layout.topology import KVCacheGroup, LayerGroup
from vllm_kvpool.network.allowed_peers import ANY_HOSTS, MAX_PORT
from vllm_kvpool.scheduler.blocks import GroupTables
from vllm_kvpool.staging.copier import Copier
from vllm_kvpool.staging.devices import Device, device_for
from vllm_kvpool.vllm_adapt import ascend, compat
from vllm_kvpool.vllm_adapt.compat import Defect, known_defects
from vllm_kvpool.vllm_adapt.identity import weights_version
from vllm_kvpool.vllm_adapt.identity.namespace import UNNAMED, drafter_identity, engine_namespace
from vllm_kvpool.vllm_adapt.kv_cache_specs import (
    deepseek_v4,
    drafters,
    page_specs,
    state_specs,
)
from vllm_kvpool.vllm_adapt.kv_cache_specs.layer_groups import (
    RankLayerGroup,
    groups_of,
    place_of,
    rank_layer_groups,
    shared_layer_groups,
)
from vllm_kvpool.vllm_adapt.weight_sources import WeightSources, sample_at_start

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Facts about an engine that the pool needs.

    Equal in the scheduler and in workers, except for the namespace and its values: ranks are sent
    the namespace, and have no values. `defects`: what vLLM computes wrongly here, and the pool
    leaves out.
    """

    shape: ModelShape
    layer_groups: tuple[RankLayerGroup, ...]
    values: Mapping[str, Any] = field(default_factory=dict)
    defects: tuple[Defect, ...] = ()
    drafter: str = ""
    """The identity of the drafter whose layers are stored, too."""

    @property
    def reference_group(self) -> RankLayerGroup:
        """The layer group that stands for all in KV events: one of full attention, if any."""
        own = [each for each in self.layer_groups if not each.is_draft]
        attention = [each for each in own if each.state is None]
        return next(
            (layer_group for layer_group in attention if layer_group.window.is_full),
            (attention or own)[0],
        )


def role_of(vllm_config: "VllmConfig") -> KVRole:
    """Return vLLM's `kv_role`."""
    assert vllm_config.kv_transfer_config is not None
    return KVRole(vllm_config.kv_transfer_config.kv_role)


def first_weights_version(vllm_config: "VllmConfig") -> str:
    """Return the version of the weights that the engine starts with; "" for random weights."""
    if str(vllm_config.load_config.load_format) == "dummy":
        return ""
    return weights_version.version_of_files(WeightSources.of(vllm_config), sample_at_start)


def extra_config(vllm_config: "VllmConfig") -> Mapping[str, Any]:
    """Return `kv_connector_extra_config` as the user wrote it."""
    assert vllm_config.kv_transfer_config is not None
    return vllm_config.kv_transfer_config.kv_connector_extra_config or {}


def read_engine(
    vllm_config: "VllmConfig",
    kv_cache_config: KVCacheConfig,
    config: KVPoolConfig,
    *,
    with_namespace: bool = True,
) -> EngineFacts:
    """Check that the engine's KV can be shared, and collect what the pool needs to know.

    The namespace takes reading the model's files and a sample of its weights. Raises ConfigError,
    and OSError if they cannot be read.
    """
    refuse_options(vllm_config)
    own = rank_layer_groups(vllm_config, kv_cache_config)
    drafts = _draft_layer_groups(vllm_config, kv_cache_config, config, is_told=with_namespace)
    layer_groups = own + drafts
    shared = shared_layer_groups(vllm_config, layer_groups, config)
    context = shared[0].topology.context
    parallel = vllm_config.parallel_config
    ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size * context.pcp_size
    groups = groups_of(kv_cache_config, layer_groups, shared)
    for group in groups:
        if group.is_state:
            state_specs.check_blocks(group.block_size, config.chunk_tokens)
    if deepseek_v4.is_model(vllm_config):
        deepseek_v4.check_chunks(GroupTables(groups).block_size, config.chunk_tokens)
    if config.layerwise:
        refuse_layerwise(vllm_config, own, groups)
    loads = GroupTables(groups).resumes or compat.reports_failed_loads_by_request()
    if not loads:
        logger.warning(
            "kvpool: nothing is loaded: this release of vLLM does not survive a failed load of a "
            "model with sliding window or chunked local attention, or with several KV cache "
            "groups; saves go on, for other engines. vLLM 0.32 loads, too"
        )
    defects = known_defects(vllm_config)
    identity, drafter = UNNAMED, ""
    if with_namespace:
        specs, num_own = [layer_group.spec for layer_group in layer_groups], len(own)
        identity = engine_namespace(vllm_config, config, specs[:num_own], shared[:num_own])
        drafter = drafter_identity(vllm_config, specs[num_own:], shared[num_own:])
        shared = tuple(_of_drafter(layer_group, drafter) for layer_group in shared)
    shape = ModelShape(
        namespace=identity.namespace,
        layer_groups=shared,
        groups=groups,
        num_blocks=kv_cache_config.num_blocks,
        num_ranks=ranks,
        loads=loads and all(defect.loads for defect in defects),
        stops_at_first=compat.stops_at_first(),
        in_lockstep=parallel.data_parallel_size > 1,
        max_drafted_tokens=drafters.max_drafted_tokens(vllm_config) if drafts else None,
    )
    return EngineFacts(shape, layer_groups, identity.values, defects, drafter)


def _draft_layer_groups(
    vllm_config: "VllmConfig",
    kv_cache_config: KVCacheConfig,
    config: KVPoolConfig,
    *,
    is_told: bool,
) -> tuple[RankLayerGroup, ...]:
    """Return the layer groups of a drafter that are stored; ConfigError if all are required.

    `is_told`: this side tells the user what is left out. What the last pipeline stage alone sees,
    that stage's first rank tells.
    """
    try:
        return drafters.draft_layer_groups(vllm_config, kv_cache_config, config)
    except drafters.UnsharedDrafterError as error:
        if config.drafts is Drafts.REQUIRE:
            raise ConfigError(
                f"drafts is set to require, but KV of this drafter cannot be stored: {error}; set "
                "drafts to prefer, or choose another drafter"
            ) from error
        is_first = rank_place(vllm_config).tp_rank == 0
        if is_told or (isinstance(error, drafters.OtherDrafterError) and is_first):
            logger.warning(
                "kvpool: KV of this drafter is not stored: %s. After a hit it drafts without the "
                "prompt, so few drafts are accepted",
                error,
            )
        return ()


def _of_drafter(layer_group: LayerGroup, drafter: str) -> LayerGroup:
    name = of_drafter(layer_group.name, drafter)
    return replace(layer_group, topology=replace(layer_group.topology, layer_group=name))


def refuse_options(vllm_config: "VllmConfig") -> None:
    """Raise ConfigError where an option makes KV that no other engine can use."""
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise ConfigError(
            "calculate_kv_scales computes scales at run time that other engines cannot know; use "
            "a checkpoint with static scales or another kv_cache_dtype"
        )
    cache_dtype = str(vllm_config.cache_config.cache_dtype)
    if compat.is_plugins_kv_dtype(cache_dtype):
        raise ConfigError(
            f"a plugin has registered kv_cache_dtype {cache_dtype}, so it is not known what lies "
            "in its pages; choose one of vLLM's own"
        )
    if compat.shuffles_pages():
        raise ConfigError(
            "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT interleaves the tokens of a block, so its pages "
            "cannot be cut by token; unset it"
        )
    if compat.indexer_is_fp4(vllm_config):
        raise ConfigError(
            "indexer_kv_dtype mxfp4 keeps an indexer's keys in a form that is not known here; set "
            "--attention-config.indexer_kv_dtype to fp8"
        )
    if _plans_on_each_rank(vllm_config.parallel_config):
        raise ConfigError(
            "with distributed_executor_backend external_launcher every rank plans its own steps, "
            "and what one finds in the pool in time another may not, so their steps would differ; "
            "set it to mp or ray, or run each engine on one rank"
        )
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size > 1 and compat.is_interleaved_for_nixl(
        parallel, _engines_transfer_config()
    ):
        raise ConfigError(
            "NIXL has vLLM's workers, and them alone, deal tokens out by blocks over decode "
            "context parallelism; set --cp-kv-cache-interleave-size to the block size"
        )


def _plans_on_each_rank(parallel: Any) -> bool:
    """Return True if each of an engine's several ranks has a scheduler. `parallel`: vLLM's."""
    ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    ranks *= parallel.prefill_context_parallel_size
    return bool(ranks > 1 and parallel.distributed_executor_backend == "external_launcher")


def _engines_transfer_config() -> Any:
    """Return the engine's own `KVTransferConfig`, if it is known here.

    A child of a MultiConnector has a configuration of its own.
    """
    engine = get_current_vllm_config_or_none()
    return engine.kv_transfer_config if engine is not None else None


def refuse_layerwise(
    vllm_config: "VllmConfig",
    layer_groups: Sequence[RankLayerGroup],
    groups: Sequence[KVCacheGroup],
) -> None:
    """Raise ConfigError where a load that fails within a step could leave wrong KV."""
    has_states = any(group.is_state for group in groups)
    if len(layer_groups) > 1 or has_states or not GroupTables(groups).resumes:
        raise ConfigError(
            "layerwise needs a model with one KV cache group, whose layers have one form and "
            "attend to the whole prompt: vLLM cannot take a step back in others; leave it out"
        )
    refuse_layerwise_options(vllm_config)


def refuse_layerwise_options(vllm_config: "VllmConfig") -> None:
    """Raise ConfigError for options of vLLM beside which layerwise does not work."""
    # Both plan a request's next step before it is known that its load has failed.
    if vllm_config.scheduler_config.async_scheduling:
        raise ConfigError(
            "layerwise needs steps that are planned one after another; set async_scheduling to "
            "false (--no-async-scheduling), or leave layerwise out"
        )
    if getattr(vllm_config.parallel_config, "enable_fault_tolerance", False):
        raise ConfigError(
            "layerwise needs every rank's report of a step, which a step that fails does not give; "
            "leave enable_fault_tolerance or layerwise out"
        )
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        raise ConfigError(
            "layerwise needs steps that are planned one after another; set "
            "pipeline_parallel_size to 1, or leave layerwise out"
        )
    whole, own = _engines_transfer_config(), vllm_config.kv_transfer_config
    if whole is not None and own is not None and whole.kv_connector != own.kv_connector:
        raise ConfigError(
            f"layerwise does not work with other connectors ({whole.kv_connector}): they would "
            "keep what a step computes after a load that failed; leave layerwise out"
        )
    if not compat.has_loads_within_steps():
        raise ConfigError(
            "layerwise needs a release of vLLM that knows loads within a step; use vLLM 0.32, or "
            "leave layerwise out"
        )
    if compat.device_type() == "npu":
        raise ConfigError("layerwise is not tested on Ascend NPUs; leave it out")
    if not compat.takes_steps_back(vllm_config):
        raise ConfigError(
            "layerwise needs vLLM's first model runner: the second one does not take back a step "
            "whose load failed, and answers wrongly; set VLLM_USE_V2_MODEL_RUNNER=0, or leave "
            "layerwise out"
        )


def layer_spans(facts: EngineFacts, vllm_config: "VllmConfig") -> Mapping[str, int]:
    """Return for each layer of this rank, by name, the first layer of its cells.

    Layered loads need it.
    """
    names = [name for name, _ in facts.layer_groups[0].layers]
    place = rank_place(vllm_config)
    cells = facts.shape.layer_groups[0].topology.local_cells(place.tp_rank, place.pp_rank)
    return {
        name: cell.layer_start
        for cell in cells
        for name in names[cell.layer_start : cell.layer_stop]
    }


# Pages


def layer_pages(
    kv_caches: Mapping[str, Any],
    facts: EngineFacts,
    vllm_config: "VllmConfig",
    device: Device | None = None,
) -> tuple[LayerPages, ...]:
    """Return the pages of every layer of this rank, by layer group, in model order."""
    stage = rank_place(vllm_config).pp_rank
    device = device_of(kv_caches) if device is None else device
    ascend.refuse_options(vllm_config.additional_config)
    pages = []
    for layer_group, shared in zip(facts.layer_groups, facts.shape.layer_groups, strict=True):
        start, stop = shared.topology.stages[stage]
        if tuple(place_of(name) for name, _ in layer_group.layers) != shared.layers[start:stop]:
            raise ConfigError(
                f"this pipeline stage has pages for {len(layer_group.layers)} layers where "
                f"{stop - start} were expected, or for other layers; set pipeline_parallel_size to "
                "1 to share this model"
            )
        for each in layer_group.groups:  # layers of several groups lie in the same memory
            names = [name for name, group in layer_group.layers if group == each]
            ascend.refuse_repeated(names, kv_caches)
        if layer_group.state is not None:
            for name, group in layer_group.layers:
                layer = state_specs.state_pages(
                    kv_caches[name], layer_group.spec, layer_group.state, vllm_config
                )
                pages.append(replace(layer, group=group))
            continue
        expected = ascend.Expected(
            num_blocks=facts.shape.num_blocks,
            block_size=layer_group.spec.block_size // layer_group.tokens_per_row,
            num_heads=shared.topology.heads_per_rank,
            key_bytes=layer_group.key_bytes,
            value_bytes=layer_group.row_bytes - layer_group.key_bytes,
            is_latent=layer_group.is_latent,
        )
        for name, group in layer_group.layers:
            layer = _pages_of(
                name, kv_caches[name], layer_group.spec, expected, vllm_config, device
            )
            pages.append(replace(layer, group=group))
    return tuple(pages)


def _pages_of(
    name: str,
    value: Any,
    spec: Any,
    expected: ascend.Expected,
    vllm_config: "VllmConfig",
    device: Device,
) -> LayerPages:
    if not ascend.is_vllm_tensor(value):
        return ascend.from_registered(name, value, expected, device)
    # Pages may be cut finer for the attention kernel than the scheduler's blocks.
    ratio = expected.block_size // value.shape[2]
    on_gpu = value.device.type == "cuda"
    if page_specs.needs_gpu(spec) and not on_gpu:
        raise ConfigError(
            f"layer {name!r} has packed pages, whose form is known on NVIDIA and AMD GPUs alone, "
            f"not on {value.device.type}; choose another --attention-backend or --kv-cache-dtype, "
            "or run this model without kvpool"
        )
    if value.device.type != "cpu" or expected.is_latent:
        backend = compat.backend_of(vllm_config, name)
        return page_specs.device_layer_pages(
            value, spec, backend, is_rocm=on_gpu and compat.is_rocm(), blocks_per_id=ratio
        )
    return page_specs.cpu_layer_pages(
        value, expected.key_bytes, expected.value_bytes, vllm_config, blocks_per_id=ratio
    )


class PoolPins:
    """References on blocks of vLLM's pool, which is bound before the first request.

    Scheduler's thread. vLLM resets its prefix cache only when no block is held: `before_reset` is
    called before it tries, `on_reset` afterwards with whether it has.
    """

    def __init__(
        self, on_reset: Callable[[bool], None], before_reset: Callable[[], None] = lambda: None
    ) -> None:
        self._on_reset = on_reset
        self._before_reset = before_reset

    def use_pool(self, pool: "BlockPool") -> None:
        """Take vLLM's pool, and watch its resets."""
        self._pool = pool
        reset = pool.reset_prefix_cache

        @functools.wraps(reset)
        def reset_prefix_cache() -> bool:
            self._before_reset()
            done = bool(reset())
            self._on_reset(done)
            return done

        pool.reset_prefix_cache = reset_prefix_cache

    def pin(self, block_ids: Sequence[int]) -> None:
        """Keep blocks from reuse."""
        self._pool.touch([self._pool.blocks[i] for i in block_ids])

    def unpin(self, block_ids: Sequence[int]) -> None:
        """Drop the references; last block first, so that a prefix is evicted last."""
        self._pool.free_blocks(self._pool.blocks[i] for i in reversed(block_ids))

    def evict(self, block_ids: Sequence[int]) -> None:
        """Take blocks out of the prefix cache; requests that hold them keep them."""
        self._pool.evict_blocks(set(block_ids))

    def num_if_all_free(self) -> int:
        """Return the number of blocks besides the null block if all are free; else 0."""
        usable = self._pool.num_gpu_blocks - 1
        return usable if self._pool.get_num_free_blocks() == usable else 0


# Ranks, devices and policies


def rank_place(vllm_config: "VllmConfig") -> RankPlace:
    """Return the place of this worker.

    Ranks count over TP, then prefill context, then the pipeline.
    """
    parallel = vllm_config.parallel_config
    tp_size, pp_size = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    pcp_size, rank = parallel.prefill_context_parallel_size, parallel.rank
    stage = rank // (tp_size * pcp_size) % pp_size
    # Not `data_parallel_rank`, which is 0 in every engine of a model without experts.
    dp_rank = parallel.data_parallel_index
    pcp_rank, on_host = rank // tp_size % pcp_size, _ranks_on_host(parallel)
    return RankPlace(rank % tp_size, stage, rank, pcp_rank, dp_rank, on_host)


def notice_place(
    vllm_config: "VllmConfig", config: KVPoolConfig, num_ranks: int
) -> NoticePlace | None:
    """Return the place at which this rank tells how far prompts are stored; None without saves.

    Ports run over ranks, then over data-parallel engines. ConfigError if they run out.
    """
    saves = role_of(vllm_config) is not KVRole.CONSUMER or config.save_decode
    if not saves or config.notice_listen == NO_NOTICES:
        return None
    own = compat.host_address()
    own = f"[{own}]" if ":" in own else own
    if not config.notice_listen:
        return NoticePlace(f"tcp://{own}:*", own, is_required=False)
    host, _, text = config.notice_listen.removeprefix("tcp://").rpartition(":")
    first = int(text)
    port = first + rank_place(vllm_config).number(num_ranks)
    if not 0 < first <= port <= MAX_PORT:
        raise ConfigError(
            f"notice_listen: a rank of this engine would listen at port {port}, and {MAX_PORT} is "
            "the last; choose a lower one"
        )
    return NoticePlace(f"tcp://{host}:{port}", own if host in ANY_HOSTS else host, is_required=True)


def _ranks_on_host(parallel: Any) -> int:
    """Return the workers that vLLM starts on this host; 1 where others start them.

    `parallel` is vLLM's.
    """
    if parallel.distributed_executor_backend in ("ray", "external_launcher"):
        return 1
    return int(parallel.local_world_size) * max(1, int(parallel.data_parallel_size_local))


def gathers_in_step(device: Device) -> bool:
    """Return True if a step waits until its saves are gathered.

    A CPU's cores gather faster while no model computes. An engine in its caller's process may make
    no further step, in which blocks are released; `sleep` and `reset_prefix_cache` need all.
    """
    return device.is_host or compat.is_in_process()


def gather_in_stage(data: bytes) -> list[bytes]:
    """Return the bytes of every rank of this pipeline stage, in the same order on all of them.

    A collective of vLLM's CPU groups: every rank calls it, with equally many bytes.
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
    """Return the device of the pages; ConfigError if a rank's layers are on several."""
    places = {t.device for value in kv_caches.values() for t in ascend.tensors_of(value)}
    if len(places) != 1:
        found = ", ".join(sorted(map(str, places))) or "no tensors"
        raise ConfigError(f"the KV cache of a rank must lie on one device, found {found}")
    return device_for(places.pop())


def scheduler_device() -> Device:
    """Return the device for stores of the scheduler's process that use one.

    On NPUs the first card that the process sees, as for vLLM-Ascend's own pool.
    """
    name = compat.device_type()
    return device_for(torch.device(name, 0) if name == "npu" else torch.device("cpu"))


def make_copier(pages: Sequence[LayerPages], device: Device | None = None) -> Copier:
    """Return the copier for the device that the pages are on."""
    place = pages[0].owner[0].device
    device = device_for(place) if device is None else device
    if device.is_host:
        from vllm_kvpool.staging.copy_cpu import CpuCopier

        copier = CpuCopier(pages)
        copier.warm_up()
        return copier
    if place.type == "cuda" and triton_is_here():
        from vllm_kvpool.staging.copy_triton import TritonCopier
        from vllm_kvpool.staging.cuda_streams import CudaStreams

        on_gpu = TritonCopier(pages, CudaStreams(place))
        on_gpu.warm_up()
        return on_gpu
    from vllm_kvpool.staging.copy_torch import TorchCopier

    return TorchCopier(pages, device)


def may_answer(request: "Request") -> bool:
    """Return True if the pool answers a finished request.

    Where a MultiConnector takes one answer only, another connector answers requests with its
    parameters.
    """
    spoken_to = set(request.kv_transfer_params or ()) - {"kvpool"}
    return not spoken_to or (compat.merges_answers() and compat.device_type() != "npu")


@functools.cache
def triton_is_here() -> bool:
    """Return True if Triton is installed; a warning if not."""
    from vllm.triton_utils import HAS_TRITON

    if not HAS_TRITON:
        logger.warning(
            "kvpool: Triton is not installed, so pages are copied by many small operations of "
            "torch; install triton to copy them by one kernel"
        )
        return False
    return True


def preferred_layout(vllm_config: "VllmConfig") -> str | None:
    """Return head-major pages, where heads exist; vLLM may choose another layout."""
    if vllm_config.model_config is None or vllm_config.model_config.use_mla:
        return None
    return "LBHNC"


def prefer_recompute(vllm_config: "VllmConfig", config: KVPoolConfig) -> None:
    """Have vLLM compute what could not be loaded, unless `load_failure` is `fail`.

    vLLM's default of `kv_load_failure_policy` is "fail", and cannot be told from a user's "fail".
    """
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    if config.load_failure is not None:
        transfer.kv_load_failure_policy = config.load_failure.value
    elif transfer.kv_load_failure_policy != LoadFailure.RECOMPUTE.value:
        logger.info(
            "kvpool: what cannot be loaded is computed (kv_load_failure_policy recompute, not "
            "vLLM's default %r); to end such requests with an error, set load_failure to fail in "
            "kv_connector_extra_config",
            transfer.kv_load_failure_policy,
        )
        transfer.kv_load_failure_policy = LoadFailure.RECOMPUTE.value
