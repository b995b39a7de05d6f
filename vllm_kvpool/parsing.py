"""Exceptions of parsers. `errors.py` has the others, and is imported where msgspec is not."""

import msgspec

UNREADABLE = (ValueError, RecursionError, msgspec.DecodeError)
"""Exceptions of the parsers of JSON, TOML and MessagePack for input that is malformed or nests too
deeply. msgspec's own error is a ValueError since 0.21 only."""
