"""Sizes in bytes as users write them."""

import re
from decimal import Decimal

from vllm_kvpool.errors import ConfigError

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{p}B": 1000 ** (i + 1) for i, p in enumerate("KMGT")}
_UNITS |= {f"{p}iB": 1024 ** (i + 1) for i, p in enumerate("KMGT")}
MAX_SHOWN = 40
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(value: str | int, what: str = "size") -> int:
    """Return bytes of "50GiB", "512MB", "4096" or 4096; KB, MB, … are decimal, KiB, MiB, … binary.

    `what` names the option in the error.
    """
    shown = repr(value) if isinstance(value, int) else repr(str(value)[:MAX_SHOWN])
    if isinstance(value, int) and not isinstance(value, bool):
        nbytes = Decimal(value)
    else:
        match = _SIZE.fullmatch(value) if isinstance(value, str) else None
        units = {name.lower(): factor for name, factor in _UNITS.items()}
        if match is None or match[2].lower() not in units:
            raise ConfigError(
                f"{what}: {shown} is not a size; "
                "write a number of bytes or one like 512MiB or 50GiB"
            )
        nbytes = Decimal(match[1]) * units[match[2].lower()]
    if nbytes < 1:
        raise ConfigError(f"{what}: {shown} must be at least one byte")
    return int(nbytes)
