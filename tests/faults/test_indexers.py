"""Latents, an indexer with one key for several tokens, and recurrent states, as in GLM 5 Next.

vLLM's real scheduler and KV cache manager run. Every step compares all rows, keys and states from
which it continues. The ring must hold every token whose key is not computed yet (`rig.py`).
"""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults.kinds import Kind
from tests.faults.model import KEY_TOKENS, FakeModel
from tests.faults.moments import Moment
from tests.faults.rig import BLOCK, RigSpec
from tests.faults.scene import Library
from tests.faults.test_matrix import cells_in_turn, check_cell
from tests.faults.workshop import Workshop
from vllm_kvpool.vllm_adapt import compat
from vllm_kvpool.vllm_adapt.kv_cache_specs import page_specs

MODEL = FakeModel(layers=6, heads=1, latent=True, indexers=(2, 3), states=(4, 5))
SPEC = RigSpec(model=MODEL, num_blocks=300, options={"chunk_tokens": BLOCK})
MATRIX_SPEC = replace(SPEC, num_blocks=RigSpec().num_blocks, options={})


def tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(3, 1000), k=count)


PROMPT = tokens(5, 300)
HIT = (len(PROMPT) - 1) // BLOCK * BLOCK
OTHERS = [tokens(60 + i, 250) for i in range(5)]


@pytest.fixture(autouse=True, scope="module")
def packed_pages_on_hosts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page_specs, "needs_gpu", lambda spec: False)
        yield


def test_the_engine_has_groups_as_expected(workshop: Workshop) -> None:
    """The tests below need these groups to be meaningful."""
    rig = workshop.rig(SPEC, workshop.memory())
    groups = rig.scheduler.kv_cache_manager.kv_cache_config.kv_cache_groups
    assert [name.split(".")[2] for name in groups[0].layer_names] == ["0", "1", "2", "3"]
    assert compat.is_ring(groups[-1].kv_cache_spec)
    names = [each.name for each in rig.pool._service.core._names.layer_groups]
    assert [name.partition("-1x")[0] for name in names] == [
        "full",
        f"indexer-of-{KEY_TOKENS}",
        "state-linear",
    ]
    rig.shutdown()


@pytest.fixture(scope="module")
def with_indexers(packed_pages_on_hosts: None, _models: Workshop) -> Library:
    with _models:
        return Library(_models, MATRIX_SPEC)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(("fault", "moment", "tp"), [*cells_in_turn(every=3)])
def test_matrix(
    fault: Kind,
    moment: Moment,
    tp: int,
    workshop: Workshop,
    library: Library,
    with_indexers: Library,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Play a third of all pairs, with every fault and every moment.

    test_matrix.py plays all pairs. Faults meet shared code, and only the places of the bytes differ
    here.
    """
    spec = replace(MATRIX_SPEC, tp=tp)
    check_cell(fault, moment, spec, workshop, with_indexers, tmp_path, monkeypatch)
