"""What is to be done for a client whose engine is lost, and how that is told (values only)."""

from dataclasses import dataclass

from vllm_kvpool.router.dataplane.recovery import Manner

DETOKENIZE_PATH = "/detokenize"


class EngineLost(Exception):
    """The engine's stream cannot go on; close it and call `lost`."""


class CannotResume(EngineLost):
    """The engine says something else than the client has been told already."""


@dataclass(frozen=True, slots=True)
class Resume:
    """POST `body` to `path` of any engine, and feed what it streams.

    It may be sent to one engine after another until one streams. `num_tokens` of the answer go with
    the prompt; so many less are left to generate.
    """

    manner: Manner
    path: str
    body: bytes
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Detokenize:
    """POST `body` to `path` of any engine; give `spelled` the answer's `prompt`, or None."""

    body: bytes
    path: str = DETOKENIZE_PATH


@dataclass(frozen=True, slots=True)
class Finish:
    """The answer is complete; only its end was lost. The client is sent the rest of it."""

    payloads: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Refusal:
    """The answer cannot go on. The client is sent `payloads`, or `body` if it has no status yet."""

    why: str
    body: bytes
    payloads: tuple[bytes, ...]


Step = Resume | Detokenize | Finish | Refusal
