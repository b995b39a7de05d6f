"""vLLM's own front half without an engine: from a body to the payloads of its stream.

Requests are read by vLLM's protocol classes; tokens are detokenized, stopped and merged by its
`OutputProcessor`, and written by the generators of its serving classes. Only what stands between,
the model and its scheduler, is a function from the tokens so far to the next one.
"""

import asyncio
import json
import re
import warnings
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import PreTrainedTokenizerFast
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
    from vllm.entrypoints.serve.utils.api_utils import get_max_tokens
    from vllm.outputs import RequestOutput
    from vllm.parser.parser_manager import ParserManager
    from vllm.renderers.online_renderer import _reused_prompt_token_ids
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
    from vllm.v1.engine.output_processor import OutputProcessor
    from vllm.v1.outputs import LogprobsLists

EOS, THINK, END_THINK = "<|end|>", "<think>", "</think>"
MAX_MODEL_LEN = 4096
CORPUS = [
    "The quick brown fox jumps over the lazy dog. A pool of cache, shared by all engines!",
    "Es grünt so grün, wenn Spaniens Blüten blühen. Ça va? Größe, Maß, naïve.",
    "日本語の文章と漢字。中文也在这里。한국어도 있습니다.",
    "😀😃 🎉 👩‍👩‍👧 ✓ → ∑ ∞",
    "one two three\n\nfour five\n###\nsix seven, eight; nine (ten)",
]

NextToken = Callable[[Sequence[int]], int]
"""A model: returns the next token for all tokens so far, prompt included."""


