"""Examples of the transfer engine, written as scripts of a `Bench`.

    load stops at the first chunk that it cannot have
        on disk; load 1 a b c d; ends 0 done missing done failed -> check a; slots 3 1 0
        run -> scatter a | loaded 1 to 1 missing; clean

`on` names the tiers, near ones first, and sets options of the bench: `slots=4`, `limits=2x3` (each
lane runs two batches of three cells), `tiers=2x1` (the lanes of tiers alone). Cells, and the lines
that the engine says, are named as on the bench. `ends 0 done full` ends batch 0: its first cell is
done, and for its second the store is full; without outcomes all are done. A batch also goes by its
lane, such as `get-0`, or as `oldest` or `newest`. `run` ends all batches until none is left, and
`run put-1 b full, get any missing` with those outcomes of cells of a lane. A time is a number, or a
constant by name, perhaps as `SAVE_STALL_S/2`. `VERBS` has all verbs.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import groupby, islice
from typing import Any

import pytest

from tests.support import scripts
from tests.support.scripts import Example
from tests.transfer.engine_bench import (
    DISK,
    FAR,
    MEMORY,
    REPLICAS,
    SECOND,
    TIMEOUT_S,
    Bench,
    load_job,
    save_job,
    slab_of,
    slots_of,
)
from vllm_kvpool.storage.breaker import FAILURES_TO_OPEN, FIRST_PAUSE_S, LONGEST_PAUSE_S
from vllm_kvpool.transfer import loads, loans, ops, saves
from vllm_kvpool.transfer.graph import Batch, LaneLimits
from vllm_kvpool.transfer.ops import CellOutcome, LaneName, OpKind

__all__ = ["Example", "examples", "outcomes", "play"]

TIERS = {"disk": DISK, "memory": MEMORY, "far": FAR}
TIMES_S = {
    "TIMEOUT_S": TIMEOUT_S,
    "FIRST_PAUSE_S": FIRST_PAUSE_S,
    "LONGEST_PAUSE_S": LONGEST_PAUSE_S,
    "ASK_S": REPLICAS.ask_s,
    "LOAN_S": REPLICAS.loan_s,
    "URGENT_S": loads.URGENT_S,
    "HOLD_S": loans.HOLD_S,
    "SAVE_STALL_S": saves.SAVE_STALL_S,
    "PATIENCE_LEFT_S": saves.PATIENCE_LEFT_S,
    "STALL_REST_S": saves.STALL_REST_S,
}


def examples(text: str, given: str = "") -> pytest.MarkDecorator:
    """Return a mark that sets the test's parameter `example` to each example of the text.

    `given`: steps before each example.
    """
    return scripts.examples(text, _on, VERBS, given)


def play(steps: str) -> Bench:
    """Play some steps, and return the bench."""
    bench: Bench = Example("", (steps,), _on, VERBS).play()
    return bench


def outcomes(text: str) -> Callable[[LaneName, str], CellOutcome]:
    """Parse `"put-1 b full, get any missing"`: outcomes of a lane's cells; other cells are done."""
    rules = [each.split() for each in text.split(",")]

    def outcome_of(lane: LaneName, key: str) -> CellOutcome:
        for of_lane, of_key, outcome in rules:
            names = (str(lane), lane.kind.value, f"tier-{lane.tier}", "any")
            if of_lane in names and of_key in (key, "any"):
                return CellOutcome(outcome)
        return CellOutcome.DONE

    return outcome_of


def _on(verb: str, *tiers: str, limits: str = "2x64", **options: Any) -> Bench:
    assert verb == "on"
    lanes: dict[OpKind, LaneLimits] = {}
    for name, kinds in LANES.items():
        if name in options:
            lanes |= dict.fromkeys(kinds, _limits(options.pop(name)))
    if shared := options.pop("replicas", None):
        groups = ("",) if shared is True else (shared,)
        options["replicas"] = replace(REPLICAS, layer_groups=groups)
    return Bench(*(TIERS[each] for each in tiers), limits=_limits(limits), lanes=lanes, **options)


LANES = {
    "fences": (OpKind.FENCE,),
    "gets": (OpKind.GET,),
    "puts": (OpKind.PUT,),
    "tiers": (OpKind.GET, OpKind.PUT, OpKind.REMOVE),
}


def _limits(text: str) -> LaneLimits:
    """Parse limits: `2x3` is two batches of three cells."""
    batches, cells = map(int, text.split("x"))
    return LaneLimits(batches, cells, batch_bytes=1 << 30, budget_bytes=1 << 30)


def _number(bench: Bench, batch: str) -> int:
    """Return a batch's number, by number, by lane (its oldest), or as the oldest or newest of
    all."""
    if batch.isdecimal():
        return int(batch)
    known = bench.running | bench.hanging
    if batch in ("oldest", "newest"):
        return min(known) if batch == "oldest" else max(known)
    return min(number for number, each in known.items() if str(each.lane) == batch)


