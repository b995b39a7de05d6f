"""Rates of the deployment, learned while it serves (pure; time comes in as `now`).

A rate is a sum of amounts divided by a sum of durations, never a mean of single rates. Both sums
fade with a half-life. Time without work is in neither sum, so an idle night does not lower a rate.
The capacity of decoders is not the rate at which they worked. It follows from the time of a step by
its number of requests (`Rates.step_s`), and from `StartRate` while requests wait to be started.
Without samples, the duration of a hand-over ages towards its prior, so a slow path is tried again.
The first `COLD_SAMPLES` of each replica measure compiling and warming up, and are left out.
All objects belong to one thread.
"""

import math
from collections import Counter, deque
from dataclasses import dataclass, field

import msgspec

HALF_LIFE_S = 60.0
AGEING_HALF_LIFE_S = 120.0  # of what is learned of hand-overs, without any
MIN_SAMPLES = 8  # from here on the prior counts nothing
COLD_SAMPLES = 2
OUTLIER_FACTOR = 10.0  # a sample further off than this counts as this far off
MIN_SPREAD = 0.1  # of the mean: below it, hand-overs are too alike in length to tell a slope
LEAST_SPAN_S = 1.0  # of a flow: two readings at almost one moment are not a flood
MAX_READINGS = 128  # of a flow that are kept
STEP_HALF_LIFE_S = 600.0  # of step times: large batches come now and then
MAX_STARTS = 128  # of which the rate is taken
MIN_STARTS = 8  # fewer say nothing: the first of a batch has waited for all of it
FORGET_STARTS_S = 60.0  # without any waiting: the next burst may be of other requests


class Rates(msgspec.Struct, frozen=True):
    """The rates at one moment.

    The defaults are assumed until there are measurements; what is only assumed refuses no request.
    """

    prefill_tokens_per_s: float = 10_000.0  # of one prefill replica: prompt tokens computed
    transfer_tokens_per_s: float = 50_000.0  # of one decode replica: prompt tokens taken over
    handoff_overhead_s: float = 0.02  # of one hand-over, however short the prompt
    handoff_s_per_token: float = 0.00002  # of one hand-over, beyond that
    local_prefill_s_per_token: float = 0.0001  # of a prompt that its decode replica computes
    local_overhead_s: float = 0.0  # the same as a line: until the first token, however short it is
    local_s_per_token: float = 0.0001  # beyond that
    step_base_s: float = 0.02  # from one token to the next, however few are decoded side by side
    step_s_per_request: float = 0.0  # for each request that is
    output_tokens_per_request: float = 256.0
    tokens_per_byte: float = 0.25  # prompt tokens by bytes of the request's body
    unmeasured: frozenset[str] = frozenset()
    """Names of rates above that are still what was assumed."""

    def measured(self) -> dict[str, float | None]:
        """Return each rate by its name; None where it is only assumed."""
        return {name: None if name in self.unmeasured else getattr(self, name) for name in RATES}

    def step_s(self, requests: float) -> float:
        """Return the seconds between two tokens of each of so many requests at one replica."""
        return self.step_base_s + self.step_s_per_request * requests

    def handoff_s(self, tokens: float) -> float:
        """Return the seconds from the end of a prefill to the first decoded token."""
        return self.handoff_overhead_s + self.handoff_s_per_token * tokens

    def local_prefill_s(self, tokens: float) -> float:
        """Return the seconds of a decode replica that computes so many prompt tokens.

        The overhead that a hand-over of the shortest prompt costs as well is left out.
        """
        local_s = self.local_overhead_s + self.local_s_per_token * tokens
        return local_s - min(self.local_overhead_s, self.handoff_overhead_s)


RATES = tuple(name for name in Rates.__struct_fields__ if name != "unmeasured")


