"""The end of the embeddings' connector."""

from pathlib import Path
from types import SimpleNamespace

from vllm_kvpool.config import EmbedsConfig
from vllm_kvpool.embeds.connector import KVPoolECConnector
from vllm_kvpool.metrics import Tally


def test_counters_that_cannot_be_written_keep_no_connection_open(tmp_path: Path) -> None:
    """Sockets that are left open are found by whoever collects garbage next."""
    ends: list[str] = []
    connector = object.__new__(KVPoolECConnector)
    connector._closed = False
    connector._config = EmbedsConfig(stats_file=str(tmp_path / "no directory" / "stats"))
    connector._vllm_config = SimpleNamespace(  # type: ignore[assignment]
        parallel_config=SimpleNamespace(data_parallel_index=0)
    )
    connector._worker_side = None
    connector._scheduler_side = SimpleNamespace(  # type: ignore[assignment]
        tally=Tally(), close=lambda: ends.append("scheduler")
    )
    connector.shutdown()
    connector.shutdown()
    assert ends == ["scheduler"]
