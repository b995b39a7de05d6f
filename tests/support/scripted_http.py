"""The HTTP side of a scripted engine: vLLM's endpoints.

An `Api` outlives its engine's restarts: `ScriptedEngine` sets its `core` at each start. A `Reply`
belongs to one request. It writes HTTP chunks directly to the transport, so a token costs no task. A
client that reads too slowly gets several tokens in one event, as with vLLM. `Reply` also applies
the faults of requests in progress.
"""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

import msgspec
from aiohttp import web

from tests.support.scripted_core import CONTENT_TYPE, Choice, EngineCore, EngineCounts, metrics_text
from tests.support.scripted_protocol import (
    DONE,
    Ask,
    ChatForm,
    CompletionForm,
    Delta,
    DetokenizeBody,
    Head,
    Refusal,
    TokenizeBody,
    Usage,
    chat_text,
    check_model,
    event,
    models_body,
    read_body,
    read_chat,
    read_completion,
    wrong_media_type,
)
from tests.support.scripted_spec import (
    GENERATION_PATHS,
    Fault,
    FaultBoard,
    FaultKind,
    RequestFaults,
    ScriptedSpec,
)
from tests.support.scripted_words import decode, encode

MAX_BUFFER_BYTES = 64 << 10  # above this size, deltas are held back and merged
_GARBLED = b'data: {"id":"cmpl-","object":"text_compl\n\n'


class Ending(Enum):
    """The end of a reply."""

    DONE = "done"
    WITHOUT_DONE = "without_done"
    ERROR = "error"
    NEVER = "never"  # no more bytes; the connection stays open
    GONE = "gone"  # the connection ends


class Said(NamedTuple):
    """A choice and its last delta."""

    choice: Choice
    delta: Delta


