"""Examples of a router's controller, written as scripts of `Steps`.

    prompt that fails {failed|lost} is computed elsewhere
        with max_lost=3
        fleet a b / d; ask r -> prefill r a
        prefilled r a {} -> probe a, prefill r b; phase r prefilling

A line that is not indented names an example. `{x|y}` in the name makes one example of each, with
`x` for `{}` in the steps (`{x: step|y: step}`: with `step`). `with` sets fields of Settings,
OverloadConfig and PlannerConfig. A deeper line continues the one before; a line with `#` is a
comment. A step is a verb of `VERBS`; the invariants are checked after each.

`-> a, b` compares the step's actions, `-> ... a` finds `a` among them, `-> no a` finds no action of
that name, `-> nothing` no action at all. `each 0-3 x: ask r$; began r$` repeats its steps with 0,
1, 2, 3 and x for `$`. `assert` takes an expression over the names in `_check`.
"""

import ast
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from msgspec import Struct

from tests.support.router_steps import Steps, spec
from tests.support.scripts import arguments_of, unrolled
from vllm_kvpool.router.control.events import (
    EVERYTHING,
    Abort,
    Action,
    Added,
    Decode,
    DecodeEnded,
    Load,
    Mode,
    ModelsListed,
    Outcome,
    Prefill,
    PrefillEnded,
    Refuse,
    Retire,
)
from vllm_kvpool.router.control.handovers import ExpectedPrompts
from vllm_kvpool.router.control.requests import RequestId
from vllm_kvpool.router.control.settings import OverloadConfig, PlannerConfig, Settings
from vllm_kvpool.router.control.states import ReplicaId, Role, State


class Example(NamedTuple):
    name: str
    lines: tuple[str, ...]

    def play(self) -> Steps:
        """Take all of its steps. AssertionError at the first that comes out otherwise."""
        wanted = " ".join(each.removeprefix("with ") for each in self.lines if _is_with(each))
        steps = _made(arguments_of(wanted.split())[1])
        for line in self.lines:
            for step in [] if _is_with(line) else unrolled(line):
                try:
                    take(steps, step)
                except Exception as error:
                    error.add_note(f"{self.name}: {step}")
                    raise
        return steps


def examples(text: str, *, given: str = "") -> pytest.MarkDecorator:
    """A mark: the test's parameter `example` is each one of the text. `given`: set for all."""
    found: list[Example] = []
    text = re.sub(r"\n {5,}", " ", text.strip())
    for part in re.split(r"\n(?=\S)", text):
        name, *lines = part.splitlines()
        lines = [f"with {given}", *(each.strip() for each in lines if "#" not in each)]
        choices = re.search(r"\{(.+)\}", name)
        for choice in choices[1].split("|") if choices else [""]:
            label, _, step = choice.partition(": ")
            filled = tuple(each.replace("{}", step or label) for each in lines)
            title = name.replace(choices[0], label) if choices else name
            found.append(Example(title, filled))
    return pytest.mark.parametrize("example", found, ids=[each.name for each in found])


def say(action: Action) -> str:
    """An action in words."""
    match action:
        case Prefill(request_id, replica, hands_over):
            return f"prefill {request_id} {replica}{' told' * hands_over}"
        case Decode(request_id, replica, tokens):
            what = "all" if tokens == EVERYTHING else str(tokens or "")
            return f"decode {request_id} {replica} {what}".strip()
        case Refuse(request_id, status):
            return f"refuse {request_id} {status}"
        case Load(replica, role):
            return f"load {replica} {role.value}"
        case Retire(replica, forget):
            return f"retire {replica}{' forget' * forget}"
        case Abort(request_id, replica):
            return f"abort {request_id} {replica}"
    return f"{type(action).__name__.lower()} {action.replica}"


def _is_with(line: str) -> bool:
    return line.startswith("with ")


