"""Small pieces of work together, large ones alone."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from vllm_kvpool.embeds.dataplane.io_workers import BATCH_BYTES, batches_of


@given(st.lists(st.integers(0, 2 * BATCH_BYTES)))
def test_batches_keep_the_order_and_their_bound(sizes: list[int]) -> None:
    batches = list(batches_of(sizes, lambda nbytes: nbytes))
    assert [nbytes for batch in batches for nbytes in batch] == sizes
    assert all(len(batch) == 1 or sum(batch) <= BATCH_BYTES for batch in batches)
    for batch, following in itertools.pairwise(batches):
        assert sum(batch) + following[0] > BATCH_BYTES, "they would have gone together"
