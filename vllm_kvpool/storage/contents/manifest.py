"""The manifest of a namespace: the values behind its digest, beside its cells, for display only.

It is an object of `MANIFEST_BYTES` under `manifest_key(namespace)`: a cell's header
(`cell_format.py`), then JSON, padded with spaces:

    {"kvpool_manifest": 1, "namespace": "...", "first": "...", "epoch": "", "cells": [...],
     "values": {...}}

`first` is the namespace of the weights that the engine started with, `epoch` the version of the
weights ("" for those). `values` were digested for the namespace; names and order may change between
releases. Long values become `{"omitted_bytes": n, "digest": "..."}`, possible secrets `HIDDEN`.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from vllm_kvpool.errors import BuffersInUse
from vllm_kvpool.identity.keys import Namespace, key_digest, manifest_key
from vllm_kvpool.storage.base import Buffer, GetOutcome, Store, map_buffer
from vllm_kvpool.storage.contents.cell_format import HEADER_BYTES, verify, write_header

MANIFEST_BYTES = 16 << 10
VERSION = 1
HIDDEN = "(hidden)"
DIGEST_BYTES = 8
MOST_DEPTH = 3
OMITTED_BYTES = 64  # at most, of the replacement of a long value
VALUES_BYTES = MANIFEST_BYTES - HEADER_BYTES - (3 << 10)

_WORDS = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])")
_SECRET_WORDS = frozenset(
    (
        *("secret", "password", "passwd", "credential", "credentials", "auth", "authorization"),
        *("salt", "cookie", "bearer", "signature", "apikey"),
    )
)
_OWNERS_OF_KEYS = frozenset(("api", "access", "private", "account", "encryption"))
_USER_OF_URL = re.compile(r"(\w+://)[^/@\s]*@")
_QUERY_OF_URL = re.compile(r"(\w+://[^\s?#]*)[?#]\S*")


class Manifest(NamedTuple):
    """The description of a namespace."""

    namespace: Namespace
    first: Namespace
    weights_version: str
    """Empty for the weights of the start. Stored as `epoch`, its name in earlier releases."""
    values: Mapping[str, Any]
    cells: tuple[Mapping[str, Any], ...] = ()
    """What the names of cells are made of in the engine that wrote it: `layout/description.py`."""


def write_manifest(manifest: Manifest) -> bytes:
    """The bytes of a manifest."""
    fields = manifest._asdict()
    fields["epoch"] = fields.pop("weights_version")
    text = _json({"kvpool_manifest": VERSION, **fields, "values": fitted(manifest.values)})
    content = bytearray(HEADER_BYTES) + text.ljust(MANIFEST_BYTES - HEADER_BYTES)
    assert len(content) == MANIFEST_BYTES, len(text)
    write_header(memoryview(content), key_digest(manifest_key(manifest.namespace)))
    return bytes(content)


def fitted(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values without secrets, and with the deepest and longest omitted until they fit."""
    plain: dict[str, Any] = shown(values)
    excess = len(_json(plain)) - VALUES_BYTES
    for depth in range(MOST_DEPTH, 0, -1):
        sized = [(len(_json(owner[name])), owner, name) for owner, name in _entries(plain, depth)]
        sized.sort(key=lambda entry: -entry[0])
        for nbytes, owner, name in sized:
            if excess <= 0 or nbytes < 2 * OMITTED_BYTES:
                break
            owner[name] = _omitted(owner[name])
            excess -= nbytes - OMITTED_BYTES
    return plain if excess <= 0 else _omitted(plain)


def read_manifest(content: bytes | memoryview, namespace: Namespace) -> Manifest | None:
    """Parse the manifest of a namespace; None if these bytes are not it."""
    if verify(memoryview(content), key_digest(manifest_key(namespace)), checksum=True) is not None:
        return None
    try:
        stored = json.loads(bytes(content[HEADER_BYTES:]))
        if stored.pop("kvpool_manifest") != VERSION:
            return None
        stored["weights_version"] = stored.pop("epoch")
        known = {name: stored[name] for name in Manifest._fields if name in stored}
        manifest = Manifest(**{**known, "cells": tuple(stored.get("cells", ()))})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return manifest if manifest.namespace == namespace else None


def manifest_in(store: Store, namespace: Namespace) -> Manifest | None:
    """Read the manifest of a namespace from a store; None if it has none. Raises StoreError."""
    buffer = map_buffer(MANIFEST_BYTES)
    store.register(buffer)
    try:
        [outcome] = store.get([manifest_key(namespace)], [buffer])
    except BuffersInUse:
        _in_use.append(buffer)
        raise
    store.unregister(buffer)
    return read_manifest(buffer.view, namespace) if outcome is GetOutcome.OK else None


_in_use: list[Buffer] = []
"""Buffers that abandoned calls may still write to."""


def shown(value: Any, name: str = "") -> Any:
    """A value without what may be a secret, by its name or in a URL."""
    if value is not None and _is_secret(name, value):
        return HIDDEN
    if isinstance(value, str):
        return _QUERY_OF_URL.sub(rf"\1?{HIDDEN}", _USER_OF_URL.sub(r"\1", value))
    if isinstance(value, Mapping):
        return {str(each): shown(value[each], str(each)) for each in value}
    if isinstance(value, list | tuple):
        return [shown(each) for each in value]
    return value


def _is_secret(name: str, value: Any) -> bool:
    words = [word.lower() for word in _WORDS.findall(name)]
    if "token" in words and isinstance(value, str):  # a number is a token id
        return True
    return not _SECRET_WORDS.isdisjoint(words) or (
        "key" in words and not _OWNERS_OF_KEYS.isdisjoint(words)
    )


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _omitted(value: Any) -> dict[str, Any]:
    text = _json(value)
    digest = hashlib.blake2b(text, digest_size=DIGEST_BYTES).hexdigest()
    return {"omitted_bytes": len(text), "digest": digest}


def is_omitted(value: Any) -> bool:
    """Whether it stands for a long value."""
    return isinstance(value, Mapping) and value.keys() == {"omitted_bytes", "digest"}


def digest_of(value: Any) -> str:
    """The digest of a value, whether it is omitted or not."""
    return str((value if is_omitted(value) else _omitted(value))["digest"])


def _entries(values: dict[str, Any], depth: int) -> Iterator[tuple[dict[str, Any], str]]:
    """The entries `depth` objects deep, each with its object."""
    for name, value in values.items():
        if depth == 1:
            yield values, name
        elif isinstance(value, dict):
            yield from _entries(value, depth - 1)
