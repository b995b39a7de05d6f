"""Asks a `kvpool serve` what the pool has of a prompt."""

import urllib.error
import urllib.request
from http.client import HTTPException
from typing import Annotated, Any, TypeVar

import msgspec

from vllm_kvpool.direct_http import open_directly, read_whole
from vllm_kvpool.parsing import UNREADABLE

T = TypeVar("T")

DEFAULT_PORT = 8200
TIMEOUT_S = 5.0
MAX_PROMPT_TOKENS = 1 << 20
MAX_MODEL_CHARS = 4096
MAX_REFUSAL_BYTES = 1 << 16

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class LookupRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The body of `POST /lookup`: a namespace or a model, and the prompt in one of three forms."""

    namespace: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    """Whole, or the beginning of its name or digest where stores can list theirs."""
    model: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_MODEL_CHARS)] | None = None
    """The model's name, as in a request to an engine. The namespace with most of it counts."""
    tokens: Annotated[list[TokenId], msgspec.Meta(max_length=MAX_PROMPT_TOKENS)] | None = None
    text: str | None = None
    """The prompt as in `/v1/completions`. `text` and `messages` need `kvpool serve --tokenizer`."""
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    """Tools of the chat, as in `/v1/chat/completions`; so are `chat_template_kwargs`."""
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None


class TierCoverage(msgspec.Struct, kw_only=True):
    """The part of a prompt that one store has."""

    store: str
    covered_tokens: int = 0
    error: str = ""
    """Error of a store that could not be asked; `covered_tokens` is then 0."""


class _Refusal(msgspec.Struct):
    error: str


class LookupAnswer(msgspec.Struct, kw_only=True):
    """The part of a prompt that the pool has, in tokens from the prompt's beginning on."""

    namespace: str
    """Empty: none is known of the model, and the pool has nothing."""
    tokens: int
    """Tokens of the prompt; 0 without a namespace."""
    chunk_tokens: int
    covered_tokens: int
    """In all stores together. Engines load whole blocks of it, and never the last token."""
    tiers: list[TierCoverage]


class ServeError(Exception):
    """The request was refused, or the service did not answer.

    `status` is HTTP's, 0 without an answer.
    """

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class LookupClient:
    """A client of one `kvpool serve`. Calls block; any thread may call."""

    def __init__(self, url: str, timeout_s: float = TIMEOUT_S) -> None:
        self._url = url.rstrip("/")
        self._timeout_s = timeout_s

    def lookup(self, request: LookupRequest) -> LookupAnswer:
        """Return the part of a prompt that the pool has; raises ServeError."""
        return self._call("/lookup", LookupAnswer, msgspec.json.encode(request))

    def stats(self) -> list[dict[str, Any]]:
        """Return each store's contents as `kvpool inspect --json` does; raises ServeError."""
        return self._call("/stats", list[dict[str, Any]])

    def health(self) -> dict[str, Any]:
        """Return the service's status and each store's error, "" without one. Raises ServeError."""
        return self._call("/healthz", dict[str, Any])

    def _call(self, path: str, kind: type[T], body: bytes | None = None) -> T:
        headers = {"Content-Type": "application/json"} if body is not None else {}
        try:
            request = urllib.request.Request(f"{self._url}{path}", body, headers)
            with open_directly(request, self._timeout_s) as answer:
                return msgspec.json.decode(read_whole(answer, self._timeout_s), type=kind)
        except urllib.error.HTTPError as error:
            with error:
                raise ServeError(_why(error), error.code) from None
        except (OSError, HTTPException, *UNREADABLE) as error:
            raise ServeError(f"{self._url}{path}: {error}") from None


def _why(refusal: urllib.error.HTTPError) -> str:
    try:
        return msgspec.json.decode(refusal.read(MAX_REFUSAL_BYTES), type=_Refusal).error
    except (OSError, HTTPException, *UNREADABLE):
        return f"{refusal.url}: {refusal.code} {refusal.reason}"
