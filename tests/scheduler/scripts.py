"""Examples of the scheduler, written as scripts of a `Bench`.

    what could not be loaded is computed and saved
        engine; stored 3; add a; admit a -> 96; step -> load a 0-96; load_stops a 40
        step a=68 -> save a 1-3

`engine` makes the bench, with its options. Prompts are 0, 1, 2, … with 100 tokens. `stored 3` puts
their first three chunks into the store, `stored 1-3` the second and third. `add b 60 save=False`
adds a request with options.

`match a 32` asks for the offer beyond 32 computed tokens: `96`, or `96 now` for a load within the
step, or nothing. `admit` takes the offer.

`step a=100` computes tokens and returns the workers' plans. Loads count tokens: `load a 48-96`.
Saves count chunks: `save a 0-3`. `end 20` is a prompt's end of 20 tokens, `as v` names other
weights. Further plans are `prefetch a 3` and `landed 2 final`. Every step checks that plans name
the right hashes and blocks.

`count hit_tokens 96` compares a metric. `count miss_tokens absent:32 short:4` compares a metric
with labels. `VERBS` has all verbs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import pytest

from tests.scheduler.scheduler_bench import (
    CHUNK,
    LIMIT_S,
    NAMES,
    NOTHING,
    Bench,
    StateBench,
    chain_of,
    has_none,
    hashes_of,
    put_cells,
)
from tests.support import scripts
from tests.support.faults import Fault
from tests.support.invariants import check
from tests.support.scripts import Example
from vllm_kvpool.config import KVPoolConfig, KVRole, LoadPolicy, RequestOptions
from vllm_kvpool.scheduler.blocks import NO_PAGES, state_page
from vllm_kvpool.scheduler.loads import IDLE_WAIT_MAX_S
from vllm_kvpool.scheduler.lookup_service import LOOKUP_TIMEOUT_S
from vllm_kvpool.scheduler.messages import Loaded, StepPlan, StepReport, Stored
from vllm_kvpool.scheduler.pool_scheduler import (
    STREAM_WAIT_MIN_S,
    STREAM_WAIT_S,
    WATCHED_WAIT_S,
)
from vllm_kvpool.scheduler.request import OwnKV, StateOffer
from vllm_kvpool.scheduler.save_outcomes import EndedSave
from vllm_kvpool.scheduler.states import AdmissionState
from vllm_kvpool.transfer.ops import NULL_BLOCK, JobId, JobPages, Landed, LoadPlan, SavePlan

__all__ = ["Example", "examples", "in_words", "play"]

PROMPT = range(1000)
FIRST_WEIGHTS = "first"


def examples(text: str, given: str = "") -> pytest.MarkDecorator:
    """Return a mark that gives each example of the text to the test. `given`: steps before."""
    return scripts.examples(text, _engine, VERBS, given)


def play(steps: str) -> Bench:
    """Take some steps, and return the bench."""
    bench: Bench = Example("", (steps,), _engine, VERBS).play()
    return bench


def _engine(verb: str, **options: Any) -> Bench:
    """`state_engine`: of a model with recurrent states."""
    if verb == "state_engine":
        return StateBench(**options)
    assert verb == "engine"
    config = {k: options.pop(k) for k in _fields(KVPoolConfig) & options.keys()}
    if "load_policy" in config:
        config["load_policy"] = LoadPolicy(config["load_policy"])
    if "role" in options:
        options["role"] = KVRole(options["role"])
    return Bench(config=KVPoolConfig(**config), **options)


def _fields(kind: type) -> set[str]:
    return {each.name for each in fields(kind)} - {"tenant"}  # which a trait of the request is


def in_words(bench: Bench, plan: StepPlan) -> list[str]:
    """See the module docstring."""
    told = [_load_in_words(bench, each) for each in plan.loads]
    told += [_save_in_words(bench, each) for each in plan.saves]
    told += [
        f"prefetch {each.request_id} {len(each.hashes)}{_as(each.weights_version)}"
        for each in plan.prefetches
    ]
    told += [
        f"landed {each.stop_chunk}{' final' * each.is_final}{' urgent' * each.is_urgent}"
        for each in plan.landed
    ]
    return told + [f"handed over {each.found} {each.chunks}" for each in plan.hand_over_ends]


def _load_in_words(bench: Bench, load: LoadPlan) -> str:
    start, stop = load.token_start, load.token_stop
    known = len(load.hashes) - (load.end_tokens > 0 or load.is_last_other)
    tokens = bench.views[load.request_id].tokens()
    own = hashes_of(tokens)[load.first_chunk :]
    assert list(load.hashes[:known]) == own[:known]
    for last in load.hashes[known:]:
        other = bench.others.get(last)
        assert other is not None or last == _end_of(tokens)
        assert other is None or list(other[:stop]) == list(tokens[:stop])
        assert load.end_tokens == len(tokens if other is None else other) % CHUNK
    assert load.first_chunk == start // CHUNK
    assert len(load.hashes) == -(-stop // CHUNK) - load.first_chunk
    pages, *states = load.pages
    assert (pages.token_start, pages.token_stop) == (start, stop)
    blocks = bench.tables[load.request_id][start // bench.block : -(-stop // bench.block)]
    assert list(pages.block_ids) == blocks
    end = f" end {load.end_tokens}" * (load.end_tokens > 0)
    other = " of another" * load.is_last_other
    landed = "" if load.landed_stop is None else f" landed {load.landed_stop}"
    for each in states:
        assert each == state_page(each.block_ids[0], stop)
    state = f" from {_blocks(states)}" if states else ""
    layered = " layered" * load.layered
    what = f"{start}-{stop}{end}{other}{landed}{state}{layered}"
    return f"load {load.request_id} {what}{_as(load.weights_version)}"


def _end_of(tokens: Sequence[int]) -> bytes | None:
    return chain_of(tokens).end(tokens)


def _blocks(states: Sequence[JobPages]) -> str:
    return " ".join(str(*each.block_ids) if each != NO_PAGES else "-" for each in states)


def _save_in_words(bench: Bench, save: SavePlan) -> str:
    stop = save.first_chunk + len(save.hashes)
    pages, *states = save.pages
    if save.end_tokens:
        stop_token = save.first_chunk * CHUNK + save.end_tokens
        tokens = bench.views[save.request_id].tokens()[:stop_token]
        assert save.hashes == (_end_of(tokens),)
        assert pages.token_stop == stop_token
    else:
        wanted = bench.save(save.job_id, range(save.first_chunk, stop), save.request_id)
        assert (save.hashes, save.before) == (wanted.hashes, wanted.before)
        own = NO_PAGES if save.is_state else wanted.pages[0]
        assert pages == own or not bench.tables[save.request_id]
    if save.is_state:
        for each in states:
            assert each == NO_PAGES or each == state_page(each.block_ids[0], stop * CHUNK)
        return f"state {save.request_id} {stop * CHUNK} from {_blocks(states)}"
    assert not any(each.block_ids for each in states)
    end = f" end {save.end_tokens}" * (save.end_tokens > 0)
    return f"save {save.request_id} {save.first_chunk}-{stop}{end}" + _as(save.weights_version)


def _as(weights_version: str) -> str:
    return f" as {weights_version}" if weights_version else ""


def _said(offer: tuple[int | None, bool]) -> list[str]:
    count, is_async = offer
    if count is None:
        return ["pending"]
    return [f"{count}{'' if is_async else ' now'}"] if count else []


def _chunks(text: str) -> range:
    first, dash, stop = text.partition("-")
    return range(int(first), int(stop)) if dash else range(int(first))


def _stored(bench: Bench, chunks: str, weights: str = FIRST_WEIGHTS) -> None:
    names = NAMES.with_weights("" if weights == FIRST_WEIGHTS else weights)
    for chunk in _chunks(chunks):
        put_cells(bench.memory, names.of_chunk(hashes_of(PROMPT)[chunk]))


def _has(bench: StateBench, attention: str, *boundaries: str) -> None:
    """Store so many chunks of attention, and the states after so many tokens."""
    bench.store_cells(0, *range(int(attention)))
    bench.store_cells(1, *(int(each) // CHUNK - 1 for each in boundaries))


def _drop_attention(bench: StateBench, chunk: str) -> None:
    bench.memory.remove(bench.names.of_chunk(hashes_of(PROMPT)[int(chunk)], 0))


def _offer(bench: Bench, name: str, *offers: str, drafts: bool = False) -> None:
    """Offer states: `offer a 1:41:96` offers block 41 of group 1 with the state after 96 tokens."""
    bench.offers = {name: [StateOffer(*map(int, each.split(":"))) for each in offers]}
    bench.drafted = [name] if drafts else []


def _load_fails(bench: Bench, name: str, tokens: str, ranks: str = "1") -> None:
    """Report from every rank, each in its own step, that only so many tokens were loaded."""
    for _ in range(int(ranks)):
        bench.scheduler.apply(StepReport(loads={name: Loaded(int(tokens))}))
    bench.scheduler.load_ended(name)
    _computed(bench, name, "0")
    _free(bench, name)
    check(bench.scheduler)


def _wanted(bench: Bench, name: str, own: str = "0") -> list[str]:
    """Return the boundary whose state vLLM should keep; `own` tokens are in its own cache."""
    return [str(bench.scheduler.wanted_boundary(name, int(own)))]


def _kept(bench: Bench, name: str, boundary: str) -> None:
    assert bench.views[name].kept_state == int(boundary)


def _other(bench: Bench, shared: str, count: str, *, with_end: bool = False) -> None:
    """Store another engine's prompt with its aliases; its first tokens are shared.

    Only whole chunks are stored, unless `with_end`.
    """
    tokens = [*range(int(shared)), *range(5000, 5000 + int(count) - int(shared))]
    hashes = hashes_of(tokens)
    bench.others |= {each: tokens[: (i + 1) * CHUNK] for i, each in enumerate(hashes)}
    plans = [SavePlan(JobId(1), "x", 0, tuple(hashes), ())]
    if with_end:
        end = _end_of(tokens)
        assert end is not None
        bench.others[end] = tokens
        rest = len(tokens) % CHUNK
        plans.append(SavePlan(JobId(2), "x", len(hashes), (end,), (), end_tokens=rest))
    put_cells(
        bench.memory,
        [key for plan in plans for each in plan.hashes for key in bench.names.of_chunk(each)],
    )
    assert bench.aliases is not None
    (writer,) = bench.aliases._writers
    for plan in plans:  # on this thread, so that nothing is to be waited for
        writer._perform(EndedSave(plan, Stored(1, frozenset({0})), (chain_of(tokens), tokens)))


def _lose_other(bench: Bench, chunk: str) -> None:
    """Remove the other prompt's chunk from the store."""
    gone = next(h for h, tokens in bench.others.items() if len(tokens) == (int(chunk) + 1) * CHUNK)
    bench.memory.remove(bench.names.of_chunk(gone))


