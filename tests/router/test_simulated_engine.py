"""Simulated engines: steps that are done many at a time are those that are done one by one."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tests.support.router_engines import Call, Engine, engine_spec
from tests.support.router_steps import spec
from tests.support.scripted_batch import ScriptedPool, Step
from vllm_kvpool.router.control.events import Outcome
from vllm_kvpool.router.control.requests import RequestId, RequestSpec

SPEC = replace(
    engine_spec(kv_blocks=80, max_num_seqs=6, max_num_batched_tokens=512), chunk_tokens=64
)


class OneByOne(Engine):
    """Does each step by itself."""

    def _num_repeats(self, step: Step) -> int:
        return 0


class Life:
    """An engine, and when each call began and ended, and how."""

    def __init__(self, kind: type[Engine]) -> None:
        self.seen: list[tuple[float, RequestId, Outcome | None, int]] = []
        self.now = 0.0
        self.pool = ScriptedPool()
        self.engine = kind(spec("r"), SPEC, self.pool, self._see, self._see)

    def _see(self, call: Call) -> None:
        self.seen.append((round(self.now, 6), call.ask.request_id, call.outcome, call.generated))

    def run(self, until: float) -> None:
        while (due := self.engine.due()) <= until:
            self.now = due
            self.engine.tell(due)
        self.now = until


requests = st.lists(
    st.tuples(
        st.floats(0.0, 2.0),  # comes so much later than the one before
        st.integers(1, 900),  # prompt
        st.integers(1, 300),  # to generate
        st.integers(0, 2),  # which beginning
        st.none() | st.floats(0.0, 6.0),  # is given up so much later
        st.booleans(),  # whether metrics are asked for then
    ),
    min_size=1,
    max_size=8,
)


@given(requests, st.floats(1.0, 4.0))
def test_many_steps_at_a_time_are_the_same_steps(
    asked: list[tuple[float, int, int, int, float | None, bool]], slowness: float
) -> None:
    lives = []
    for kind in (Engine, OneByOne):
        life, engine = Life(kind), None
        engine = life.engine
        moments: list[tuple[float, int, Call]] = []
        at = 0.0
        for number, (later, prompt, tokens, root, gives_up, _) in enumerate(asked):
            at += later
            ask = RequestSpec(
                request_id=RequestId(f"r{number}"),
                prompt_tokens=prompt,
                max_output_tokens=tokens,
                prefix=tuple(root * 100 + n for n in range(min(prompt // 64, 6))),
                prefix_tokens=64,
            )
            call = Call(
                ask=ask,
                spec=engine.spec,
                is_prefill=False,
                prompt_tokens=prompt,
                output_tokens=tokens,
            )
            moments.append((at, 0, call))
            if gives_up is not None:
                moments.append((at + gives_up, 1, call))
        for at, what, call in sorted(moments, key=lambda each: each[:2]):
            life.run(at)
            if what == 0:
                engine.take(call, at)
            else:
                engine.drop(call, Outcome.CANCELLED, at)
            number = int(call.ask.request_id[1:])
            if asked[number][5]:
                engine.sample(at)
        engine.change(life.now, slowness=slowness)
        life.run(life.now + 10_000.0)
        assert not engine.calls
        sample = engine.sample(life.now)
        assert (sample.running, sample.waiting, sample.used_blocks) == (0, 0, 0)
        lives.append((life.seen, engine.generated_tokens, sample))
    assert lives[0] == lives[1]
