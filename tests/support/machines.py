"""State machines of Hypothesis that reach what they are for."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture.engine import ConjectureRunner
from hypothesis.stateful import Rule, RuleBasedStateMachine, RuleStrategy


@contextmanager
def every_rule_runs(machine: type[RuleBasedStateMachine]) -> Iterator[None]:
    """Draw each example of a machine anew with all rules, and refuse a run without one of them.

    Hypothesis derives up to five examples from each that it draws, and leaves rules out of each.
    About nine of 50 examples were drawn, and no load ever ended in the scheduler's machine.
    `make fuzz` has thousands of examples and leaves the choice to Hypothesis.
    """
    if not settings().derandomize:
        yield
        return
    rules: list[Rule] = machine.setup_state().rules
    missing = {rule.function.__name__ for rule in rules}

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            missing.discard(function.__name__)
            return function(*args, **kwargs)

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ConjectureRunner, "generate_mutations_from", lambda self, data: None)
        patch.setattr(RuleStrategy, "_rule_is_enabled", RuleStrategy.is_valid)
        for rule in rules:
            patch.setattr(rule, "function", noted(rule.function))
        yield
    assert not missing, f"rules that never ran: {sorted(missing)}"
