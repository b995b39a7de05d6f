"""What parsers raise; apart from the other errors, which are imported where msgspec is not."""

import msgspec

UNREADABLE = (ValueError, RecursionError, msgspec.DecodeError)
"""What parsers of JSON, TOML and MessagePack raise for what is none, or nests too deeply; msgspec's
own is a ValueError since 0.21 only."""
