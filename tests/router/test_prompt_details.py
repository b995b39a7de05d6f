"""The details of a prompt in an answer's `usage`: the counts of the engine that computed it."""

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support import scripted_http
from tests.support.router_rig import CHAT, COMPLETIONS, RouterRig
from tests.support.scripted_protocol import Usage
from tests.support.scripted_spec import FaultKind, ScriptedSpec
from vllm_kvpool.router.dataplane.answers import PROMPT_GRACE_S, Resumed
from vllm_kvpool.router.dataplane.calls import AnswerCall
from vllm_kvpool.router.dataplane.request_body import ApiPath
from vllm_kvpool.router.dataplane.upstream import Upstream

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


def delay_prefill(monkeypatch: pytest.MonkeyPatch, late_s: float) -> None:
    """Have the answers of prefill engines come later."""
    own = Upstream.ask

    async def ask(upstream: Upstream, url: str, *more: Any, **named: Any) -> Any:
        answer = await own(upstream, url, *more, **named)
        if more and b'"hand_over":true' in more[0]:
            await asyncio.sleep(late_s)
        return answer

    monkeypatch.setattr(Upstream, "ask", ask)


async def details_of(rig: RouterRig, path: str, body: Body) -> Any:
    """The counts that a client is told; None without details."""
    reply = await rig.complete({"max_tokens": 8, **body}, path)
    assert reply.status == 200, reply
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
    async with RouterRig(1, 1, spec=SPEC, **TRUSTING) as rig:
        let_tell(monkeypatch, rig, (PREFILL, DECODE))
        before = rig.engines[0].counts.received[path]
        assert await details_of(rig, path, body) == told_by(path, PREFILL)
        assert rig.engines[0].counts.received[path] == before + 1, "it was computed apart"