def _put(bench: Bench) -> None:
    """Store the cells that the last step's saves name."""
    keys = [
        key for plan in bench.plan.saves for each in plan.hashes for key in NAMES.of_chunk(each)
    ]
    put_cells(bench.memory, keys)


def _in_store(bench: Bench, count: str, weights: str = FIRST_WEIGHTS) -> None:
    """Assert the number of cells in the store."""
    names = NAMES.with_weights("" if weights == FIRST_WEIGHTS else weights)
    keys = bench.memory._table.list_keys()
    assert sum(key.startswith(f"{names.namespace}@") for key in keys) == int(count)


def _add(bench: Bench, name: str, tokens: str = "100", **more: Any) -> None:
    wished = {k: more.pop(k) for k in _fields(RequestOptions) & more.keys()}
    bench.add(name, int(tokens), RequestOptions(**wished), **more)


def _match(bench: Bench, name: str, computed: str = "0") -> list[str]:
    return _said(bench.match(name, int(computed)))


def _poll(bench: Bench, name: str, computed: str = "0") -> list[str]:
    """Match without waiting for the lookup."""
    return _said(bench.scheduler.match(name, int(computed)))


def _step(bench: Bench, *, preempted: str = "", **scheduled: int) -> list[str]:
    bench.preempted = [preempted] if preempted else []
    return _told(bench, bench.step(**scheduled))


