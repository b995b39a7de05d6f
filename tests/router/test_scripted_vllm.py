"""The scripted engine against vLLM's own code: the bytes of its answers, and the text of tokens."""

import asyncio
import inspect
import json
import re
import warnings
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.scripted_batch import Batch, ScriptedPool
from tests.support.scripted_core import EngineStats, metrics_text
from tests.support.scripted_engine import ScriptedEngine
from tests.support.scripted_spec import ScriptedSpec
from tests.support.scripted_words import EOS_ID, Continuation, Detokenizer, encode, token_bytes
from vllm_kvpool.metrics import METRICS

pytestmark = pytest.mark.slow  # importing vLLM's server takes ten seconds

SPEC = ScriptedSpec(
    notices=None,
    step_base_s=0,
    decode_sequence_s=0,
    wide_probability=0.3,
    eos_probability=0.01,
    default_temperature=0.0,
    enable_prompt_tokens_details=True,
    chunk_tokens=4,
    max_model_len=4096,
)
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
INPUTS: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "tell me a story about a \u2192 and a \U0001f600"},
    CHAT: {"messages": [{"role": "user", "content": "tell me a story"}]},
}
ASKED: dict[str, dict[str, Any]] = {
    "few tokens": {"max_tokens": 16},
    "stop strings": {"stop": [" ba", "a f"], "max_tokens": 200},
    "stop token": {"stop_token_ids": encode("\xe0")[:1], "max_tokens": 200},
    "to the end": {"max_tokens": 2000},
    "past the end": {"max_tokens": 200, "ignore_eos": True},
}
FORMS: dict[str, dict[str, Any]] = {
    "whole": {},
    "whole, ids": {"return_token_ids": True},
    "stream": {"stream": True},
    "stream, ids": {"stream": True, "return_token_ids": True},
    "stream, usage": {"stream": True, "stream_options": {"include_usage": True}},
    "stream, usage all the time": {
        "stream": True,
        "return_token_ids": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    },
}
TELLING = {"stream": True, "return_token_ids": True, "stream_options": {"include_usage": True}}


@pytest.fixture(autouse=True, scope="module")
def _imported() -> None:
    """Import vLLM's server first: what it and torch warn of then is not ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import vllm.entrypoints.openai.chat_completion.serving
        import vllm.entrypoints.openai.completion.serving
        import vllm.v1.engine.detokenizer  # noqa: F401 - imported for its effect


async def post(url: str, body: dict[str, Any]) -> bytes:
    headers = {"X-Request-Id": "one"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, json=body, headers=headers) as answer,
    ):
        assert answer.status == 200
        return await answer.read()


def serving(kind: type) -> Any:
    """vLLM's serving class, without the engine that it has."""
    made = object.__new__(kind)
    parts = {
        "enable_prompt_tokens_details": True,
        "enable_force_include_usage": False,
        "enable_per_request_metrics": False,
        "_include_reasoning_tokens_details": False,
        "parser_cls": None,
        "enable_auto_tools": False,
        "enable_log_outputs": False,
        "request_logger": None,
        "response_role": "assistant",
        "system_fingerprint": "vllm-0.32.0-00000000",
    }
    for name, value in parts.items():
        setattr(made, name, value)
    return made


