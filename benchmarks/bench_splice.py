"""What the router does with bodies and streams, in time of its only thread.

    python benchmarks/bench_splice.py --json resumer.json

Bodies and chunks are vLLM's, byte for byte, without an engine. A chunk is measured as part of a
stream of a thousand, whose first, which may carry the prompt's token ids, has rows of its own.
"""

import json
import time
from collections.abc import Callable

from benchmarks.common import Result, Row, Target, run_script, spread
from vllm_kvpool.router.dataplane.request_body import READ, ApiPath, parse_request
from vllm_kvpool.router.dataplane.resume.policy import joined_ids, resume_body
from vllm_kvpool.router.dataplane.resume.stream_resumer import Resume, StreamResumer
from vllm_kvpool.router.dataplane.sse import Events, frames

CHUNKS = 1000
CHARS_PER_TOKEN = 4
PROMPT_TOKENS = (1_000, 32_000, 128_000)
REPEATS, QUICK_REPEATS = 40, 3
MAX_CHUNK_US = 20.0
MAX_BODY_MS = 5.0


def chat_body(prompt_tokens: int, **fields: object) -> bytes:
    """As a client with `json.dumps` writes it."""
    word = "word " * (prompt_tokens * CHARS_PER_TOKEN // 5)
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": word}]
    return json.dumps({"model": "m", "messages": messages, "stream": True, **fields}).encode()


def completion_body(prompt_tokens: int, **fields: object) -> bytes:
    ids = list(range(10_000, 10_000 + prompt_tokens))
    return json.dumps({"model": "m", "prompt": ids, "stream": True, **fields}).encode()


def head(kind: ApiPath) -> str:
    name = "chat.completion.chunk" if kind is ApiPath.CHAT else "text_completion"
    return f'{{"id":"id-0123456789abcdef","object":"{name}","created":1700000000,"model":"m",'


def first_chunk(kind: ApiPath, ids: bytes) -> bytes:
    if kind is ApiPath.CHAT:
        choice = '{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,'
        choice += '"finish_reason":null}'
        text = f'{head(kind)}"choices":[{choice}],"prompt_token_ids":'
        return text.encode() + ids + b',"prompt_text":null}'
    return chunk(kind, 0).replace(b'"prompt_token_ids":null', b'"prompt_token_ids":' + ids)


def chunk(kind: ApiPath, turn: int) -> bytes:
    rest = '"finish_reason":null'
    if kind is ApiPath.CHAT:
        body = f'"delta":{{"content":" word{turn}"}},"logprobs":null,{rest}'
    else:
        body = f'"text":" word{turn}","logprobs":null,{rest},"stop_reason":null,'
        body += '"prompt_token_ids":null'
    choice = f'{{"index":0,{body},"token_ids":[{10_000 + turn}]}}'
    return f'{head(kind)}"choices":[{choice}]}}'.encode()


def timed(action: Callable[[], object], repeats: int) -> list[float]:
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return seconds


def row(what: str, seconds: list[float], per: int = 1, of: str = "") -> Row:
    return {"what": what, "of": of, **spread("", "us", [1e6 * each / per for each in seconds])}


def stream_rows(kind: ApiPath, repeats: int) -> list[Row]:
    request = parse_request(kind, body_of(kind, 1_000))
    first = first_chunk(kind, b"[1,2,3]")
    chunks = [chunk(kind, turn) for turn in range(CHUNKS)]
    framed = [frames((each,)) for each in chunks]
    wire = b"".join(framed)

    def feed() -> None:
        resumer = StreamResumer(request)
        resumer.feed(first)
        for each in chunks:
            resumer.feed(each)

    def split() -> None:
        events = Events()
        for each in framed:
            events.feed(each)

    actions: dict[str, Callable[[], object]] = {
        "feed, a chunk": feed,
        "split, a chunk a read": split,
        "split, all in one read": lambda: Events().feed(wire),
    }
    of = kind.name.lower()
    return [row(what, timed(action, repeats), CHUNKS, of) for what, action in actions.items()]


def body_of(kind: ApiPath, prompt_tokens: int) -> bytes:
    make = chat_body if kind is ApiPath.CHAT else completion_body
    return make(prompt_tokens, max_tokens=2 * CHUNKS, temperature=0)


def size_rows(kind: ApiPath, prompt_tokens: int, repeats: int) -> list[Row]:
    of = f"{kind.name.lower()}, {prompt_tokens // 1000}k prompt tokens"
    raw = body_of(kind, prompt_tokens)
    request = parse_request(kind, raw)
    ids = json.dumps(list(range(10_000, 10_000 + prompt_tokens)), separators=(",", ":")).encode()
    first = first_chunk(kind, ids)
    fresh = [StreamResumer(request) for _ in range(repeats)]

    def resumed() -> None:
        resume_body(request, joined_ids(ids, range(500)), 500, 1, 1000)

    def lost() -> None:
        resumer = StreamResumer(request)
        resumer.feed(first)
        for turn in range(3):
            resumer.feed(chunk(kind, turn))
        assert isinstance(resumer.lost(), Resume)

    actions: dict[str, Callable[[], object]] = {
        "parse a body": lambda: parse_request(kind, raw),
        "prefill body": request.prefill_body,
        "whole body": lambda: request.whole_body(256, 1000, True),
        "feed, the first chunk": lambda: fresh.pop().feed(first),
        "resume body": resumed,
        "first chunk, three more, lost": lost,
    }
    return [row(what, timed(action, repeats), of=of) for what, action in actions.items()]


def measure(quick: bool) -> Result:
    repeats = QUICK_REPEATS if quick else REPEATS
    rows = [each for kind in READ for each in stream_rows(kind, repeats)]
    for prompt_tokens in PROMPT_TOKENS:
        rows += [each for kind in READ for each in size_rows(kind, prompt_tokens, repeats)]
    values = {(each["what"], each["of"]): each["p50 us"] for each in rows}
    slowest = max(float(str(values["feed, a chunk", kind.name.lower()])) for kind in READ)
    parse = float(str(values["parse a body", "chat, 128k prompt tokens"])) / 1000
    targets = [
        Target("feed a chunk, p50", slowest, MAX_CHUNK_US, False, "us"),
        Target("parse a chat of 128k tokens, p50", parse, MAX_BODY_MS, False, "ms"),
    ]
    return Result(rows, targets, ["one thread; the memory of a body is not counted"])


if __name__ == "__main__":
    run_script(__doc__, measure)
