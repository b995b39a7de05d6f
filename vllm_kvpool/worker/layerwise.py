"""Worker side of layered loads: which layers of a step are in the pages, and who looked (pure).

Owned by the model's thread. A layered load begins and ends within one step: the model's layers ask
for theirs as it comes to them. A layer that has been computed without asking may have read pages
that were not filled, so that a step in which one has not asked counts as a load that has failed.
"""

from collections.abc import Iterable, Mapping

from vllm_kvpool.transfer.ops import JobId, LoadDone, Report, SpanLoaded


class LayerWaits:
    """See the module docstring. `spans`: each layer's name -> the first layer of its cells."""

    def __init__(self, spans: Mapping[str, int]) -> None:
        self._spans = spans
        self._done: dict[JobId, set[int]] = {}  # loads under way -> spans that are over
        self._unasked: set[str] = set()

    @property
    def loading(self) -> bool:
        """Whether a layered load is under way."""
        return bool(self._done)

    def begin(self, job: JobId) -> None:
        """A load of this step."""
        if not self._done:
            self._unasked = set(self._spans)
        self._done[job] = set()

    def take(self, reports: Iterable[Report]) -> None:
        """What the engine has reported."""
        for report in reports:
            if isinstance(report, SpanLoaded):
                self._done[report.job_id].add(report.layer_start)
            elif isinstance(report, LoadDone):
                self._done.pop(report.job_id, None)

    def asked(self, layer_name: str) -> None:
        """The model has come to that layer."""
        self._unasked.discard(layer_name)

    def ready(self, layer_name: str) -> bool:
        """Whether nothing is to come into the layer's pages; also of layers that have none."""
        span = self._spans.get(layer_name)
        return span is None or all(span in done for done in self._done.values())

    @property
    def unasked(self) -> frozenset[str]:
        """Layers that have been computed without asking, if the step's forward pass is over."""
        return frozenset(self._unasked)
