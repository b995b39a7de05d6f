"""The requests that `kvpool try` sends: conversations made here, or a trace file. Pure."""

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from vllm_kvpool.cli.try_report import Kind
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.parsing import UNREADABLE

CONVERSATIONS, TURNS = 8, 3  # before the restart, behind which each has one turn more
DOCUMENT_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 2000, 24, 32
TRACE_BLOCK_TOKENS = 512
MAX_TRACE_ANSWER_TOKENS = 64


class TrialRequest(NamedTuple):
    """A prompt: what was said in its session before, and new tokens behind that."""

    session: int
    new_tokens: list[int]
    answer_tokens: int
    kind: Kind
    known_tokens: int = 0
    """Leading tokens of `new_tokens` that a prompt of another session had."""


class Workload(NamedTuple):
    """Requests in order: those before the engines restart, and those behind it."""

    before: list[TrialRequest]
    after: list[TrialRequest]


def conversations(
    words: Sequence[int], max_tokens: int, chunk_tokens: int, chance: random.Random
) -> Workload:
    """Make conversations, each about a long document of its own, turn by turn.

    Args:
        words: Token ids that documents and questions are made of.
        max_tokens: The longest prompt and answer together that the engine takes.
        chunk_tokens: Tokens of a chunk of the pool.
        chance: Source of the words' order.

    Raises:
        ConfigError: A prompt of `max_tokens` has no whole chunk.
    """
    room = max_tokens - (TURNS + 1) * (QUESTION_TOKENS + ANSWER_TOKENS)
    document = min(DOCUMENT_TOKENS, room)
    if document < chunk_tokens:
        raise ConfigError(
            f"--max-model-len {max_tokens} leaves {max(0, room)} tokens for a document, less than "
            f"a chunk (chunk_tokens={chunk_tokens}): raise --max-model-len"
        )

    def turn(number: int) -> list[TrialRequest]:
        kind = {0: Kind.NEW, TURNS: Kind.RESTARTED}.get(number, Kind.SEEN)
        length = QUESTION_TOKENS + (0 if number else document)
        return [
            TrialRequest(session, chance.choices(words, k=length), ANSWER_TOKENS, kind)
            for session in range(CONVERSATIONS)
        ]

    return Workload([each for number in range(TURNS) for each in turn(number)], turn(TURNS))


class TraceRequest(msgspec.Struct, frozen=True):
    """A line of a trace in the format of Mooncake's published traces."""

    input_length: int
    output_length: int
    hash_ids: list[int]
    """An id for each block of 512 tokens; equal ids stand for equal prefixes up to there."""


def read_trace(path: str) -> list[TraceRequest]:
    """Read a trace: a JSON object in each line. ConfigError names the line that is wrong."""
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"--trace {path}: {error.strerror}") from None
    requests = []
    for number, line in enumerate(lines, 1):
        try:
            request = msgspec.json.decode(line, type=TraceRequest)
        except UNREADABLE as error:
            raise ConfigError(f"--trace {path}: line {number}: {error}") from None
        blocks = len(request.hash_ids)
        if request.output_length < 1 or -(-request.input_length // TRACE_BLOCK_TOKENS) != blocks:
            raise ConfigError(
                f"--trace {path}: line {number}: expected an output_length of 1 or more, and one "
                f"of hash_ids for each {TRACE_BLOCK_TOKENS} tokens of input_length"
            )
        if blocks:
            requests.append(request)
    if len(requests) < 2:
        raise ConfigError(f"--trace {path}: expected two requests or more, one in each line")
    return requests


def of_trace(
    trace: Sequence[TraceRequest], words: Sequence[int], max_tokens: int, seed: int
) -> Workload:
    """Make a trace's requests; the engines restart after the first half.

    Answers are at most `MAX_TRACE_ANSWER_TOKENS` long. Requests longer than `max_tokens` are left
    out. A prompt counts as seen if at least half of its blocks were seen.

    Raises:
        ConfigError: Fewer than two requests fit.
    """
    fitting = [
        each
        for each in trace
        if each.input_length + min(each.output_length, MAX_TRACE_ANSWER_TOKENS) <= max_tokens
    ]
    if len(fitting) < 2:
        raise ConfigError(
            f"--trace: {len(fitting)} of {len(trace)} requests fit into --max-model-len "
            f"{max_tokens}, and two are needed"
        )
    half = len(fitting) // 2
    lives: tuple[list[TrialRequest], list[TrialRequest]] = ([], [])
    ever: set[int] = set()
    sessions = itertools.count()
    for life, part in zip(lives, (fitting[:half], fitting[half:]), strict=True):
        here: set[int] = set()
        for each in part:
            known, own = (_leading(each.hash_ids, seen) for seen in (ever, here))
            enough = len(each.hash_ids) / 2
            kind = Kind.NEW if known < enough else Kind.SEEN if own >= enough else Kind.RESTARTED
            blocks = (
                random.Random(f"{seed} {name}").choices(words, k=TRACE_BLOCK_TOKENS)
                for name in each.hash_ids
            )
            tokens = [token for block in blocks for token in block][: each.input_length]
            answer = min(each.output_length, MAX_TRACE_ANSWER_TOKENS)
            known_tokens = min(known * TRACE_BLOCK_TOKENS, each.input_length)
            life.append(TrialRequest(next(sessions), tokens, answer, kind, known_tokens))
            here.update(each.hash_ids)
            ever.update(each.hash_ids)
    return Workload(*lives)


def _leading(names: Sequence[int], seen: set[int]) -> int:
    """Return how many of the first names were seen, up to the first that was not."""
    return next((i for i, name in enumerate(names) if name not in seen), len(names))