def outputs(told: bytes, is_stream: bool, own: bytes) -> Iterator[Any]:
    """Rebuild the outputs of vLLM's engine from `told`, an answer with all fields.

    The counts of cached and created tokens come from `own`, the answer under comparison.
    """
    from vllm.outputs import CompletionOutput, RequestOutput

    events = [json.loads(line[6:]) for line in told.decode().split("\n\n")[:-2]]
    prompt = next(
        ids
        for each in events
        for ids in (each.get("prompt_token_ids"), each["choices"][0].get("prompt_token_ids"))
        if ids
    )
    cached = int((re.search(rb'"cached_tokens":(\d+)', own) or [b"", b"0"])[1])
    created = int((re.search(rb'"created_cache_tokens":(\d+)', own) or [b"", b"0"])[1])
    choices = [each["choices"][0] for each in events if each["choices"]]
    choices = [each for each in choices if each.get("token_ids")]
    texts = [each["text"] if "text" in each else each["delta"]["content"] for each in choices]
    if not is_stream:
        every = [token_id for each in choices for token_id in each["token_ids"]]
        choices, texts = [{**choices[-1], "token_ids": every}], ["".join(texts)]
    for choice, text in zip(choices, texts, strict=True):
        reason = choice["finish_reason"]
        output = CompletionOutput(
            index=0,
            text=text,
            token_ids=choice["token_ids"],
            cumulative_logprob=None,
            logprobs=None,
            finish_reason=reason,
            stop_reason=choice.get("stop_reason"),
        )
        yield RequestOutput(
            "one",
            "",
            prompt,
            None,
            [output],
            reason is not None,
            num_cached_tokens=cached,
            num_cache_creation_tokens=created,
            kv_transfer_params={"kvpool": {"tokens": len(prompt) // 4 * 4}},
        )


async def theirs(path: str, body: dict[str, Any], told: bytes, own: bytes) -> bytes:
    """Return vLLM's answer with the same tokens."""
    from starlette.responses import JSONResponse
    from vllm.entrypoints.generate.base.protocol import RequestResponseMetadata
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion

    given = list(outputs(told, bool(body.get("stream")), own))
    told_of = RequestResponseMetadata(request_id="one")

    async def plain() -> AsyncIterator[Any]:
        for each in given:
            yield each

    async def numbered() -> AsyncIterator[Any]:
        for each in given:
            yield 0, each

    if path == COMPLETIONS:
        request = CompletionRequest(**body)
        server = serving(OpenAIServingCompletion)
        if not request.stream:
            whole = server.request_output_to_completion_response(
                given, request, "cmpl-one", 1, SPEC.model, None, told_of
            )
            return JSONResponse(whole.model_dump()).body
        events = server.completion_stream_generator(
            request, [None], numbered(), "cmpl-one", 1, SPEC.model, 1, None, told_of
        )
    else:
        chat = ChatCompletionRequest(**body)
        server = serving(OpenAIServingChat)
        if not chat.stream:
            answer = await server.chat_completion_full_generator(
                chat, plain(), "chatcmpl-one", SPEC.model, [], None, told_of
            )
            return JSONResponse(answer.model_dump()).body
        events = server.chat_completion_stream_generator(
            chat, plain(), "chatcmpl-one", SPEC.model, [], None, told_of
        )
    return "".join([event async for event in events]).encode()


def timeless(answer: bytes) -> bytes:
    """Return the answer without its time and fingerprint, which differ between engines."""
    answer = re.sub(rb'"created":\d+', b'"created":1', answer)
    return re.sub(rb'"vllm-0.32.0-\w{8}"', b'"fingerprint"', answer)


@pytest.mark.parametrize("path", INPUTS)
def test_answers_are_vllms_byte_for_byte(path: str) -> None:
    async def run() -> list[str]:
        engine = ScriptedEngine(SPEC, ScriptedPool())
        url = await engine.start() + path
        ends = []
        for asked in ASKED.values():
            body = {"model": SPEC.model, **INPUTS[path], **asked}
            told = await post(url, {**body, **TELLING})
            ends += re.findall(r'"finish_reason":"(\w+)","stop_reason":([^,]+)', told.decode())
            for form in FORMS.values():
                ours = await post(url, {**body, **form})
                vllms = await theirs(path, {**body, **form}, told, ours)
                assert timeless(ours).split(b"\n") == timeless(vllms).split(b"\n")
        await engine.stop()
        return ends

    ends = asyncio.run(run())
    assert len(set(ends)) == 4, ends  # each way to end has been seen


def test_metrics_are_named_as_vllms() -> None:
    from vllm.v1.metrics import loggers

    batch = Batch(SPEC, None)
    text = metrics_text(replace(SPEC, notices=("tcp://a:1",)), batch, EngineStats()).decode()
    helps = dict(re.findall(r"# HELP (vllm:\w+?)(?:_total|_created)? (.*)", text))
    source = inspect.getsource(loggers)
    source = re.sub(r'"\s+"', "", source)  # texts of several lines
    for name, told in helps.items():
        if not name.startswith("vllm:kvpool"):
            assert f'"{name}"' in source
            assert f'"{told}' in source
    for name in re.findall(r"vllm:(kvpool_\w+?)(?:_total|_created)?{", text):
        assert name in METRICS


def tokenizer_of(token_ids: Sequence[int]) -> Any:
    """A tokenizer as vLLM has them, with just these tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    # Of the 256, those that are not a byte's own character stand for the other bytes, in order.
    own = [letter for letter in letters if ord(letter) < 256]
    others = [byte for byte in range(256) if chr(byte) not in own]
    by_byte = {ord(letter): letter for letter in own}
    by_byte.update(zip(others, letters[len(own) :], strict=True))
    words = {"".join(by_byte[byte] for byte in token_bytes(each)) for each in token_ids}
    vocabulary = {word: number for number, word in enumerate(sorted({*words, *letters} - {""}))}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("</s>", special=True)])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>")
    numbers = {
        each: vocabulary["".join(by_byte[byte] for byte in token_bytes(each))]
        for each in token_ids
        if each != EOS_ID
    }
    return wrapped, {**numbers, EOS_ID: made.token_to_id("</s>")}


@example([*encode("{\U000a0432"), EOS_ID], 0, [], False, 0)  # no text after the last character
@example([*encode("{\U000a0432"), *[EOS_ID] * 5], 0, [], False, 0)
@given(
    start=st.text(max_size=8).map(lambda text: encode(f"x{text}")),
    num_before=st.integers(0, 12),
    stop=st.lists(
        st.sampled_from([" b", "a", "o z", "\u2192", "\xe9", "i ku", "zz", "ta", " l"]), max_size=3
    ),
    include_stop=st.booleans(),
    min_tokens=st.integers(0, 5),
)
def test_text_is_vllms(
    start: list[int], num_before: int, stop: list[str], include_stop: bool, min_tokens: int
) -> None:
    """Wherever the prompt is cut, also within a character."""
    from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

    words = Continuation(SPEC.model, start, eos_probability=0.05, wide_probability=0.5)
    follows = [words.next() for _ in range(num_before + 30)]
    prompt, answer = start + follows[:num_before], follows[num_before:]
    tokenizer, numbers = tokenizer_of([*prompt, *answer])
    ours = Detokenizer(prompt, stop, include_stop)
    asked = SimpleNamespace(
        request_id="one",
        prompt_token_ids=[numbers[each] for each in prompt],
        sampling_params=SimpleNamespace(
            stop=stop,
            min_tokens=min_tokens,
            include_stop_str_in_output=include_stop,
            skip_special_tokens=True,
            spaces_between_special_tokens=True,
        ),
    )
    vllms = FastIncrementalDetokenizer(tokenizer, asked)
    for number, token_id in enumerate(answer, 1):
        ours_by = ours.add(token_id, number > min_tokens)
        vllms_by = vllms.update([numbers[token_id]], stop_terminated=False)
        is_over = ours_by is not None or number == len(answer)
        assert ours_by == vllms_by
        assert ours.take(is_over) == vllms.get_next_output_text(is_over, delta=True)
        if is_over:
            break
