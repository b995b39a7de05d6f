"""Requests of clients, and the bodies that engines are sent for them (pure).

A body is read once, into the raw JSON of its fields, so that a prompt of a megabyte is copied but
never decoded. Only what the router has to understand is looked at; whether a request makes sense is
for the engine to say, and fields that are not known here pass. A body that needs no change is sent
byte for byte as it came.

The memory that reading takes is a small multiple of the body's bytes, whatever the body has.
`fields_of` bounds the number of fields. `scalar_of` decodes no list and no object. Lists are
counted in their bytes, and the few structures that are decoded have a type and a limit.
"""

import re
from codecs import BOM_UTF8
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from itertools import islice
from typing import Any

import msgspec
import xxhash
from msgspec import Raw

from vllm_kvpool.config import MAX_ENGINE_CHARS
from vllm_kvpool.parsing import UNREADABLE
from vllm_kvpool.router.control.prefix_index import SEGMENT_ENDS, SPAN_BYTES
from vllm_kvpool.router.dataplane.vllm_fields import Scalar, Trait, fields_with, read_scalar

MEDIA_TOKENS = 1024
"""Tokens that an image inside a message counts as, before an engine has seen it."""
MAX_OUTPUT_TOKENS = 1 << 20
"""Limit of the tokens that an engine may generate of one sequence."""
MAX_MODEL_TOKENS = 1 << 30
"""Limit of a model's length. An engine that lists a longer one has given none."""
ANSWER_BYTES, TOKEN_BYTES, LOGPROB_BYTES = 4 << 20, 4096, 512
"""Limits in an answer: bytes beside its tokens, bytes a token, bytes a log-probability."""
MAX_SEQUENCES = 1 << 31
MAX_OBJECTS = 4096  # that are told apart from those inside of them
"""Largest number of sequences that is counted. No engine runs so many."""
PROMPT_TIMES = 16
"""Copies of the prompt that an answer may contain, token ids included."""
EMBEDDING_BYTES = 256 << 10
"""JSON bytes of one embedding: 8,192 numbers take 200,000."""
MAX_ANSWER_BYTES = 256 << 20
"""Bytes of an answer in one piece. Prompt log-probabilities of a long prompt are large."""
SMALL_ANSWER_BYTES = 8 << 20
"""Bytes of an answer to the router's own request."""
COMPLETION_MAX_TOKENS = 16  # vLLM's, where a completion does not say
MAX_MODEL_CHARS = 4096
"""Limit of a model's name, which goes into messages and logs. Some names are paths."""
MAX_FIELDS = 512
"""Fields of a body, and of each object that is read in it. vLLM's requests have under 100."""
MAX_SCALAR_BYTES = 6 * MAX_MODEL_CHARS + 2
"""JSON bytes of a number or text that is read."""
MAX_STOP_BYTES = 16 << 10
"""JSON bytes of the stop strings with which an answer can go on at another engine."""
MAX_MEDIA = 1024
"""Images and the like that are told from a prompt's text; further ones count as text."""


class ApiPath(Enum):
    """Kinds of requests; the value is the path."""

    COMPLETION = "/v1/completions"
    CHAT = "/v1/chat/completions"
    RESPONSES = "/v1/responses"
    MESSAGES = "/v1/messages"


READ = (ApiPath.COMPLETION, ApiPath.CHAT)
"""Answers are read, so that another engine can go on. All others are passed on as they come."""


class BadRequest(Exception):
    """No engine would take this; the message says what to change. `param` names the field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param

    def body(self, path: str) -> bytes:
        """Return the JSON body of the 400 answer, in the form that `path` has for errors."""
        return error_body(400, str(self), path, self.param)


_ERROR_TYPES = {
    401: "Unauthorized",
    403: "PermissionDenied",
    404: "NotFoundError",
    405: "MethodNotAllowed",
    408: "RequestTimeout",
    413: "RequestEntityTooLarge",
    415: "UnsupportedMediaType",
    429: "RateLimitError",
    500: "InternalServerError",
    502: "ServiceUnavailable",
    503: "ServiceUnavailable",
}


def error_body(status: int, message: str, path: str, param: str | None = None) -> bytes:
    """Return an error as vLLM writes it at this path.

    Its form is Anthropic's for that API, else OpenAI's.
    """
    kind = _ERROR_TYPES.get(status, "BadRequestError")
    if is_anthropic(path):
        return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message}})
    error = {"message": message, "type": kind, "param": param, "code": status}
    return msgspec.json.encode({"error": error})


def is_anthropic(path: str) -> bool:
    """Return True if a path is of Anthropic's API, whose errors have their own form."""
    return f"{path}/".startswith(f"{ApiPath.MESSAGES.value}/")


class ClientRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request of a client. `raw` is its body, `fields` the same as raw JSON by name.

    With an empty `raw` the body is `fields`.
    """

    api_path: ApiPath
    raw: bytes
    fields: Mapping[str, Raw]
    model: str
    """Empty: whichever the engine serves."""
    stream: bool
    n: int
    max_output_tokens: int | None
    """None: as many as fit the model's length."""
    priority: int
    num_prompts: int
    num_sequences: int
    """Sequences that an engine runs for it at a time; of a beam search, its width."""
    prompt_bytes: int
    """JSON bytes of all that is rendered into the prompt, without media."""
    num_media: int
    prompt_ids: Raw | None
    """The prompt's own JSON where it is one of token ids."""
    prefix: tuple[int, ...]
    """Hashes of ever longer beginnings of the prompt's JSON, as in `prefix_index`."""
    wants_handoff: bool
    """True if the prompt may be computed on one replica and decoded on another."""
    asks_token_ids: bool
    trackable: bool
    """True if a stream can be asked for with token ids, and the answer stays the same.

    vLLM leaves the echoed prompt of a completion out where ids are asked for, and a prompt of
    embeddings has none.
    """
    model_length: int | None = None
    """The most tokens that the model has in one sequence; None until an engine has said it."""
    tenant: str = ""
    """The tenant whose room in the pool the prompt takes; empty if unknown."""

    @property
    def most_tokens(self) -> int:
        """Tokens that an engine may generate of each sequence."""
        asked = self.max_output_tokens
        if asked is None:
            asked = self.model_length or MAX_OUTPUT_TOKENS
        return min(max(1, asked), MAX_OUTPUT_TOKENS)

    def most_answer_bytes(self, request_id: str) -> int:
        """Return bytes beyond which an answer is none that an engine gives to this request.

        `request_id` is in each chunk of a stream, as the model's name is.
        """
        fields, tokens = self.fields, self.most_tokens
        token_bytes = TOKEN_BYTES + len(self.model) + len(request_id)
        if not _RETURNS_PROMPT.isdisjoint(fields):
            tokens += self.prompt_bytes
        if not _LOGPROBS.isdisjoint(fields):
            token_bytes += LOGPROB_BYTES * _num_logprobs(fields)
        prompt_bytes = PROMPT_TIMES * max(1, self.n) * self.prompt_bytes
        return ANSWER_BYTES + prompt_bytes + self.num_sequences * tokens * token_bytes

    def value(self, name: str) -> "Scalar | Undecoded":
        """Return a field as `value_of` reads it; None where it is missing."""
        return value_of(self.fields, name)

    def members(self, name: str) -> dict[str, Raw]:
        """Return the fields of an object; empty where there is none."""
        return _members(self.fields, name) or {}

    @property
    def is_passed_on(self) -> bool:
        """True if the answer is not read, so that no other engine can go on with it."""
        return self.api_path not in READ

    @property
    def own_id(self) -> str:
        """The client's `request_id`, after which vLLM names the answer unless a header has one.

        Empty where there is none, or none that a header may have.
        """
        own = None if self.is_passed_on else self.value("request_id")
        return own if isinstance(own, str) and _HEADER_ID.fullmatch(own) else ""

    def prompt_tokens(self, tokens_per_byte: float) -> int:
        """Return the tokens of the prompt: exact for token ids, else estimated.

        `tokens_per_byte` is what was learned of others. Engines cut or refuse, and do not compute,
        what is longer than the model.
        """
        tokens = self._text_tokens(tokens_per_byte) + MEDIA_TOKENS * self.num_media
        if self.model_length is None:
            return tokens
        return min(tokens, self.model_length * max(1, self.num_prompts))

    def prefix_tokens(self, tokens_per_byte: float) -> int:
        """Return the tokens that one entry of `prefix` stands for, at least 1."""
        tokens = self._text_tokens(tokens_per_byte)
        return max(1, round(SPAN_BYTES * tokens / max(1, self.prompt_bytes)))

    def _text_tokens(self, tokens_per_byte: float) -> int:
        """Return the tokens of the prompt without media, also beyond the model's length."""
        if self.prompt_ids is not None:
            return count_ids(self.prompt_ids)
        return round(self.prompt_bytes * tokens_per_byte)

    def prefill_body(self, *, hands_over: bool = False) -> bytes:
        """Have the same prompt computed, and one token only; `hands_over`: for another engine.

        Whatever shapes the rendered prompt stays; sampling, which could only cost or fail, goes.
        """
        fields = {name: raw for name, raw in self.fields.items() if name not in _ANSWER_ONLY}
        if self.api_path is ApiPath.COMPLETION:
            # In a chat, some renderers write the format into the prompt.
            fields.pop("response_format", None)
        elif "max_completion_tokens" in fields:
            fields["max_completion_tokens"] = _ONE
        fields["max_tokens"] = _ONE
        fields["temperature"] = _ZERO
        fields["stream"] = _FALSE
        options = {"hand_over": True} if hands_over else {}
        if options or self.tenant:
            fields["kv_transfer_params"] = Raw(msgspec.json.encode(self.transfer_params(options)))
        return msgspec.json.encode(fields)

    def whole_body(
        self,
        expect_tokens: int = 0,
        expect_timeout_ms: int | None = None,
        track: bool = False,
        expect_from: str | None = None,
        notices: Sequence[str] | None = None,
    ) -> bytes:
        """Have the request answered as it came.

        `expect_tokens`, which `expect_from` saves and tells of at `notices`, are to be awaited in
        the pool, unless the client has said so itself; with None the engine knows no notices;
        `track` asks for token ids besides, which `StreamResumer` takes out again.
        """
        assert self.trackable or not track
        changed: dict[str, Raw] = {}
        if track and not self.asks_token_ids:
            changed["return_token_ids"] = _TRUE
        options: dict[str, Any] = {}
        if expect_tokens:
            options["expect_tokens"] = expect_tokens
            if notices is not None:
                # Prefill has said how much it saves: if that is the whole prompt, with its end.
                options["expect_end"] = True
            if expect_timeout_ms is not None:
                options["expect_timeout_ms"] = expect_timeout_ms
            if expect_from is not None:
                options["expect_from"] = expect_from[:MAX_ENGINE_CHARS]
            if notices:
                options["notices"] = notices
        if options or self.tenant:
            changed["kv_transfer_params"] = Raw(msgspec.json.encode(self.transfer_params(options)))
        if self.raw and not changed:
            return self.raw
        return msgspec.json.encode({**self.fields, **changed})

    def transfer_params(self, options: Mapping[str, Any]) -> Any:
        """Return `kv_transfer_params` with the tenant and `options`; the client's own values count.

        What an engine could not read is left as it is, for the engine to refuse.
        """
        params = _members(self.fields, "kv_transfer_params")
        if params is None:
            if self.value("kv_transfer_params"):
                return self.fields["kv_transfer_params"]
            params = {}
        if self.tenant:
            options = {"tenant": self.tenant, **options}
        theirs = kvpool_options(params)
        if not options or theirs is None:
            return params
        return {**params, "kvpool": {**options, **theirs}}