def _made(options: dict[str, Any]) -> Steps:
    if "mode" in options:
        options["mode"] = Mode(options["mode"])
    spares = options.pop("spares", 0)

    def of(kind: type[Struct]) -> dict[str, Any]:
        names = options.keys() & set(kind.__struct_fields__)
        return {name: options.pop(name) for name in names}

    settings, overload = Settings(**of(Settings)), OverloadConfig(**of(OverloadConfig))
    planner = PlannerConfig(**of(PlannerConfig))
    assert not options, options
    return Steps(settings, planner=planner, overload=overload, spares=spares)


def take(steps: Steps, step: str) -> None:
    step, _, expected = step.partition(" -> ")
    verb, _, rest = step.partition(" ")
    if verb == "assert":
        _check(steps, rest)
        return
    words, options = arguments_of(rest.split())
    done = VERBS[verb](steps, *words, **options)
    if not expected:
        return
    said = [say(each) for each in done]
    wanted = expected.removeprefix("... ").split(", ")
    if expected == "nothing":
        assert said == []
    elif expected.startswith("no "):
        assert not any(each.startswith(expected.removeprefix("no ")) for each in said), said
    elif expected.startswith("... "):
        assert set(wanted) <= set(said), said
    else:
        assert said == wanted


def _check(steps: Steps, expression: str) -> None:
    state = steps.controller.state
    known = {
        "approx": pytest.approx,
        "inf": math.inf,
        "state": state,
        "steps": steps,
        "rates": state.rates.snapshot(steps.now),
        "pressure": steps.controller.admission.pressure,
        "scaling": steps.controller.scaling,
        "work": lambda replica_id: steps.replica(replica_id).work,
        "decodes": [each for each in steps.history if isinstance(each, Decode)],
        "whys": [each.why for each in steps.history if isinstance(each, Refuse)],
    }
    compared = ast.parse(expression, mode="eval").body
    left = ast.unparse(compared.left if isinstance(compared, ast.Compare) else compared)
    assert eval(expression, known), (left, eval(left, known))


# Verbs


def _add(steps: Steps, name: str, role: str = "", *, is_started: bool = False) -> list[Action]:
    made = spec(name, is_started=is_started)
    return steps.step(Added(spec=made, role=Role(role) if role else None))


def _ask(steps: Steps, name: str, *sizes: str, **more: Any) -> list[Action]:
    return steps.ask(name, *map(int, sizes), **more)


def _decoded(
    steps: Steps, name: str, replica: str, outcome: str = "ok", *, output: int = 10, **more: Any
) -> list[Action]:
    ids = {"request_id": RequestId(name), "replica": ReplicaId(replica)}
    return steps.step(
        DecodeEnded(**ids, outcome=Outcome(outcome), output_tokens=output, **more)  # type: ignore[arg-type]
    )


def _prefilled(
    steps: Steps, name: str, replica: str, outcome: str = "ok", *, saved: int = 0, **more: Any
) -> list[Action]:
    ids = {"request_id": RequestId(name), "replica": ReplicaId(replica)}
    return steps.step(
        PrefillEnded(**ids, outcome=Outcome(outcome), saved_tokens=saved, **more)  # type: ignore[arg-type]
    )


def _fleet(steps: Steps, *names: str) -> None:
    """`fleet p q / d`: replicas that serve prefill and decode."""
    prefill, _, decode = " ".join(names).partition("/")
    steps.fleet(prefill=prefill, decode=decode)


def _told(steps: Steps, *names: str) -> None:
    """Create replicas as `fleet` does, of a release with notices."""
    _fleet(steps, *names)
    for each in names:
        if each != "/":
            _measure(steps, each, notices=each)


def _measure(
    steps: Steps, name: str, *expected: str, notices: str = "", **sample: Any
) -> list[Action]:
    """`expected p 1 3`: of the prompts of `p` it has found 1, and 3 are missing."""
    if notices:
        sample["notices"] = [f"tcp://{notices}:5555"]
    if expected:
        _, *counted = expected
        found = zip(counted[::3], counted[1::3], counted[2::3], strict=True)
        sample["expected"] = {x: ExpectedPrompts(int(y), int(z)) for x, y, z in found}
    return steps.measure(name, **sample)


