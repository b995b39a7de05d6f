"""A connector that promises tokens and loads none of them, to be used beside the pool's connector.

A request states in its `kv_transfer_params` how many of its tokens are promised (`empty_loads`).
The promise holds once. The connector reports the blocks of a load as invalid in the step in which
the load ends. A synchronous load ends in the step in which it begins, an asynchronous load in the
next step.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


@dataclass
class EmptyLoadsMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """The blocks of each load that begins in a step, by request."""

    loads: dict[str, list[int]] = field(default_factory=dict)


class EmptyLoads(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """A connector with one option, `asynchronous`: True if requests wait for their loads."""

    def __init__(
        self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig"
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        assert vllm_config.kv_transfer_config is not None
        options = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._asynchronous = bool(options["asynchronous"])
        self._block_size = vllm_config.cache_config.block_size
        self._promised: dict[str, int] = {}  # request -> tokens computed before; -1: promise used
        self._loads: dict[str, list[int]] = {}  # loads that begin in the next step
        self._begun: dict[str, list[int]] = {}  # loads that end in the next step
        self._invalid: set[int] = set()

    # Scheduler side

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int, bool]:
        promised = int((request.kv_transfer_params or {}).get("empty_loads", 0))
        if request.request_id in self._promised and self._promised[request.request_id] < 0:
            return 0, False
        self._promised[request.request_id] = num_computed_tokens
        return max(0, promised - num_computed_tokens), self._asynchronous

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        if num_external_tokens:
            start = self._promised[request.request_id]
            stop = start + num_external_tokens
            table = blocks.get_block_ids()[0]
            mine = table[start // self._block_size : -(-stop // self._block_size)]
            self._loads[request.request_id] = mine
            self._promised[request.request_id] = -1

    def build_connector_meta(self, scheduler_output: Any) -> EmptyLoadsMetadata:
        loads, self._loads = self._loads, {}
        return EmptyLoadsMetadata(loads)

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, None]:
        self._promised.pop(request.request_id, None)
        return False, None

    # Worker side

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Load nothing."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return at once: no load is in progress."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kw: Any) -> None:
        """Save nothing."""

    def wait_for_save(self) -> None:
        """Return at once: no save is in progress."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, EmptyLoadsMetadata)
        ended, self._begun = self._begun, metadata.loads
        if not self._asynchronous:
            ended, self._begun = self._begun, {}
        self._invalid.update(block for blocks in ended.values() for block in blocks)
        return None, set(ended) if self._asynchronous else None

    def get_block_ids_with_load_errors(self) -> set[int]:
        invalid, self._invalid = self._invalid, set()
        return invalid