def _starts(
    bench: Bench, name: str, own: int | str = 0, *, loaded: int = 128, blocks: bool = True
) -> None:
    """Admit a request of 192 tokens, the first of which another connector loads.

    The engine's own cache has `own` tokens. After the load, `loaded` tokens are computed. Without
    `blocks`, the names of the engine's blocks are not trusted.
    """
    if name not in bench.views:
        bench.add(name, 192).own = OwnKV(blocks=blocks)
    assert bench.match(name, int(own)) == NOTHING
    bench.grow(name, 192)
    bench.scheduler.allocated(name, (), 0)
    bench.views[name].num_computed_tokens = loaded


def _load_failed(bench: Bench, name: str, kept: str) -> None:
    """Compute the request again, as vLLM does, from the first token that was not loaded."""
    _computed(bench, name, kept)
    bench.scheduler.step_ended()


def _told(bench: Bench, plan: StepPlan) -> list[str]:
    bench.plan = plan
    bench.gathering += plan.saves
    bench.unconfirmed += plan.saves
    return in_words(bench, plan)


def _told_load(bench: Bench, *words: str) -> None:
    """Assert that the step before planned a load; a chunk of its stream may have landed."""
    [load] = bench.plan.loads
    assert load.landed_stop in (0, 1)
    assert in_words(bench, StepPlan(loads=(replace(load, landed_stop=None),))) == [
        " ".join(("load", *words))
    ]


