"""The pool's metrics of a running engine, from its `/metrics`."""

import math
from collections import defaultdict
from collections.abc import Mapping
from http.client import HTTPException
from typing import NamedTuple
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from vllm_kvpool.direct_http import open_directly, read_whole
from vllm_kvpool.errors import ConfigError
from vllm_kvpool.metrics import METRICS, POOL_PREFIX, PREFIX

SCRAPE_TIMEOUT_S = 5.0


class Series(NamedTuple):
    """The name of a sample without its prefixes, and its labels but for those of the engine."""

    name: str
    labels: tuple[tuple[str, str], ...]


Samples = Mapping[Series, float]


def parse_metrics(text: str) -> Samples:
    """Return the pool's samples of an engine, summed over its data-parallel ranks.

    Of gauges that are 1 for well, the lowest rank's value counts. Left out are samples that
    `METRICS` does not have, or not with these labels (another release's), and NaN and infinity.
    """
    samples: dict[Series, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.removeprefix(PREFIX)
            metric = METRICS.get(name) or METRICS.get(name.rpartition("_")[0])  # _total, _sum, ...
            if metric and sample.labels.keys() >= {*metric.labels} and math.isfinite(sample.value):
                labels = {k: v for k, v in sample.labels.items() if k not in _OF_ENGINE}
                series = Series(name.removeprefix(POOL_PREFIX), tuple(sorted(labels.items())))
                if series not in samples:
                    samples[series] = sample.value
                elif metric.lowest:
                    samples[series] = min(samples[series], sample.value)
                else:
                    samples[series] += sample.value
    return samples


_OF_ENGINE = frozenset(("engine", "model_name"))


def scrape(url: str) -> Samples:
    """Return the samples of the engine at a URL. Blocks.

    Raises ConfigError, which begins with the URL and a colon, if the engine does not give them.
    """
    check_url(url)
    try:
        with open_directly(f"{url.rstrip('/')}/metrics", SCRAPE_TIMEOUT_S) as answer:
            return parse_metrics(read_whole(answer, SCRAPE_TIMEOUT_S).decode())
    except OSError as error:
        why = getattr(error, "reason", error)  # of urllib
        raise ConfigError(f"{url}: /metrics cannot be read: {why}") from None
    except (ValueError, HTTPException):
        raise ConfigError(
            f"{url}: /metrics is not what Prometheus reads; name the server of an engine"
        ) from None


def check_url(url: str) -> None:
    """Raise ConfigError if the text is no URL of an engine."""
    try:
        parts = urlsplit(url)
        is_well = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_well = False
    if not is_well:
        raise ConfigError(f"{url}: write the URL of an engine's server, http://HOST:PORT")


class Growth:
    """Growth of samples over an interval. A counter that was reset has grown by its value."""

    def __init__(self, before: Samples, now: Samples, seconds: float) -> None:
        self._seconds = seconds
        self.now = now
        self._grown = {
            series: value - before.get(series, 0.0) if value >= before.get(series, 0.0) else value
            for series, value in now.items()
        }

    def total(self, name: str, **labels: str) -> float:
        """Return the growth of all series of a name that have these labels."""
        wanted = set(labels.items())
        return sum(
            grown
            for series, grown in self._grown.items()
            if series.name == name and wanted <= set(series.labels)
        )

    def rate(self, name: str, **labels: str) -> float:
        """Return the growth a second."""
        return self.total(name, **labels) / self._seconds

    def mean(self, name: str, **labels: str) -> float | None:
        """Return the mean of what a histogram has counted in the interval."""
        count = self.total(f"{name}_count", **labels)
        return self.total(f"{name}_sum", **labels) / count if count else None

    def by(self, name: str, label: str) -> dict[str, float]:
        """Return the growth by one label, where there is any."""
        found: dict[str, float] = defaultdict(float)
        for series, grown in self._grown.items():
            if series.name == name and grown > 0:
                found[dict(series.labels)[label]] += grown
        return dict(sorted(found.items()))
