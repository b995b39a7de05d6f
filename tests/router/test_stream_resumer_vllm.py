"""Streams as vLLM writes them, cut off and spliced: vLLM's front half, without an engine."""

import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from tests.router.clients import Router, Transcript, chunk_ends, transcript
from tests.support.seeds import seeds
from vllm_kvpool.router.dataplane.request_body import READ, ApiPath, ClientRequest, parse_request
from vllm_kvpool.router.dataplane.resume.answer import Answer
from vllm_kvpool.router.dataplane.resume.stream_resumer import Refusal, Resume, StreamResumer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

    from tests.router.front_half import FrontHalf, NextToken, make_tokenizer, scripted

PROMPT = "Say it: é"
CHAT_PROMPT = f"user: {PROMPT}\nassistant: "
TEXTS = [
    "The quick brown fox 日本",
    "日本語の文章と漢字。中文。",
    "Größe 😀 é naïve 👩‍👩‍👧 ✓ ok",
    "a one two\n\nthree ### four\n\n",
    "é",
]
STEPS = [(1,), (1, 3, 2), (1, 7)]
FIELDS: list[dict[str, Any]] = [
    {},
    {"return_token_ids": True},
    {"stream_options": {"include_usage": True}},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"stop": ["\n\n", "漢字。中"]},
    {"stop": ["fox", "###", "ïv"], "return_token_ids": True},
    {"stop": ["wo\n\nth", "é n"], "include_stop_str_in_output": True},
    {"max_tokens": 9, "min_tokens": 7, "stop": ["e", "。"]},
    {"ignore_eos": True, "max_tokens": 30, "return_token_ids": True},
    {"stop_token_ids": [70], "skip_special_tokens": False},
]
LOGPROBS: dict[ApiPath, list[dict[str, Any]]] = {
    ApiPath.COMPLETION: [{"logprobs": 0}, {"logprobs": 2, "stop": ["\n\n"]}, {"echo": True}],
    ApiPath.CHAT: [{"logprobs": True}, {"logprobs": True, "top_logprobs": 2, "stop": ["\n\n"]}],
}
BY_KIND = [(kind, fields) for kind in READ for fields in FIELDS + LOGPROBS[kind]]


@cache
def tokenizer() -> Any:
    return make_tokenizer()


@dataclass
class Case:
    kind: ApiPath
    text: str = ""
    """The model's answer; it repeats until something ends the stream."""
    steps: tuple[int, ...] = (1,)
    fields: dict[str, Any] = field(default_factory=dict)
    parser: str = ""
    next_token: NextToken | None = None

    def body(self) -> bytes:
        prompt: dict[str, Any] = {"prompt": PROMPT}
        if self.kind is ApiPath.CHAT:
            prompt = {"messages": [{"role": "user", "content": PROMPT}]}
        fields = {"model": "m", "stream": True, "temperature": 0, "request_id": "7", **prompt}
        return json.dumps({**fields, "max_tokens": 60, **self.fields}).encode()

    def prompt_tokens(self) -> int:
        text = CHAT_PROMPT if self.kind is ApiPath.CHAT else PROMPT
        if messages := self.fields.get("messages"):
            text = "".join(f"{each['role']}: {each['content']}\n" for each in messages)
        return len(tokenizer().encode(text))

    def engine(self, answer: Sequence[int] = ()) -> FrontHalf:
        said = answer or [*tokenizer().encode(self.text), tokenizer().eos_token_id]
        next_token = scripted(said, self.prompt_tokens())
        if not answer and self.next_token is not None:
            next_token = self.next_token
        return FrontHalf(tokenizer(), next_token, self.steps, self.parser)

    def reference(self, answer: Sequence[int] = ()) -> list[bytes]:
        return self.engine(answer).stream(self.kind.value, self.body())

    def request(self) -> ClientRequest:
        return parse_request(self.kind, self.body())

    def first_stream(self) -> list[bytes]:
        """Return the first engine's stream to the router."""
        request = self.request()
        return self.engine().stream(self.kind.value, request.whole_body(track=request.trackable))

    def run(
        self,
        cuts: Sequence[int],
        detokenize: Callable[[bytes], str | None] | None = None,
        pick: Callable[[], tuple[int, ...]] | None = None,
    ) -> tuple[list[bytes], Router]:
        """`pick`: the steps of each engine, where they are not those of the case."""
        created = iter(range(1_700_000_000, 1_800_000_000))
        request = self.request()

        def engine(path: str, body: bytes) -> list[bytes]:
            one = self.engine()
            one.created, one.steps = next(created), pick() if pick else self.steps
            return one.stream(path, body)

        resumer = StreamResumer(request)
        router = Router(resumer, engine, cuts, detokenize or self.engine().detokenize)
        return router.run(self.kind.value, request.whole_body(track=request.trackable)), router


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize(("kind", "fields"), BY_KIND)
def test_a_stream_that_is_not_cut_is_the_engines_own(
    kind: ApiPath, fields: dict[str, Any], steps: tuple[int, ...]
) -> None:
    for text in TEXTS:
        case = Case(kind, text, steps, fields)
        assert case.run([])[0] == case.reference()


