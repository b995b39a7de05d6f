"""For every test there is."""

import gc
import logging
import os
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

COLLECTED: pytest.StashKey[set[str]] = pytest.StashKey()
"""The full names of all tests that a run has collected, those that it does not run among them."""

# What is imported and collected stays: to look for garbage in it took a tenth of that time.
gc.disable()

# Where only GPU tests run, it need not be installed.
if find_spec("hypothesis") is not None:
    from hypothesis import settings

    # No test is about how long one example takes, and a busy machine has taken all deadlines. The
    # same few examples each time, so that what fails fails again; many others are for `make fuzz`.
    settings.register_profile("kvpool", deadline=None, derandomize=True, max_examples=50)
    settings.register_profile(
        "fuzz", deadline=None, derandomize=False, print_blob=True, max_examples=300
    )
    settings.load_profile("kvpool")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[COLLECTED] = set()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    gc.freeze()
    gc.enable()


def pytest_itemcollected(item: pytest.Item) -> None:
    item.config.stash[COLLECTED].add(item.nodeid)


@pytest.fixture(autouse=True)
def log_of_its_own() -> Iterator[None]:
    """A connector logs with vLLM's handlers from its start; the next test sees records again."""
    yield
    ours = logging.getLogger("vllm_kvpool")
    ours.handlers, ours.propagate = [], True
    ours.setLevel(logging.NOTSET)


@pytest.fixture(autouse=True)
def priority_of_its_own() -> Iterator[None]:
    """A lower priority would be that of all tests that this process runs later."""
    before = os.nice(0)
    yield
    assert os.nice(0) == before, "this test has lowered the priority of its own process"
