"""The grammar of cell keys; the only module that builds or parses them.

    {model_name}@fmt:{12 hex}@dcp{r}of{n}@head:{h}@layers:{a}-{b}@{chunk_hash hex}
    `------- namespace ------'

`h` is the global KV head (of a recurrent state the unit), `a-b` the half-open global layer range;
with several layer groups it counts within one, and `@kind:{group}` follows. Where
`per_head_storage` is off, a rank's heads are one cell, `@rank:{r}of{n}`. The hash is the chunk's; a
state has that of the last chunk before it. A namespace's manifest is `{namespace}@manifest`;
aliases are `{namespace}@kind:alias@{hash hex}`. Keys hold `_SAFE` and `@:`, safe in every store.
"""

import hashlib
import re
from dataclasses import dataclass
from pathlib import PurePath
from typing import NewType, Self
from urllib.parse import quote, unquote

CellKey = NewType("CellKey", str)
Namespace = NewType("Namespace", str)

FORMAT_DIGEST_HEX = 12
MAX_MODEL_NAME_CHARS = 96
KEY_DIGEST_BYTES = 16
_DRAFT = "draft-"

_SAFE = r"[A-Za-z0-9._~%+-]"
_NAMESPACE = re.compile(rf"{_SAFE}{{1,{MAX_MODEL_NAME_CHARS}}}@fmt:[0-9a-f]{{{FORMAT_DIGEST_HEX}}}")
_KEY = re.compile(
    rf"(?P<namespace>{_NAMESPACE.pattern})"
    r"@dcp(?P<dcp_rank>\d+)of(?P<dcp_size>\d+)"
    r"@(?:head:(?P<head>\d+)|rank:(?P<rank>\d+)of(?P<rank_count>\d+))"
    r"@layers:(?P<layer_start>\d+)-(?P<layer_stop>\d+)"
    rf"(?:@kind:(?P<kind>{_SAFE}+))?"
    r"@(?P<chunk_hash>(?:[0-9a-f]{2})+)",
    re.ASCII,
)


def make_namespace(model_name: str, format_digest: str) -> Namespace:
    """Join a model name, escaped and bounded, with the first hex digits of a format digest.

    A name that is too long keeps its beginning and ends in a digest of the whole, so two long
    names never meet.
    """
    # A "~" marks a shortened name and a lone "%" the empty one; escaping leaves neither.
    escaped = quote(model_name, safe="+", errors="surrogatepass").replace("~", "%7E") or "%"
    if len(escaped) > MAX_MODEL_NAME_CHARS:
        tail = (
            "~"
            + hashlib.blake2b(model_name.encode(errors="surrogatepass"), digest_size=8).hexdigest()
        )
        escaped = escaped[: MAX_MODEL_NAME_CHARS - len(tail)] + tail
    namespace = f"{escaped}@fmt:{format_digest[:FORMAT_DIGEST_HEX]}"
    assert _NAMESPACE.fullmatch(namespace), namespace
    return Namespace(namespace)


def name_of_model(model: str) -> str:
    """Return a model's name in namespaces: the last part of its name or path.

    A snapshot in Hugging Face's cache has its repository's name, which other engines may be given.
    """
    path = PurePath(model)
    repository = path.parent.parent.name
    if path.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.rpartition("--")[2]
    return path.name or model


def manifest_key(namespace: Namespace) -> str:
    """Return the key of a namespace's manifest."""
    return f"{namespace}@manifest"


def is_manifest(key: str) -> bool:
    """Return True if a key is a namespace's manifest's: no cell, though it lies among them."""
    namespace = namespace_of(key)
    return namespace is not None and key == manifest_key(namespace)


def alias_prefix(namespace: Namespace) -> str:
    """Return the common beginning of the keys of a namespace's aliases.

    To stores an alias is the cell of a chunk in a layer group of its own.
    """
    return f"{namespace}@kind:alias@"


def with_weights(namespace: Namespace, weights_version: str) -> Namespace:
    """Return the namespace under another version of the weights; "" is the one at the start."""
    if not weights_version:
        return namespace
    head = namespace[:-FORMAT_DIGEST_HEX]
    digest = hashlib.blake2b(
        f"{namespace}\n{weights_version}".encode(), digest_size=FORMAT_DIGEST_HEX // 2
    )
    return Namespace(head + digest.hexdigest())


@dataclass(frozen=True, slots=True)
class HeadShard:
    """The cell holds one global KV head."""

    head: int

    def __str__(self) -> str:
        return f"head:{self.head}"


@dataclass(frozen=True, slots=True)
class RankShard:
    """The cell holds all heads of rank `rank` of `count` distinct (not replicated) ranks."""

    rank: int
    count: int

    def __str__(self) -> str:
        return f"rank:{self.rank}of{self.count}"


@dataclass(frozen=True, slots=True)
class ContextRank:
    """A rank's place in decode context parallelism, whose ranks hold different tokens.

    Ranks of prefill context parallelism hold the same tokens, so keys do not name them.
    """

    dcp_rank: int = 0
    dcp_size: int = 1

    def __str__(self) -> str:
        return f"dcp{self.dcp_rank}of{self.dcp_size}"


