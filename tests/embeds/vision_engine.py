"""An engine of images without a neural network: vLLM's scheduler, and both sides of the connector.

vLLM's own code drives every hook: its scheduler and, around an encoder that makes numbers of an
item's name, its model runners' mixin. All of it runs in the caller's thread.
"""

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of vLLM and torch, while they are imported
    import vllm.engine.arg_utils
    import vllm.v1.core.sched.scheduler
    import vllm.v1.worker.ec_connector_model_runner_mixin  # noqa: F401 - imported for its effect

from vllm.config import ECTransferConfig
from vllm.distributed.ec_transfer import ec_transfer_state
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
from vllm.engine.arg_utils import EngineArgs
from vllm.multimodal.inputs import (
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    MultiModalSharedField,
    PlaceholderRange,
)
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_kv_cache_config_from_groups,
    get_kv_cache_groups,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.ec_connector_model_runner_mixin import ECConnectorModelRunnerMixin

from tests.support.models import LlavaShape, make_model
from tests.support.server_process import free_ports
from vllm_kvpool.embeds.connector import KVPoolECConnector
from vllm_kvpool.embeds.worker import EmbedsWorker
from vllm_kvpool.vllm_adapt import compat
from vllm_kvpool.vllm_adapt import embeds as adapt

SHAPE = LlavaShape()
ROWS, WIDTH, BLOCK = SHAPE.image_rows, SHAPE.hidden, 16
PATIENCE_S = 20.0
PAUSE_S = 0.001


def vision_config(directory: Path, role: str, port: int, **options: Any) -> Any:
    """Return vLLM's configuration of an engine; `options` are the connector's."""
    config = EngineArgs(
        model=str(make_model(directory, SHAPE)),
        dtype="float32",
        enforce_eager=True,
        block_size=BLOCK,
        enable_prefix_caching=False,
        max_model_len=512,
        max_num_batched_tokens=512,
        async_scheduling=False,
        limit_mm_per_prompt={"image": 4, "video": 0},
        ec_transfer_config=ECTransferConfig(
            ec_connector="KVPoolECConnector",
            ec_connector_module_path="vllm_kvpool.embeds.connector",
            ec_role=role,
            ec_ip="127.0.0.1",
            ec_port=port,
            ec_connector_extra_config={"transport": "local", "heartbeat_s": 0.3, **options},
        ),
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = 64
    config.cache_config.kv_cache_layout = "LBHNC"  # as engines find it to be on the CPU
    return config


def encoded(name: str) -> torch.Tensor:
    """Return what the encoder makes of an item, `[ROWS, WIDTH]`."""
    seed = sum(name.encode())
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))


@dataclass(slots=True)
class Seen:
    """The outcome of a request."""

    items: Sequence[str]
    reason: str = ""
    params: Mapping[str, Any] | None = None
    used: dict[str, torch.Tensor] = field(default_factory=dict)
    """Its items' tensors in the step that computed them."""


