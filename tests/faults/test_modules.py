"""MTP with several modules, on one pipeline stage or the last of two, as vLLM's second runner runs.

No CPU engine has either: the second runner needs Triton, and the first one runs the first module
alone and starts no drafter with pipeline parallelism. The rig checks every row that a module reads,
whatever computed it (`Rig._drafted`).
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from vllm.config import SpeculativeConfig, VllmConfig

from tests.faults.audit import serve
from tests.faults.rig import BLOCK, CHUNK, NUM_DRAFTS, RigSpec
from tests.faults.scene import tokens
from tests.faults.workshop import Workshop

pytestmark = pytest.mark.skipif(
    not hasattr(SpeculativeConfig, "use_multi_module_mtp"),
    reason="this release runs the first module alone",
)

SPEC = RigSpec(drafter="mtp", runner="second")
LIMIT_S = 60.0


PROMPT = tokens(1, 5 * CHUNK + 5)
FOUND = len(PROMPT) // CHUNK * CHUNK


@pytest.fixture(autouse=True)
def second_runner() -> Iterator[None]:
    """Let vLLM say that it runs the modules by its second runner, which needs Triton."""
    with pytest.MonkeyPatch.context() as patch:
        is_mtp = property(lambda config: getattr(config.speculative_config, "method", "") == "mtp")
        patch.setattr(VllmConfig, "use_v2_model_runner", is_mtp)
        yield


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:FOUND]], ids=["within a chunk", "whole chunks"])
def test_every_row_that_modules_read_is_right_after_any_hit(
    workshop: Workshop, tp: int, pp: int, prompt: list[int]
) -> None:
    """Cold, after vLLM's own hit, after a hit of the pool by engines of other shape, and after
    vLLM's own hit after that. Prompts that part at a chunk's end have their own last rows."""
    store = workshop.memory()
    other = [*prompt[:FOUND], *tokens(2, 30)]
    writer = workshop.rig(SPEC, store, "writer")
    reader = workshop.rig(replace(SPEC, tp=tp, pp=pp), store, "reader")
    loaded = []
    for rig, prompts in ((writer, (prompt, prompt, other)), (reader, (other, other, prompt))):
        for each in prompts:
            serve(rig, each, max_tokens=40)
            rig.settle()
            loaded.append(rig.count("kvpool_draft_tokens", "loaded"))
            assert not rig.draft_rows["missing"] + rig.draft_rows["spoiled"]
    assert loaded[3] == FOUND - NUM_DRAFTS
    assert not reader.count("kvpool_draft_tokens", "missing")


def test_stages_of_a_writer_store_the_drafter_once_for_engines_of_one_stage(
    workshop: Workshop,
) -> None:
    store = workshop.memory()
    writer = workshop.rig(replace(SPEC, tp=2, pp=2), store, "writer")
    reader = workshop.rig(SPEC, store, "reader")
    for rig in (writer, reader):
        rig.add(PROMPT, 20)
        rig.run(LIMIT_S)
        rig.settle()
    assert reader.count("kvpool_draft_tokens", "loaded") == FOUND - NUM_DRAFTS
    assert not reader.count("kvpool_draft_tokens", "missing")


def test_a_wrong_row_of_a_module_is_seen(workshop: Workshop) -> None:
    """The tests above need the rig to see one wrong element."""
    rig = workshop.rig(SPEC, workshop.memory())
    rig.add(PROMPT, 20)
    rig.run(LIMIT_S, until=lambda: bool(rig.answers["r0"].tokens))
    block = rig.scheduler.kv_cache_manager.get_block_ids("r0")[0][3]
    (*_, last_bhnc) = rig.pages[-1].by_layer().values()
    last_bhnc[block, -1, 5, 7] += 2.0**-11
    with pytest.raises(AssertionError, match=rf"of others at tokens \[{3 * BLOCK + 7}\]"):
        rig.step()
