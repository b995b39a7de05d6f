"""Rigs and engines, as in tests/faults."""

from tests.faults.conftest import (  # noqa: F401 - fixtures
    _library,
    _models,
    engines,
    library,
    llama,
    workshop,
)
