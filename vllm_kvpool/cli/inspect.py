"""`kvpool inspect`: the contents of stores by namespace, and the loads of running engines.

In detail the contents are by kind of layer and by prompt, the loads by tier.
"""

import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_kvpool.cli.common.prompt import names_of
from vllm_kvpool.cli.common.stores import NamedStore, manifests
from vllm_kvpool.cli.common.tables import TextTable, age_text, size_text, texts
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.identity.keys import Namespace, ParsedKey
from vllm_kvpool.storage.base import ChunkUsage, Listing, NamespaceUsage, Store
from vllm_kvpool.storage.contents.manifest import Manifest, manifest_in
from vllm_kvpool.storage.file.store import DirectoryReader

if TYPE_CHECKING:
    from vllm_kvpool.cli.common.engine_metrics import Samples

MOST_PREFIXES = 5  # of a namespace
CHUNK_CHARS = 16  # of a chunk's hash
KIND_COLUMNS = (
    *("kind", "chunks", "cells", "bytes", "hits", "used", "pinned"),
    *("newest", "median", "oldest"),
)
PREFIX_COLUMNS = ("kind", "chunk", "tokens", "prompts", "bytes", "hits")
# A namespace begins with its model's name.
COLUMNS = ("namespace", "weights", "chunks", "tokens", "cells", "bytes", "hits")
OPTIONAL_COLUMNS = ("weights", "cells")
TIER_COLUMNS = ("namespace", "tier", "bytes", "hits", "evicted")
HITS_ELSEWHERE = "kvpool inspect --engine URL shows what a running engine has loaded from each tier"


def contents(stores: Sequence[NamedStore]) -> list[dict[str, Any]]:
    """Return the contents of each store as JSON: namespaces by bytes, the largest first."""
    return [{"store": each.url, **each.go_through(_content)} for each in stores]


def _content(store: Store) -> dict[str, Any]:
    if not isinstance(store, Listing):
        why = f"this kind of store cannot list what it holds; {HITS_ELSEWHERE}"
        return {"namespaces": None, "why": why}
    usage = sorted(store.usage(), key=lambda each: -each.nbytes)
    return {
        "namespaces": [
            _namespace_shown(each, manifest_in(store, Namespace(each.namespace))) for each in usage
        ],
        **_shares(store),
        **(
            {"no_hits": f"this kind of store does not count what is read of it; {HITS_ELSEWHERE}"}
            if any(each.num_hits is None for each in usage)
            else {}
        ),
    }


def _namespace_shown(usage: NamespaceUsage, manifest: Manifest | None) -> dict[str, Any]:
    num_chunks = _num_chunks(usage, manifest)
    return {
        "namespace": usage.namespace,
        "model": usage.namespace.partition("@")[0],
        **_described(manifest, num_chunks),
        "chunks": num_chunks or (None if usage.num_cells else 0),
        "cells": usage.num_cells,
        "bytes": usage.nbytes,
        "hits": usage.num_hits,
    }


def _num_chunks(usage: NamespaceUsage, manifest: Manifest | None) -> int:
    """Return the number of chunks without aliases, where chunks are known to have several cells."""
    if manifest is None:
        return usage.num_chunks
    try:
        names = names_of(manifest, ()).cell_names
    except ConfigError:
        return usage.num_chunks
    of_groups = (names.of_chunk(b"", group) for group in range(len(names.layer_groups)))
    return usage.num_chunks - (usage.num_single if min(map(len, of_groups)) > 1 else 0)


def host_memory() -> dict[str, Any]:
    """Return the JSON in place of host memory's contents, which belong to their engine."""
    why = f"host memory belongs to its engine, and is not seen from here; {HITS_ELSEWHERE}"
    return {"store": "host://", "namespaces": None, "why": why}


def engine_tiers(url: str, samples: "Samples") -> dict[str, Any]:
    """Return an engine's tiers by its metrics, as JSON (pure).

    Cells loaded from each tier since the start, and bytes of host memory.
    """
    info = pool_info(samples)
    if info is None:
        return {"engine": url, "tiers": None, "why": NO_POOL}
    namespace = info["namespace"]
    hits, evicted = (_by_tier(samples, f"{n}_cells_total") for n in ("hit", "evicted"))
    host = [value for each, value in samples.items() if each.name == "host_bytes"]
    tiers = {*hits, *evicted, *_by_tier(samples, "tier_up"), *(["host"] if host else [])}
    return {
        "engine": url,
        "tiers": [
            {
                "namespace": namespace,
                "model": namespace.partition("@")[0],
                "tier": tier,
                "bytes": int(sum(host)) if tier == "host" else None,
                "hits": hits[tier],
                "evicted": evicted[tier],
            }
            for tier in sorted(tiers)
        ],
        "why": "since its start; bytes are those of its host memory, of the rank that has most, "
        "and hits are cells; an engine counts none of it by kind of layer or by age",
    }


