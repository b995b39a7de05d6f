"""Processes that bring cells near: told what they are to bring, ended, and never in the way."""

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tests.support.router_rig import run
from vllm_kvpool.identity.cell_names import Brought, ChunkNames, KeyPrefix
from vllm_kvpool.router.control.events import ReplicaSpec
from vllm_kvpool.router.control.fleet import Fleet
from vllm_kvpool.router.control.prefix_index import SPAN_BYTES
from vllm_kvpool.router.control.requests import Ask, Request, RequestId
from vllm_kvpool.router.control.states import Cause, ReplicaId, State
from vllm_kvpool.router.ops import prefetches as module
from vllm_kvpool.router.ops.prefetches import Prefetches

LIMIT_S = 20.0
NAMES = ChunkNames((KeyPrefix("a@", 100),), ("x", "y"))
PREFIX = (1, 2)
# Says a word to people, then two cells for each chunk it is told of; keeps what it was told.
TALKS = """
import json, sys
print("welcome to this host", flush=True)
for line in sys.stdin:
    open(sys.argv[1], "a").write(line)
    print(json.dumps({"brought": 2 * len(json.loads(line)["chunks"]), "nbytes": 7}), flush=True)
open(sys.argv[1], "a").write("over")
"""


class Bench:
    """A host with one replica that loads and waits with a request; its process runs `script`."""

    def __init__(self, tmp_path: Path, script: str) -> None:
        self.told = tmp_path / "told"
        self.logs = tmp_path / "logs"
        command = (sys.executable, "-c", script, str(self.told))
        self.prefetches = Prefetches({"h": command}, self.logs)
        self.prefetches.known.learn(PREFIX, 2 * SPAN_BYTES, NAMES)
        self.fleet = Fleet()
        spec = ReplicaSpec(replica_id=ReplicaId("r"), url="http://r", host="h", is_ours=True)
        self.replica = self.fleet.add(spec, 0.0)

    def binds(self, prefix: tuple[int, ...] = PREFIX) -> None:
        if self.replica.state is State.INACTIVE:
            self.fleet.move(self.replica, Cause.TAKE_OVER, "test", 0.0)
        ask = Ask(request_id=RequestId("q"), prompt_tokens=9, max_output_tokens=1, prefix=prefix)
        self.replica.assign(Request(ask, 0.0, len(self.replica.bound)))
        self.prefetches.look(self.fleet)

    def serves(self) -> None:
        self.fleet.move(self.replica, Cause.LOADED, "test", 1.0)
        self.prefetches.look(self.fleet)

    def text(self) -> str:
        return self.told.read_text() if self.told.exists() else ""

    @property
    def counts(self) -> dict[str, int]:
        return {name: count for name, count in self.prefetches.counts.items() if count}


async def until(is_so: Callable[[], object], what: str) -> None:
    end = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < end, what
        await asyncio.sleep(0.01)


def test_a_process_is_told_and_ends_when_the_replica_serves(tmp_path: Path) -> None:
    async def main() -> None:
        bench = Bench(tmp_path, TALKS)
        bench.binds()
        await until(lambda: bench.counts.get("brought"), "it is told")
        assert msgspec.json.decode(bench.text(), type=ChunkNames) == NAMES
        for _ in range(3):
            bench.prefetches.look(bench.fleet)
        bench.serves()
        await until(lambda: bench.text().endswith("over"), "it ends with its input")
        await bench.prefetches.close()
        assert bench.text().count("\n") == 1
        assert bench.counts == {"begun": 1, "brought": 4, "nbytes": 7}

    run(main)


@pytest.mark.parametrize(
    "script",
    ["raise SystemExit(3)", "import os; os.close(0); raise SystemExit(3)"],
    ids=["at once", "without reading"],
)
def test_one_that_fails_is_counted_and_not_tried_again(tmp_path: Path, script: str) -> None:
    async def main() -> None:
        bench = Bench(tmp_path, script)
        bench.binds()
        await until(lambda: bench.counts.get("failed"), "it fails")
        other = msgspec.structs.replace(NAMES, chunks=("z",))
        bench.prefetches.known.learn((7,), SPAN_BYTES, other)
        bench.binds((7,))
        bench.serves()
        await bench.prefetches.close()
        assert bench.counts == {"begun": 1, "failed": 1}

    run(main)


def test_a_command_that_is_not_there_is_a_failure(tmp_path: Path) -> None:
    async def main() -> None:
        bench = Bench(tmp_path, "")
        bench.prefetches = Prefetches({"h": ["/no/such/command"]}, tmp_path)
        bench.prefetches.known.learn(PREFIX, 2 * SPAN_BYTES, NAMES)
        bench.binds()
        await until(lambda: bench.counts.get("failed"), "it fails")
        await bench.prefetches.close()

    run(main)


def test_one_that_does_not_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "END_S", 0.3)
    script = "import sys, time; open(sys.argv[1], 'w').write('up'); time.sleep(600)"

    async def main() -> None:
        bench = Bench(tmp_path, script)
        bench.binds()
        await until(bench.text, "it runs")
        began = time.monotonic()
        await bench.prefetches.close()
        assert time.monotonic() - began < LIMIT_S / 2
        assert bench.counts == {"begun": 1}

    run(main)


def test_rubbish_it_says_is_passed_by(tmp_path: Path) -> None:
    said = msgspec.json.encode(Brought(brought=5)).decode()
    script = f"print('x' * 300000); print('{{'); print('[1]'); print('{said}'); input()"

    async def main() -> None:
        bench = Bench(tmp_path, script)
        bench.binds()
        await until(lambda: bench.counts.get("brought") == 5, "what is none is passed by")
        await bench.prefetches.close()

    run(main)


def test_what_it_prints_for_people_is_kept(tmp_path: Path) -> None:
    async def main() -> None:
        bench = Bench(tmp_path, "import sys; sys.exit('no such store')")
        bench.binds()
        await until(lambda: bench.counts.get("failed"), "it fails")
        await bench.prefetches.close()
        assert (bench.logs / "h.prefetch.log").read_text() == "no such store\n"

    run(main)


def test_nothing_is_started_where_nothing_is_known(tmp_path: Path) -> None:
    async def main() -> None:
        bench = Bench(tmp_path, TALKS)
        bench.prefetches = Prefetches({"h": ["/no/such/command"]}, tmp_path)
        assert bench.prefetches.is_on
        bench.binds()
        bench.serves()
        await bench.prefetches.close()
        assert bench.counts == {}
        assert not Prefetches({}, tmp_path).is_on

    run(main)
