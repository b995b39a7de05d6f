"""A factory of rigs: configurations, model weights on disk, and stores that can be made to fail."""

import copy
import itertools
import logging
import threading
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import pytest
import torch
from vllm.config import KVTransferConfig
from vllm.config.kv_events import KVEventsConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

import tests.support.memory_store  # noqa: F401  (its scheme)
from tests.cache_tensors import tensors_of
from tests.faults.model import KEY_BYTES, KEY_TOKENS, SCALE_BYTES, VOCAB, FakeModel
from tests.faults.rig import BLOCK, CHUNK, NUM_DRAFTS, Rig, RigSpec, Sibling
from tests.support.drafters import speculation
from tests.support.faults import Faults, FaultyStore
from tests.support.models import DeepseekShape, LlamaShape, make_model
from tests.support.store_hooks import wrap_stores
from tests.support.threads import NewThreads
from vllm_kvpool.storage.backends import open_store
from vllm_kvpool.storage.base import Store
from vllm_kvpool.storage.health import StoreAccess
from vllm_kvpool.storage.url import parse_store_url
from vllm_kvpool.vllm_adapt import compat

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vllm_kvpool.storage.guarded import GuardedStore

PATIENT: dict[str, Any] = {
    # Busy machines must not turn a hit into a miss where no fault does.
    "lookup_timeout_ms": 5_000,
    "load_timeout_s": 10.0,
    "shutdown_timeout_s": 2.0,
}
WITH_WINDOWS = pytest.mark.skipif(
    not compat.reports_failed_loads_by_request(), reason="this release loads no windows"
)
WITH_STATES = pytest.mark.skipif(
    not compat.offers_states(), reason="this release of vLLM offers no states"
)
_NUMBERS = itertools.count()  # for memory stores, which belong to the process, not to a workshop


