"""An engine whose two ranks run on two hosts, each with files of its own."""

import logging
from pathlib import Path

import pytest

from tests.faults.rig import CHUNK, RigSpec
from tests.faults.workshop import Workshop

CHUNKS = 4
PROMPT = [3 + 7 * i % 900 for i in range(CHUNKS * CHUNK + 9)]
LIMIT_S = 60.0


@pytest.mark.parametrize("is_shared", [False, True])
def test_files_of_each_host_serve_hits_only_beside_a_store_of_both(
    workshop: Workshop, tmp_path: Path, caplog: pytest.LogCaptureFixture, is_shared: bool
) -> None:
    """Answers are right in both cases: the rig compares every row that its model reads."""
    shared = [workshop.memory()] if is_shared else []
    first, second = (
        [*shared, f"file://{tmp_path}/{host}/kvpool?size=64MiB"] for host in ("a", "b")
    )
    loaded, log = [], logging.getLogger("vllm_kvpool.connector")
    log.addHandler(caplog.handler)  # the pool's log goes to vLLM's handlers alone, at their level
    caplog.set_level(logging.WARNING, log.name)
    try:
        for number in range(2):
            rig = workshop.rig(RigSpec(tp=2), first, f"engine{number}", second_host=second)
            rig.add(PROMPT, 2)
            rig.run(LIMIT_S)
            loaded.append(rig.count("kvpool_hit_tokens"))
            rig.shutdown()
    finally:
        log.removeHandler(caplog.handler)
    assert loaded == [0, CHUNKS * CHUNK if is_shared else 0]
    warned = "workers run on 2 hosts, and each has its own files" in caplog.text
    assert warned is not is_shared
    assert warned is (first[-1] in caplog.text)
