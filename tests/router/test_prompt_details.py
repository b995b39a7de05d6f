"""The details of a prompt in an answer's `usage`: the counts of the engine that computed it."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.support import scripted_http
from tests.support.router_rig import CHAT, COMPLETIONS, RouterRig
from tests.support.scripted_protocol import Usage
from tests.support.scripted_spec import FaultKind, ScriptedSpec

LONG = "hello world " * 400  # over a thousand tokens: worth a prefill of its own
TALK = {"messages": [{"role": "user", "content": LONG}]}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
ONE_PIECE = {"kv_transfer_params": {"kvpool": {"tenant": "search"}}}
TRUSTING = {"front": {"trust_clients": True}}
SPEC = ScriptedSpec(step_base_s=0.001, put_s=0.005, enable_prompt_tokens_details=True)

Body = dict[str, Any]
Counts = tuple[int | None, int | None]
"""Cached and created tokens."""

FORMS: dict[str, tuple[str, Body]] = {
    f"{kind}, {form}": (path, {**prompt, **more})
    for kind, path, prompt in (("completion", COMPLETIONS, {"prompt": LONG}), ("chat", CHAT, TALK))
    for form, more in {
        "stream": USAGE,
        "whole": {},
        "in one piece": ONE_PIECE,
        "choices": {"n": 2},
        "stream of choices": {"n": 2, **USAGE},
    }.items()
}
PREFILL, DECODE = (96, 900), (850, 32)


@dataclass
class Case:
    """Engines, the counts that each tells, and the counts that the client is told."""

    told: Counts | None
    says: tuple[Counts | None, ...]
    """By engine; None: an engine without `--enable-prompt-tokens-details`."""
    prefill: int = 1
    fault: Body = field(default_factory=dict)
    engine: int = 0
    """The engine that has the fault, once."""


BUSY = {"kind": FaultKind.BUSY}
CUT = {"kind": FaultKind.CUT, "after_tokens": 0}
CUT_LATER = {"kind": FaultKind.CUT, "after_tokens": 3}
BROKEN = {"kind": FaultKind.STATUS, "status": 500}
CASES = {
    "computed apart": Case(PREFILL, (PREFILL, DECODE)),
    "decoder finds less": Case((850, 50), ((850, 50), (32, 700))),
    "prefill does not tell": Case((None, None), (None, DECODE)),
    "decoder does not tell": Case(None, (PREFILL, None)),
    "no prefill engine": Case(DECODE, (DECODE,), prefill=0),
    "prefill is busy": Case(DECODE, (PREFILL, DECODE), fault=BUSY),
    "prefill fails": Case((None, None), (PREFILL, DECODE), fault=BROKEN),
    "prefill is lost": Case((None, None), (PREFILL, DECODE), fault=CUT),
    "decoder is lost": Case(PREFILL, (PREFILL, DECODE), fault=CUT, engine=1),
    "decoder is lost later": Case(PREFILL, (PREFILL, DECODE), fault=CUT_LATER, engine=1),
    "one engine is lost": Case((None, None), (DECODE, DECODE), prefill=0, fault=CUT),
    "one engine is lost later": Case((None, None), (DECODE, DECODE), prefill=0, fault=CUT_LATER),
    "one engine is busy": Case(DECODE, (DECODE, DECODE), prefill=0, fault=BUSY),
}


def let_tell(monkeypatch: pytest.MonkeyPatch, rig: RouterRig, says: tuple[Any, ...]) -> None:
    """Have each engine tell its own counts, whatever it has found."""
    own = scripted_http.Reply.usage

    def usage(reply: scripted_http.Reply, spec: ScriptedSpec) -> Usage:
        counts = says[[each.core for each in rig.engines].index(reply._core)]
        cached, created = counts or (None, 0)
        return own(reply, spec)._replace(cached_tokens=cached, created_tokens=created)

    monkeypatch.setattr(scripted_http.Reply, "usage", usage)


async def details_of(rig: RouterRig, path: str, body: Body) -> Any:
    """The counts that a client is told; None without details."""
    reply = await rig.complete({"max_tokens": 8, **body}, path)
    assert reply.status == 200, reply
    assert reply.usage is not None
    details = reply.usage.get("prompt_tokens_details")
    return details and (details["cached_tokens"], details.get("created_cache_tokens"))


def told_by(path: str, counts: Counts | None) -> Any:
    """A completion has no `created_cache_tokens`."""
    return counts if path == CHAT or counts is None else (counts[0], None)


@pytest.mark.parametrize("form", FORMS)
async def test_answer_of_a_prompt_computed_apart_tells_the_counts_of_prefill(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decoder found 850 tokens and created 32, all of them from the prefill engine."""
    path, body = FORMS[form]
    async with RouterRig(1, 1, spec=SPEC, config=TRUSTING) as rig:
        let_tell(monkeypatch, rig, (PREFILL, DECODE))
        before = rig.engines[0].counts.received[path]
        assert await details_of(rig, path, body) == told_by(path, PREFILL)
        assert rig.engines[0].counts.received[path] == before + 1, "it was computed apart"


@pytest.mark.parametrize("form", ["chat, stream", "chat, whole", "chat, in one piece"])
@pytest.mark.parametrize("name", CASES)
async def test_answer_tells_the_counts_of_the_first_engine_that_had_the_prompt(
    name: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where that engine does not tell, or was lost, the counts are null: no count is made up."""
    case, (path, body) = CASES[name], FORMS[form]
    decode = len(case.says) - case.prefill
    async with RouterRig(case.prefill, decode, spec=SPEC, config=TRUSTING) as rig:
        let_tell(monkeypatch, rig, case.says)
        if case.fault:
            rig.fail(case.engine, times=1, **case.fault)
        assert await details_of(rig, path, body) == case.told
        assert not rig.engines[case.engine].board.faults(), "it has happened"