@pytest.mark.parametrize("form", ["chat, stream", "chat, whole", "chat, in one piece"])
@pytest.mark.parametrize("name", CASES)
async def test_answer_tells_the_counts_of_the_first_engine_that_had_the_prompt(
    name: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If that engine reports no counts or was lost, the counts are null: no count is made up."""
    case, (path, body) = CASES[name], FORMS[form]
    decode = len(case.says) - case.prefill
    async with RouterRig(case.prefill, decode, spec=SPEC, **TRUSTING) as rig:
        let_tell(monkeypatch, rig, case.says)
        if case.fault:
            rig.fail(case.engine, times=1, **case.fault)
        assert await details_of(rig, path, body) == case.told
        assert not rig.engines[case.engine].board.faults(), "it has happened"


@pytest.mark.parametrize(
    ("late_s", "told"), [(0.05, PREFILL), (4 * PROMPT_GRACE_S, (None, None))], ids=str
)
@pytest.mark.parametrize("form", [form for form in FORMS if form.startswith("chat")])
async def test_usage_waits_a_moment_for_the_counts_of_prefill(
    form: str, late_s: float, told: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decoder has answered while the answer of the prefill engine is on its way."""
    path, body = FORMS[form]
    async with RouterRig(1, 1, spec=SPEC, **TRUSTING) as rig:
        let_tell(monkeypatch, rig, (PREFILL, DECODE))
        delay_prefill(monkeypatch, late_s)
        assert await details_of(rig, path, {**body, "max_tokens": 2}) == told
        assert rig.counts["served"] == 1


@pytest.mark.parametrize("form", [form for form in FORMS if "stream" not in form])
async def test_answer_that_comes_in_one_read_before_the_counts_of_prefill_is_told_once(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine the decoder's stream is read when it has ended."""
    own_feed = Resumed._feed
    read: defaultdict[int, bytes] = defaultdict(bytes)

    def feed(answer: Resumed, call: AnswerCall, data: bytes) -> bool:
        read[id(call)] += data
        if b"[DONE]" not in read[id(call)]:
            return False
        return own_feed(answer, call, read.pop(id(call)))

    path, body = FORMS[form]
    body = {"max_tokens": 8, **body}
    async with RouterRig(1, 1, spec=SPEC, **TRUSTING) as rig:
        let_tell(monkeypatch, rig, (PREFILL, DECODE))
        delay_prefill(monkeypatch, 0.05)
        monkeypatch.setattr(Resumed, "_feed", feed)
        before = rig.engines[0].counts.received[path]
        reply = await rig.complete(body, path)
        assert rig.engines[0].counts.received[path] == before + 1, "it was computed apart"
        expected = await rig.complete(body, path, at=rig.engines[1])
        assert (reply.status, reply.text) == (200, expected.text)


# Counters

KEY = "key-of-search-0123456789"
RESPONSES, MESSAGES = ApiPath.RESPONSES.value, ApiPath.MESSAGES.value
PASSED_ON: dict[str, tuple[str, Body]] = {
    "response": (RESPONSES, {"input": LONG, "max_output_tokens": 8}),
    "message": (MESSAGES, {**TALK, "max_tokens": 8}),
}
STREAM = {"stream": True}
COUNTED: dict[str, tuple[str, Body, str]] = {
    **{form: (path, body, "told") for form, (path, body) in FORMS.items()},
    "stream without usage": (COMPLETIONS, {"prompt": LONG, **STREAM}, "told"),
    "several prompts": (COMPLETIONS, {"prompt": [LONG, LONG]}, "unknown"),
    **{f"{name}, whole": (*each, "unknown") for name, each in PASSED_ON.items()},
    **{
        f"{name}, stream": (at, {**of, **STREAM}, "unknown") for name, (at, of) in PASSED_ON.items()
    },
}
"""Path, body, and the source under which the prompt counts. Scripted engines send no cached tokens
in streams that the router passes on."""


def prompt_tokens(rig: RouterRig) -> dict[tuple[str, str], int]:
    return dict(rig.router.telemetry._prompt_tokens)


@pytest.mark.parametrize("form", COUNTED)
async def test_prompt_tokens_are_counted_for_the_tenant(
    form: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path, body, source = COUNTED[form]
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[[tenants]]\nname = "search"\nkey = "{KEY}"\n')
    keys.chmod(0o600)
    front = {"trust_clients": True, "keys_file": str(keys)}
    async with RouterRig(1, 1, spec=SPEC, front=front) as rig:
        let_tell(monkeypatch, rig, (PREFILL, DECODE))
        reply = await rig.complete(body, path, {"Authorization": f"Bearer {KEY}"})
        assert reply.status == 200
        await rig.until(lambda: not rig.router._open, "it is over")
        counts = prompt_tokens(rig)
    assert {tenant for tenant, _ in counts} == {"search"}
    by_source = {name: tokens for (_, name), tokens in counts.items()}
    assert sum(by_source.values()) > 1000
    if source == "told":
        assert by_source.keys() == {"cached", "computed"}
        assert by_source["cached"] == PREFILL[0]
    else:
        assert by_source.keys() == {"unknown"}


@pytest.mark.parametrize("name", ["engine tells", "stream without usage", "choices"])
async def test_prompt_tokens_without_prefill_are_those_that_the_answer_tells(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream without a usage, and an engine's count of one of several choices, do not tell."""
    more = {"engine tells": {}, "stream without usage": STREAM, "choices": {"n": 2}}[name]
    async with RouterRig(0, 1, spec=SPEC) as rig:
        let_tell(monkeypatch, rig, (DECODE,))
        reply = await rig.complete({"prompt": LONG, "max_tokens": 4, **more})
        assert reply.status == 200
        await rig.until(lambda: not rig.router._open, "it is over")
        counts = prompt_tokens(rig)
    expected = {("-", "cached"), ("-", "computed")} if not more else {("-", "unknown")}
    assert counts.keys() == expected
    if not more:
        assert counts["-", "cached"] == DECODE[0]


async def test_prompt_tokens_of_an_answer_that_its_client_leaves_are_counted() -> None:
    async with RouterRig(0, 1, spec=SPEC) as rig:
        body = rig.body({"prompt": LONG, "max_tokens": 2000, **STREAM})
        async with rig.session.post(rig.url + COMPLETIONS, json=body) as got:
            await got.content.readany()
        await rig.until(lambda: not rig.router._open, "it is over")
        counts = prompt_tokens(rig)
    assert counts.keys() == {("-", "unknown")}
    assert counts["-", "unknown"] > 1000
