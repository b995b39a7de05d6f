"""The HTTP side of a scripted engine: vLLM's endpoints, and two of its own for tests.

`GET, POST, DELETE /faults` show, set and clear faults, `GET /counts` shows what happened. An `Api`
outlives the lives of its engine: whoever starts one puts it into `core`.
"""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import fields
from typing import TypeAlias

import msgspec
from aiohttp import web

from tests.support.scripted_bodies import (
    DONE,
    ChatForm,
    CompletionForm,
    Head,
    event,
    models_body,
)
from tests.support.scripted_core import EngineCore, EngineCounts
from tests.support.scripted_faults import FaultBoard, RequestFaults
from tests.support.scripted_metrics import CONTENT_TYPE, metrics_text
from tests.support.scripted_replies import Ending, Reply
from tests.support.scripted_requests import (
    Ask,
    DetokenizeBody,
    Refusal,
    TokenizeBody,
    chat_text,
    check_model,
    read_body,
    read_chat,
    read_completion,
    wrong_media_type,
)
from tests.support.scripted_spec import (
    GENERATION_PATHS,
    Fault,
    FaultKind,
    ScriptedSpec,
)
from tests.support.scripted_words import decode, encode

_GUARDED = ("/v1", "/v2", "/inference", "/cohere")  # what needs the key
_CONTROL = ("/faults", "/counts")
_JSON_PATHS = (*GENERATION_PATHS, "/tokenize", "/detokenize")
_SERVER = {"Server": "uvicorn"}
_JSON_TYPE = "application/json"
_STREAM_TYPE = "text/event-stream; charset=utf-8"
_RUBBISH = b"\x16\x03\x01 this is no HTTP\r\n\r\n"


class Request(web.BaseRequest):
    """A request, and what faults do to it."""

    answer_type = ""  # the content type of its answer, instead of the true one
    is_cut = False  # it was not the client who ended the connection


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
    """Until the connection is gone, which cancels."""
    await asyncio.get_running_loop().create_future()


class Api:
    """Answers requests. `core` is None while there is no engine behind it that could."""

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
            "/v1/models": {"GET": self._models},
            "/health": {"GET": self._health},
            "/metrics": {"GET": self._metrics},
            "/tokenize": {"POST": self._tokenize},
            "/detokenize": {"POST": self._detokenize},
            "/version": {"GET": self._version},
            "/sleep": {"POST": self._sleep},
            "/wake_up": {"POST": self._wake_up},
            "/is_sleeping": {"GET": self._is_sleeping},
            "/counts": {"GET": self._get_counts},
            "/faults": {
                "GET": self._get_faults,
                "POST": self._post_fault,
                "DELETE": self._delete_faults,
            },
        }

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request, with what faults there are."""
        path = request.path
        if path in _CONTROL:
            return await self._answer(request)
        self._counts.received[path] += 1
        if path in GENERATION_PATHS:
            headers = {name.lower(): value for name, value in request.headers.items()}
            self._counts.last_headers = headers
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
            # The client went away, unless it was the engine that died or a fault.
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
            case FaultKind.WRONG_TYPE:
                assert isinstance(request, Request)
                request.answer_type = fault.content_type
            case FaultKind.BUSY:
                return self._refused(_busy())
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

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            return await self._handler(request)(request)
        except Refusal as refusal:
            return self._refused(refusal, request.path not in _CONTROL)

    def _handler(self, request: web.BaseRequest) -> Handler:
        if self._spec.api_key and request.path.startswith(_GUARDED):
            kind, _, key = request.headers.get("Authorization", "").partition(" ")
            if kind.lower() != "bearer" or key != self._spec.api_key:
                return self._unauthorized
        if self.core is None and request.path not in _CONTROL:
            return self._loading
        methods = self._routes.get(request.path)
        if methods is None:
            raise Refusal(404, "Not Found", "Not Found")
        if request.method not in methods:
            raise Refusal(405, "Method Not Allowed", "Method Not Allowed")
        if request.path in _JSON_PATHS and request.content_type != _JSON_TYPE:
            raise wrong_media_type()
        return methods[request.method]

    def _refused(self, refusal: Refusal, is_counted: bool = True) -> web.Response:
        self._counts.refused += is_counted
        return _json(refusal.body(), refusal.status)

    async def _unauthorized(self, request: web.BaseRequest) -> web.Response:
        self._counts.refused += 1
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
        most = self._spec.max_num_queued_reqs
        if most and core.batch.num_unfinished + ask.n > most:
            core.stats.rejections += 1
            raise _busy()
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
        kind = request.answer_type or _STREAM_TYPE
        response = web.StreamResponse(headers={**_SERVER, "Content-Type": kind})
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
                return _empty(200)  # which nobody gets
        body = reply.body(self._spec)
        data = body[: len(body) // 2] if reply.is_garbled else body
        kind = request.answer_type or _JSON_TYPE
        return web.Response(body=data, headers={**_SERVER, "Content-Type": kind})

    # The rest

    async def _models(self, request: web.BaseRequest) -> web.Response:
        return _json(models_body(self._spec, self._started))

    async def _health(self, request: web.BaseRequest) -> web.Response:
        return _empty(200)

    async def _metrics(self, request: web.BaseRequest) -> web.Response:
        core = self._alive()
        return web.Response(
            body=metrics_text(self._spec, core.batch, core.stats, core.sleep_level),
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

    async def _get_counts(self, request: web.BaseRequest) -> web.Response:
        counts = msgspec.to_builtins(self._counts)
        return _json({**counts, "last_body": msgspec.Raw(self._counts.last_body)})

    async def _get_faults(self, request: web.BaseRequest) -> web.Response:
        return _json(self._board.faults())

    async def _post_fault(self, request: web.BaseRequest) -> web.Response:
        data = await request.read()
        fault = read_body(data, Fault)
        unknown = read_body(data, dict).keys() - {field.name for field in fields(Fault)}
        if unknown:
            raise Refusal(400, "Bad Request", f"a fault has no {sorted(unknown)}")
        self._board.set(fault)
        return _json({})

    async def _delete_faults(self, request: web.BaseRequest) -> web.Response:
        self._board.clear()
        return _json({})


def _generation_error() -> Refusal:
    return Refusal(500, "InternalServerError", "Internal server error")
