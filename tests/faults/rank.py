"""One worker of a rig: the real connector in its worker role over real pages, and a watch on it.

The hooks are called in the order of vLLM's `KVConnectorModelRunnerMixin`.
"""

import pickle
from collections import Counter
from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from tests.faults.model import Pages
from vllm_kvpool.connector import KVPoolConnector
from vllm_kvpool.pool import sides
from vllm_kvpool.testing.fakes import FaultyPerform
from vllm_kvpool.transfer.executor import Executor
from vllm_kvpool.transfer.ops import JobId, LoadDone, LoadPlan, SaveGathered, SavePlan


class WatchedExecutor(Executor):
    """The real executor, with lanes that can be made to fail, and with a count of what is owed."""

    made: "WatchedExecutor | None" = None
    """The newest one; `Rank` takes it."""

    def __init__(self, engine: Any, planner: Any, perform: Any, *rest: Any, **named: Any) -> None:
        self.engine = engine
        self.perform = FaultyPerform(perform)
        self.owed: Counter[JobId] = Counter()  # plans less reports
        super().__init__(engine, planner, self.perform, *rest, **named)
        WatchedExecutor.made = self

    def post(self, message: Any) -> None:
        if isinstance(message, LoadPlan | SavePlan):
            assert message.job_id not in self.owed, "a plan was posted twice"
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
        """Whether nothing is under way. What was posted before has been taken, as the question goes
        through the same inbox; later only a post can start something."""
        self.story("")
        return self.engine.idle


class Rank:
    """Owned by the rig's thread."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, pages: Pages) -> None:
        self.pages = pages
        connector = KVConnectorFactory.create_connector(
            vllm_config, KVConnectorRole.WORKER, kv_cache_config
        )
        assert isinstance(connector, KVPoolConnector)
        self.connector = connector
        WatchedExecutor.made = None
        real, sides.Executor = sides.Executor, WatchedExecutor  # type: ignore[misc]
        try:
            connector.register_kv_caches(pages.by_layer())
        finally:
            sides.Executor = real  # type: ignore[misc]
        self.executor = WatchedExecutor.made

    @property
    def side(self) -> sides.WorkerSide:
        side = self.connector._worker_side
        assert side is not None
        return side

    def begin(self, output: SchedulerOutput) -> None:
        """What comes before the forward pass."""
        metadata = pickle.loads(pickle.dumps(output.kv_connector_metadata))
        self.connector.handle_preemptions(metadata)
        self.connector.bind_connector_metadata(metadata)
        if output.has_sync_kv_loads:
            self.connector.start_load_kv(None)

    def end(self, output: SchedulerOutput, sampled: Mapping[str, list[int]]) -> ModelRunnerOutput:
        """What comes after it."""
        connector, told = self.connector, KVConnectorOutput()
        if not output.has_sync_kv_loads:
            connector.start_load_kv(None)
        connector.wait_for_save()
        results = connector.get_transfer_results(output.finished_req_ids)
        told.finished_sending = results.finished_sending
        told.finished_recving = results.finished_recving
        told.failed_recving = results.failed_recving
        told.invalid_block_ids = connector.get_block_ids_with_load_errors()
        told.kv_connector_stats = connector.get_kv_connector_stats()
        told.kv_cache_events = connector.get_kv_connector_kv_cache_events()
        told.kv_connector_worker_meta = connector.build_connector_worker_meta()
        connector.clear_connector_metadata()
        if not sampled:
            return ModelRunnerOutput.with_kv_conn_output_only(told)
        ids = list(sampled)
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
            sampled_token_ids=[sampled[request_id] for request_id in ids],
            kv_connector_output=told,
        )