@dataclass(slots=True)
class Rate:
    """Amount by what it took (tokens by seconds, say), over the recent past."""

    prior: float
    outlier_factor: float = OUTLIER_FACTOR
    trusted_after: int = MIN_SAMPLES
    """Samples until the prior counts nothing."""
    samples: int = 0
    _ratio: float = 0.0  # kept beside the weight: both sums fade to nothing in a long pause
    _weight: float = 0.0  # what was taken, faded
    _at: float = 0.0

    def add(self, now: float, amount: float, took: float) -> None:
        """Add a sample; `took` is positive. Samples may come a little out of order."""
        if self.samples >= MIN_SAMPLES:
            # What was too slow took less, what was too fast was less: neither gains weight.
            took = min(took, _quotient(amount * self.outlier_factor, self._ratio))
            amount = min(amount, self._ratio * self.outlier_factor * took)
        weight = self._weight * 0.5 ** (max(0.0, now - self._at) / HALF_LIFE_S)
        if took > 0.0:
            self._ratio = (self._ratio * weight + amount) / (weight + took)
            self._weight, self._at = weight + took, max(now, self._at)
            self.samples += 1

    @property
    def value(self) -> float:
        """The measured ratio; near the prior until `trusted_after` samples have come."""
        share = min(1.0, self.samples / self.trusted_after)
        return self.prior + share * (self._ratio - self.prior)


def _quotient(amount: float, ratio: float) -> float:
    return amount / ratio if ratio > 0.0 else float("inf")


@dataclass(slots=True)
class Line:
    """Seconds by tokens (or requests): an overhead and a slope, by least squares."""

    prior_overhead_s: float
    prior_s_per_token: float
    half_life_s: float = HALF_LIFE_S
    trusted_after: int = MIN_SAMPLES
    ageing_half_life_s: float = math.inf
    """Half-life of what was learned, while no sample comes."""
    samples: int = 0
    _weight: float = 0.0
    _at: float = 0.0
    _tokens: float = 0.0  # means, variance and covariance, faded
    _seconds: float = 0.0
    _variance: float = 0.0
    _covariance: float = 0.0

    def add(self, now: float, tokens: float, seconds: float) -> None:
        """Add a sample at `now`; an outlier is limited to OUTLIER_FACTOR around the line."""
        if self.samples >= MIN_SAMPLES:
            overhead_s, s_per_token = self.value
            expected_s = overhead_s + s_per_token * tokens
            seconds = min(max(seconds, expected_s / OUTLIER_FACTOR), expected_s * OUTLIER_FACTOR)
        faded = 0.5 ** (max(0.0, now - self._at) / self.half_life_s)
        self._weight = self._weight * faded + 1.0
        self._at = max(now, self._at)
        share = 1.0 / self._weight
        d_tokens, d_seconds = tokens - self._tokens, seconds - self._seconds
        self._tokens += share * d_tokens
        self._seconds += share * d_seconds
        self._variance = (1 - share) * (self._variance + share * d_tokens * d_tokens)
        self._covariance = (1 - share) * (self._covariance + share * d_tokens * d_seconds)
        self.samples += 1

    def aged(self, now: float) -> tuple[float, float]:
        """Return `value`, the nearer to the prior the longer nothing was added."""
        share = 0.5 ** (max(0.0, now - self._at) / self.ageing_half_life_s)
        overhead_s, s_per_token = self.value
        return (
            self.prior_overhead_s + share * (overhead_s - self.prior_overhead_s),
            self.prior_s_per_token + share * (s_per_token - self.prior_s_per_token),
        )

    @property
    def value(self) -> tuple[float, float]:
        """Overhead in seconds, and seconds by token; neither is negative."""
        share = min(1.0, self.samples / self.trusted_after)
        if not share:
            return self.prior_overhead_s, self.prior_s_per_token
        if self._variance > (MIN_SPREAD * self._tokens) ** 2:
            slope = max(0.0, self._covariance / self._variance)
        else:
            slope = self.prior_s_per_token
        slope = min(slope, _quotient(self._seconds, self._tokens))
        overhead_s = max(0.0, self._seconds - slope * self._tokens)
        return (
            self.prior_overhead_s + share * (overhead_s - self.prior_overhead_s),
            self.prior_s_per_token + share * (slope - self.prior_s_per_token),
        )


