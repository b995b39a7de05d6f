"""A worker of a rig: the real connector in its worker role over real pages, and checks around it.

The hooks are called in the order of one of vLLM's model runners (`runners.py`).
"""

import pickle
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from tests.faults.model import Pages
from tests.faults.runners import RUNNERS, with_own_metadata
from tests.support.fakes import FaultyPerform
from tests.transfer.barrier import has_taken_all
from vllm_kvpool.connector import KVPoolConnector
from vllm_kvpool.transfer.executor import Executor
from vllm_kvpool.transfer.ops import JobId, LoadDone, LoadPlan, SaveGathered, SavePlan
from vllm_kvpool.worker import worker_part


class WatchedExecutor(Executor):
    """The real executor, with lanes that can be made to fail. It counts the reports that are
    owed."""

    made: "WatchedExecutor | None" = None
    """The newest executor; `Rank` takes it."""

    def __init__(self, engine: Any, planner: Any, perform: Any, *rest: Any, **named: Any) -> None:
        self.engine = engine
        self.perform = FaultyPerform(perform)
        self.owed: Counter[JobId] = Counter()  # plans minus reports
        self.in_forward = False
        super().__init__(engine, planner, self.perform, *rest, **named)
        WatchedExecutor.made = self

    def post(self, message: Any) -> None:
        if isinstance(message, LoadPlan | SavePlan):
            assert message.job_id not in self.owed, "a plan was posted twice"
            is_early = self.in_forward and isinstance(message, SavePlan)
            assert not is_early, "a save was posted before its forward pass had ended"
            self.owed[message.job_id] = 1
        super().post(message)

    def drain(self) -> list[Any]:
        reports = super().drain()
        for report in reports:
            if isinstance(report, LoadDone | SaveGathered):
                self.owed[report.job_id] -= 1
                assert self.owed[report.job_id] == 0, f"{report} was reported twice"
        return reports

    @property
    def unreported(self) -> list[JobId]:
        return [job for job, count in self.owed.items() if count]

    @property
    def idle(self) -> bool:
        """True if no transfer is in progress.

        The question goes through the inbox, so earlier posts have been taken. Afterwards only a
        post can start work.
        """
        has_taken_all(self)
        return self.engine.idle


def pool_in(connector: Any) -> KVPoolConnector:
    """Return the pool's connector: this connector, or a child of it."""
    [pool] = [
        each
        for each in getattr(connector, "_connectors", [connector])
        if isinstance(each, KVPoolConnector)
    ]
    return pool


class Rank:
    """A worker: its connector and pages. Only the rig's thread uses it."""

    def __init__(
        self, vllm_config: Any, kv_cache_config: Any, pages: Pages, runner: str = "first"
    ) -> None:
        self.pages = pages
        connector = KVConnectorFactory.create_connector(
            vllm_config, KVConnectorRole.WORKER, kv_cache_config
        )
        self.connector = connector
        make, drafts = RUNNERS[runner]
        drafts |= vllm_config.speculative_config is not None
        self._runner = make(vllm_config, connector, drafts=drafts)
        WatchedExecutor.made = None
        real, worker_part.Executor = worker_part.Executor, WatchedExecutor  # type: ignore[misc]
        try:
            self._runner.register(pages.by_layer())
        finally:
            worker_part.Executor = real  # type: ignore[misc]
        self.executor = WatchedExecutor.made

    @property
    def part(self) -> worker_part.WorkerPart:
        part = pool_in(self.connector)._worker_part
        assert part is not None
        return part

    def begin(self, output: SchedulerOutput) -> None:
        """Call the hooks that come before the forward pass."""
        self._set_in_forward(output.total_num_scheduled_tokens > 0)
        metadata = pickle.loads(pickle.dumps(output.kv_connector_metadata))
        self._output = with_own_metadata(output, metadata)
        self._runner.begin(self._output)

    def wait_for_layers(self) -> None:
        """Wait for the load of each layer, as attention does before it reads its pages."""
        for name in self.pages.by_layer():
            self.connector.wait_for_layer_load(name)

    def end(
        self,
        output: SchedulerOutput,
        sampled: Mapping[str, list[int]],
        draft: Callable[[], None],
    ) -> ModelRunnerOutput:
        """Call the hooks that come after the forward pass, and return the step's output.

        `draft` runs the drafter.
        """
        self._set_in_forward(False)
        told = self._runner.end(self._output, draft)
        if not sampled:
            return ModelRunnerOutput.with_kv_conn_output_only(told)
        ids = list(sampled)
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
            sampled_token_ids=[sampled[request_id] for request_id in ids],
            kv_connector_output=told,
        )

    def give_up(self, error: Exception) -> None:
        """End a step whose forward pass has failed."""
        self._set_in_forward(False)
        self._runner.give_up(error)

    def _set_in_forward(self, is_running: bool) -> None:
        if self.executor is not None:
            self.executor.in_forward = is_running
