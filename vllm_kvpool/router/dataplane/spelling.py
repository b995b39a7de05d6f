"""Asks engines what text some tokens are, for an answer that is to go on at another one."""

import asyncio
from collections.abc import Sequence

from vllm_kvpool.router.dataplane.headers import Headers
from vllm_kvpool.router.dataplane.replies import OK, NoReply, read_spelled
from vllm_kvpool.router.dataplane.splice import Splice
from vllm_kvpool.router.dataplane.steps import Detokenize, Finish, Refusal, Resume
from vllm_kvpool.router.dataplane.upstream import EngineLost, Upstream

SPELL_TIMEOUT_S = 5.0
MAX_SPELLERS = 3
"""Engines that are asked, one after the other."""


async def spell(
    splice: Splice, step: Detokenize, engines: Upstream, urls: Sequence[str], headers: Headers
) -> Resume | Finish | Refusal:
    """What `splice` wants done once it knows; any engine of a model knows, and one may not answer.

    Takes SPELL_TIMEOUT_S at most, after which the splice goes on without knowing.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + SPELL_TIMEOUT_S
    after: Resume | Finish | Refusal | Detokenize = step
    while isinstance(after, Detokenize):
        text: str | None = None
        for url in urls[:MAX_SPELLERS]:
            left_s = deadline - loop.time()
            if left_s <= 0:
                break
            try:
                answer = await engines.post(url + after.path, after.body, headers, left_s)
                if answer.status == OK:
                    text = read_spelled(answer.body)
                    break
            except (EngineLost, NoReply):
                continue
        after = splice.spelled(text)
    return after