@pytest.mark.parametrize(("kind", "fields"), BY_KIND)
def test_wherever_a_greedy_stream_is_cut_the_client_sees_the_same(
    kind: ApiPath, fields: dict[str, Any]
) -> None:
    for text, steps in zip(TEXTS, [STEPS[0], STEPS[1], STEPS[1], STEPS[0], STEPS[2]], strict=True):
        case = Case(kind, text, steps, fields)
        expected = transcript(case.reference())
        for cut in chunk_ends(case.first_stream()):
            told, router = case.run([cut, cut])
            seen = transcript(told)
            assert seen == expected, (cut, router.steps)
            assert seen.counts == sorted(seen.counts)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (ApiPath.COMPLETION, {}),
        (ApiPath.COMPLETION, {"return_token_ids": True}),
        (ApiPath.CHAT, {}),
        (ApiPath.CHAT, {"stop": ["日本\n", "x"]}),
    ],
)
def test_any_byte_is_a_place_to_die(kind: ApiPath, fields: dict[str, Any]) -> None:
    case = Case(kind, "a é日本 b", STEPS[1], {**fields, **FIELDS[3]})
    expected = transcript(case.reference())
    for cut in range(0, sum(len(each) + 8 for each in case.first_stream()), 11):
        assert transcript(case.run([cut, 700])[0]) == expected, cut


@pytest.mark.parametrize("temperature", [0, 0.7])
@pytest.mark.parametrize("fields", [{}, {"return_token_ids": True}, {"stop": ["\n\n"]}])
def test_a_message_that_is_echoed_is_no_part_of_the_answer(
    fields: dict[str, Any], temperature: float
) -> None:
    messages = [{"role": "user", "content": PROMPT}, {"role": "assistant", "content": "So far"}]
    more = {"echo": True, "add_generation_prompt": False, "continue_final_message": True}
    fields = {**fields, **more, "messages": messages, "temperature": temperature}
    for text, steps in zip(TEXTS, [STEPS[0], STEPS[1], STEPS[1], STEPS[0], STEPS[2]], strict=True):
        case = Case(ApiPath.CHAT, text, steps, fields)
        expected = transcript(case.reference())
        assert expected.texts["content"].startswith("So far")
        for cut in chunk_ends(case.first_stream()):
            told, router = case.run([cut, cut])
            assert transcript(told) == expected, (cut, router.steps)


STOPS = [["\n\n"], ["aé", "#x"], ["b"], ["x 漢字", "日😀"], ["a", "b "]]


@pytest.mark.parametrize("seed", seeds(40, 120))
def test_what_is_sampled_reads_as_if_one_engine_had_drawn_it(seed: int) -> None:
    """Engines draw at random, each its own, also what is no text at all."""
    random, eos = Random(seed), tokenizer().eos_token_id
    words = [*tokenizer().encode("ab é日😀\n\n#x 漢字。 the"), eos]
    kind = random.choice(READ)
    options = {"include_usage": True, "continuous_usage_stats": random.random() < 0.5}
    fields = {**random.choice(FIELDS + LOGPROBS[kind][:2]), "stream_options": options}
    fields |= {"max_tokens": random.choice([3, 12, 40]), "temperature": 0.8, "min_tokens": 0}
    if random.random() < 0.5:
        fields |= {"stop": random.choice(STOPS), "seed": 5}
    drawn = [*random.sample(words, random.choice([2, 4, len(words)])), eos]
    case = Case(kind, fields=fields, next_token=lambda tokens: random.choice(drawn))
    cuts = [random.randrange(6000) for _ in range(random.randrange(1, 5))]
    spells = case.engine().detokenize if seed % 5 else lambda body: None
    told, router = case.run(cuts, spells, lambda: random.choice(STEPS))
    seen = transcript(told)
    if seen.error is not None:
        assert isinstance(router.steps[-1], Refusal)
        return
    assert seen == transcript(case.reference(router.resumer.answer.ids.tolist())), router.steps