def _landed(bench: Bench) -> list[str]:
    """Run steps until a stream is final, and return its `landed` plans. It never goes back."""
    landed: list[Landed] = []
    while not (landed and landed[-1].is_final):
        bench.lookups.wait(LIMIT_S)
        landed += bench.step().landed
    stops = [each.stop_chunk for each in landed]
    assert stops == sorted(set(stops))
    return in_words(bench, StepPlan(landed=tuple(landed)))


def _gather(bench: Bench, ranks: str = "1") -> None:
    """Report that so many ranks have gathered all saves that workers were told."""
    bench.gather(StepPlan(saves=tuple(bench.gathering)), int(ranks))
    bench.gathering.clear()


def _confirm(bench: Bench) -> None:
    """Confirm that a store has all saves told since the last call."""
    bench.stored(*bench.unconfirmed)
    bench.unconfirmed.clear()


def _compute(bench: Bench, name: str, computed: str = "0", **traits: bool) -> list[str]:
    """Run a request in one step, beyond `computed` tokens of the engine's own cache, and end it."""
    bench.add(name, **traits)
    bench.match(name, int(computed))
    bench.allocate(name, int(computed), 0)
    said = _step(bench, **{name: 100 - int(computed)})
    _gather(bench)
    bench.finish(name)
    return said


def _unknown(bench: Bench, name: str) -> None:
    """Make every call with the id of a request that does not exist."""
    bench.scheduler.allocated(name, ((1,),), 16)
    bench.scheduler.load_ended(name)
    bench.scheduler.apply(StepReport(loads={name: Loaded(0)}))
    assert bench.scheduler.finish(name, ()) is None


def _computed(bench: Bench, name: str, tokens: str) -> None:
    """Set the number of tokens that vLLM counts as computed."""
    bench.views[name].num_computed_tokens = int(tokens)