class VisionEngine:
    """An engine with one rank; `encoded` are the names of the items that its encoder computed."""

    def __init__(
        self,
        directory: Path,
        role: str,
        monkeypatch: pytest.MonkeyPatch,
        *,
        port: int = 0,
        **options: Any,
    ) -> None:
        self.port = port or free_ports(1)[0]
        self.config = config = vision_config(directory, role, self.port, **options)
        # Of vLLM's processes: one rank, which is this process itself.
        monkeypatch.setattr(adapt, "broadcast_from_first_rank", lambda make: make())
        self.worker = ECConnectorFactory.create_connector(config, ECConnectorRole.WORKER)
        self.worker.start_worker_services()
        card = getattr(self.worker, "worker_card", None)
        monkeypatch.setattr(compat, "ask_workers", lambda ask, timeout_s: [card])
        names = [f"language_model.model.layers.{layer}.self_attn.attn" for layer in range(2)]
        spec = FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32
        )
        groups = get_kv_cache_groups(config, dict.fromkeys(names, spec))
        cache = get_kv_cache_config_from_groups(config, groups, available_memory=4 << 20)
        self.scheduler = Scheduler(
            config,
            generate_scheduler_kv_cache_config([cache]),
            StructuredOutputManager(config),
            BLOCK,
            log_stats=True,
        )
        self.encoder_cache: dict[str, torch.Tensor] = {}
        self.encoded: list[str] = []
        self.seen: dict[str, Seen] = {}
        self.stats: list[Any] = []

    @property
    def connector(self) -> KVPoolECConnector:
        """The scheduler's side."""
        assert isinstance(self.scheduler.ec_connector, KVPoolECConnector)
        return self.scheduler.ec_connector

    @property
    def side(self) -> EmbedsWorker:
        """The worker's side."""
        assert isinstance(self.worker, KVPoolECConnector)
        assert self.worker._worker_part is not None
        return self.worker._worker_part

    @property
    def endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    def add(
        self,
        request_id: str,
        *items: str,
        has_media: bool = True,
        padding: int = 0,
        **params: Any,
    ) -> None:
        """A request for items arrives; `params` are its `ec_transfer_params`.

        `padding`: tokens of each item in front of its rows.
        """
        length = padding + ROWS
        has_row = torch.arange(length) >= padding if padding else None
        pixels = torch.zeros(3, SHAPE.image_size, SHAPE.image_size)
        features = []
        for number, name in enumerate(items):
            element = MultiModalFieldElem(pixels, MultiModalSharedField(batch_size=1))
            data = MultiModalKwargsItem({"pixel_values": element}) if has_media else None
            where = PlaceholderRange(1 + number * (length + 1), length, has_row)
            features.append(MultiModalFeatureSpec(data, "image", name, where))
        extra = {"ec_transfer_params": params} if params else None
        request = Request(
            request_id,
            [1] * (1 + len(items) * (length + 1)),
            SamplingParams(max_tokens=1, temperature=0.0, extra_args=extra),
            None,
            mm_features=features,
        )
        self.seen[request_id] = Seen(items)
        self.scheduler.add_request(request)

    def step(self) -> None:
        """Run one step as vLLM's engine does."""
        output = self.scheduler.schedule()
        ec_transfer_state._EC_CONNECTOR_AGENT = self.worker
        try:
            done = self._execute(output)
        finally:
            ec_transfer_state._EC_CONNECTOR_AGENT = None
        for mm_hash in output.free_encoder_mm_hashes:
            self.encoder_cache.pop(mm_hash, None)
        for answers in self.scheduler.update_from_output(output, done).values():
            if answers.scheduler_stats is not None:
                self.stats.append(answers.scheduler_stats)
            for answer in answers.outputs:
                if answer.finish_reason is not None:
                    self.seen[answer.request_id].reason = str(answer.finish_reason)
                    self.seen[answer.request_id].params = answer.ec_transfer_params
        if not output.total_num_scheduled_tokens:
            time.sleep(PAUSE_S)  # threads of the connector have the core

    def _execute(self, output: Any) -> ModelRunnerOutput:
        mixin = ECConnectorModelRunnerMixin
        with mixin.maybe_get_ec_connector_output(output, self.encoder_cache) as told:
            for request_id, inputs in output.scheduled_encoder_inputs.items():
                for number in inputs:
                    name = self.seen[request_id].items[number]
                    self.encoded.append(name)
                    self.encoder_cache[name] = encoded(name)
                    mixin.maybe_save_ec_to_connector(self.encoder_cache, name)
            ids = list(output.num_scheduled_tokens)
            for request_id in ids:
                seen = self.seen[request_id]
                here = [name for name in seen.items if name in self.encoder_cache]
                seen.used = {name: self.encoder_cache[name] for name in here}
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
            sampled_token_ids=[[5] if self._is_prefilled(each) else [] for each in ids],
            ec_connector_output=told,
        )

    def _is_prefilled(self, request_id: str) -> bool:
        request = self.scheduler.requests[request_id]
        return bool(request.num_computed_tokens >= request.num_tokens)

    def run(self, *others: "VisionEngine", limit_s: float = PATIENCE_S) -> None:
        """Step until every request has ended; `others` step beside."""
        deadline = time.monotonic() + limit_s
        while any(not seen.reason for seen in self.seen.values()):
            assert time.monotonic() < deadline, f"still waiting: {self.seen}"
            for engine in (self, *others):
                engine.step()

    def close(self) -> None:
        self.scheduler.shutdown()
        self.worker.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