def _time(text: str) -> float:
    """Parse a time: `10`, `SAVE_STALL_S`, `2*TIMEOUT_S`, `A-B`, `A/4`."""
    for sign, both in {"-": float.__sub__, "*": float.__mul__, "/": float.__truediv__}.items():
        left, found, right = text.partition(sign)
        if found:
            return both(_time(left), _time(right))
    return TIMES_S[text] if text in TIMES_S else float(text)


def _cells(words: tuple[str, ...]) -> str:
    return " ".join(words)


def _load(
    bench: Bench, job: str, *cells: str, after: int = 0, timeout: str = "TIMEOUT_S", **more: Any
) -> list[str]:
    """Load cells. `after` is the position of the first chunk."""
    return bench.load(int(job), _cells(cells), after, timeout_s=_time(str(timeout)), **more)


def _in_parts(job: ops.LoadJob | ops.SaveJob, cells: str) -> Any:
    """Return the job with its cells after each `/` as a later part."""
    counts = [len({cell[0] for cell in part.split()}) for part in cells.split("/")]
    slabs = iter(job.slabs)
    first, *rest = (tuple(islice(slabs, count)) for count in counts)
    return job._replace(slabs=first, rest=iter(rest))


def _load_in_parts(bench: Bench, job: str, *cells: str, **more: Any) -> list[str]:
    """`load_in_parts 1 a / b`: name the slabs after a `/` later."""
    whole = load_job(int(job), _cells(cells).replace("/ ", ""), **more)
    return bench.step(_in_parts(whole, _cells(cells)))


def _save_in_parts(bench: Bench, job: str, *cells: str) -> list[str]:
    whole = save_job(int(job), _cells(cells).replace("/ ", ""))
    return bench.step(_in_parts(whole, _cells(cells)))


def _layered(bench: Bench, job: str, *cells: str) -> list[str]:
    """Start a load that reports each layer. Cells are named by chunk and layer."""
    plain = load_job(int(job), _cells(cells), apart=True)
    return bench.step(plain._replace(plan=replace(plain.plan, layered=True)))


def _lend(
    bench: Bench, first: str, *cells: str, who: int = SECOND, generation: int = 0
) -> list[str]:
    """Ask for the slabs of cells as another member; loan ids count from `first`."""
    slabs = [slab_of(" ".join(each)) for _, each in groupby(cells, key=lambda cell: cell[0])]
    return bench.step(ops.Ask(who, tuple(enumerate(slabs, int(first))), generation))


def _give_back(bench: Bench, *loans: str, who: int = SECOND) -> list[str]:
    return bench.step(ops.Returned(who, tuple(map(int, loans))))


def _borrow(bench: Bench, job: str, *cells: str) -> list[str]:
    """Start a load of cells that the second member fetches."""
    plan = load_job(int(job), _cells(cells))
    slabs = tuple(slab._replace(fetcher=SECOND) for slab in plan.slabs)
    return bench.step(plan._replace(slabs=slabs))


def _answer(bench: Bench, *loans: str, slots: tuple[int, ...] = (1 << 40,)) -> list[str]:
    """Answer these asks as the second member, with slots of its own."""
    return bench.step(ops.Lent(SECOND, tuple((int(each), slots) for each in loans)))


def _reset(bench: Bench, **generation: int) -> list[str]:
    return bench.step(ops.DropSaves(forget=True, **generation))


def _take_down(bench: Bench, *but: str) -> None:
    """Let loads fail in tier 0 and miss in the others, until tier 0 is left alone.

    Batches of the lanes `but` keep running.
    """
    for job in range(FAILURES_TO_OPEN):
        bench.load(100 + job, "x")
        while free := [n for n, batch in bench.running.items() if str(batch.lane) not in but]:
            is_first = bench.running[free[0]].lane.tier == 0
            bench.ends(free[0], CellOutcome.FAILED if is_first else CellOutcome.MISSING)
    assert bench.counted("kvpool_tier_up", tier=bench.engine.context.tiers[0].name) == 0


def _run(bench: Bench, *words: str) -> list[str]:
    return bench.run(outcomes(" ".join(words)) if words else None)


def _due(bench: Bench, time: str) -> None:
    """Assert the next deadline; `due never` means none."""
    due = bench.engine.next_deadline()
    assert due == (None if time == "never" else _time(time))


def _count(bench: Bench, name: str, number: str, **labels: str) -> None:
    assert bench.counted(f"kvpool_{name}", **labels) == int(number)


def _slots(bench: Bench, *counts: str) -> None:
    """Assert the numbers of free, held and quarantined slots."""
    assert bench.slots() == " ".join(counts)


