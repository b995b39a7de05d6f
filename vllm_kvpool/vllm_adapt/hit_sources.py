"""Where hits come from, in vLLM's words."""

from collections.abc import Callable, Sequence
from typing import Any

from vllm_kvpool.transfer.ops import LoadPlan
from vllm_kvpool.vllm_adapt import compat


class HitSources:
    """Divides a hit among host memory and the stores behind it. Scheduler's thread.

    `kinds` are those of the stores; which of several of them has a chunk is not asked, so that
    stores of different kinds together are "unspecified".
    """

    def __init__(self, kinds: Sequence[str]) -> None:
        self._host = compat.hit_source(["host"])
        self._stores = compat.hit_source(kinds) if kinds else self._host

    def of(
        self,
        load: LoadPlan | None,
        num_tokens: int,
        chunk_tokens: int,
        in_host: Callable[[bytes], bool],
    ) -> dict[Any, int]:
        """Tokens of the hit by source; `in_host` says of a chunk's hash whether all ranks have it.

        A cell may leave host memory before it is loaded, or come into it.
        """
        from_host = 0
        if load is not None:
            for chunk, chunk_hash in enumerate(load.hashes, load.first_chunk):
                start = max(load.token_start, chunk * chunk_tokens)
                stop = min(load.token_stop, (chunk + 1) * chunk_tokens)
                if in_host(chunk_hash):
                    from_host += stop - start
        sources: dict[Any, int] = {}
        for source, tokens in ((self._host, from_host), (self._stores, num_tokens - from_host)):
            if tokens:
                sources[source] = sources.get(source, 0) + tokens
        return sources
