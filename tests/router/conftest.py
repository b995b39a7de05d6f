"""Tests that are coroutines run in a loop like the router's own, for a minute at most."""

import inspect

import pytest

from tests.support.router_rig import run


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}
    run(lambda: test(**given))
    return True
