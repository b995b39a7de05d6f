"""The orders in which vLLM's model runners call a connector. The forward pass is not run.

Runners of this release are vLLM's own code. Runners of 0.27.1 are written after its sources
(v1/worker/kv_connector_model_runner_mixin.py and v1/worker/gpu/kv_connector.py). They differ, by
release and runner:

| | first, 0.27.1 | second, 0.27.1 | first, 0.32 | second, 0.32 |
|---|---|---|---|---|
| loads start | before the pass | before | after, if none is waited for | after, likewise |
| with drafts, `wait_for_save` is | after the results | before them | after them | before them |
| without tokens, `wait_for_save` is | left out | left out | called | called |
| results by | `get_finished` | same | `get_transfer_results` | same |
| `finish_forward` | | | | called |
| arguments of `start_load_kv` | context | same | same | also the batch's |
"""

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from types import SimpleNamespace
from typing import Any

from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.forward_context import get_forward_context, set_forward_context
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin


class Runner:
    """A model runner that calls one rank's connector: `begin`, the forward pass, `end`.

    `drafts`: there is a draft model, run by `draft`. `register` is called once, before the first
    step.
    """

    def __init__(self, vllm_config: Any, connector: KVConnectorBase_V1, *, drafts: bool) -> None:
        self.vllm_config = vllm_config
        self.connector = connector
        self.drafts = drafts

    def register(self, pages: dict[str, Any]) -> None:
        self.connector.register_kv_caches(pages)

    def begin(self, output: SchedulerOutput) -> None:
        raise NotImplementedError

    def end(self, output: SchedulerOutput, draft: Callable[[], None]) -> KVConnectorOutput:
        raise NotImplementedError

    def give_up(self, error: Exception) -> None:
        """End a step whose forward pass has failed."""

    @contextmanager
    def agent(self) -> Iterator[None]:
        """Make this rank's connector the global connector that vLLM's code reads."""
        kv_transfer_state._KV_CONNECTOR_AGENT = self.connector
        try:
            with set_forward_context(None, self.vllm_config):
                yield
        finally:
            kv_transfer_state._KV_CONNECTOR_AGENT = None


class First(Runner):
    """The first runner of this release."""

    _around: AbstractContextManager[KVConnectorOutput | None]

    def begin(self, output: SchedulerOutput) -> None:
        with self.agent():
            self.connector.handle_preemptions(output.kv_connector_metadata)
            if output.total_num_scheduled_tokens:
                self._around = KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(
                    output, defer_finalize=self.drafts
                )
                self._told = self._around.__enter__()

    def end(self, output: SchedulerOutput, draft: Callable[[], None]) -> KVConnectorOutput:
        mixin = KVConnectorModelRunnerMixin
        with self.agent():
            if not output.total_num_scheduled_tokens:
                done = mixin.kv_connector_no_forward(output, self.vllm_config)
                return done.kv_connector_output or KVConnectorOutput()
            self._around.__exit__(None, None, None)
            draft()
            if self.drafts:
                mixin.finalize_kv_connector()
        assert self._told is not None
        return self._told

    def give_up(self, error: Exception) -> None:
        with self.agent(), suppress(type(error)):
            self._around.__exit__(type(error), error, error.__traceback__)


class Second(Runner):
    """The second runner of this release."""

    _active: ActiveKVConnector

    def register(self, pages: dict[str, Any]) -> None:
        with self.agent():
            self._active = ActiveKVConnector(self.vllm_config, pages)

    def begin(self, output: SchedulerOutput) -> None:
        if output.total_num_scheduled_tokens:
            batch: Any = SimpleNamespace(
                idx_mapping=None,
                req_ids=list(output.num_scheduled_tokens),
                num_tokens=output.total_num_scheduled_tokens,
            )
            takes_batch = "batch" in str(inspect.signature(self._active.pre_forward))
            more = ((batch,), {"attn_metadata": {}}) if takes_batch else ((), {})
            with self.agent():
                self._active.pre_forward(output, *more[0], **more[1])

    def end(self, output: SchedulerOutput, draft: Callable[[], None]) -> KVConnectorOutput:
        draft()
        with self.agent():
            if not output.total_num_scheduled_tokens:
                done = self._active.no_forward(output)
                return done.kv_connector_output or KVConnectorOutput()
            if hasattr(self._active, "finish_forward"):
                self._active.finish_forward()
            told = self._active.post_forward(output.finished_req_ids)
        assert told is not None
        return told


class Older(Runner):
    """A runner of 0.27.1, first or second. With drafts, the first runner waits for saves at the
    end."""

    def begin(self, output: SchedulerOutput) -> None:
        assert output.kv_connector_metadata is not None
        self.connector.handle_preemptions(output.kv_connector_metadata)
        self.connector.bind_connector_metadata(output.kv_connector_metadata)
        with self.agent():
            self.connector.start_load_kv(get_forward_context())

    def end(self, output: SchedulerOutput, draft: Callable[[], None]) -> KVConnectorOutput:
        connector, told = self.connector, KVConnectorOutput()
        has_pass = output.total_num_scheduled_tokens > 0
        if has_pass and not self.drafts:
            connector.wait_for_save()
        told.finished_sending, told.finished_recving = connector.get_finished(
            output.finished_req_ids
        )
        told.invalid_block_ids = connector.get_block_ids_with_load_errors()
        told.kv_connector_stats = connector.get_kv_connector_stats()
        told.kv_cache_events = connector.get_kv_connector_kv_cache_events()
        told.kv_connector_worker_meta = connector.build_connector_worker_meta()
        draft()
        if has_pass and self.drafts:
            connector.wait_for_save()
        connector.clear_connector_metadata()
        return told


class NeverFinal(First):
    """A pipeline stage before the last, with drafts. It never waits for its saves."""

    def end(self, output: SchedulerOutput, draft: Callable[[], None]) -> KVConnectorOutput:
        if not output.total_num_scheduled_tokens:
            return super().end(output, draft)
        with self.agent():
            self._around.__exit__(None, None, None)
            draft()
        assert self._told is not None
        return self._told


RUNNERS: dict[str, tuple[Callable[..., Runner], bool]] = {
    "first": (First, False),
    "first, drafts": (First, True),
    "second": (Second, False),
    "0.27.1": (Older, False),
    "0.27.1, first, drafts": (Older, True),
    "first, drafts, not the last stage": (NeverFinal, True),
}


def with_own_metadata(output: SchedulerOutput, metadata: Any) -> SchedulerOutput:
    """Return the scheduler's output with a rank's own copy of the connector's metadata."""
    mine = copy.copy(output)
    mine.kv_connector_metadata = metadata
    return mine
