"""The manifest of a namespace: the values behind its digest, for display only.

An object of `MANIFEST_BYTES` under `manifest_key(namespace)`: a cell's header, JSON, then spaces:

    {"kvpool_manifest": 1, "namespace": "...", "first": "...", "weights_version": "",
     "cells": [...], "values": {...}}

`first` is the namespace of the weights that the engine started with, `weights_version` is "" for
these weights. `values` were digested for the namespace; names and order may change between
releases. Long values become `{"omitted_bytes": n, "digest": "..."}`, possible secrets `HIDDEN`.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec

from vllm_kvpool.config import MAX_CHUNK_TOKENS
from vllm_kvpool.identity.keys import Namespace, key_digest, manifest_key
from vllm_kvpool.parsing import UNREADABLE
from vllm_kvpool.storage.base import GetOutcome, Store, map_buffer
from vllm_kvpool.storage.contents.cell_format import HEADER_BYTES, verify, write_header

MANIFEST_BYTES = 16 << 10
MAX_CELLS = 1 << 20  # of a chunk and layer group that a manifest may name
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


ABSENT = "(absent)"
MAX_SHOWN_CHARS = 200
CHARS_BEFORE = 40  # shown of what is equal before the first difference

# What to change so that a value is the same in both engines, by the beginning of its name.
REMEDIES = {
    "alone": "an option or code of this engine cannot be compared; its log names it",
    "architecture": "use the same model",
    "attn_temperature_tuning": "set max_model_len on one side of 32768 in both engines",
    "byte_order": "machines of unlike byte order share nothing",
    "chunk_tokens": "set chunk_tokens in kv_connector_extra_config to the same value",
    "code": "run the same plugins and classes of models and workers; its parts say which differ",
    "configuration": "use the same model",
    "decode_context_parallel_size": "set it to the same number in both engines",
    "device": "run quantised models, and quantised KV, on devices of one kind",
    "encrypted_cells": "give both engines encryption_key_file, or none",
    "engine": "start both engines with the same value of this option of vLLM",
    "environment": "set this environment variable of vLLM alike",
    "files": "use the same files of the model",
    "format": "run one release of vllm-kvpool",
    "layer_span": "set layer_span in kv_connector_extra_config to the same value",
    "kinds": "start both engines with the same dtype and kv_cache_dtype; if windows differ, run "
    "one release of vLLM",
    "namespace": "set namespace in kv_connector_extra_config to the same value",
    "rank_cells_of_tp": "set per_head_storage to true, or the same tensor_parallel_size",
    "remote_code": "use the same code of the model; repositories stand before the colon",
    "rope": "use the same rope options, and one release of vLLM if `scale` differs; max_model_len "
    "counts where it exceeds the model's own",
    "scheme": "run one release of vllm-kvpool",
    "weights": "load the same weights; set weights_id for the same weights in other files",
    "weights_version": "load the same weights: one engine's were changed while it ran",
}


class Manifest(NamedTuple):
    """The description of a namespace."""

    namespace: Namespace
    first: Namespace
    weights_version: str
    """Empty for the weights of the start."""
    values: Mapping[str, Any]
    cells: tuple[Mapping[str, Any], ...] = ()
    """The parts of cells' names in the engine that wrote the manifest: `layout/description.py`.
    Empty if that does not fit."""

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a chunk; 0 if the manifest does not say."""
        given = self.values.get("chunk_tokens")
        return given if isinstance(given, int) and 0 < given <= MAX_CHUNK_TOKENS else 0


def write_manifest(manifest: Manifest) -> bytes:
    """Return the bytes of a manifest."""
    fields = {"kvpool_manifest": VERSION, **manifest._asdict(), "values": fitted(manifest.values)}
    text = _json(fields)
    if len(text) > MANIFEST_BYTES - HEADER_BYTES:  # a model of very many groups of layers
        text = _json({**fields, "cells": ()})
    content = bytearray(HEADER_BYTES) + text.ljust(MANIFEST_BYTES - HEADER_BYTES)
    assert len(content) == MANIFEST_BYTES, len(text)
    write_header(memoryview(content), key_digest(manifest_key(manifest.namespace)))
    return bytes(content)