def pool_info(samples: "Samples") -> dict[str, str] | None:
    """Return the labels of an engine's `kvpool_info`: its namespace and chunk_tokens.

    The result is None without it.
    """
    found = (each for each, value in samples.items() if each.name == "info" and value)
    return next((dict(each.labels) for each in found), None)


NO_POOL = "it has no metric kvpool_info: start it with KVPoolConnector in --kv-transfer-config"


def _by_tier(samples: "Samples", name: str) -> Counter[str]:
    found: Counter[str] = Counter()
    for series, value in samples.items():
        if series.name == name:
            found[dict(series.labels)["tier"]] += int(value)
    return found


def _shares(store: Store) -> dict[str, Any]:
    owners = store.owners() if isinstance(store, DirectoryReader) else []
    owners.sort(key=lambda each: (-each.nbytes, each.owner))
    shown = [{"owner": o.owner, "cells": o.num_cells, "bytes": o.nbytes} for o in owners]
    return {"shares": shown} if shown else {}


def _described(manifest: Manifest | None, num_chunks: int) -> dict[str, Any]:
    """Return weights and tokens; no tokens with recurrent states, which few chunks have."""
    if manifest is None:
        return {"weights": None, "tokens": None}
    values = manifest.values
    kinds = values.get("kinds")
    num_groups = len(kinds) if isinstance(kinds, list) and kinds else 1
    has_states = any(group.get("state") for group in manifest.cells)
    tokens = 0 if has_states else num_chunks // num_groups * manifest.chunk_tokens
    return {
        "weights": str(values.get("weights", ""))
        + (f" ({manifest.weights_version})" * bool(manifest.weights_version)),
        "tokens": tokens or None,
    }


def details(named: NamedStore, progress: Callable[[], object] = lambda: None) -> dict[str, Any]:
    """Return the contents of one store by kind of layer and by prefix, as JSON.

    Calls `progress` for each chunk.
    """
    store = named.store
    if not isinstance(store, DirectoryReader):
        return {"details": "this kind of store does not say what it holds in detail"}
    tokens: dict[str, int] = {
        name: manifest.chunk_tokens for name, manifest in manifests([named]).items()
    }

    def chunks() -> Iterator[ChunkUsage]:
        for chunk in store.chunks():
            yield chunk
            progress()

    return described_chunks(chunks(), tokens, time.time_ns())


@dataclass(slots=True)
class _Node:
    """A chunk in the tree of prompts that begin alike."""

    chunk: ChunkUsage
    which: tuple[str, str]
    """Its namespace and kind of layer."""
    chunk_hash: str
    parent: "_Node | None"
    nbytes: int = 0
    """With those of the chunks behind it, as `hits` and `leaves`."""
    hits: int = 0
    children: int = 0
    leaves: int = 0


def described_chunks(
    chunks: Iterable[ChunkUsage], chunk_tokens: Mapping[str, int], now_ns: int
) -> dict[str, Any]:
    """Return the ages and hits by namespace and kind of layer, and the prefixes with most bytes.

    A prefix counts with the bytes behind it.
    `chunks` has parents before children (pure).
    """
    kinds: defaultdict[tuple[str, str], list[ChunkUsage]] = defaultdict(list)
    nodes: dict[int, _Node] = {}
    for chunk in chunks:
        try:
            name = ParsedKey.parse(chunk.key)
        except ValueError:  # of another release
            continue
        which = (chunk.namespace, name.span.layer_group)
        kinds[which].append(chunk)
        parent = nodes.get(chunk.parent) if chunk.parent is not None else None
        nodes[chunk.id] = _Node(chunk, which, name.chunk_hash.hex(), parent)
    return {
        "kinds": [_kind_shown(*each, now_ns) for each in sorted(kinds.items())],
        "prefixes": _prefixes(list(nodes.values()), chunk_tokens),
    }


