"""Metrics of a running server, read until they say what a test waits for.

An answer may come before its counts. An engine shows the counts of a step after the step's answer,
some of them only with the next step. The router shows a page that is up to `MAX_AGE_S` old. So a
test names what it waits for, and cannot read a page just once.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from prometheus_client.samples import Sample

LIMIT_S = 30.0
POLL_S = 0.1


class MetricsPage:
    """The samples of one answer of `/metrics`."""

    def __init__(self, text: str) -> None:
        self._samples: dict[str, list[Sample]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self._samples.setdefault(sample.name, []).append(sample)

    def labels(self, name: str) -> list[Mapping[str, str]]:
        """Return the labels of each sample of a name."""
        return [sample.labels for sample in self._samples.get(name, ())]

    def by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Return the samples of a name that have these labels, summed by another label."""
        sums: dict[str, float] = {}
        for sample in self._samples.get(name, ()):
            if labels.items() <= sample.labels.items():
                sums[sample.labels[label]] = sums.get(sample.labels[label], 0.0) + sample.value
        return sums

    def total(self, name: str) -> float:
        """Return the sum of a name's samples."""
        return sum(sample.value for sample in self._samples.get(name, ()))


def wait_for_metrics(
    url: str,
    is_so: Callable[[MetricsPage], bool],
    headers: Mapping[str, str] | None = None,
    limit_s: float = LIMIT_S,
) -> MetricsPage:
    """Return the first page of the server at `url` for which `is_so` holds.

    Raises AssertionError with the last page after `limit_s` seconds.
    """
    text, page = "", MetricsPage("")

    def has_come() -> bool:
        nonlocal text, page
        text = httpx.get(f"{url}/metrics", headers=headers, timeout=limit_s).text
        page = MetricsPage(text)
        return is_so(page)

    wait_until(has_come, limit_s, lambda: text, POLL_S)
    return page
