"""Fixtures of rigs, shared with tests/faults."""

from tests.faults.conftest import (  # noqa: F401 - fixtures
    _library,
    _models,
    library,
    workshop,
)