@pytest.mark.parametrize("fields", [{}, {"stop": ["zzqq"]}], ids=["plain", "stop"])
@pytest.mark.parametrize("kind", READ)
def test_asked_what_its_tokens_are_an_engine_lets_every_sampled_stream_go_on(
    kind: ApiPath, fields: dict[str, Any]
) -> None:
    """Without (`/detokenize`), where chunks may have two tokens, a third or so ends."""
    random, errors = Random(5), {True: 0, False: 0}
    words = tokenizer().encode("the quick brown fox, a b c: of ten")
    for number in range(80):
        sampled = {"temperature": 0.8, "max_tokens": 40, **fields}
        drawn = random.sample(words, 8)
        case = Case(
            kind,
            steps=(1, 2, 1),
            fields=sampled,
            next_token=lambda tokens, drawn=drawn: random.choice(drawn),
        )
        answers = number % 2 == 0
        detokenize = case.engine().detokenize if answers else lambda body: None
        told, _ = case.run([random.randrange(300, 2500)], detokenize)
        errors[answers] += transcript(told).error is not None
    assert errors[True] == 0
    assert 5 <= errors[False] <= 30


THOUGHTS = [
    "<think>let me é 日本 see</think>\n\nthe answer 漢字 is 4",
    "<think>only thinking 日",
    "no thinking 日本 at all",
    "thinking é on</think> then <b> & answer",
]


def without_details(seen: Transcript) -> Transcript:
    """Remove the count of reasoning tokens, which is known only approximately."""
    if seen.usage is not None:
        seen.usage.pop("completion_tokens_details", None)
    return seen


@pytest.mark.parametrize("temperature", [0, 0.7])
@pytest.mark.parametrize("parser", ["deepseek_r1", "deepseek_v3", "qwen3"])
def test_reasoning_goes_on_as_reasoning(parser: str, temperature: float) -> None:
    others = [{}, {"return_token_ids": True}, {"include_reasoning": False}, {"stop": ["is", "日"]}]
    resumes = 0
    for number, (text, named) in enumerate(product(THOUGHTS, (FIELDS[2], *others))):
        fields = {**named, "temperature": temperature}
        case = Case(ApiPath.CHAT, text, STEPS[len(text) % 2], fields, parser)
        reference = case.reference()
        expected = without_details(transcript(reference))
        assert case.run([])[0] == reference
        for cut in [*chunk_ends(case.first_stream())][number % 2 :: 2]:
            told, router = case.run([cut])
            seen = without_details(transcript(told))
            is_refused = isinstance(router.steps[-1], Refusal)
            assert seen == expected or (temperature and is_refused), (cut, router.steps)
            resumes += isinstance(router.steps[-1], Resume) and not is_refused
    assert resumes > 100


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("stop", [[], ["zzz"], ["zz", "qqqqqq"]])
@pytest.mark.parametrize("steps", STEPS)
def test_a_detokenizer_primed_up_to_a_resume_point_goes_on_exactly_there(
    text: str, stop: list[str], steps: tuple[int, ...]
) -> None:
    """vLLM's own, with a byte-level BPE: its text after a mark is the text after that mark."""

    def detokenizer(ids: list[int]) -> FastIncrementalDetokenizer:
        params = SimpleNamespace(stop=stop, min_tokens=0, include_stop_str_in_output=False)
        params.skip_special_tokens = params.spaces_between_special_tokens = True
        request = SimpleNamespace(prompt_token_ids=ids, sampling_params=params, request_id="r")
        return FastIncrementalDetokenizer(tokenizer(), request)

    prompt, answer = tokenizer().encode(PROMPT), tokenizer().encode(text)
    whole, known = detokenizer(prompt), Answer(stop, withholds=True)
    done = turn = num_given = 0
    while done < len(answer):
        new = answer[done : done + steps[turn % len(steps)]]
        whole.update(new, False)
        done, turn = done + len(new), turn + 1
        if given := whole.get_next_output_text(finished=False, delta=True):
            known.add_text([("text", given)], len(new), done)
            num_given += 1
    marks = {known.last_resume_point(chars) for chars in range(len(text) + 10)} - {None}
    assert steps != (1,) or len(marks) == num_given
    for mark in marks:
        primed = detokenizer(prompt + answer[: mark.num_tokens])
        primed.update(answer[mark.num_tokens :], False)
        rest = primed.get_next_output_text(finished=True, delta=True)
        assert text[mark.num_chars :] == rest
