"""`kvpool inspect`: what stores hold, by namespace."""

from collections.abc import Sequence
from typing import Any

from vllm_kvpool.cli.stores import NamedStore
from vllm_kvpool.cli.tables import TextTable, size_text, texts
from vllm_kvpool.identity.keys import Namespace
from vllm_kvpool.storage.base import DetailedListing, Listing
from vllm_kvpool.storage.manifest import Manifest, manifest_in

COLUMNS = ("namespace", "model", "weights", "chunks", "tokens", "cells", "bytes")


def contents(stores: Sequence[NamedStore]) -> list[dict[str, Any]]:
    """What each store holds, as JSON: namespaces by bytes, the largest first."""
    return [{"store": each.url, **_content(each)} for each in stores]


def _content(named: NamedStore) -> dict[str, Any]:
    if not isinstance(named.store, Listing):
        return {"namespaces": None, "why": "this kind of store cannot list what it holds"}
    usage = sorted(named.store.usage(), key=lambda each: -each.nbytes)
    return {
        "namespaces": [
            {
                "namespace": each.namespace,
                **_described(manifest_in(named.store, Namespace(each.namespace)), each.num_chunks),
                "chunks": each.num_chunks or None,
                "cells": each.num_cells,
                "bytes": each.nbytes,
            }
            for each in usage
        ],
        **_shares(named),
    }


def _shares(named: NamedStore) -> dict[str, Any]:
    owners = named.store.owners() if isinstance(named.store, DetailedListing) else []
    owners.sort(key=lambda each: (-each.nbytes, each.owner))
    shown = [{"owner": o.owner, "chunks": o.num_chunks, "bytes": o.nbytes} for o in owners]
    return {"shares": shown} if shown else {}


def _described(manifest: Manifest | None, num_chunks: int) -> dict[str, Any]:
    if manifest is None:
        return {"model": None, "weights": None, "tokens": None}
    values = manifest.values
    num_groups = max(1, len(values.get("kinds") or ()))
    tokens = num_chunks // num_groups * int(values.get("chunk_tokens") or 0)
    return {
        "model": str(manifest.namespace).partition("@")[0],
        "weights": str(values.get("weights", "")) + (f" ({manifest.epoch})" * bool(manifest.epoch)),
        "tokens": tokens or None,
    }


def as_text(found: Sequence[dict[str, Any]]) -> str:
    """The same as a table."""
    lines = []
    for each in found:
        lines.append(str(each["store"]))
        if each["namespaces"] is None:
            lines.append(f"  {each['why']}")
            continue
        if not each["namespaces"]:
            lines.append("  empty")
            continue
        rows = [[_shown(row, name) for name in COLUMNS] for row in each["namespaces"]]
        lines.append(TextTable("", COLUMNS, texts(rows)).as_text())
        for share in each.get("shares", ()):
            size = size_text(share["bytes"])
            lines.append(f"  share of {share['owner']}: {share['chunks']} chunks, {size}")
    return "\n".join(lines)


def _shown(row: dict[str, Any], name: str) -> str:
    value = row[name]
    if value is None:
        return "?"
    return size_text(value) if name == "bytes" else str(value)