_RETURNS_PROMPT = fields_with(Trait.RETURNS_PROMPT)
_LOGPROBS = fields_with(Trait.LOGPROBS)
MAX_LOGPROBS = 1 << 18
"""Log-probabilities of one token; -1 asks for the whole vocabulary."""
_TRUE, _FALSE, _ZERO, _ONE = Raw(b"true"), Raw(b"false"), Raw(b"0"), Raw(b"1")
_NULL = Raw(b"null")

_HEADER_ID = re.compile("[!-~]{1,256}")
_ANSWER_ONLY = fields_with(Trait.ANSWER_ONLY)
_SHAPES_PREFIX = sorted(fields_with(Trait.PREFIX))
_BASE64 = re.compile(rb";base64,[A-Za-z0-9+/=_\\-]*")


RESERVED_FIELDS = fields_with(Trait.RESERVED)
"""Fields that only the router, or a trusted client, may send to an engine."""
CACHE_SALT = "cache_salt"
Salt = Callable[[str], str]
"""Makes the `cache_salt` for engines of a client's own, "" for none."""
XARGS = "vllm_xargs"
RESERVED_XARGS = frozenset({"kv_transfer_params", "ec_transfer_params"})
"""vLLM reads these there as well."""


class Undecoded(msgspec.Struct, frozen=True, gc=False):
    """A list, an object or a long text that has not been decoded: true unless it is empty."""

    is_filled: bool

    def __bool__(self) -> bool:
        return self.is_filled