def _kind_shown(
    which: tuple[str, str], chunks: Sequence[ChunkUsage], now_ns: int
) -> dict[str, Any]:
    ages = [(now_ns - each.written_ns) / 1e9 for each in chunks]
    nbytes = sum(each.nbytes for each in chunks)
    return {
        "namespace": which[0],
        "kind": which[1],
        "chunks": len(chunks),
        "cells": sum(each.num_cells for each in chunks),
        "bytes": nbytes,
        "hits": sum(each.num_hits for each in chunks),
        "used": sum(each.nbytes for each in chunks if each.num_hits) / nbytes,
        "pinned": sum(each.pinned_until_ns > now_ns for each in chunks),
        "newest_s": min(ages),
        "median_s": statistics.median(ages),
        "oldest_s": max(ages),
    }


def _prefixes(nodes: Sequence[_Node], chunk_tokens: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return the prefixes with most bytes in and after them.

    Each reaches to where its prompts part or end.
    """
    only_child: dict[int, _Node] = {}
    for node in reversed(nodes):  # children before parents
        node.nbytes += node.chunk.nbytes
        node.hits += node.chunk.num_hits
        node.leaves = node.leaves or 1
        if (parent := node.parent) is not None:
            parent.nbytes += node.nbytes
            parent.hits += node.hits
            parent.leaves += node.leaves
            parent.children += 1
            only_child[parent.chunk.id] = node
    roots = [node for node in nodes if node.parent is None]
    found = []
    taken: Counter[tuple[str, str]] = Counter()
    for root in sorted(roots, key=lambda node: -node.nbytes):
        if taken[root.which] >= MOST_PREFIXES:
            continue
        taken[root.which] += 1
        end = root
        while end.children == 1:
            end = only_child[end.chunk.id]
        namespace, kind = root.which
        tokens = (end.chunk.position + 1) * chunk_tokens.get(namespace, 0)
        found.append(
            {
                "namespace": namespace,
                "kind": kind,
                "chunk": end.chunk_hash,
                "tokens": tokens or None,
                "prompts": root.leaves,
                "bytes": root.nbytes,
                "hits": root.hits,
            }
        )
    return found


def as_text(found: Sequence[dict[str, Any]]) -> str:
    """Return the same figures as a table in text."""
    lines: list[str] = []
    for each in found:
        if "engine" in each:
            lines += _tiers_shown(each)
            continue
        lines.append(str(each["store"]))
        if each["namespaces"] is None:
            lines.append(f"  {each['why']}")
            continue
        if not each["namespaces"]:
            lines.append("  empty")
            continue
        rows = [[_shown(row, name) for name in COLUMNS] for row in each["namespaces"]]
        lines.append(TextTable("", COLUMNS, texts(rows), OPTIONAL_COLUMNS).as_text())
        for share in each.get("shares", ()):
            size = size_text(share["bytes"])
            lines.append(f"  share of {share['owner']}: {share['cells']} cells, {size}")
        if "no_hits" in each:
            lines.append(f"  no hits: {each['no_hits']}")
        lines += _details_shown(each)
    return "\n".join(lines)


def _shown(row: dict[str, Any], name: str) -> str:
    value = row[name]
    if value is None:
        return "?"
    return size_text(value) if name == "bytes" else str(value)


def _tiers_shown(engine: Mapping[str, Any]) -> Iterator[str]:
    yield str(engine["engine"])
    if engine["tiers"]:
        rows = [[_shown(row, name) for name in TIER_COLUMNS] for row in engine["tiers"]]
        yield TextTable("", TIER_COLUMNS, texts(rows)).as_text()
    yield f"  {engine['why']}"


def _details_shown(store: Mapping[str, Any]) -> Iterator[str]:
    if "details" in store:
        yield f"  {store['details']}"
    kinds, prefixes = store.get("kinds", ()), store.get("prefixes", ())
    for namespace in dict.fromkeys(row["namespace"] for row in (*kinds, *prefixes)):
        rows = [
            [
                *(row["kind"] or "-", row["chunks"], row["cells"]),
                *(size_text(row["bytes"]), row["hits"], f"{100 * row['used']:.0f} %"),
                row["pinned"],
                *(age_text(row[name]) for name in ("newest_s", "median_s", "oldest_s")),
            ]
            for row in kinds
            if row["namespace"] == namespace
        ]
        title = f"  {namespace} by kind of layer"
        yield TextTable(title, KIND_COLUMNS, texts(rows), ("cells", "median")).as_text()
        rows = [
            [
                *(row["kind"] or "-", row["chunk"][:CHUNK_CHARS]),
                *(row["tokens"] or "?", row["prompts"], size_text(row["bytes"]), row["hits"]),
            ]
            for row in prefixes
            if row["namespace"] == namespace
        ]
        title = f"  {namespace}: largest prefixes, with what comes after them"
        yield TextTable(title, PREFIX_COLUMNS, texts(rows)).as_text()
