"""From where cells are brought to where, as far as a configuration tells (pure).

The near tier is one that outlives processes and is shared by them, so that an engine finds there
what was brought before it could serve: files. The far ones stand behind it and cross a network. A
list without either has nothing to bring: nothing is started for it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

NEAR = "file"
FAR = ("mooncake", "s3")
CONNECTOR = "KVPoolConnector"


class Route(NamedTuple):
    """Places in a list of tiers."""

    near: int
    far: tuple[int, ...]


def route_of(schemes: Sequence[str]) -> Route | None:
    """How cells get nearer among tiers of such schemes, nearest first; None if they cannot."""
    if NEAR not in schemes:
        return None
    near = schemes.index(NEAR)
    far = tuple(i for i, scheme in enumerate(schemes) if i > near and scheme in FAR)
    return Route(near, far) if far else None


def scheme_of(url: str) -> str:
    """What kind of tier a url names."""
    return url.partition(":")[0].lower()


class _Connector(msgspec.Struct):
    kv_connector: str = ""
    kv_connector_extra_config: dict[str, Any] = {}


def pool_options(kv_transfer_config: str) -> Mapping[str, Any] | None:
    """The pool's options in what an engine is started with; None if there is no pool in it.

    It may be one of several connectors. ValueError for what is no such configuration.
    """
    try:
        given = msgspec.json.decode(kv_transfer_config, type=_Connector)
        inside = given.kv_connector_extra_config.get("connectors", [])
        every = [given, *msgspec.convert(inside, list[_Connector])]
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"no configuration of a connector: {error}") from None
    ours = (each for each in every if each.kv_connector == CONNECTOR)
    return next((each.kv_connector_extra_config for each in ours), None)