def _counted(steps: Steps, *names: str) -> None:
    """Create replicas as `fleet` does, whose engines count found and missed prompts."""
    _fleet(steps, *names)
    for each in names:
        if each != "/":
            steps.measure(each, expected={})


def _serve(steps: Steps, name: str, role: str, **more: Any) -> None:
    steps.serve(name, Role(role), **more)


def _set(steps: Steps, name: str, role: str) -> list[Action]:
    return steps.set_role(name, Role(role))


def _models(steps: Steps, name: str, *listed: str) -> list[Action]:
    """Report the models that the replica's engine lists."""
    return steps.step(ModelsListed(ReplicaId(name), frozenset(listed)))


def pass_time(steps: Steps, seconds: int | str) -> None:
    """Let time pass, with metrics of all serving replicas."""
    for _ in range(int(seconds)):
        steps.tick(1.0)
        for name, state in steps.states().items():
            if state in (State.PREFILL, State.DECODE, State.OLD_PREFILL):
                steps.measure(name, blocks=100_000)


def _plan_drains(steps: Steps, name: str) -> None:
    """Drain the replica for a plan, not for an administrator."""
    steps.controller.lifecycle.drain(steps.replica(name), "planned")


def _counted_as(steps: Steps, role: str, *counts: str) -> None:
    """Assert a role's replicas in the planner's input: serving, coming."""
    told = steps.controller.scaling._inputs().of(Role(role))
    assert (told.serving, told.coming) == tuple(map(int, counts))


def _wait(steps: Steps, seconds: str) -> None:
    """Let time pass without a tick or a measurement."""
    steps.now += float(seconds)


def _expire(steps: Steps, name: str) -> list[Action]:
    """End the replica's time as a standby."""
    steps.controller.lifecycle.expire(steps.replica(name), "not needed")
    return steps.controller.actions[-1:]


def _phase(steps: Steps, name: str, phase: str) -> None:
    found = steps.phase(name)
    assert (found.value if found else "ended") == phase


def _place(steps: Steps, name: str, replica: str) -> None:
    assert steps.place(name) == replica


def _state(steps: Steps, name: str, state: str) -> None:
    """Assert a replica's state; `gone` means that it has been forgotten."""
    found = steps.states().get(name)
    assert (found.value if found else "gone") == state


def _count(steps: Steps, what: str, number: str) -> None:
    assert steps.count(what) == int(number)


def _paths(steps: Steps, **counts: int) -> None:
    """Assert the numbers of prompts by path."""
    found = +steps.controller.state.counts.prompts
    assert {path.value: number for path, number in found.items()} == counts


def _locked(steps: Steps, *names: str) -> None:
    assert steps.controller.state.overload.locked == set(names)


VERBS: dict[str, Callable[..., Any]] = {
    "add": _add,
    "ask": _ask,
    "began": Steps.began,
    "cancel": Steps.cancel,
    "counted": _counted,
    "decoded": _decoded,
    "drain": Steps.drain,
    "expire": _expire,
    "failed": Steps.failed,
    "fleet": _fleet,
    "loaded": Steps.loaded,
    "measure": _measure,
    "models": _models,
    "pass": pass_time,
    "plan_drains": _plan_drains,
    "prefilled": _prefilled,
    "remove": Steps.remove,
    "serve": _serve,
    "set": _set,
    "start": lambda steps, role: steps.start(Role(role)),
    "tick": lambda steps, after="1": steps.tick(float(after)),
    "told": _told,
    "wait": _wait,
    "warmed": Steps.warmed,
    # What has come of it
    "count": _count,
    "locked": _locked,
    "counted_as": _counted_as,
    "paths": _paths,
    "phase": _phase,
    "place": _place,
    "state": _state,
}