@dataclass(slots=True)
class CounterRate:
    """Units by second over about the last `window_s`."""

    window_s: float = 10.0
    _counter: float | None = None
    _total: float = 0.0
    _readings: deque[tuple[float, float]] = field(default_factory=deque)  # when, units until then

    def read(self, now: float, counter: float) -> None:
        """Take a counter's value; a value lower than before says that it began again at zero."""
        before, self._counter = self._counter, counter
        if before is not None:
            self.add(now, counter - before if counter >= before else counter)
        else:
            self.add(now, 0.0)

    def add(self, now: float, units: float) -> None:
        """Add an amount; that of the first call came before there was a rate."""
        self._total += units
        readings = self._readings
        if len(readings) > 1 and now < readings[-2][0] + self.window_s / MAX_READINGS:
            readings.pop()
        readings.append((now, self._total))
        while len(readings) > 2 and readings[1][0] <= now - self.window_s:
            readings.popleft()

    def per_second(self, now: float) -> float:
        """Return the rate over the window that ends with the last reading.

        The rate is zero once that is as long ago.
        """
        if not self._readings or now - self._readings[-1][0] >= self.window_s:
            return 0.0
        (begin, first), (end, last) = self._readings[0], self._readings[-1]
        return (last - first) / max(end - begin, LEAST_SPAN_S)


@dataclass(slots=True)
class StartRate:
    """Requests by second that decoders start while others wait for that, here or in an engine.

    Whatever they wait for (blocks, sequences, prompts computed before theirs), they are started as
    fast as this says. Time in which none waits does not count, so a light load says nothing.
    """

    _seconds: float = 0.0
    """In which requests have waited."""
    _at: float = 0.0
    _is_waiting: bool = False
    _starts: deque[float] = field(default_factory=lambda: deque([0.0], MAX_STARTS + 1))
    """`_seconds` at each start, and at the beginning."""

    def watch(self, now: float, *, is_waiting: bool) -> None:
        """Note whether requests wait from now on."""
        self._pass(now)
        if is_waiting and not self._is_waiting and now - self._at > FORGET_STARTS_S:
            self._starts.clear()
            self._starts.append(self._seconds)
        if is_waiting or self._is_waiting:
            self._at = now
        self._is_waiting = is_waiting

    def started(self, now: float) -> None:
        """Count a start at `now`, if requests waited for it."""
        if self._is_waiting:
            self._pass(now)
            self._starts.append(self._seconds)

    def per_second(self, now: float) -> float:
        """Return the starts by second of all decoders; infinite after fewer than MIN_STARTS."""
        self._pass(now)
        number, seconds = len(self._starts) - 1, self._seconds - self._starts[0]
        return number / seconds if number >= MIN_STARTS and seconds > 0.0 else float("inf")

    def _pass(self, now: float) -> None:
        if self._is_waiting:
            self._seconds += now - self._at
            self._at = now


RATES_EVERY_S = 0.01
"""Age up to which `current` answers again what it has answered: one sample moves it little."""
RATE_WINDOW_S = 60.0
"""Window of arrival rates: in a shorter window a few long prompts look like another load."""