_EMPTY, _FILLED = Undecoded(False), Undecoded(True)
_decode_scalar: Callable[[memoryview], Scalar] = msgspec.json.Decoder(Scalar).decode


def scalar_of(raw: Raw) -> Scalar | Undecoded:
    """Decode a number, a text, a boolean or null; BadRequest. Nothing else is decoded."""
    data = memoryview(raw)
    if data[0] in b"[{":
        is_empty = len(data) < MAX_SCALAR_BYTES and not bytes(data[1:-1]).strip()
        return _EMPTY if is_empty else _FILLED
    if len(data) > MAX_SCALAR_BYTES:
        return _FILLED
    try:
        return _decode_scalar(data)
    except UNREADABLE as error:
        raise _no_json(error) from None


class _Field(str):
    """The name of a field that was counted."""

    __slots__ = ()


class _FieldCounter:
    """Counts fields while an object is decoded: a dict of all of them might not fit into memory."""

    def __init__(self) -> None:
        self._num_left = 0
        self._decode = msgspec.json.Decoder(dict[_Field, Raw], dec_hook=self._count).decode

    def decode(self, data: bytes) -> dict[str, Raw]:
        self._num_left = MAX_FIELDS
        return {str(name): raw for name, raw in self._decode(data).items()}

    def _count(self, kind: type, name: str) -> _Field:
        self._num_left -= 1
        if self._num_left < 0:
            raise BadRequest(f"The body has an object with more than {MAX_FIELDS} fields.")
        return _Field(name)


_decode_fields = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_counted = _FieldCounter().decode


def fields_of(data: bytes) -> dict[str, Raw]:
    """Return the raw JSON of each field of an object; BadRequest, also beyond MAX_FIELDS."""
    # Each field has a colon. Most bodies have few of them, and counting fields is slower.
    decode = _decode_fields if data.count(b":") <= MAX_FIELDS else _decode_counted
    try:
        return decode(data)
    except RecursionError:
        raise BadRequest("The body is nested too deeply.") from None
    except UNREADABLE as error:
        raise _no_json(error) from None


def _no_json(error: Exception) -> BadRequest:
    what = "a JSON object" if isinstance(error, msgspec.ValidationError) else "JSON"
    return BadRequest(f"The body must be {what}: {error}.")


def _members(fields: Mapping[str, Raw], name: str) -> dict[str, Raw] | None:
    """Return the fields of an object; None where it is something else, or missing."""
    raw = fields.get(name)
    return fields_of(bytes(raw)) if raw is not None and _begin_of(raw) == b"{" else None


def _begin_of(raw: Raw) -> bytes:
    return bytes(memoryview(raw)[:1])


def parse_request(
    kind: ApiPath,
    raw: bytes,
    *,
    is_trusted: bool = False,
    tenant: str = "",
    salt: Salt | None = None,
) -> ClientRequest:
    """Read a client's body; BadRequest where no engine could be asked.

    RESERVED_FIELDS are taken out, unless the client is trusted with them. `salt` makes the
    `cache_salt` that engines are sent of the client's own.
    """
    raw, fields = _permitted(raw, is_trusted, salt)
    model = _model(value_of(fields, "model"))
    if kind is ApiPath.RESPONSES:
        _refuse_kept(fields)
    prompts, num_prompts = _prompts(kind, fields)
    text = bytes(prompts[0]) if prompts else b""
    media = [] if kind is ApiPath.COMPLETION else _media(text)
    single_ids = num_prompts == 1 and text.startswith(b"[")
    num_choices = _whole(fields, "n") or 1
    has_echo = kind is ApiPath.COMPLETION and bool(value_of(fields, "echo"))
    is_single = num_choices == 1 and num_prompts == 1
    return ClientRequest(
        api_path=kind,
        raw=raw,
        fields=fields,
        model=model,
        stream=_truth(fields, "stream"),
        n=num_choices,
        max_output_tokens=_max_output_tokens(kind, fields),
        priority=_whole(fields, "priority") or 0,
        num_prompts=num_prompts,
        num_sequences=_num_sequences(fields, num_choices) * max(1, num_prompts),
        prompt_bytes=sum(len(memoryview(each)) for each in prompts) - sum(media),
        num_media=len(media),
        prompt_ids=prompts[0] if kind is ApiPath.COMPLETION and single_ids else None,
        prefix=_prefix(fields, text if num_prompts == 1 else text[1:].lstrip()),
        wants_handoff=kind in READ and _wants_handoff(fields, num_prompts),
        asks_token_ids=bool(value_of(fields, "return_token_ids")),
        trackable=is_single and "prompt_embeds" not in fields and not has_echo,
        tenant=tenant,
    )


