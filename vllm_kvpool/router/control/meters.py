"""What a replica moves by second, from the counters of its engine (pure)."""

from dataclasses import dataclass, field

from vllm_kvpool.router.control.events import Sample
from vllm_kvpool.router.control.rates import Flow


@dataclass(frozen=True, slots=True)
class Moved:
    """By second, over the last seconds."""

    bytes_in: float
    """From the pool into the engine."""
    bytes_out: float
    prompt_tokens: float
    generated_tokens: float


@dataclass(slots=True)
class Meters:
    """Of one replica. A counter lower than before belongs to an engine that was started again."""

    _bytes_in: Flow = field(default_factory=Flow)
    _bytes_out: Flow = field(default_factory=Flow)
    _prompt_tokens: Flow = field(default_factory=Flow)
    _generated_tokens: Flow = field(default_factory=Flow)

    def read(self, now: float, sample: Sample) -> None:
        self._bytes_in.read(now, sample.bytes_in)
        self._bytes_out.read(now, sample.bytes_out)
        self._prompt_tokens.read(now, sample.prompt_tokens)
        self._generated_tokens.read(now, sample.generated_tokens)

    def per_second(self, now: float) -> Moved:
        """Nothing, once no sample has come for a while."""
        return Moved(
            bytes_in=self._bytes_in.per_second(now),
            bytes_out=self._bytes_out.per_second(now),
            prompt_tokens=self._prompt_tokens.per_second(now),
            generated_tokens=self._generated_tokens.per_second(now),
        )
