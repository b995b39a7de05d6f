"""Which requests a load consists of, and when each is sent (pure).

Arrivals are a Poisson process whose rate is on and off by turns: `rate`, and `burst_rate` in the
last `burst_s` of every `burst_every_s`. They do not wait for answers (an open loop), so a server
that falls behind meets the same load. Prompts share prefixes, the first of them most often.
"""

import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

import msgspec

from vllm_kvpool.errors import ConfigError, nearest

MAX_ARRIVALS = 1_000_000
SYLLABLES = ("ba", "do", "fe", "gi", "ko", "lu", "ma", "ne", "pi", "ro", "su", "ta", "ve", "zo")
WORDS = tuple(first + second for first in SYLLABLES for second in SYLLABLES)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSpec:
    """A load. ConfigError if it cannot be one."""

    seconds: float = 60.0
    rate: float = 2.0
    """Requests per second outside bursts."""
    burst_rate: float = 10.0
    burst_every_s: float = 20.0
    burst_s: float = 5.0
    num_prefixes: int = 8
    """Beginnings that prompts share; the k-th is k times rarer than the first."""
    prefix_words: int = 200
    prompt_words_min: int = 8
    """Of what follows the prefix; short ones are as frequent as long ones on a scale of powers."""
    prompt_words_max: int = 128
    output_tokens_min: int = 8
    output_tokens_max: int = 64
    endpoint: Literal["chat", "completions"] = "completions"
    model: str = ""
    """Empty: the first that the server names."""
    ignore_eos: bool = True
    """Have vLLM generate all of `output_tokens`."""
    request_timeout_s: float = 120.0
    max_in_flight: int = 2000
    """Requests beyond it are not sent, and counted so."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in (
            ("seconds", self.seconds),
            ("burst_every_s", self.burst_every_s),
            ("request_timeout_s", self.request_timeout_s),
            ("max_in_flight", self.max_in_flight),
            ("num_prefixes", self.num_prefixes),
        ):
            _require(value > 0, f"{name} must be above 0")
        for name, value in (
            ("rate", self.rate),
            ("burst_rate", self.burst_rate),
            ("burst_s", self.burst_s),
            ("prefix_words", self.prefix_words),
        ):
            _require(value >= 0, f"{name} must not be below 0")
        _require(self.burst_s <= self.burst_every_s, "burst_s must not exceed burst_every_s")
        for name, low, high in (
            ("prompt_words", self.prompt_words_min, self.prompt_words_max),
            ("output_tokens", self.output_tokens_min, self.output_tokens_max),
        ):
            _require(1 <= low <= high, f"1 <= {name}_min <= {name}_max must hold")
        expected = self.seconds * max(self.rate, self.burst_rate)
        _require(expected <= MAX_ARRIVALS, f"more than {MAX_ARRIVALS} requests")


class Arrival(NamedTuple):
    """One request, and when it is sent, in seconds from the begin of the load."""

    at_s: float
    prompt: str
    prefix: int
    output_tokens: int


def read_load_spec(options: Mapping[str, object]) -> LoadSpec:
    """A load from options as a file or a command line has them; ConfigError names mistakes."""
    known = [field.name for field in fields(LoadSpec)]
    for name in options:
        if name not in known:
            raise ConfigError(f"a load has no option {name!r}; {nearest(name, known)}")
    try:
        return msgspec.convert(dict(options), LoadSpec, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"load: {error}") from error


def bursts(spec: LoadSpec) -> Iterator[tuple[float, float]]:
    """Begin and end of each burst, in seconds."""
    for begin, end, is_burst in _phases(spec):
        if is_burst:
            yield begin, end


def arrivals(spec: LoadSpec) -> Iterator[Arrival]:
    """The requests in order of time; the same for the same spec."""
    chance = random.Random(spec.seed)
    prefixes = [_words(chance, spec.prefix_words) for _ in range(spec.num_prefixes)]
    weights = [1 / number for number in range(1, spec.num_prefixes + 1)]
    for at_s in _times(spec, chance):
        (prefix,) = chance.choices(range(spec.num_prefixes), weights)
        words = _length(chance, spec.prompt_words_min, spec.prompt_words_max)
        yield Arrival(
            at_s,
            f"{prefixes[prefix]} {_words(chance, words)}".strip(),
            prefix,
            _length(chance, spec.output_tokens_min, spec.output_tokens_max),
        )


def _times(spec: LoadSpec, chance: random.Random) -> Iterator[float]:
    # Expected requests until the next; what is left of it goes on into the next phase, as the
    # process has no memory.
    wait = chance.expovariate(1.0)
    for begin, end, is_burst in _phases(spec):
        rate = spec.burst_rate if is_burst else spec.rate
        at_s = begin
        while rate > 0 and at_s + wait / rate < end:
            at_s += wait / rate
            yield at_s
            wait = chance.expovariate(1.0)
        wait -= (end - at_s) * rate


def _phases(spec: LoadSpec) -> Iterator[tuple[float, float, bool]]:
    for number in itertools.count():
        begin = number * spec.burst_every_s
        burst, end = begin + spec.burst_every_s - spec.burst_s, begin + spec.burst_every_s
        if begin >= spec.seconds:
            return
        yield begin, min(burst, spec.seconds), False
        if burst < min(end, spec.seconds):
            yield burst, min(end, spec.seconds), True


def _length(chance: random.Random, low: int, high: int) -> int:
    """Between both, with equal chances for each factor: most are short, some are long."""
    return min(high, int(low * ((high + 1) / low) ** chance.random()))


def _words(chance: random.Random, count: int) -> str:
    return " ".join(chance.choices(WORDS, k=count))


def _require(is_met: bool, message: str) -> None:
    if not is_met:
        raise ConfigError(f"load: {message}")