def make_tokenizer(num_tokens: int = 420) -> PreTrainedTokenizerFast:
    """A byte-level BPE of few merges, so that many characters have several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=num_tokens,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[EOS],
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken(THINK), AddedToken(END_THINK)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS)


def scripted(answer: Sequence[int], prompt_tokens: int) -> NextToken:
    """Greedy: always the next token of `answer`, which begins again at its end."""
    return lambda tokens: answer[(len(tokens) - prompt_tokens) % len(answer)]


@dataclass
class FrontHalf:
    """Streams of one engine. `steps` are the tokens that come at once, in turn, again and again."""

    tokenizer: PreTrainedTokenizerFast
    next_token: NextToken
    steps: Sequence[int] = (1,)
    reasoning_parser: str = ""
    fingerprint: str | None = "vllm-0.32-tp1"
    created: int = 1_700_000_000
    has_usage_forced: bool = False
    seen: list[Any] = field(default_factory=list)
    """Requests as vLLM has parsed them."""

    def stream(self, path: str, body: bytes) -> list[bytes]:
        """Return the payloads of vLLM's stream."""
        data = json.loads(body)
        if path == "/v1/completions":
            return self._complete(CompletionRequest.model_validate(data))
        return self._chat(ChatCompletionRequest.model_validate(data))

    def whole(self, path: str, body: bytes) -> dict[str, Any]:
        """Return the body of vLLM's answer without a stream."""
        data = {**json.loads(body), "stream": False}
        if path == "/v1/completions":
            return self._complete_whole(CompletionRequest.model_validate(data))
        return self._chat_whole(ChatCompletionRequest.model_validate(data))

    def _complete_whole(self, request: CompletionRequest) -> dict[str, Any]:
        ids = self.tokenizer.encode(request.prompt)
        (output,) = self._generate(request, ids, request.max_tokens)
        output.prompt = request.prompt
        response = self._serving(OpenAIServingCompletion).request_output_to_completion_response(
            [output],
            request,
            f"cmpl-{request.request_id}",
            self.created,
            request.model,
            self.tokenizer,
            SimpleNamespace(),
        )
        return self._dumped(response)

    def _chat_whole(self, request: ChatCompletionRequest) -> dict[str, Any]:
        conversation, ids = self._rendered(request)
        outputs = self._generate(request, ids, vars(request)["max_tokens"])
        serving = self._chat_serving()
        parser = serving.parser_cls and serving._make_parser(request, self.tokenizer, {})
        response = serving.chat_completion_full_generator(
            request,
            _async(outputs),
            f"chatcmpl-{request.request_id}",
            request.model,
            conversation,
            self.tokenizer,
            SimpleNamespace(),
            parser=parser,
        )
        return self._dumped(asyncio.run(response))

    def _dumped(self, response: Any) -> dict[str, Any]:
        # As FastAPI does: through JSON, where vLLM gives it a dict.
        dumped: dict[str, Any] = json.loads(json.dumps(response.model_dump()))
        return {**dumped, "created": self.created}

    def _rendered(self, request: ChatCompletionRequest) -> tuple[list[Any], list[int]]:
        """Return the conversation and its prompt's token ids."""
        conversation = [{"role": m["role"], "content": m["content"]} for m in request.messages]
        text = "".join(f"{m['role']}: {m['content']}\n" for m in conversation)
        if request.add_generation_prompt:
            text += "assistant: "
        return conversation, self.tokenizer.encode(text)

    def _chat_serving(self) -> Any:
        serving = self._serving(OpenAIServingChat)
        serving.response_role = "assistant"
        serving.parser_cls = None
        serving.enable_log_outputs = serving.enable_auto_tools = False
        serving._include_reasoning_tokens_details = bool(self.reasoning_parser)
        if self.reasoning_parser:
            serving.parser_cls = ParserManager.get_parser(
                reasoning_parser_name=self.reasoning_parser, tokenizer=self.tokenizer
            )
        return serving

    def detokenize(self, body: bytes) -> str:
        return str(self.tokenizer.decode(json.loads(body)["tokens"]))

    def _complete(self, request: CompletionRequest) -> list[bytes]:
        self.seen.append(request)
        prompt = request.prompt
        ids = prompt if isinstance(prompt, list) else self.tokenizer.encode(prompt)
        outputs = self._generate(request, ids, request.max_tokens)
        serving = self._serving(OpenAIServingCompletion)
        chunks = serving.completion_stream_generator(
            request,
            [{"type": "token", "prompt_token_ids": ids, "prompt": prompt}],
            _indexed(outputs),
            f"cmpl-{request.request_id}",
            self.created,
            request.model,
            num_prompts=1,
            tokenizer=self.tokenizer,
            request_metadata=SimpleNamespace(),
        )
        return self._payloads(chunks)

    def _chat(self, request: ChatCompletionRequest) -> list[bytes]:
        self.seen.append(request)
        ids = _reused_prompt_token_ids(
            request,
            SimpleNamespace(validate_token_ids=lambda ids, parameter: None),
            request.messages,
        )
        conversation: list[Any] = []
        if ids is None:
            conversation, ids = self._rendered(request)
        asked = request.max_completion_tokens
        if asked is None:
            asked = vars(request)["max_tokens"]  # reading it otherwise warns
        outputs = self._generate(request, ids, asked)
        chunks = self._chat_serving().chat_completion_stream_generator(
            request,
            _async(outputs),
            f"chatcmpl-{request.request_id}",
            request.model,
            conversation,
            self.tokenizer,
            SimpleNamespace(),
            chat_template_kwargs={},
        )
        return self._payloads(chunks)

    def _payloads(self, chunks: AsyncIterator[str]) -> list[bytes]:
        async def collect() -> list[str]:
            return [chunk.removeprefix("data: ").removesuffix("\n\n") async for chunk in chunks]

        created = f'"created":{self.created}'
        return [
            re.sub(r'"created":\d+', created, each, count=1).encode()
            for each in asyncio.run(collect())
        ]

    def _serving(self, kind: type) -> Any:
        serving = object.__new__(kind)
        serving.enable_force_include_usage = self.has_usage_forced
        serving.enable_prompt_tokens_details = False
        serving.enable_per_request_metrics = False
        serving.return_tokens_as_token_ids = False
        serving.system_fingerprint = self.fingerprint
        serving.model_config = SimpleNamespace(is_encoder_decoder=False)
        serving.request_logger = None
        return serving

    def _generate(
        self, request: CompletionRequest | ChatCompletionRequest, ids: list[int], asked: int | None
    ) -> Iterator[RequestOutput]:
        max_tokens = get_max_tokens(MAX_MODEL_LEN, asked, len(ids), {})
        params = request.to_sampling_params(max_tokens, {})
        params.update_from_generation_config({}, self.tokenizer.eos_token_id)
        processor = OutputProcessor(self.tokenizer, log_stats=False)
        processor.add_request(
            EngineCoreRequest(
                request_id="r",
                prompt_token_ids=list(ids),
                mm_features=None,
                sampling_params=params,
                pooling_params=None,
                arrival_time=0.0,
                lora_request=None,
                cache_salt=None,
                data_parallel_rank=None,
                external_req_id="r",
            ),
            None,
        )
        tokens, turn = list(ids), 0
        while processor.has_unfinished_requests():
            output = self._step(params, tokens, len(ids), self.steps[turn % len(self.steps)])
            turn += 1
            yield from processor.process_outputs([output]).request_outputs

    def _step(
        self, params: SamplingParams, tokens: list[int], prompt_tokens: int, num_new: int
    ) -> EngineCoreOutput:
        """Sample a step's tokens as vLLM's scheduler, sampler and `check_stop` do."""
        new: list[int] = []
        finish, reason = None, None
        while len(new) < num_new and finish is None:
            token = self.next_token(tokens)
            tokens.append(token)
            new.append(token)
            num_output = len(tokens) - prompt_tokens
            if token == params.eos_token_id and num_output > params.min_tokens:
                finish = FinishReason.STOP
            elif token in (params.stop_token_ids or ()):
                finish, reason = FinishReason.STOP, token
            elif num_output >= params.max_tokens:
                finish = FinishReason.LENGTH
        logprobs = None
        if params.logprobs is not None:
            logprobs = _logprobs(new, params.logprobs, len(self.tokenizer))
        return EngineCoreOutput("r", new, logprobs, finish_reason=finish, stop_reason=reason)


def _logprobs(ids: list[int], num_top: int, vocab: int) -> LogprobsLists:
    rows = [[token, *((token * 7 + i) % vocab for i in range(num_top))] for token in ids]
    values = [[-((token % 13) + column) / 8 for column in range(num_top + 1)] for token in ids]
    return LogprobsLists(np.array(rows), np.array(values), np.ones(len(ids), dtype=np.int64))


async def _indexed(outputs: Iterator[RequestOutput]) -> AsyncIterator[tuple[int, RequestOutput]]:
    for output in outputs:
        yield 0, output


async def _async(outputs: Iterator[RequestOutput]) -> AsyncIterator[RequestOutput]:
    for output in outputs:
        yield output