class Workshop:
    """A factory of rigs and stores.

    Within its `with` block, every store that is opened obeys `faults`, under the name of its
    opener: `{rig}.scheduler` or `{rig}.rank`. At the end all rigs that are still open are closed.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._undo: Callable[[], None] = lambda: None
        self._opening = ""
        self._chatter = logging.NOTSET
        self._threads = NewThreads()
        self._own: list[threading.Thread] = []
        self._rigs: list[Rig] = []
        self._plain: list[Store] = []
        self._base = cache(self._make_base)
        self.faults = Faults()
        self.slow_s = 0.0
        """Seconds that a slow call takes."""

    def __enter__(self) -> Self:
        self.slow_s = 0.0
        self.faults = Faults(lambda: time.sleep(self.slow_s))
        self._threads, self._own = NewThreads(), []
        self._chatter = logging.getLogger("vllm").level
        logging.getLogger("vllm").setLevel(logging.ERROR)
        self._undo = wrap_stores(self._wrap)
        return self

    def __exit__(self, *exc: object) -> None:
        self.faults.heal()
        for rig in self._rigs:
            for executor in rig.executors:
                executor.perform.release()
            rig.shutdown()
        self._rigs.clear()
        for store in self._plain:
            store.close()
        self._plain.clear()
        self._undo()
        logging.getLogger("vllm").setLevel(self._chatter)

    def memory(self) -> str:
        """Return the URL of an unused memory store."""
        return f"memory://rig{next(_NUMBERS)}"

    def plain_store(self, url: str) -> Store:
        """Return a store without faults, to read and change the objects that engines have put."""
        self._opening = ""
        threads = NewThreads()
        store = open_store(parse_store_url(url), segment=False)
        self._plain.append(store)
        self._own += threads.alive()
        return store

    def rig(
        self,
        spec: RigSpec,
        store: str | list[str] = "",
        name: str = "rig",
        *,
        second_host: list[str] | None = None,
    ) -> Rig:
        """Make a rig. `second_host`: the stores of its last rank, which runs on another host."""
        config = self._config(spec, store)
        config.parallel_config.nnodes = 1 if second_host is None else 2

        def rank_config(rank: int) -> Any:
            self._opening = f"{name}.{rank}"
            mine = copy.copy(config)
            mine.parallel_config = copy.copy(config.parallel_config)
            mine.parallel_config.rank = rank
            if second_host is not None and rank == spec.tp * spec.pp - 1:
                mine.kv_transfer_config = self._config(spec, second_host).kv_transfer_config
            return mine

        self._opening = f"{name}.scheduler"
        rig = Rig(spec, config, _by_stage(spec, _cache_config(spec, config)), rank_config)
        self._rigs.append(rig)
        return rig

    def pool_threads(self) -> list[threading.Thread]:
        """Return the pool's live threads, of this test's rigs."""
        return [each for each in self._threads.alive("kvpool") if each not in self._own]

    def asks_stores(self, rig: Rig) -> bool:
        """Return True if every part of the engine asks its stores, and no lookup waits for an
        answer."""
        lookups = rig.pool._service
        stores = cast("Sequence[GuardedStore]", lookups._stores)
        tiers = [each for executor in rig.executors for each in executor.engine.context.health]
        return (
            all(tier.call is None and not tier.pace.is_left_alone for tier in lookups.core._tiers)
            and all(store._health.access is StoreAccess.FULL for store in stores)
            and all(tier.is_up and tier.is_writable for tier in tiers)
        )

    def may_try_tiers(self, rig: Rig) -> bool:
        """Return True if the next lookup tries a tier that lookups have left alone."""
        now = time.monotonic()
        tiers = rig.pool._service.core._tiers
        return any(tier.call is None and tier.pace.may_be_tried(now) for tier in tiers)

    def _wrap(self, store: Store) -> Store:
        if not self._opening:
            return store
        self.faults.begin(self._opening, "open", [""])
        return FaultyStore(store, faults=self.faults, label=self._opening)

    def _config(self, spec: RigSpec, store: str | list[str]) -> Any:
        base = self._base(spec.model, spec.max_batched_tokens, spec.drafter)
        config = copy.copy(base)
        config.parallel_config = copy.copy(base.parallel_config)
        config.parallel_config.tensor_parallel_size = spec.tp
        config.parallel_config.pipeline_parallel_size = spec.pp
        config.parallel_config.world_size = spec.tp * spec.pp
        config.scheduler_config = copy.copy(base.scheduler_config)
        config.scheduler_config.async_scheduling = spec.plans_ahead
        config.cache_config = copy.copy(base.cache_config)
        config.cache_config.num_gpu_blocks = spec.num_blocks
        if spec.model.states:
            config.cache_config.mamba_cache_mode = "align"
            config.cache_config.mamba_block_size = BLOCK
            config.cache_config.prefix_cache_retention_interval = spec.retention_interval
        if spec.events:
            config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        # The layout of CPU engines. Indexers exist on GPUs only, where a block has all layers.
        config.cache_config.kv_cache_layout = "BLHNC" if spec.model.indexers else "LBHNC"
        config.kv_transfer_config = None
        if spec.pool:
            own = {"store": store, "chunk_tokens": CHUNK, "staging_bytes": "1MiB"}
            config.kv_transfer_config = KVTransferConfig(
                kv_connector="KVPoolConnector",
                kv_connector_module_path="vllm_kvpool.connector",
                kv_role="kv_both",
                kv_connector_extra_config={**own, **PATIENT, **spec.options},
            )
        if spec.sibling is not None:
            config.kv_transfer_config = _beside(spec.sibling, config.kv_transfer_config)
        return config

    def _make_base(self, model: FakeModel, max_batched_tokens: int, drafter: str) -> Any:
        weights = self._weights(model)
        method = "eagle" if drafter == "mtp" else drafter  # the weights have no modules
        config = EngineArgs(
            model=str(weights),
            dtype=model.dtype,
            skip_tokenizer_init=True,
            enforce_eager=True,
            block_size=BLOCK,
            max_model_len=1024,
            max_num_seqs=8,
            max_num_batched_tokens=max_batched_tokens,
            enable_chunked_prefill=True,
            async_scheduling=False,
            speculative_config=dict(speculation(method, weights, NUM_DRAFTS)) if method else None,
        ).create_engine_config()
        # With MLA, CPU engines refuse prefix caching and chunked prefill; rigs run no kernels.
        config.scheduler_config.enable_chunked_prefill = True
        config.scheduler_config.max_num_batched_tokens = max_batched_tokens
        config.cache_config.enable_prefix_caching = True
        if drafter == "mtp":
            config.speculative_config.method = drafter
            draft = config.speculative_config.draft_model_config
            draft.hf_config.num_nextn_predict_layers = NUM_DRAFTS
            draft.model_arch_config.total_num_hidden_layers = NUM_DRAFTS
        if model.indexers:
            text = config.model_config.hf_text_config
            text.index_head_dim, text.index_kpool = KEY_BYTES - SCALE_BYTES, KEY_TOKENS
        return config

    def _weights(self, model: FakeModel) -> Path:
        same: dict[str, Any] = {
            "heads": model.heads,
            "layers": model.layers,
            "hidden": 32,
            "intermediate": 32,
            "vocab": VOCAB,
            "max_position": 1024,
            "seed": model.seed,
        }
        if model.latent:
            halves = {"latent": model.head_dim, "rope_dim": model.head_dim}
            return make_model(self._directory, DeepseekShape(**{**same, **halves, "heads": 4}))
        shape = LlamaShape(**same, kv_heads=model.heads, head_dim=model.head_dim)
        return make_model(self._directory, shape)


def _beside(sibling: Sibling, pool: KVTransferConfig) -> KVTransferConfig:
    """Return the configuration of a MultiConnector of both."""
    empty_loads = {
        "kv_connector": "EmptyLoads",
        "kv_connector_module_path": "tests.support.empty_loads",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"asynchronous": sibling.asynchronous},
    }
    names = ("kv_connector", "kv_connector_module_path", "kv_role", "kv_connector_extra_config")
    children = [empty_loads, {name: getattr(pool, name) for name in names}]
    return KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_load_failure_policy=sibling.policy,
        kv_connector_extra_config={"connectors": children},
    )


def _by_stage(spec: RigSpec, cache: KVCacheConfig) -> list[KVCacheConfig]:
    """Return the cache configuration of each pipeline stage; the last one has the drafter."""
    if spec.pp == 1:
        return [cache]
    per_stage = spec.model.layers // spec.pp
    stops = [per_stage * stage for stage in range(1, spec.pp)]
    bounds = [0, *stops, spec.model.layers + len(spec.lookaheads)]
    found = []
    for first, stop in itertools.pairwise(bounds):
        names = [spec.model.layer_name(layer) for layer in range(first, stop)]
        [group] = cache.kv_cache_groups
        groups = [replace(group, layer_names=names)]
        found.append(
            KVCacheConfig(
                spec.num_blocks, kv_cache_tensors=tensors_of(names), kv_cache_groups=groups
            )
        )
    return found


def _cache_config(spec: RigSpec, config: Any) -> KVCacheConfig:
    model = spec.model
    held = model.heads_of(0, spec.tp)
    same: dict[str, Any] = {
        "block_size": BLOCK,
        "num_kv_heads": held.stop - held.start,
        "head_size": model.head_dim * (2 if model.latent else 1),
        "dtype": model.torch_dtype,
    }
    whole = MLAAttentionSpec if model.latent else FullAttentionSpec
    windows = model.windows or (0,) * model.layers
    specs: dict[str, Any] = {
        model.layer_name(layer): SlidingWindowSpec(**same, sliding_window=window)
        if window
        else whole(**same)
        for layer, window in enumerate(windows)
    }
    if model.states:
        from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

        state = MambaSpec(
            block_size=BLOCK,
            shapes=((same["num_kv_heads"], model.head_dim, model.head_dim // 2),),
            dtypes=(model.torch_dtype,),
            page_size_padded=whole(**same).page_size_bytes,
            mamba_type=MambaAttentionBackendEnum.LINEAR,
            mamba_cache_mode="align",
            num_speculative_blocks=NUM_DRAFTS if spec.drafter else 0,
            tp_replicated=model.latent,
        )
        specs |= {model.layer_name(layer): state for layer in model.states}
    if model.indexers:
        specs |= _of_indexers(model, specs)
    drafts = range(model.layers, model.layers + len(spec.lookaheads))
    specs |= {model.layer_name(layer): whole(**same) for layer in drafts}
    groups = get_kv_cache_groups(config, specs)
    tensors = tensors_of(list(specs))
    if model.indexers:  # the page's size identifies the kind of layer
        sizes = {spec.page_size_bytes for spec in specs.values()}
        tensors = [
            KVCacheTensor(
                size=0,
                layers=[name for name, spec in specs.items() if spec.page_size_bytes == size],
                layer_stride=size,
                block_stride=size,
            )
            for size in sorted(sizes)
        ]
    more: dict[str, Any] = {}
    if model.states:
        more["prefix_cache_retention_interval"] = spec.retention_interval
    return KVCacheConfig(spec.num_blocks, kv_cache_tensors=tensors, kv_cache_groups=groups, **more)


def _of_indexers(model: FakeModel, specs: dict[str, Any]) -> dict[str, Any]:
    """Return the cache configuration with indexer caches in place of those with the same names, and
    with their rings."""
    from vllm.v1.kv_cache_interface import CircularBufferSpec, SparseCacheRole

    keys = MLAAttentionSpec(
        block_size=BLOCK,
        num_kv_heads=1,
        head_size=KEY_BYTES,
        dtype=torch.uint8,
        tokens_per_state=KEY_TOKENS,
        cache_role=SparseCacheRole.INDEXER,
    )
    ring = CircularBufferSpec(
        block_size=KEY_TOKENS,
        num_kv_heads=1,
        head_size=2 * model.head_dim,
        head_size_v=0,
        dtype=model.torch_dtype,
        dcp_sharded=False,
    )
    names = [model.layer_name(layer) for layer in model.indexers]
    return dict.fromkeys(names, keys) | {
        name.replace("k_cache", "tail_cache"): ring for name in names
    }