def _lose_block(bench: Bench, name: str, index: str) -> None:
    bench.tables[name][int(index)] = NULL_BLOCK


def _unname(bench: Bench, name: str) -> None:
    bench.views[name].identified = None


def _finish(bench: Bench, name: str) -> list[str]:
    """Finish a request and return the client's answer: the number of tokens in the pool."""
    answer = bench.finish(name)
    return [] if answer is None else [f"{answer['kvpool']['tokens']} tokens"]


def _preempt(bench: Bench, name: str) -> None:
    bench.views[name].preempt()
    _free(bench, name)


def _free(bench: Bench, name: str) -> None:
    bench.tables[name] = []


def _block(bench: Bench, name: str, *request: str, **more: Any) -> None:
    """Let the store's method hang, perhaps with the lookup of a request in it."""
    bench.store.inject(Fault.BLOCKED, name)
    if request:
        _add(bench, *request, **more)
        assert bench.store.entered.wait(LIMIT_S)


def _count(bench: Bench, name: str, *counts: str) -> None:
    """Counts by the values of their labels."""
    found = {
        "/".join(label.partition("=")[2] for label in labels.strip("{}").split(",") if label): value
        for labels, value in bench.counts(f"kvpool_{name}").items()
        if not labels or labels[0] == "{"
    }
    wanted = (each.rpartition(":") for each in counts)
    assert found == {label: float(count) for label, _, count in wanted}, found


def _weights(bench: Bench, weights: str, is_reset: bool = True) -> None:
    """Change the weights, then empty the engine's own cache, as vLLM asks for."""
    bench.scheduler.weights_changed("" if weights == FIRST_WEIGHTS else weights)
    check(bench.scheduler)
    if is_reset:
        bench.scheduler.own_cache_was_reset()


def _reset(bench: Bench) -> None:
    assert bench.scheduler.reset()
    check(bench.scheduler)


def _pending(bench: Bench, is_pending: str) -> None:
    """`pending False` asserts that no save waits."""
    assert str(bench.scheduler.saves.has_pending) == is_pending


def _pins(bench: Bench, number: str) -> None:
    """Assert the number of pinned blocks."""
    assert len(bench.pins.references) == int(number)


def _watch(bench: Bench) -> None:
    bench.watch_waits()


def _sees_arrivals(bench: Bench) -> None:
    """Show arriving requests to the scheduler; none arrive."""
    bench.scheduler._has_arrivals = has_none


def _worked(bench: Bench) -> None:
    """Tell the scheduler that the step before had work."""
    bench.scheduler._idle = False


def _waited(bench: Bench, *waits: str) -> None:
    """Assert the timeouts with which steps since `watch` have waited for lookups, in words."""
    assert len(bench.waits.seconds) == len(waits), bench.waits.seconds
    for seconds, name in zip(bench.waits.seconds, waits, strict=True):
        if name == "short":
            assert 0 < seconds <= IDLE_WAIT_MAX_S
        else:
            assert seconds == pytest.approx(WAITS_S.get(name) or float(name))
    if waits and waits[-1] != "short":
        assert bench.waits.until is has_none, "it ends with an arrival"


WAITS_S = {
    "lookup": LOOKUP_TIMEOUT_S,
    "half_a_lookup": LOOKUP_TIMEOUT_S / 2,
    "watched": WATCHED_WAIT_S,
    "stream_min": STREAM_WAIT_MIN_S,
    "stream": STREAM_WAIT_S,
}


def _workers_wait(bench: Bench, is_idle: str) -> None:
    """Assert whether the last step allowed workers to wait for loads."""
    assert str(bench.plan.idle) == is_idle


def _queue(bench: Bench, name: str) -> None:
    """Set a request back to queued: vLLM has not reached it in its queue."""
    bench.scheduler._requests[name].admission = AdmissionState.QUEUED


