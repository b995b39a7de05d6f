"""Clients' requests and the calls to engines that they lead to, in a simulated cluster.

Every call ends with exactly one event, also when it was aborted. An account is kept of every
request: it fails an assertion if one has two calls at a time, or ends twice, or is begun again
after its end.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tests.support.router_engines import Call, Engine
from tests.support.router_timeline import Habits, Timeline
from vllm_kvpool.router.events import DecodeBegan, DecodeEnded, Event, Outcome, PrefillEnded
from vllm_kvpool.router.requests import Ask, RequestId
from vllm_kvpool.router.states import ReplicaId

CHUNK_TOKENS = 256  # of the pool


@dataclass(slots=True, eq=False)
class Client:
    """One request, as its client sees it."""

    ask: Ask
    arrived: float
    output_tokens: int
    received: int = 0
    first_token: float | None = None
    is_computed: bool = False
    """Whether its prompt is in the pool."""
    fate: str = ""
    """How it has ended."""


class Calls:
    """Owned by a world."""

    def __init__(
        self,
        timeline: Timeline,
        habits: Habits,
        engines: Mapping[ReplicaId, Engine],
        post: Callable[[Event], None],
    ) -> None:
        self._timeline = timeline
        self._habits = habits
        self._engines = engines
        self._post = post
        self.clients: dict[RequestId, Client] = {}
        """Those whose requests have not ended."""
        self.live: dict[RequestId, Call] = {}
        self.fates: Counter[str] = Counter()
        self.waits: list[tuple[float, float]] = []
        """When a request arrived, and how long its first token took."""
        self._pool: set[int] = set()
        self.pool_is_up = True

    # Requests

    def arrive(self, ask: Ask, output_tokens: int) -> Client:
        client = Client(ask, self._timeline.now, output_tokens)
        assert ask.request_id not in self.clients
        self.clients[ask.request_id] = client
        self.fates["arrived"] += 1
        return client

    def finish(self, client: Client, fate: str) -> None:
        """A request ends, once."""
        assert client.fate == "", f"{client.ask.request_id} was {client.fate}, is {fate}"
        client.fate = fate
        self.fates[fate] += 1
        if client.first_token is not None:
            self.waits.append((client.arrived, client.first_token - client.arrived))
        del self.clients[client.ask.request_id]

    def lose_pool(self) -> None:
        """It is down, and empty when it is back."""
        self.pool_is_up = False
        self._pool.clear()
        for client in self.clients.values():
            client.is_computed = False

    # What the controller wants done

    def prefill(self, request_id: RequestId, replica: ReplicaId) -> None:
        client = self.clients[request_id]
        assert client.first_token is None, "computed again what is being answered"
        self._begin(client, self._engines[replica], client.ask.prompt_tokens, is_prefill=True)

    def decode(self, request_id: RequestId, replica: ReplicaId, expect_tokens: int) -> None:
        client = self.clients[request_id]
        assert expect_tokens <= client.ask.prompt_tokens
        until = client.ask.prompt_tokens + client.received
        self._begin(client, self._engines[replica], until, is_prefill=False)

    def abort(self, request_id: RequestId) -> None:
        call = self.live.get(request_id)
        if call is not None:
            self._timeline.after(
                self._timeline.moment(), lambda: self.drop(call, Outcome.CANCELLED)
            )

    def _begin(self, client: Client, engine: Engine, until: int, *, is_prefill: bool) -> None:
        ask = client.ask
        assert ask.request_id not in self.live, f"{ask.request_id} has two calls at a time"
        cached = min(_known(ask, engine.cached), until)
        pooled = ask.prompt_tokens if client.is_computed else _known(ask, self._pool)
        pooled = min(pooled, until) if self.pool_is_up else 0
        call = self.live[ask.request_id] = Call(
            ask=ask,
            spec=engine.spec,
            is_prefill=is_prefill,
            prompt_tokens=until,
            tokens_to_compute=max(1, until - max(cached, pooled)),
            tokens_to_load=max(0, pooled - cached),
            output_tokens=1 if is_prefill else client.output_tokens - client.received,
        )
        self._timeline.after(self._timeline.moment(), lambda: self._send(call, engine))

    def _send(self, call: Call, engine: Engine) -> None:
        """The engine gets it, or does not."""
        now, habits, draw = self._timeline.now, self._habits, self._timeline.chance.random()
        if call.outcome is not None:
            return
        if not engine.is_up or engine.is_asleep:
            self._refuse(call, Outcome.FAILED)
        elif engine.refuses_until > now:
            self._refuse(call, Outcome.BUSY)
        elif draw < habits.failed_share:
            self._refuse(call, Outcome.FAILED)
        elif draw < habits.failed_share + habits.rejected_share:
            self._refuse(call, Outcome.REJECTED)
        elif draw < habits.failed_share + habits.rejected_share + habits.hopeless_share:
            self._refuse(call, Outcome.FAILED if call.is_prefill else Outcome.HOPELESS)
        else:
            engine.take(call, now)
            self.wake(engine)
            if engine.is_hung:
                self.watch_silence(call, engine)

    def _refuse(self, call: Call, outcome: Outcome) -> None:
        call.outcome = outcome
        self.ended(call)

    def watch_silence(self, call: Call, engine: Engine) -> None:
        """An engine has hung."""

        def give_up() -> None:
            if engine.is_hung:
                self.drop(call, Outcome.FAILED)

        self._timeline.after(self._habits.silence_s, give_up)

    def drop(self, call: Call, outcome: Outcome) -> None:
        """A call ends before it is done, if it has not ended just now."""
        if call.outcome is not None:
            return
        engine = self._engines[call.spec.replica_id]
        if call in engine.calls:
            engine.drop(call, outcome, self._timeline.now)
            self.wake(engine)
        else:  # on its way there
            self._refuse(call, outcome)

    # What comes of it

    def wake(self, engine: Engine) -> None:
        """See to it that an engine is told the time when something is due."""
        due = engine.due()

        def tell() -> None:
            if engine.due() <= due:  # else it has a later entry
                engine.tell(self._timeline.now)
                self.wake(engine)

        if due < float("inf"):
            self._timeline.at(due, tell)

    def began(self, call: Call) -> None:
        """An engine has brought a first token."""

        def post() -> None:
            client = self.clients.get(call.ask.request_id)
            if client is not None and client.first_token is None:
                client.first_token = self._timeline.now
            if self.live.get(call.ask.request_id) is call:
                self._post(DecodeBegan(call.ask.request_id))

        self._timeline.after(0.0, post)

    def ended(self, call: Call) -> None:
        """An engine has done with a call."""
        is_ok = call.outcome is Outcome.OK
        delay_s = 0.0 if is_ok else self._timeline.moment()
        self._timeline.after(delay_s, lambda: self._answer(call))

    def _answer(self, call: Call) -> None:
        request_id, outcome = call.ask.request_id, call.outcome
        assert outcome is not None
        assert self.live.pop(request_id) is call
        client = self.clients.get(request_id)
        if call.is_prefill:
            self._answer_prefill(call, client, outcome)
            return
        if client is not None:
            client.received += call.generated
            assert client.received <= client.output_tokens
            if outcome is Outcome.OK:
                assert client.received == client.output_tokens
                self.finish(client, "served")
            elif outcome in (Outcome.REJECTED, Outcome.HOPELESS):
                self.finish(client, outcome.value)
        self._post(
            DecodeEnded(
                request_id=request_id,
                replica=call.spec.replica_id,
                outcome=outcome,
                prompt_tokens=call.prompt_tokens,
                output_tokens=call.generated,
            )
        )

    def _answer_prefill(self, call: Call, client: Client | None, outcome: Outcome) -> None:
        is_saved = outcome is Outcome.OK and self.pool_is_up
        if is_saved:
            self._pool.update(call.ask.prefix)
            if client is not None:
                client.is_computed = call.prompt_tokens == call.ask.prompt_tokens
        self._post(
            PrefillEnded(
                request_id=call.ask.request_id,
                replica=call.spec.replica_id,
                outcome=outcome,
                prompt_tokens=call.prompt_tokens,
                saved_tokens=call.prompt_tokens // CHUNK_TOKENS * CHUNK_TOKENS if is_saved else 0,
            )
        )


def _known(ask: Ask, hashes: set[int]) -> int:
    """Tokens of a prompt that somebody has."""
    number = max((n for n, each in enumerate(ask.prefix, 1) if each in hashes), default=0)
    return number * ask.prefix_tokens