class Reply:
    """The growing answer to one request. Once `over` is set, `ending` says how it ended."""

    def __init__(
        self,
        core: EngineCore,
        form: CompletionForm,
        transport: asyncio.Transport,
        faults: RequestFaults,
    ) -> None:
        self.over = asyncio.Event()
        self.ending = Ending.NEVER
        self.is_garbled = False
        self._core = core
        self._form = form
        self._ask = form.head.ask
        self._transport = transport
        self._faults = faults
        self._choices: list[Choice] = []
        self._said: dict[int, Said] = {}
        self._begun: set[int] = set()
        self._held: dict[int, Delta] = {}

    def begin(self) -> None:
        """Submit the request to the engine."""
        self._choices = self._core.submit(self._ask, self._take)
        self.suffer(0)

    def give_up(self) -> bool:
        """Abort the request in the engine. Return True if it was unfinished."""
        return self._core.abort(self._choices)

    def suffer(self, num_tokens: int, is_over: bool = False) -> None:
        """Apply the faults that are due."""
        for fault in self._faults.under_way(num_tokens, is_over):
            ending = self._spoil(fault)
            if ending is not None:
                self._end(ending)

    def _spoil(self, fault: Fault) -> Ending | None:
        match fault.kind:
            case FaultKind.STALL:
                return Ending.NEVER
            case FaultKind.NO_DONE:
                return Ending.WITHOUT_DONE
            case FaultKind.ERROR:
                return Ending.ERROR
            case FaultKind.BROKEN_JSON:
                self.is_garbled = True
                if self._ask.is_stream:
                    self._send(_GARBLED)
                return None
            case FaultKind.CUT:
                self._transport.close()
        return Ending.GONE

    def _end(self, ending: Ending) -> None:
        self.give_up()
        if not self.over.is_set():
            self.ending = ending
            self.over.set()

    def _take(self, choice: Choice, delta: Delta | None) -> None:
        """Add a token of a choice to the reply."""
        if self.over.is_set():
            return
        if delta is not None:
            if self._ask.is_stream:
                self._write(choice, delta)
            if delta.finish_reason is not None:
                self._said[choice.index] = Said(choice, delta)
        self.suffer(choice.num_tokens, is_over=len(self._said) == len(self._choices))
        if len(self._said) == len(self._choices):
            self._end(Ending.DONE)

    def _write(self, choice: Choice, delta: Delta) -> None:
        held = self._held.pop(choice.index, None)
        if held is not None:
            delta = held.then(delta)
        is_last = delta.finish_reason is not None
        if not is_last and self._transport.get_write_buffer_size() > MAX_BUFFER_BYTES:
            self._held[choice.index] = delta
            return
        usage = Usage(choice.sequence.num_prompt, choice.num_tokens)
        prompt = None
        if choice.index not in self._begun:
            self._begun.add(choice.index)
            prompt = choice.prompt
            opening = self._form.opening(choice.index, prompt, usage._replace(completion_tokens=0))
            if opening:
                self._send(opening)
        self._send(self._form.chunk(choice.index, delta, usage, prompt))

    def _send(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def usage(self, spec: ScriptedSpec) -> Usage:
        """Return the usage of the whole request, after its end."""
        usage = Usage(
            prompt_tokens=sum(map(len, self._ask.prompts)),
            completion_tokens=sum(choice.num_tokens for choice in self._choices),
        )
        first = self._choices[0].sequence
        if not spec.enable_prompt_tokens_details or first.num_cached is None:
            return usage
        whole_blocks = first.num_prompt // spec.block_size * spec.block_size
        return usage._replace(
            cached_tokens=first.num_cached, created_tokens=max(0, whole_blocks - first.num_cached)
        )

    def body(self, spec: ScriptedSpec) -> bytes:
        """Return the answer in one piece, after its end."""
        said = [self._said[choice.index] for choice in self._choices]
        return self._form.answer(
            [(choice.prompt, delta) for choice, delta in said],
            self.usage(spec),
            self._core.saved_tokens(self._choices[0]),
        )


_GUARDED = ("/v1", "/v2", "/inference", "/cohere")  # path prefixes that require the key
_JSON_PATHS = (*GENERATION_PATHS, "/tokenize", "/detokenize")
_SERVER = {"Server": "uvicorn"}
_JSON_TYPE = "application/json"
_STREAM_TYPE = "text/event-stream; charset=utf-8"
_RUBBISH = b"\x16\x03\x01 this is no HTTP\r\n\r\n"


class Request(web.BaseRequest):
    """A request; `is_cut` is True if a fault has ended its connection."""

    is_cut = False  # True: a fault ended the connection, not the client


Handler: TypeAlias = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


def _json(body: object, status: int = 200) -> web.Response:
    data = body if isinstance(body, bytes) else msgspec.json.encode(body)
    return web.Response(status=status, body=data, headers={**_SERVER, "Content-Type": _JSON_TYPE})


def _empty(status: int) -> web.Response:
    return web.Response(status=status, headers=_SERVER)


def _busy() -> Refusal:
    return Refusal(
        503,
        "Service Unavailable",
        "The engine is currently busy and cannot accept new requests. Please try again later or "
        "on a different instance.",
    )


async def _never() -> None:
    """Wait until the end of the connection cancels the handler."""
    await asyncio.get_running_loop().create_future()


class Api:
    """The request handlers. `core` is None while no engine runs."""

    def __init__(self, spec: ScriptedSpec, board: FaultBoard, counts: EngineCounts) -> None:
        self.core: EngineCore | None = None
        self.thawed = asyncio.Event()
        self.thawed.set()
        self._spec = spec
        self._board = board
        self._counts = counts
        self._started = int(time.time())
        self._routes: Mapping[str, Mapping[str, Handler]] = {
            "/v1/completions": {"POST": self._completions},
            "/v1/chat/completions": {"POST": self._chat},
            "/v1/responses": {"POST": self._responses},
            "/v1/messages": {"POST": self._messages},
            "/v1/models": {"GET": self._models},
            "/health": {"GET": self._health},
            "/metrics": {"GET": self._metrics},
            "/tokenize": {"POST": self._tokenize},
            "/detokenize": {"POST": self._detokenize},
            "/version": {"GET": self._version},
            "/sleep": {"POST": self._sleep},
            "/wake_up": {"POST": self._wake_up},
            "/is_sleeping": {"GET": self._is_sleeping},
        }

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request, with the faults that are set."""
        path = request.path
        self._counts.received[path] += 1
        headers = {name.lower(): value for name, value in request.headers.items()}
        if path in GENERATION_PATHS:
            self._counts.last_headers = headers
        if request.method == "POST":
            self._counts.headers_of[path] = headers
            self._counts.body_of[path] = await request.read()
        assert isinstance(request, Request)
        core = self.core
        try:
            await self.thawed.wait()
            for fault in self._faults(request).at_arrival():
                spoiled = await self._spoil(request, fault)
                if spoiled is not None:
                    return spoiled
            return await self._answer(request)
        except asyncio.CancelledError:
            # The client has disconnected, unless the engine died or a fault cut the connection.
            is_alive = core is not None and core is self.core
            if is_alive and path in GENERATION_PATHS and not request.is_cut:
                self._counts.aborted += 1
            raise

    def _faults(self, request: web.BaseRequest) -> RequestFaults:
        request_id = request.headers.get("X-Request-Id", "")
        return RequestFaults(self._board, request.path, request_id)

    async def _spoil(self, request: web.BaseRequest, fault: Fault) -> web.StreamResponse | None:
        match fault.kind:
            case FaultKind.HANG:
                await _never()
            case FaultKind.SLOW:
                await asyncio.sleep(fault.seconds)
            case FaultKind.BUSY:
                return self._refused(_busy())
            case FaultKind.ENDLESS:
                return await self._endless(request)
            case FaultKind.NOT_HTTP:
                assert request.transport is not None
                request.transport.write(_RUBBISH)
                request.transport.close()
                return _empty(200)
            case _:
                return web.Response(
                    status=fault.status,
                    body=fault.body.encode(),
                    headers={**_SERVER, "Content-Type": fault.content_type},
                )
        return None

    async def _endless(self, request: web.BaseRequest) -> web.StreamResponse:
        asked = msgspec.json.decode(await request.read())
        is_stream = asked.get("stream")
        content_type = _STREAM_TYPE if is_stream else _JSON_TYPE
        response = web.StreamResponse(headers={**_SERVER, "Content-Type": content_type})
        response.enable_chunked_encoding()
        await response.prepare(request)
        said = {"delta": {"content": "a "}} if "messages" in asked else {"text": "a "}
        ids = {"token_ids": [5], "prompt_token_ids": [1]} if asked.get("return_token_ids") else {}
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": None, **ids}
        head = {"id": "x", "object": "o", "created": 1, "model": "scripted"}
        piece = b'{"choices":[{"text":"'
        while True:
            if is_stream:
                piece = b"data: %b\n\n" % msgspec.json.encode({**head, "choices": [choice]})
            self._counts.endless_bytes += len(piece)
            await response.write(piece)
            piece = b"a" * 4096

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            return await self._handler(request)(request)
        except Refusal as refusal:
            return self._refused(refusal)

    def _handler(self, request: web.BaseRequest) -> Handler:
        if self._spec.api_key and request.path.startswith(_GUARDED):
            kind, _, key = request.headers.get("Authorization", "").partition(" ")
            if kind.lower() != "bearer" or key != self._spec.api_key:
                return self._unauthorized
        if self.core is None:
            return self._loading
        methods = self._routes.get(request.path)
        if methods is None:
            raise Refusal(404, "Not Found", "Not Found")
        if request.method not in methods:
            raise Refusal(405, "Method Not Allowed", "Method Not Allowed")
        if request.path in _JSON_PATHS and request.content_type != _JSON_TYPE:
            raise wrong_media_type()
        return methods[request.method]

    def _refused(self, refusal: Refusal) -> web.Response:
        return _json(refusal.body(), refusal.status)

    async def _unauthorized(self, request: web.BaseRequest) -> web.Response:
        return _json({"error": "Unauthorized"}, 401)

    async def _loading(self, request: web.BaseRequest) -> web.Response:
        return _empty(503)

    def _alive(self) -> EngineCore:
        assert self.core is not None, "_handler has looked"
        return self.core

    # Requests for tokens

    async def _completions(self, request: web.BaseRequest) -> web.StreamResponse:
        return await self._generate(request, CompletionForm, read_completion)

    async def _chat(self, request: web.BaseRequest) -> web.StreamResponse:
        return await self._generate(request, ChatForm, read_chat)

    async def _responses(self, request: web.BaseRequest) -> web.StreamResponse:
        return await self._generate_plainly(request, "input", "max_output_tokens", _response_end)

    async def _messages(self, request: web.BaseRequest) -> web.StreamResponse:
        return await self._generate_plainly(request, "messages", "max_tokens", _message_end)

    async def _generate_plainly(
        self,
        request: web.BaseRequest,
        prompt: str,
        most: str,
        end_of: Callable[[str, bool], dict[str, Any]],
    ) -> web.StreamResponse:
        """Answer in another form than a chat's: one text, named events, `input_tokens`."""
        data = await request.read()
        core = self._alive()
        self._counts.last_body = data
        given = read_body(data, dict[str, Any])
        said = given[prompt]
        chat = {
            "model": given.get("model"),
            "messages": [{"role": "user", "content": said}] if isinstance(said, str) else said,
            "max_tokens": given.get(most, 16),
            "temperature": 0,
        }
        ask = read_chat(msgspec.json.encode(chat), self._spec)
        head = Head(request_id="plain", created=int(time.time()), spec=self._spec, ask=ask)
        assert request.transport is not None
        form = ChatForm(head)
        reply = Reply(core, form, request.transport, self._faults(request))
        assert isinstance(request, Request)
        try:
            answer = await self._whole(request, reply)
            assert isinstance(answer, web.Response)
            assert isinstance(answer.body, bytes)
            whole = msgspec.json.decode(answer.body)
            text = whole["choices"][0]["message"]["content"]
            finish_reason = whole["choices"][0]["finish_reason"]
            transfer = {"kv_transfer_params": whole["kv_transfer_params"]}
            usage = {
                "input_tokens": whole["usage"]["prompt_tokens"],
                "output_tokens": whole["usage"]["completion_tokens"],
            }
            if not given.get("stream"):
                told = end_of(finish_reason, False)
                return _json({"text": text, "usage": usage, **told, **transfer})
            response = web.StreamResponse(headers={**_SERVER, "Content-Type": _STREAM_TYPE})
            response.enable_chunked_encoding()
            await response.prepare(request)
            for word in text.split(" "):
                piece = msgspec.json.encode({"word": word})
                await response.write(b"event: word\ndata: %b\n\n" % piece)
                await asyncio.sleep(self._spec.step_base_s)
            told = end_of(finish_reason, True)
            told.get("response", {}).update(transfer)
            end = msgspec.json.encode({"usage": usage, **told})
            await response.write(b"event: end\ndata: %b\n\n" % end)
            return response
        finally:
            request.is_cut = reply.ending is Ending.GONE
            reply.give_up()

    async def _generate(
        self,
        request: web.BaseRequest,
        form: type[CompletionForm],
        read: Callable[[bytes, ScriptedSpec], Ask],
    ) -> web.StreamResponse:
        data = await request.read()
        core = self._alive()
        ask = read(data, self._spec)
        self._counts.last_body = data
        name = request.headers.get("X-Request-Id") or ask.request_id or uuid.uuid4().hex
        head = Head(
            request_id=form.id_prefix + name, created=int(time.time()), spec=self._spec, ask=ask
        )
        assert request.transport is not None
        reply = Reply(core, form(head), request.transport, self._faults(request))
        assert isinstance(request, Request)
        try:
            if ask.is_stream:
                return await self._stream(request, reply, form(head))
            return await self._whole(request, reply)
        finally:
            request.is_cut = reply.ending is Ending.GONE
            reply.give_up()

    async def _stream(
        self, request: "Request", reply: Reply, form: CompletionForm
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={**_SERVER, "Content-Type": _STREAM_TYPE})
        response.enable_chunked_encoding()
        await response.prepare(request)
        reply.begin()
        await reply.over.wait()
        match reply.ending:
            case Ending.NEVER:
                await _never()
            case Ending.ERROR:
                await response.write(event(_generation_error().body()))
                await response.write(DONE)
            case Ending.DONE:
                if form.head.ask.include_usage:
                    await response.write(form.usage_chunk(reply.usage(self._spec)))
                await response.write(DONE)
        return response

    async def _whole(self, request: "Request", reply: Reply) -> web.StreamResponse:
        reply.begin()
        await reply.over.wait()
        match reply.ending:
            case Ending.NEVER:
                await _never()
            case Ending.ERROR:
                raise _generation_error()
            case Ending.GONE:
                return _empty(200)  # the connection is closed, so no client gets it
        body = reply.body(self._spec)
        data = body[: len(body) // 2] if reply.is_garbled else body
        return web.Response(body=data, headers={**_SERVER, "Content-Type": _JSON_TYPE})

    # The rest

    async def _models(self, request: web.BaseRequest) -> web.Response:
        return _json(models_body(self._spec, self._started))

    async def _health(self, request: web.BaseRequest) -> web.Response:
        return _empty(200)

    async def _metrics(self, request: web.BaseRequest) -> web.Response:
        core = self._alive()
        return web.Response(
            body=metrics_text(self._spec, core.batch, core.stats),
            headers={**_SERVER, "Content-Type": CONTENT_TYPE},
        )

    async def _tokenize(self, request: web.BaseRequest) -> web.Response:
        body = read_body(await request.read(), TokenizeBody)
        check_model(body.model, self._spec)
        text = body.prompt or ""
        if body.messages is not None:
            text = chat_text(body.messages, body.add_generation_prompt, body.continue_final_message)
        tokens = encode(text)
        limit = self._spec.max_model_len
        return _json(
            {"count": len(tokens), "max_model_len": limit, "tokens": tokens, "token_strs": None}
        )

    async def _detokenize(self, request: web.BaseRequest) -> web.Response:
        body = read_body(await request.read(), DetokenizeBody)
        check_model(body.model, self._spec)
        return _json({"prompt": decode(body.tokens)})

    async def _version(self, request: web.BaseRequest) -> web.Response:
        return _json({"version": self._spec.version})

    async def _sleep(self, request: web.BaseRequest) -> web.Response:
        level, mode = request.query.get("level", "1"), request.query.get("mode", "abort")
        if level not in ("0", "1", "2") or mode not in ("abort", "keep"):
            raise Refusal(400, "Bad Request", "level is 0 to 2, mode is abort or keep", "query")
        self._alive().sleep(int(level), mode)
        return _json({"status": "sleeping", "level": int(level)})

    async def _wake_up(self, request: web.BaseRequest) -> web.Response:
        self._alive().wake()
        return _json({"status": "awake", "tags": request.query.getall("tags", None)})

    async def _is_sleeping(self, request: web.BaseRequest) -> web.Response:
        return _json({"is_sleeping": self._alive().sleep_level is not None})


def _generation_error() -> Refusal:
    return Refusal(500, "InternalServerError", "Internal server error")


def _response_end(finish_reason: str, is_stream: bool) -> dict[str, Any]:
    """Return the end of a /v1/responses answer: its object, or the stream's last event."""
    status = {"abort": "cancelled", "length": "incomplete"}.get(finish_reason, "completed")
    if is_stream:
        return {"type": "response.completed", "response": {"status": status}}
    return {"object": "response", "status": status}


def _message_end(finish_reason: str, is_stream: bool) -> dict[str, Any]:
    """Return the end of a /v1/messages answer; an aborted request has no stop reason."""
    reason = {"stop": "end_turn", "length": "max_tokens"}.get(finish_reason)
    if is_stream:
        return {"type": "message_delta", "delta": {"stop_reason": reason}}
    return {"type": "message", **({"stop_reason": reason} if reason else {})}
