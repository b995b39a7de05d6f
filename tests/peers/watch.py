"""A check of vLLM's own prefix cache after every step of a rig, for given prompts."""

from collections.abc import Sequence

import numpy as np
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from tests.faults.model import Context
from tests.faults.rig import BLOCK, HASH, Rig


class PrefixCacheWatch:
    """Fails in the step after which a cached block of a prompt has other rows than it must have."""

    def __init__(self, rig: Rig, *prompts: Sequence[int]) -> None:
        self._rig = rig
        self._prompts = prompts
        self.num_looks = 0
        rig.on_stepped.append(self._look)

    def cached_tokens(self, prompt: Sequence[int]) -> int:
        """Return the number of a prompt's tokens that another request would find in the cache."""
        return len(self._cached_blocks(prompt)) * BLOCK

    def _cached_blocks(self, prompt: Sequence[int]) -> list[int]:
        hasher = get_request_block_hasher(BLOCK, HASH)
        request = Request(
            "watch", list(prompt), SamplingParams(max_tokens=1), None, block_hasher=hasher
        )
        found = []
        for block_hash in request.block_hashes:
            blocks = self._rig.block_pool.get_cached_block(block_hash, [0])
            if not blocks:
                break
            found.append(blocks[0].block_id)
        return found

    def _look(self, output: SchedulerOutput) -> None:
        for prompt in self._prompts:
            blocks = self._cached_blocks(prompt)
            count = len(blocks) * BLOCK
            if not count:
                continue
            self.num_looks += 1
            rows = Context(self._rig.spec.model, prompt).rows()[:, :, :count]
            for pages in self._rig.pages:
                read = pages.read([np.array(blocks)], count)
                assert np.array_equal(read, rows[:, pages.heads]), (
                    f"after step {self._rig.num_steps} the prefix cache has {count} tokens of a "
                    "prompt, some of them with wrong rows"
                )