class RateEstimator:
    """The rates of all replicas together.

    `left_out` of a method counts the samples of an engine that were left out, by their kind.
    """

    def __init__(self, prior: Rates) -> None:
        self._prefill = Rate(prior.prefill_tokens_per_s, trusted_after=1)
        self._transfer = Rate(prior.transfer_tokens_per_s, trusted_after=1)
        self._step = Line(prior.step_base_s, prior.step_s_per_request, STEP_HALF_LIFE_S, 1)
        self._handoff = Line(
            prior.handoff_overhead_s,
            prior.handoff_s_per_token,
            ageing_half_life_s=AGEING_HALF_LIFE_S,
        )
        self._local = Rate(prior.local_prefill_s_per_token, trusted_after=1)
        self._local_line = Line(prior.local_overhead_s, prior.local_s_per_token)
        self.asked_tokens = CounterRate(RATE_WINDOW_S)
        """Prompt tokens to be computed apart, of arrived requests, refused ones included."""
        self.handed_tokens = CounterRate(RATE_WINDOW_S)
        """Prompt tokens that have been computed apart."""
        self._current = prior
        self._current_until = -math.inf
        # Lengths of answers and prompts differ by more than any factor, and rightly.
        self._output = Rate(prior.output_tokens_per_request, outlier_factor=math.inf)
        self._prompt = Rate(prior.tokens_per_byte, outlier_factor=math.inf)
        self._rates = {
            "prefill_tokens_per_s": self._prefill,
            "transfer_tokens_per_s": self._transfer,
            "local_prefill_s_per_token": self._local,
            "output_tokens_per_request": self._output,
            "tokens_per_byte": self._prompt,
        }
        """The source of each rate, by its name in `Rates`."""
        self._lines = {
            ("handoff_overhead_s", "handoff_s_per_token"): self._handoff,
            ("local_overhead_s", "local_s_per_token"): self._local_line,
            ("step_base_s", "step_s_per_request"): self._step,
        }

    def prefilled(self, left_out: Counter[str], now: float, tokens: int, busy_s: float) -> None:
        """Count tokens that a prefill replica has computed in so many seconds of work."""
        if busy_s > 0.0 and self._is_warm("prefill", left_out):
            self._prefill.add(now, tokens, busy_s)

    def transferred(self, left_out: Counter[str], now: float, tokens: int, busy_s: float) -> None:
        """Count prompt tokens that a decode replica has taken over in so many seconds of work."""
        if busy_s > 0.0 and self._is_warm("transfer", left_out):
            self._transfer.add(now, tokens, busy_s)

    def handed_over(self, left_out: Counter[str], now: float, tokens: int, seconds: float) -> None:
        """Count a prompt of `tokens` that took so long from its prefill's end to the next token."""
        if tokens > 0 and seconds > 0.0 and self._is_warm("handoff", left_out):
            self._handoff.add(now, tokens, seconds)

    def prefilled_locally(
        self, left_out: Counter[str], now: float, tokens: int, seconds: float
    ) -> None:
        """Count prompt tokens that a decode replica computed itself."""
        if tokens > 0 and seconds > 0.0 and self._is_warm("local", left_out):
            self._local.add(now, seconds, tokens)
            self._local_line.add(now, tokens, seconds)

    def decoded(self, left_out: Counter[str], now: float, requests: float, step_s: float) -> None:
        """Count the tokens of a request that got one each `step_s`, beside so many `requests`."""
        if requests > 0.0 and step_s > 0.0 and self._is_warm("step", left_out):
            self._step.add(now, requests, step_s)

    def answered(self, now: float, output_tokens: int) -> None:
        """Count a request that is over, with so many tokens generated."""
        self._output.add(now, output_tokens, 1.0)

    def counted(self, now: float, prompt_tokens: int, body_bytes: int) -> None:
        """Count the tokens that a body of so many bytes held, by an engine."""
        if prompt_tokens > 0 and body_bytes > 0:
            self._prompt.add(now, prompt_tokens, body_bytes)

    def current(self, now: float) -> Rates:
        """Return the rates at `now`, or as they were up to RATES_EVERY_S ago."""
        if now >= self._current_until:
            self._current, self._current_until = self.snapshot(now), now + RATES_EVERY_S
        return self._current

    def snapshot(self, now: float) -> Rates:
        """Return the rates at `now`."""
        found = {name: each.value for name, each in self._rates.items()}
        unmeasured = [name for name, each in self._rates.items() if not each.samples]
        for names, line in self._lines.items():
            found |= zip(names, line.aged(now), strict=True)
            if not line.samples:
                unmeasured += names
        return Rates(**found, unmeasured=frozenset(unmeasured))

    def _is_warm(self, kind: str, left_out: Counter[str]) -> bool:
        if left_out[kind] >= COLD_SAMPLES:
            return True
        left_out[kind] += 1
        return False
