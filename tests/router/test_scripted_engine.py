"""Scripted engines: each gets all tokens of its requests done, and its faults are what they say.

That they answer as vLLM does, `test_scripted_vllm.py` shows; the rest shows in what they stand for.
"""

import asyncio
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.router_rig import COMPLETIONS
from tests.support.scripted_batch import Batch, ChunkChain, Phase, ScriptedPool, Sequence
from tests.support.scripted_engine import ScriptedEngine
from tests.support.scripted_spec import Fault, FaultKind, ScriptedSpec
from vllm_kvpool.config import RequestOptions

SPEC = ScriptedSpec(
    step_base_s=0.01,
    decode_sequence_s=0.001,
    prefill_tokens_per_s=1000,
    max_num_batched_tokens=64,
    block_size=4,
    max_model_len=100,
    chunk_tokens=16,
    load_latency_s=0.5,
    load_tokens_per_s=100,
)
MOST_STEPS = 20_000

requests = st.lists(
    st.tuples(
        st.integers(1, 60),  # prompt
        st.integers(1, 40),  # to generate
        st.integers(1, 3),  # which prefix
        st.integers(0, 30),  # comes with this step
        st.booleans(),  # is given up
        st.sampled_from([0, 16, 32]),  # expects
    ),
    min_size=1,
    max_size=12,
)


@given(requests, st.integers(25, 64), st.integers(1, 4), st.booleans())
def test_everyone_gets_all_tokens_whatever_happens(
    asked: list[tuple[int, int, int, int, bool, int]], blocks: int, most: int, has_pool: bool
) -> None:
    spec = replace(SPEC, kv_blocks=blocks, max_num_seqs=most)
    pool = ScriptedPool() if has_pool else None
    batch = Batch(spec, pool)
    coming = sorted(enumerate(asked), key=lambda each: each[1][3])
    due: dict[Sequence, int] = {}
    given_up: set[Sequence] = set()
    now = 0.0
    for number in range(MOST_STEPS):
        while coming and coming[0][1][3] <= number:
            _, (prompt, tokens, first, _, stays, expects) = coming.pop(0)
            options = RequestOptions(expect_tokens=expects, expect_timeout_ms=300)
            chain = ChunkChain("m", "", spec.chunk_tokens)
            one = Sequence([first, *range(2, prompt + 1)], options, chain, now)
            due[one] = prompt + tokens
            given_up |= set() if stays else {one}
            batch.add(one)
        step = batch.step(now)
        batch.check()
        if step is None:
            wake = batch.wake_s(now)
            if wake is None and not coming:
                break
            now = max(now + 0.001, wake or 0.0)
            continue
        now += step.seconds
        for each in step.sampled:
            each.tokens.append(7)
            if len(each.tokens) == due[each] or (each in given_up and len(each.tokens) % 5 == 0):
                batch.remove(each)
                batch.remove(each)
        if pool is not None:
            pool.put(step.computed_chunks)
    assert batch.is_empty
    assert batch.free_blocks == blocks
    for each, length in due.items():
        assert each.phase is Phase.GONE
        assert each in given_up or len(each.tokens) == length


K = FaultKind
BROKEN = (aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError, aiohttp.ClientOSError)
NO_HTTP = (*BROKEN, aiohttp.ClientResponseError)
# A fault: status, whole chunks with tokens, is there [DONE], and how it ends.
SPOILED: list[
    tuple[Fault, int, int, bool, type[Exception] | tuple[type[Exception], ...] | None]
] = [
    (Fault(kind=K.CUT, after_tokens=3), 200, 3, False, BROKEN),
    (Fault(kind=K.CUT), 200, 0, False, BROKEN),
    (Fault(kind=K.DIE, after_tokens=3), 200, 3, False, BROKEN),
    (Fault(kind=K.STALL, after_tokens=3), 200, 3, False, TimeoutError),
    (Fault(kind=K.STALL), 200, 0, False, TimeoutError),
    (Fault(kind=K.NO_DONE), 200, 8, False, None),
    (Fault(kind=K.NO_DONE, after_tokens=0), 200, 0, False, None),
    (Fault(kind=K.ERROR, after_tokens=3), 200, 3, True, None),
    (Fault(kind=K.BROKEN_JSON, after_tokens=3), 200, 8, True, None),
    (Fault(kind=K.HANG), 0, 0, False, TimeoutError),
    (Fault(kind=K.STATUS), 500, 0, False, None),
    (Fault(kind=K.BUSY), 503, 0, False, None),
    (Fault(kind=K.NOT_HTTP), 0, 0, False, NO_HTTP),
]


@pytest.mark.parametrize(
    ("fault", "status", "tokens", "is_done", "end"),
    SPOILED,
    ids=[f"{row[0].kind.value} {row[0].after_tokens}" for row in SPOILED],
)
async def test_a_stream_is_spoiled_once(
    fault: Fault, status: int, tokens: int, is_done: bool, end: Any
) -> None:
    async def ask(url: str) -> tuple[int, bytes, Exception | None]:
        body = {"prompt": "once", "max_tokens": 8, "stream": True}
        said, got = b"", 0
        timeout = aiohttp.ClientTimeout(total=0.3)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.post(url + COMPLETIONS, json=body) as answer,
            ):
                got = answer.status
                async for part in answer.content.iter_any():
                    said += part
        except (TimeoutError, aiohttp.ClientError) as error:
            return got, said, error
        return got, said, None

    engine = ScriptedEngine(ScriptedSpec(step_base_s=0.002, default_temperature=0.0))
    url = await engine.start()
    engine.fail(replace(fault, times=1))
    got, said, error = await ask(url)
    assert (got, said.count(b'"text_completion","created":')) == (status, tokens)
    assert (b"data: [DONE]" in said) is is_done
    assert error is None if end is None else isinstance(error, end)
    if fault.kind is K.DIE:
        assert isinstance((await ask(url))[2], aiohttp.ClientConnectorError)
        engine.recover()
        await engine.ready()
    async with asyncio.timeout(10):
        while (again := await ask(url))[2] is not None:
            pass
    assert again[1].endswith(b"data: [DONE]\n\n")
    await engine.stop()
