"""Processes that write one cell at the same time, each with other bytes: readers see one, whole."""

import subprocess
import sys
from pathlib import Path

from tests.security.planted import CELL, MIB, NAMESPACE
from vllm_kvpool.storage.base import GetOutcome
from vllm_kvpool.storage.file.store import FileStore
from vllm_kvpool.testing.contract import get_one, key_of
from vllm_kvpool.testing.memory import make_buffer

NUM_WRITERS = 3
ROUNDS = 40
CHILD_LIMIT_S = 60

WRITER = f"""
import sys
from vllm_kvpool.storage.base import ChunkRef
from vllm_kvpool.storage.file.store import FileStore
from vllm_kvpool.testing.contract import key_of
from vllm_kvpool.testing.memory import make_buffer
store = FileStore(sys.argv[1], {4 * MIB})
buffer = make_buffer({CELL})
buffer.view[:] = bytes([int(sys.argv[2])]) * {CELL}
print("ready", flush=True)
for _ in range({ROUNDS}):
    number = int(sys.stdin.readline())
    keys = [key_of({NAMESPACE!r}, number + i) for i in range(4)]
    outcomes = store.put(keys, [buffer] * 4, [ChunkRef("g")] * 4)
    print(*(outcome.value for outcome in outcomes), flush=True)
store.close()
"""


def start_writer(root: Path, byte: int) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(root), str(byte)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_of_writers_with_other_bytes_one_wins_and_its_cell_is_whole(tmp_path: Path) -> None:
    root = tmp_path / "pool"
    store = FileStore(str(root), 4 * MIB)
    writers = [start_writer(root, byte) for byte in range(1, 1 + NUM_WRITERS)]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
    buffer = make_buffer(CELL)
    winners = set()
    for round_number in range(ROUNDS):
        for writer in writers:
            assert writer.stdin is not None
            writer.stdin.write(f"{4 * round_number}\n")
            writer.stdin.flush()
        key = key_of(NAMESPACE, 4 * round_number)
        while get_one(store, key, buffer) is not GetOutcome.OK:  # while they write, too
            pass
        seen = bytes(buffer.view)
        assert len(set(seen)) == 1, "a mixture"
        said = [writer.stdout.readline().split() for writer in writers if writer.stdout]
        assert [[outcomes[i] for outcomes in said].count("stored") for i in range(4)] == [1] * 4
        assert get_one(store, key, buffer) is GetOutcome.OK
        assert bytes(buffer.view) == seen, "the second replaced the first"
        winners.add(seen[0])
    for writer in writers:
        writer.communicate(timeout=CHILD_LIMIT_S)
        assert writer.returncode == 0
    assert winners <= set(range(1, 1 + NUM_WRITERS))
    store.close()
