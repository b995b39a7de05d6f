"""Short soaks, one for each scene, and whether what looks for trouble finds it.

The long soak is `python -m tests.soak`.
"""

import random
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from tests.soak.crew import SLACK_S, Crew, Trouble
from tests.soak.directory import Directory
from tests.soak.engine import Engine, EngineSpec
from tests.soak.rounds import (
    RECOVER_LIMIT_S,
    Kill,
    Soak,
    Strike,
    open_scene,
)
from tests.support.mooncake_master import MooncakeMaster
from vllm_kvpool.storage.guarded import OPEN_WAIT_S

NUM_PROMPTS = 3
BOTH = ("writer", "reader")
STRIKES = {
    "file": [
        Strike(victims=BOTH, rot=3),
        Strike(kills=(Kill(BOTH, 1, 0.0), Kill(("writer", "writer-2"), 0, 0.01)), victims=BOTH),
    ],
    "levels": [Strike(kills=(Kill(("writer-3",), 2, 0.0),), victims=BOTH, rot=1)],
    "mooncake": [
        Strike(server="kill", victims=("writer",), starts_meanwhile=True, lasts_s=1.0),
        Strike(server="pause", victims=("reader",), lasts_s=1.0),
    ],
    "tiers": [Strike(server="kill", victims=BOTH, rot=2, lasts_s=0.5)],
}
MOST_WORK_S = 0.8  # before a strike

pytestmark = pytest.mark.soak


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "file",
        "levels",
        pytest.param("mooncake", marks=pytest.mark.mooncake),
        pytest.param("tiers", marks=pytest.mark.mooncake),
    ],
)
def test_whoever_is_killed_nobody_reads_what_is_not_its_own(name: str, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    with ExitStack() as stack:
        scene = stack.enter_context(open_scene(name, tmp_path))
        soak = Soak(scene, seed, print, tmp_path)
        stack.callback(soak.close)
        soak.begin()
        for strike in STRIKES[name]:
            soak.round(strike.after(chance.uniform(0, MOST_WORK_S)))
        soak.end()
    assert soak.crew.totals["hits"]
    assert not soak.crew.totals["wrong"]


@pytest.mark.slow
@pytest.mark.mooncake
def test_an_engine_starts_and_serves_while_a_master_accepts_and_does_not_answer(
    tmp_path: Path,
) -> None:
    with ExitStack() as stack:
        master = stack.enter_context(MooncakeMaster())
        stores = (f"file://{tmp_path}/cells?size=64MiB", f"mooncake://{master.address}")
        crew = Crew(tmp_path, lambda member: (0,))
        stack.callback(crew.close)
        master.pause()
        engine = crew.start("engine", EngineSpec(stores, 1, 16))
        crew.work(lambda: engine.started, 2 * OPEN_WAIT_S + SLACK_S, "the start, on both sides")
        crew.work(lambda: engine.hit_tokens > 0, RECOVER_LIMIT_S, "hits of the other store")


# What looks for trouble finds it


def test_an_engine_finds_a_single_wrong_word_in_its_pages(tmp_path: Path) -> None:
    engine = Engine(EngineSpec((f"file://{tmp_path}/cells?size=64MiB",), 2, 16))
    assert [served.wrong for served in engine.serve(range(NUM_PROMPTS))] == [""] * NUM_PROMPTS
    assert not engine.serve([0])[0].wrong
    engine._ranks[1].pages_lbhnw[2, 3, 0, 1, 4] ^= np.uint64(1)  # as a late scatter would
    assert engine.serve([0])[0].wrong
    engine.close()


@pytest.mark.parametrize("place", [0, 100, -10])
def test_a_directory_with_a_damaged_object_is_found_out(tmp_path: Path, place: int) -> None:
    directory = Directory(tmp_path / "cells", 64 << 20)
    engine = Engine(EngineSpec((directory.url,), 1, 16))
    engine.serve(range(NUM_PROMPTS))
    engine.close()
    assert directory.check_in_depth(0, NUM_PROMPTS).objects
    path = next(directory.path.glob("*/objects/*/*/*"))
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    with pytest.raises(Trouble, match=r"is not a whole object|damaged"):
        directory.check_in_depth(0, NUM_PROMPTS)
