"""Layer groups as plain values, so that tools can name an engine's cells without the engine."""

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_kvpool.layout.topology import AttentionWindow, Context, LayerGroup, Topology


def described(layer_groups: Sequence[LayerGroup]) -> tuple[dict[str, Any], ...]:
    """Return the values that decide the names of each layer group's cells, as JSON."""
    return tuple(
        {
            "kind": group.name,
            "heads": group.topology.num_heads,
            "tp": group.topology.tp_size,
            "stages": [list(stage) for stage in group.topology.stages],
            "span": group.topology.layer_span,
            "per_head": group.topology.per_head,
            "dcp": group.topology.context.dcp_size,
            "row_bytes": group.row_bytes,
            "window": [group.window.sliding, group.window.local],
            **({"state": True} if group.is_state else {}),
            **({"row_tokens": group.tokens_per_row} if group.tokens_per_row > 1 else {}),
            **({"tail": group.tail_tokens} if group.tail_tokens else {}),
        }
        for group in layer_groups
    )


def from_description(groups: Sequence[Mapping[str, Any]]) -> list[LayerGroup]:
    """Return the layer groups of a description; ValueError or KeyError if it is none."""
    return [
        LayerGroup(
            Topology(
                num_heads=int(group["heads"]),
                tp_size=int(group["tp"]),
                stages=tuple((int(start), int(stop)) for start, stop in group["stages"]),
                layer_span=int(group["span"]),
                per_head=bool(group["per_head"]),
                layer_group=str(group["kind"]),
                context=Context(dcp_size=int(group["dcp"])),
            ),
            int(group["row_bytes"]),
            AttentionWindow(*map(int, group["window"])),
            is_state=bool(group.get("state", False)),
            tokens_per_row=int(group.get("row_tokens", 1)),
            tail_tokens=int(group.get("tail", 0)),
        )
        for group in groups
    ]