def _host(bench: Bench, *cells: str) -> None:
    """Assert the cells that are in host memory or on their way into it. Dirty cells have a star."""
    assert bench.cells() == _cells(cells)


def _idle(bench: Bench) -> None:
    assert bench.engine.idle


def _busy(bench: Bench) -> None:
    assert not bench.engine.idle


def _clean(bench: Bench) -> None:
    assert bench.is_clean


def _saves(bench: Bench, number: str) -> None:
    """Assert the number of saves and copies in progress."""
    assert bench.engine.num_saves == int(number)


def _lanes(bench: Bench, *lanes: str) -> None:
    """Assert the lanes of the running batches."""
    assert sorted(str(batch.lane) for batch in bench.running.values()) == list(lanes)


def _sizes(bench: Bench, *sizes: str) -> None:
    """Assert the number of cells of each op in the newest batch."""
    batch = bench.running[max(bench.running)]
    assert [op.size for op in batch.ops] == list(map(int, sizes))


def _apart(bench: Bench, *numbers: str) -> None:
    """Assert that two batches, which may hang, share no slot."""
    known: dict[int, Batch] = bench.running | bench.hanging
    first, second = (set(slots_of(known[int(number)])) for number in numbers)
    assert first.isdisjoint(second)


def _stalls(bench: Bench, number: str) -> None:
    """Assert how often a step that waits for gathers was told that saves stall."""
    assert len(bench.stalls) == int(number)


def _drops(bench: Bench, *counts: str) -> None:
    """Assert the cells that were not stored, by tier and outcome: `drops host unreachable 2`."""
    each = zip(counts[::3], counts[1::3], counts[2::3], strict=True)
    wanted = {
        (-1 if tier == "host" else int(tier), CellOutcome(outcome)): int(number)
        for tier, outcome, number in each
    }
    assert bench.engine.context.drops == wanted


def _saved(bench: Bench, **fields: Any) -> None:
    """Assert fields of the last report of a save, besides its outcomes."""
    done = bench.saved[-1]
    for name, value in fields.items():
        found: Any = getattr(done, name)
        if name == "lost":
            said = (f"{chunk}:{outcome.value}" for chunk, outcome in sorted(found))
            found = ",".join(said) or "nothing"
        assert found == value, (name, found)


def _cleared(bench: Bench, *chunks: str) -> None:
    """Assert the chunks of the first load whose optional cells were cleared."""
    assert bench.loaded[0].cleared == set(map(int, chunks))


VERBS: Mapping[str, Callable[..., Any]] = {
    "after": lambda bench, time: bench.after(_time(time)),
    "answer": _answer,
    "borrow": _borrow,
    "borrower_gone": lambda bench, who=SECOND: bench.step(ops.BorrowerGone(int(who))),
    "cancel": lambda bench, job: bench.cancel(int(job)),
    "drop": Bench.drop_saves,
    "ends": lambda bench, batch, *outs: bench.ends(_number(bench, batch), *map(CellOutcome, outs)),
    "flush": Bench.flush,
    "give_back": _give_back,
    "hand_over": lambda bench, job, *cells, without="", windows="": bench.hand_over(
        int(job), _cells(cells), without, windows
    ),
    "hangs": lambda bench, batch: bench.hangs(_number(bench, batch)),
    "lacks": lambda bench, *loans: _answer(bench, *loans, slots=()),
    "land": lambda bench, job, stop, **more: bench.land(int(job), int(stop), **more),
    "late": lambda bench, batch, *outs: bench.late(_number(bench, batch), *map(CellOutcome, outs)),
    "layered": _layered,
    "lend": _lend,
    "lender_gone": lambda bench: bench.step(ops.LenderGone(SECOND)),
    "load": _load,
    "load_in_parts": _load_in_parts,
    "prefetch": lambda bench, job, *cells: bench.prefetch(int(job), _cells(cells)),
    "reset": _reset,
    "run": _run,
    "run_but": Bench.run_but,
    "save": lambda bench, job, *cells, **more: bench.save(int(job), _cells(cells), **more),
    "save_in_parts": _save_in_parts,
    "take_down": _take_down,
    "tier_down": lambda bench, tier: bench.health(int(tier), up=False),
    "tier_full": lambda bench, tier: bench.step(ops.TierHealth(int(tier), True, is_writable=False)),
    "tier_up": lambda bench, tier: bench.health(int(tier), up=True),
    "wait": lambda bench, time: bench.clock.advance(_time(time)),
    # Checks
    "apart": _apart,
    "busy": _busy,
    "clean": _clean,
    "cleared": _cleared,
    "count": _count,
    "drops": _drops,
    "due": _due,
    "host": _host,
    "idle": _idle,
    "lanes": _lanes,
    "saved": _saved,
    "saves": _saves,
    "sizes": _sizes,
    "slots": _slots,
    "stalls": _stalls,
}
