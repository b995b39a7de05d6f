"""Faults in the stores of whole engines: answers are those of an engine without a pool, in bounded
time, and once the store is well again the pool is used again."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.conftest import EngineShelf
from tests.e2e.engine import Completion, Engine, EngineSpec, Prompt
from tests.e2e.pool import files, pool, same, tokens
from tests.support.faults import Fault, FaultControl
from tests.support.models import LlamaShape

pytestmark = pytest.mark.e2e

SHAPE = LlamaShape(kv_heads=2)
COUNT, HIT = 600, 512
SLOW_S = 1.0
ANSWER_S = 20.0  # a request, whatever its store does
WELL_S = 30.0  # from the end of a fault until the pool is used again
IMPATIENT = {"lookup_timeout_ms": 300, "load_timeout_s": 1.5, "call_timeout_s": 1.0}


@dataclass(frozen=True, slots=True)
class Cell:
    """A fault and the moment it begins: before a `load` of what is stored, before a `save` of what
    is not, or before a `reset` of the pool."""

    fault: Fault
    method: str
    moment: str
    tp: int = 1
    waits: bool = False  # the store does not answer in time

    @property
    def small(self) -> bool:
        """True if the short test run includes this cell: one rank and no slow store."""
        return self.tp == 1 and not self.waits

    @property
    def name(self) -> str:
        return f"{self.fault.value}-{self.method or 'all'}-{self.moment}-tp{self.tp}"


CELLS = [
    Cell(Fault.UNREACHABLE, "", "load"),
    Cell(Fault.ERROR, "exists", "load"),
    Cell(Fault.MISSING, "get", "load"),
    Cell(Fault.FLIPPED, "get", "load"),
    Cell(Fault.WRONG_SIZE, "get", "load"),
    Cell(Fault.FAILED, "get", "load"),
    Cell(Fault.CRASH, "get", "load"),
    Cell(Fault.UNREACHABLE, "", "save"),
    Cell(Fault.FULL, "put", "save"),
    Cell(Fault.FAILED, "put", "save"),
    Cell(Fault.HALF, "put", "save"),
    Cell(Fault.MISSING, "put", "save"),
    Cell(Fault.UNREACHABLE, "remove_namespace", "reset"),
    Cell(Fault.SLOW, "", "load", waits=True),
    Cell(Fault.BLOCKED, "exists", "load", waits=True),
    Cell(Fault.BLOCKED, "get", "load", waits=True),
    Cell(Fault.BLOCKED, "put", "save", waits=True),
    Cell(Fault.FLIPPED, "get", "load", tp=2),
    Cell(Fault.UNREACHABLE, "", "save", tp=2),
]
PROMPTS = {cell.name: Prompt(ids=tokens(500 + i, COUNT)) for i, cell in enumerate(CELLS)}


@pytest.fixture(scope="module")
def expected(llama: Callable[[LlamaShape], Path], engines: EngineShelf) -> Mapping[str, Completion]:
    """The answers without a pool."""
    answers = engines.get(EngineSpec(model=llama(SHAPE))).generate(*PROMPTS.values())
    return dict(zip(PROMPTS, answers, strict=True))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture
def control(directory: Path) -> Iterator[FaultControl]:
    control = FaultControl(directory)
    yield control
    control.heal()


@pytest.fixture
def start(
    llama: Callable[[LlamaShape], Path], engines: EngineShelf, directory: Path
) -> Callable[[Cell], Engine]:
    """The engine of a cell, shared by all that want the same."""

    def start(cell: Cell) -> Engine:
        config = pool(files(directory / f"pool{cell.waits}"), **(IMPATIENT if cell.waits else {}))
        module = {"kv_connector_module_path": "tests.support.faulty"}
        env = {"KVPOOL_FAULTS": str(directory)}
        return engines.get(
            EngineSpec(
                model=llama(SHAPE), tp=cell.tp, kv_transfer_config={**config, **module}, env=env
            )
        )

    return start


@pytest.mark.parametrize(
    "cell",
    [pytest.param(cell, marks=[pytest.mark.small] * cell.small) for cell in CELLS],
    ids=lambda cell: cell.name,
)
def test_engines_answer_whatever_the_store_does(
    cell: Cell,
    control: FaultControl,
    start: Callable[[Cell], Engine],
    expected: Mapping[str, Completion],
) -> None:
    engine, prompt, answer = start(cell), PROMPTS[cell.name], expected[cell.name]
    if cell.moment != "save":
        same(ask(engine, prompt), answer)
        until_hit(engine, prompt, answer)
    inject(control, cell)
    if cell.moment == "reset":
        assert engine.reset_prefix_cache()
        assert not engine.reset_pool()
    same(ask(engine, prompt), answer)
    wait_until(lambda: control.struck(cell.fault))
    same(ask(engine, prompt), answer)
    control.heal()
    until_hit(engine, prompt, answer)


def inject(control: FaultControl, cell: Cell) -> None:
    if cell.fault is Fault.SLOW:
        control.slow(SLOW_S, cell.method)
    else:
        control.inject(cell.fault, cell.method)


def ask(engine: Engine, prompt: Prompt) -> Completion:
    """The answer of an engine that has forgotten what it computed itself."""
    assert engine.reset_prefix_cache()
    return engine.generate(prompt, timeout_s=ANSWER_S)[0]


def until_hit(engine: Engine, prompt: Prompt, answer: Completion) -> None:
    """Send the prompt until all its chunks hit; the first request may not find all of them."""

    def hit() -> bool:
        completion = ask(engine, prompt)
        same(completion, answer)
        return completion.cached_tokens == HIT

    wait_until(hit)


def wait_until(ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WELL_S
    while not ready():
        assert time.monotonic() < deadline, "in vain"
        time.sleep(0.1)  # other processes take their time