def parse_forwarded(
    raw: bytes, *, is_trusted: bool = False, salt: Salt | None = None
) -> tuple[bytes, str, int]:
    """Read a body that an engine answers as it comes: the body to send, the model, its sequences.

    Each text of the longest list is a sequence. BadRequest where the body is no JSON object.
    RESERVED_FIELDS are taken out, and `salt` counts, as in `parse_request`.
    """
    raw, fields = _permitted(raw, is_trusted, salt)
    texts = (_num_inputs(fields[name]) for name in _TEXTS if name in fields)
    return raw, _model(value_of(fields, "model")), max((1, *texts))


def _num_inputs(values: Raw) -> int:
    """Return the number of texts, or of objects, in the value of one of `_TEXTS`."""
    if _OBJECTS.match(values) is None:
        return _num_prompts(values)
    most = bytes(values).count(b"{")
    if most > MAX_OBJECTS:
        return most  # with those inside of others
    try:
        return len(_decode_list(values))
    except UNREADABLE:
        return 1  # the engine refuses it


def most_forwarded_bytes(body: bytes, num_sequences: int) -> int:
    """Return the bytes beyond which no engine answers a body of `parse_forwarded`.

    An answer has an embedding for each sequence, or a token for each byte of the body.
    """
    most = ANSWER_BYTES + num_sequences * EMBEDDING_BYTES + PROMPT_TIMES * len(body)
    return min(most, MAX_ANSWER_BYTES)


def _permitted(raw: bytes, is_trusted: bool, salt: Salt | None) -> tuple[bytes, dict[str, Raw]]:
    """Return a body and its fields, with its salt.

    Fields that its client may not say are left out.
    """
    # vLLM reads over the mark that some editors and shells put before UTF-8.
    fields = fields_of(raw.removeprefix(BOM_UTF8))
    kept = fields if is_trusted else _without_reserved(fields)
    if salt is not None:
        kept = {**kept, CACHE_SALT: Raw(msgspec.json.encode(salt(_given_salt(kept))))}
    return (raw if kept is fields else msgspec.json.encode(kept)), kept


def _num_sequences(fields: Mapping[str, Raw], num_choices: int) -> int:
    """Return the sequences of each prompt."""
    best_of = value_of(fields, "best_of") if "best_of" in fields else 1
    most = max(1, num_choices, best_of if isinstance(best_of, int) else 1)
    return min(most, MAX_SEQUENCES)


def _num_logprobs(fields: Mapping[str, Raw]) -> int:
    """Return the log-probabilities that an engine may say of each token."""
    numbers = [value_of(fields, name) for name in _LOGPROBS]
    most = max((each for each in numbers if isinstance(each, int)), default=0)
    is_all = any(isinstance(each, int) and each < 0 for each in numbers)
    return MAX_LOGPROBS if is_all or "logprob_token_ids" in fields else min(most, MAX_LOGPROBS)


def _given_salt(fields: Mapping[str, Raw]) -> str:
    """Return a client's `cache_salt`; "" without one. BadRequest for what is none to vLLM."""
    try:
        given = value_of(fields, CACHE_SALT)
    except UNREADABLE:
        given = 0
    if given is None:
        return ""
    if not isinstance(given, str) or not given:
        raise BadRequest("`cache_salt` must be a text that is not empty.", CACHE_SALT)
    return given