@dataclass(frozen=True, slots=True)
class LayerSpan:
    """A half-open range of global layers of one layer group (`layer_group` "" if there is one)."""

    start: int
    stop: int
    layer_group: str = ""

    def __post_init__(self) -> None:
        assert 0 <= self.start < self.stop, self

    def __len__(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        suffix = f"@kind:{quote(self.layer_group, safe='')}" if self.layer_group else ""
        return f"layers:{self.start}-{self.stop}{suffix}"


def chunk_id_of(namespace: Namespace, chunk_hash: str, layer_group: str = "") -> str:
    """Return the id of all cells of a chunk in a layer group; `chunk_hash` in hexadecimal."""
    before, after = around_hash(namespace, layer_group)
    return f"{before}{chunk_hash}{after}"


def around_hash(namespace: Namespace, layer_group: str = "") -> tuple[str, str]:
    """Return the parts of chunk ids before and after the chunk's hash."""
    return f"{namespace[-FORMAT_DIGEST_HEX:]}-", f"-{layer_group}" if layer_group else ""


def layer_group_of(chunk_id: str) -> str:
    """Return the layer group in a chunk id, without the drafter's identity if it is a drafter's."""
    layer_group = chunk_id.partition("-")[2].partition("-")[2]
    return layer_group.rpartition("-")[0] if layer_group.startswith(_DRAFT) else layer_group


def draft_group(form: str) -> str:
    """Return the layer group of a drafter's layers of one form, without the drafter's identity.

    Its whole name is `draft-{form}-{drafter}`.
    """
    return _DRAFT + form


def of_drafter(layer_group: str, drafter: str) -> str:
    """Return a layer group with the drafter's identity, in hexadecimal.

    A model's own stays as it is.
    """
    return f"{layer_group}-{drafter}" if layer_group.startswith(_DRAFT) else layer_group


def chunk_id_of_key(key: str) -> str:
    """Return the chunk id of a key; a string that is no key of ours stands for itself."""
    namespace = namespace_of(key)
    if namespace is None:
        return key
    head, _, chunk_hash = key.rpartition("@")
    return chunk_id_of(namespace, chunk_hash, unquote(head.partition("@kind:")[2]))


def hash_of_key(key: str) -> str:
    """Return the hash of a cell's chunk, in hexadecimal."""
    return key.rpartition("@")[2]


def key_with_prefix(key_prefix: str, chunk_hash: str) -> CellKey:
    """Return the key of one chunk's cell; `chunk_hash` in hexadecimal."""
    return CellKey(key_prefix + chunk_hash)


class KeyMaker:
    """Builds the keys of one namespace for one context-parallel rank."""

    __slots__ = ("_head", "context", "namespace")

    def __init__(self, namespace: Namespace, context: ContextRank) -> None:
        self.namespace = namespace
        self.context = context
        self._head = f"{namespace}@{context}@"

    def with_weights(self, weights_version: str) -> "KeyMaker":
        """Return the same cells' keys under another version of the weights."""
        if not weights_version:
            return self
        return KeyMaker(with_weights(self.namespace, weights_version), self.context)

    def key_prefix(self, shard: HeadShard | RankShard, span: LayerSpan) -> str:
        """Return the common beginning of the keys of a head (or rank) and a span."""
        return f"{self._head}{shard}@{span}@"

    def key(self, shard: HeadShard | RankShard, span: LayerSpan, chunk_hash: bytes) -> CellKey:
        """Name the cell of one chunk, one head (or rank) and one span of layers."""
        return key_with_prefix(self.key_prefix(shard, span), chunk_hash.hex())


@dataclass(frozen=True, slots=True)
class ParsedKey:
    """The parts of a key, for tools and tests; the data path never parses keys."""

    namespace: Namespace
    context: ContextRank
    shard: HeadShard | RankShard
    span: LayerSpan
    chunk_hash: bytes

    @classmethod
    def parse(cls, key: str) -> Self:
        """Read a key back; ValueError if it is not one."""
        match = _KEY.fullmatch(key)
        if match is None or int(match["layer_start"]) >= int(match["layer_stop"]):
            raise ValueError(f"not a cell key: {key[:200]!r}")
        get = match.group
        context = ContextRank(int(get("dcp_rank")), int(get("dcp_size")))
        shard = (
            HeadShard(int(get("head")))
            if get("head") is not None
            else RankShard(int(get("rank")), int(get("rank_count")))
        )
        span = LayerSpan(
            int(get("layer_start")), int(get("layer_stop")), unquote(get("kind") or "")
        )
        return cls(
            Namespace(get("namespace")), context, shard, span, bytes.fromhex(get("chunk_hash"))
        )


def namespace_of(key: str) -> Namespace | None:
    """Return the namespace of a key; None for a string that is no key of ours."""
    match = _NAMESPACE.match(key)
    return Namespace(match.group()) if match and key[match.end() :].startswith("@") else None


def is_namespace(name: str) -> bool:
    """Return True if a name is that of a namespace."""
    return _NAMESPACE.fullmatch(name) is not None


def key_digest(key: str) -> bytes:
    """Return a digest for the cell's header: it shows that an object has another key's content."""
    return hashlib.blake2b(key.encode(), digest_size=KEY_DIGEST_BYTES).digest()