def fitted(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values without secrets; the deepest and longest are omitted until they fit."""
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
        stored = msgspec.convert(json.loads(bytes(content[HEADER_BYTES:])), _Stored)
    except UNREADABLE:
        return None
    if (stored.kvpool_manifest, stored.namespace) != (VERSION, namespace):
        return None
    first, cells = Namespace(stored.first), _cells_of(stored.cells)
    return Manifest(namespace, first, stored.weights_version, stored.values, cells)


class _Stored(msgspec.Struct):
    """The JSON of a manifest."""

    kvpool_manifest: int
    namespace: str
    first: str
    weights_version: str
    values: dict[str, Any]
    cells: Any = ()


_Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_CELLS)]
_Stop = Annotated[int, msgspec.Meta(ge=0, le=MAX_CELLS)]  # 0: the first stages lack the group


class _CellGroup(msgspec.Struct):
    """An entry of `Manifest.cells`, as `layout/description.py` writes it."""

    kind: str
    heads: _Count
    tp: _Count
    stages: Annotated[list[tuple[int, _Stop]], msgspec.Meta(min_length=1)]
    span: _Count
    per_head: bool
    dcp: _Count
    row_bytes: int
    window: tuple[int, int]
    state: bool = False
    row_tokens: _Count = 1
    tail: int = 0


def _cells_of(given: Any) -> tuple[Mapping[str, Any], ...]:
    """Return the parts of cells' names; none if they are unknown, or would be a flood of names."""
    try:
        groups = msgspec.convert(given, list[_CellGroup])
    except UNREADABLE:
        return ()
    for group in groups:
        stops = [stop for _, stop in group.stages]
        follow = [start for start, _ in group.stages] == [0, *stops[:-1]] and stops == sorted(stops)
        if not follow or not 0 < group.heads * max(stops) * group.dcp <= MAX_CELLS:
            return ()
    return tuple(given)


def manifest_in(store: Store, namespace: Namespace) -> Manifest | None:
    """Read the manifest of a namespace from a store; None if it has none. Raises StoreError."""
    buffer = map_buffer(MANIFEST_BYTES)
    store.register(buffer)
    [outcome] = store.get([manifest_key(namespace)], [buffer])
    store.unregister(buffer)
    return read_manifest(buffer.view, namespace) if outcome is GetOutcome.OK else None


def shown(value: Any, name: str = "") -> Any:
    """Return a value without what may be a secret, by its name or in a URL."""
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


def _is_omitted(value: Any) -> bool:
    """Return True if a value stands for a long one that was left out."""
    return isinstance(value, Mapping) and value.keys() == {"omitted_bytes", "digest"}


def _digest_of(value: Any) -> str:
    """Return the digest of a value, whether it is omitted or not."""
    return str((value if _is_omitted(value) else _omitted(value))["digest"])


def _entries(values: dict[str, Any], depth: int) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the entries `depth` objects deep, each with its object."""
    for name, value in values.items():
        if depth == 1:
            yield values, name
        elif isinstance(value, dict):
            yield from _entries(value, depth - 1)


# Why two namespaces are two: the values in which their manifests differ.


class Difference(NamedTuple):
    """A value that two namespaces do not share; `ABSENT` where one has none."""

    name: str  # the names that lead to it, joined by dots
    first: Any
    second: Any

    @property
    def remedy(self) -> str:
        """Advice that makes the value equal in both engines."""
        return REMEDIES.get(self.name.partition(".")[0], "make this value the same")


class Explanation(NamedTuple):
    """Two namespaces and the values in which they differ."""

    first: Namespace
    second: Namespace
    differences: tuple[Difference, ...]


def explain(first: Manifest, second: Manifest) -> Explanation:
    """Return the differences of two namespaces, or engines of one, by the values' names."""
    compared = [
        {**each.values, "weights_version": each.weights_version} for each in (first, second)
    ]
    if first.cells and second.cells:
        for values, each in zip(compared, (first, second), strict=True):
            values |= cut_of(each)
    return Explanation(first.namespace, second.namespace, tuple(_differences("", *compared)))


def cut_of(manifest: Manifest) -> dict[str, Any]:
    """Return the values that say how an engine cuts KV into cells.

    Keys contain them, namespaces do not.
    `layer_span` counts layers, by kind of layer if there are several; with stages of pipeline
    parallelism that end within a span, it names these ends, too.
    """
    if not manifest.cells:  # of an engine that has not started
        return {}
    spans: dict[str, Any] = {}
    for group in manifest.cells:
        span, stages = int(group["span"]), group["stages"]
        edges = {edge for stage in stages for edge in stage if edge % span}
        within = sorted(edges - {max(stop for _, stop in stages)})
        spans[str(group["kind"])] = f"{span}, and ends at {within}" if within else span
    dcp = {int(group["dcp"]) for group in manifest.cells}
    return {
        "layer_span": spans[""] if spans.keys() == {""} else spans,
        "decode_context_parallel_size": max(dcp),
    }


def is_of_same_model(one: Manifest, other: Manifest) -> bool:
    """Return True if two namespaces are of one model."""
    models = {each.namespace.partition("@")[0] for each in (one, other)}
    return one.namespace != other.namespace and len(models) == 1


def nearest(one: Manifest, others: Sequence[Manifest]) -> Explanation | None:
    """Return the other namespace that differs in the fewest values; None if there is no other."""
    found = [explain(one, other) for other in others if other.namespace != one.namespace]
    return min(found, key=lambda each: len(each.differences), default=None)


def short(value: Any) -> str:
    """Return a value for people, cut to `MAX_SHOWN_CHARS`."""
    text = _text(value)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."


def short_pair(first: Any, second: Any) -> tuple[str, str]:
    """Return two texts that show people how two values differ.

    Of lists and objects they show the differing parts alone, of long texts the place where they
    part. The two texts are never equal.
    """
    parts = _parts(first, second)
    one, other = map(_text, parts)
    if one == other:  # a number, and a text of its digits
        one, other = map(json.dumps, parts)
    if max(len(one), len(other)) > MAX_SHOWN_CHARS:
        pairs = zip(one, other, strict=False)
        part = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        start = max(0, part - CHARS_BEFORE)
        ellipsis = "..." if start else ""
        return f"{ellipsis}{short(one[start:])}", f"{ellipsis}{short(other[start:])}"
    return one, other


def _parts(first: Any, second: Any) -> tuple[Any, Any]:
    """Return the parts in which two values differ."""
    if _is_object(first) and _is_object(second):
        names = {**first, **second}
        pairs = {name: (first.get(name, ABSENT), second.get(name, ABSENT)) for name in names}
        parts = {name: _parts(*pair) for name, pair in pairs.items() if _differ(*pair)}
        if parts:
            return {n: one for n, (one, _) in parts.items()}, {
                n: two for n, (_, two) in parts.items()
            }
    if not (isinstance(first, list) and isinstance(second, list)):
        return first, second
    if len(first) == len(second):
        pairs_of = [_parts(*pair) for pair in zip(first, second, strict=True) if _differ(*pair)]
        firsts, seconds = [one for one, _ in pairs_of], [two for _, two in pairs_of]
    else:
        in_first, in_second = set(map(_digest_of, first)), set(map(_digest_of, second))
        firsts = [each for each in first if _digest_of(each) not in in_second]
        seconds = [each for each in second if _digest_of(each) not in in_first]
    if not firsts and not seconds:  # one of them repeats elements
        return first, second
    if equal := len(first) - len(firsts):
        firsts.append(f"({equal} more are equal)")
    if equal := len(second) - len(seconds):
        seconds.append(f"({equal} more are equal)")
    return firsts, seconds


def _differ(first: Any, second: Any) -> bool:
    return _digest_of(first) != _digest_of(second)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _differences(name: str, first: Any, second: Any) -> Iterator[Difference]:
    if not _differ(first, second):
        return
    if _is_object(first) and _is_object(second):
        for each in sorted({*first, *second}):
            inner = f"{name}.{each}" if name else each
            yield from _differences(inner, first.get(each, ABSENT), second.get(each, ABSENT))
    else:
        yield Difference(name, first, second)


def _is_object(value: Any) -> bool:
    return isinstance(value, Mapping) and not _is_omitted(value)