def _model(model: Any) -> str:
    """Return the model; empty where there is none."""
    if model is None:
        return ""
    if not isinstance(model, str) or len(model) > MAX_MODEL_CHARS:
        raise BadRequest("`model` must name one of the models that /v1/models lists.", "model")
    return model


def _without_reserved(fields: dict[str, Raw]) -> dict[str, Raw]:
    """Return the fields without reserved ones; the same object where nothing is reserved."""
    kept = fields
    if not fields.keys().isdisjoint(RESERVED_FIELDS):
        kept = {name: each for name, each in fields.items() if name not in RESERVED_FIELDS}
    xargs = _members(fields, XARGS)
    if xargs is not None and not RESERVED_XARGS.isdisjoint(xargs):
        left = {name: each for name, each in xargs.items() if name not in RESERVED_XARGS}
        kept = {**kept, XARGS: Raw(msgspec.json.encode(left))}
    return kept


def count_ids(ids: Raw | bytes) -> int:
    """Return the number of token ids in a JSON list."""
    data = bytes(ids)
    return data.count(b",") + 1 if data.strip(b"[] \t\r\n") else 0


def kvpool_options(params: Mapping[str, Raw]) -> dict[str, Raw] | None:
    """Return `kvpool` of a client's `kv_transfer_params`; None if the pool reads nothing of it."""
    if params.get("kvpool") in (None, _NULL):
        return {}
    return _members(params, "kvpool")


def value_of(fields: Mapping[str, Raw], name: str) -> Scalar | Undecoded:
    """Return a field as vLLM reads it, of a request or of `stream_options`.

    The result is None where it is missing.
    """
    raw = fields.get(name)
    if raw is None:
        return None
    value = scalar_of(raw)
    return value if isinstance(value, Undecoded) else read_scalar(name, value)


def _truth(fields: Mapping[str, Raw], name: str) -> bool:
    value = value_of(fields, name)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise BadRequest(f"`{name}` must be true or false.", name)


def _whole(fields: Mapping[str, Raw], name: str) -> int | None:
    value = value_of(fields, name)
    if value is None or isinstance(value, int):
        return value
    raise BadRequest(f"`{name}` must be a whole number.", name)


_decode_single = msgspec.json.Decoder(tuple[Raw]).decode
_decode_list = msgspec.json.Decoder(list[Raw]).decode
_SEVERAL = re.compile(rb'\[\s*(["\[])')
_EMPTY_LIST = re.compile(rb"\[\s*\]")
_OBJECTS = re.compile(rb"\[\s*\{")
_RENDERED = fields_with(Trait.RENDERED)
_TEXTS = (
    *("input", "inputs", "texts", "images", "documents", "items", "queries"),
    *("text_1", "text_2", "data_1", "data_2"),
)
"""Fields whose texts an engine embeds, or scores against each other."""
_KEPT_RESPONSE = fields_with(Trait.KEPT_RESPONSE)


def _refuse_kept(fields: Mapping[str, Raw]) -> None:
    """Refuse responses that an engine would keep: the next request may go to another one."""
    for name in _KEPT_RESPONSE:
        if value_of(fields, name):
            raise BadRequest(
                f"`{name}` needs a response that one engine keeps, and the router has several "
                "engines: send the whole conversation as `input`.",
                name,
            )


def _max_output_tokens(kind: ApiPath, fields: Mapping[str, Raw]) -> int | None:
    if kind is ApiPath.RESPONSES:
        return _whole(fields, "max_output_tokens")
    plain = _whole(fields, "max_tokens")
    if kind is ApiPath.COMPLETION:
        return COMPLETION_MAX_TOKENS if plain is None else plain
    newer = _whole(fields, "max_completion_tokens")
    return plain if newer is None else newer