def _late_load(bench: Bench, name: str) -> None:
    """End the load of a finished request without any token."""
    bench.scheduler.apply(StepReport(loads={name: Loaded(0)}))
    bench.scheduler.load_ended(name)


def _fails(bench: Bench, name: str, *tokens: str) -> None:
    """Report from each rank the tokens that it has loaded within a step."""
    bench.scheduler.apply(
        StepReport.merge(StepReport(loads={name: Loaded(int(each))}) for each in tokens)
    )


def _forgotten(bench: Bench, name: str, tokens: str) -> None:
    """Assert that vLLM's prefix cache forgot the request's blocks from that token on."""
    assert bench.pins.forgotten == bench.tables[name][int(tokens) // bench.block :]


def _pinned(bench: Bench, *blocks: str) -> None:
    """Assert that each block is pinned once and that the scheduler has pending work."""
    assert all(bench.pins.references[int(each)] == 1 for each in blocks)
    assert bench.scheduler.has_pending


def _lookups(bench: Bench, number: str) -> None:
    """Assert the number of lookups that have not ended."""
    assert len(bench.scheduler._lookups._open) == int(number)


def _asked(bench: Bench, most: str) -> None:
    """Assert the upper limit of `exists` calls to the store."""
    assert bench.store.calls["exists"] <= int(most)


VERBS: Mapping[str, Callable[..., Any]] = {
    "add": _add,
    "admit": lambda bench, name: _said(bench.admit(name)),
    "allocate": lambda bench, name, *counts: bench.allocate(name, *map(int, counts)),
    "answer_comes": lambda bench: bench.lookups.wait(LIMIT_S),
    "answers": Bench.take_answers,
    "block": _block,
    "comes": lambda bench, name: bench.scheduler.allocated(name, (), 0),
    "compute": _compute,
    "computed": _computed,
    "confirm": _confirm,
    "decode": lambda bench, name, *tokens: bench.views[name].output.extend(map(int, tokens)),
    "drop_attention": _drop_attention,
    "drop_late": lambda bench: bench.scheduler.saves.drop_late(),
    "encoder_cache_reset": lambda bench: bench.scheduler.encoder_cache_was_reset(),
    "end_reset": Bench.end_reset,
    "fails": _fails,
    "finish": _finish,
    "free": _free,
    "gather": _gather,
    "has": _has,
    "grow": lambda bench, name, tokens: bench.grow(name, int(tokens)),
    "landed": _landed,
    "load_stops": lambda bench, name, tokens, seconds="0": bench.load_stops(
        name, int(tokens), float(seconds)
    ),
    "late_load": _late_load,
    "load_fails": _load_fails,
    "load_failed": _load_failed,
    "loaded": lambda bench, name: bench.scheduler.load_ended(name),
    "lose_block": _lose_block,
    "lose_other": _lose_other,
    "match": _match,
    "offer": _offer,
    "other": _other,
    "own_cache_reset": lambda bench: bench.scheduler.own_cache_was_reset(),
    "poll": _poll,
    "preempt": _preempt,
    "put": _put,
    "queue": _queue,
    "release": lambda bench: bench.store.release(),
    "reset": _reset,
    "sees_arrivals": _sees_arrivals,
    "settle": lambda bench: _told(bench, bench.settle()),
    "starts": _starts,
    "step": _step,
    "step_ended": lambda bench: bench.scheduler.step_ended(),
    "stored": _stored,
    "told_load": _told_load,
    "unknown": _unknown,
    "unname": _unname,
    "wanted": _wanted,
    "watch": _watch,
    "worked": _worked,
    "wait": lambda bench, seconds: bench.clock.advance(float(seconds)),
    "weights": _weights,
    # What has come of it
    "asked": _asked,
    "count": _count,
    "forgotten": _forgotten,
    "in_store": _in_store,
    "kept": _kept,
    "lookups": _lookups,
    "pending": _pending,
    "pinned": _pinned,
    "pins": _pins,
    "waited": _waited,
    "workers_wait": _workers_wait,
}
