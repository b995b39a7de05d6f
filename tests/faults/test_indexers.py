"""Latents, an indexer with one key for several tokens, and recurrent states, as in GLM 5 Next.

vLLM's real scheduler and KV cache manager run. Every step compares all rows, keys and states from
which it continues. The ring must hold every token whose key is not computed yet (`rig.py`).
"""

from collections.abc import Iterator

import pytest

from tests.faults.model import INDEXERS, KEY_TOKENS
from tests.faults.rig import BLOCK, RigSpec
from tests.faults.workshop import Workshop
from vllm_kvpool.vllm_adapt import compat
from vllm_kvpool.vllm_adapt.kv_cache_specs import page_specs

SPEC = RigSpec(model=INDEXERS, num_blocks=300, options={"chunk_tokens": BLOCK})


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
