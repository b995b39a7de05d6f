"""Which tiers cells are prefetched from, and to which (pure).

The near tier is `file://`, which processes share and which outlives them, so that an engine finds
there what was prefetched before it could serve. The far tiers stand behind it and cross a network.
Without both there is nothing to prefetch.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

NEAR = "file"
FAR = ("mooncake", "s3")
CONNECTOR = "KVPoolConnector"


class Route(NamedTuple):
    """Positions in a list of tiers."""

    near: int
    far: tuple[int, ...]


def route_of(schemes: Sequence[str]) -> Route | None:
    """The route among tiers of these schemes, nearest first; None if there is none."""
    if NEAR not in schemes:
        return None
    near = schemes.index(NEAR)
    far = tuple(i for i, scheme in enumerate(schemes) if i > near and scheme in FAR)
    return Route(near, far) if far else None


def scheme_of(url: str) -> str:
    """The scheme of a store url."""
    return url.partition(":")[0].lower()


class _Connector(msgspec.Struct):
    kv_connector: str = ""
    kv_connector_extra_config: dict[str, Any] = {}


def pool_options(kv_transfer_config: str) -> Mapping[str, Any] | None:
    """The options of KVPoolConnector in an engine's `--kv-transfer-config`; None without one.

    It may be one of several connectors. ValueError if the text is no such configuration.
    """
    try:
        given = msgspec.json.decode(kv_transfer_config, type=_Connector)
        inside = given.kv_connector_extra_config.get("connectors", [])
        every = [given, *msgspec.convert(inside, list[_Connector])]
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"no configuration of a connector: {error}") from None
    ours = (each for each in every if each.kv_connector == CONNECTOR)
    return next((each.kv_connector_extra_config for each in ours), None)
