"""Fixtures and settings of all tests."""

import faulthandler
import gc
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import pytest

COLLECTED: pytest.StashKey[set[str]] = pytest.StashKey()
"""The full names of all tests that a run has collected, those that it does not run among them."""
STDERR: pytest.StashKey[int] = pytest.StashKey()
"""The standard error of the process itself, not of a test."""
GRACE_S = 60.0
"""Time that a test may exceed its limit by, before its process is ended."""
EXITS = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
"""Signals that a shell's background and `nohup` ignore; commands that tests start would inherit it,
and not end by the signals that tests send them."""

# Tensors of tests are small, and a process has less than a core: threads of OpenMP would wait for
# each other in every operator. torch reads the variable at its import, and so do child processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")

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


def pytest_addoption(parser: pytest.Parser) -> None:
    # On a machine for GPU tests it need not be installed either.
    if find_spec("pytest_timeout") is None:
        parser.addini("timeout", "not kept without pytest-timeout")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[COLLECTED] = set()
    assert sys.__stderr__ is not None
    config.stash[STDERR] = os.dup(sys.__stderr__.fileno())
    for number, handler in EXITS.items():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Refuse parameters that are a set: each process orders its strings otherwise, and xdist runs
    nothing unless all its processes have collected the same tests in the same order."""
    for mark in metafunc.definition.iter_markers("parametrize"):
        values = mark.kwargs.get("argvalues", *mark.args[1:2])
        if isinstance(values, set | frozenset):
            pytest.fail(f"{metafunc.definition.nodeid}: sort the set of parameters", pytrace=False)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Have vLLM look at a model's class here, where it starts a Python for it, which imports vLLM:
    10 s of a core for each class that no run of this release has looked at before."""
    registry = sys.modules.get("vllm.model_executor.models.registry")
    if registry is not None:
        registry._run_in_subprocess = quietly  # type: ignore[attr-defined]


def quietly(look: Callable[[], object]) -> object:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return look()


def end_if_hung(item: pytest.Item) -> None:
    """Ends this process, with all stacks, where the test is not done a minute after its limit."""
    mark = item.get_closest_marker("timeout")
    limit_s = float(mark.args[0] if mark else item.config.getini("timeout"))
    faulthandler.dump_traceback_later(limit_s + GRACE_S, file=item.config.stash[STDERR], exit=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """pytest-timeout raises in the main thread: no end to a test that waits in C, or catches it."""
    end_if_hung(item)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Once a test has failed, pytest stops this timer and pytest-timeout its own."""
    end_if_hung(item)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Have machines of Hypothesis reach what they are for."""
    machine = getattr(getattr(item, "obj", None), "_hypothesis_state_machine_class", None)
    if machine is None:
        return (yield)
    from tests.support.machines import every_rule_runs

    with every_rule_runs(machine):
        return (yield)


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