def _prompts(kind: ApiPath, fields: Mapping[str, Raw]) -> tuple[list[Raw], int]:
    """Return the JSON of all that is rendered into a prompt, and how many prompts there are.

    The prompt, or the list of several, or the messages, come first.
    """
    if kind is not ApiPath.COMPLETION:
        name = "input" if kind is ApiPath.RESPONSES else "messages"
        begin = _begin_of(fields[name]) if name in fields else b""
        if begin != b"[" and not (kind is ApiPath.RESPONSES and begin == b'"'):
            raise BadRequest(f"`{name}` must be a list of messages.", name)
        return [fields[name], *(fields[each] for each in _RENDERED if each in fields)], 1
    prompt, embeds = fields.get("prompt"), fields.get("prompt_embeds")
    num_embeds = 0 if embeds is None else _num_texts(bytes(embeds))  # each is in base64
    if prompt is None or _begin_of(prompt) == b"n":
        if embeds is not None:
            return [], num_embeds
        raise _no_prompt()
    if _begin_of(prompt) not in (b"[", b'"'):
        raise _no_prompt()
    if num_embeds and _EMPTY_LIST.match(prompt) is not None:
        return [], num_embeds
    if _SEVERAL.match(prompt) is None:
        return [prompt], 1 + num_embeds
    number = _num_prompts(prompt)
    if number > 1:
        return [prompt], number + num_embeds
    try:
        return list(_decode_single(bytes(prompt))), 1 + num_embeds
    except UNREADABLE:
        raise _no_prompt() from None


def _no_prompt() -> BadRequest:
    return BadRequest("`prompt` must be a text, token ids, or a list of either.", "prompt")


def _num_prompts(prompts: Raw) -> int:
    """Return the number of prompts in the JSON of a text, of token ids, or of a list of either."""
    several = _SEVERAL.match(prompts)
    if several is None:
        return 1
    data = bytes(prompts)
    return _num_texts(data) if several[1] == b'"' else data.count(b"[") - 1


def _num_texts(data: bytes) -> int:
    """Return the number of texts in a JSON list of texts."""
    if b"\\" in data:
        # In this order: a quote after two backslashes is the end of a text.
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    return data.count(b'"') // 2


def _media(messages: bytes) -> list[int]:
    """Return the JSON bytes of each media written into messages."""
    if b";base64," not in messages:
        return []
    found = islice(_BASE64.finditer(messages), MAX_MEDIA)
    return [each.end() - each.start() for each in found]


def _prefix(fields: Mapping[str, Raw], text: bytes) -> tuple[int, ...]:
    """Return the hashes of a prompt's beginnings.

    `text` is the prompt's JSON; of several prompts, from the first one on.
    """
    begin = 0
    if len(text) < SEGMENT_ENDS[0] * SPAN_BYTES:
        return ()
    digest = xxhash.xxh3_64()
    for name in _SHAPES_PREFIX:
        if name in fields:
            digest.update(b"%b:%b\n" % (name.encode(), bytes(fields[name])))
    seed, hashes = digest.intdigest(), []
    if b";base64," in text:
        # An image stands for few tokens, however many bytes it has.
        text = _BASE64.sub(
            lambda match: xxhash.xxh3_128_hexdigest(match[0]).encode(), text, count=MAX_MEDIA
        )
    prompt = memoryview(text)
    for end in SEGMENT_ENDS:
        if end * SPAN_BYTES > len(prompt):
            break
        seed = xxhash.xxh3_64_intdigest(prompt[begin : end * SPAN_BYTES], seed)
        hashes.append(seed)
        begin = end * SPAN_BYTES
    return tuple(hashes)


_HAND_OVER = fields_with(Trait.HAND_OVER)


def _wants_handoff(fields: Mapping[str, Raw], num_prompts: int) -> bool:
    if _HAND_OVER.isdisjoint(fields):
        return num_prompts == 1
    params = _members(fields, "kv_transfer_params")
    if params is None and value_of(fields, "kv_transfer_params") is not None:
        raise BadRequest("`kv_transfer_params` must be an object.", "kv_transfer_params")
    options = kvpool_options(params or {}) or {}
    if _FALSE in (options.get("save"), options.get("load")):
        return False
    # Somebody else has planned this request's transfers.
    if set(params or ()) - {"kvpool", "prompt_token_ids"}:
        return False
    # An engine that scores the prompt computes all of it, whatever is cached.
    if value_of(fields, "prompt_logprobs") is not None or value_of(fields, "echo"):
        return False
    if value_of(fields, "prompt_embeds"):
        return False
    # How far it is cut off depends on how many tokens are asked for.
    if value_of(fields, "truncate_prompt_tokens") == -1:
        return False
    return num_prompts == 1 and not value_of(fields, "use_beam_search")
