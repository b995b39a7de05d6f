"""Waits of layers for their loads (pure; the model's thread)."""

from collections.abc import Iterable, Mapping

from vllm_kvpool.transfer.ops import JobId, LoadDone, Report, SpanLoaded


class LayerWaits:
    """The layers of a step that are loaded, and those that have waited.

    A layer that was computed without waiting may have read pages that were not filled; then the
    step's layered loads count as failed. `spans`: each layer's name -> the first layer of its
    cells.
    """

    def __init__(self, spans: Mapping[str, int]) -> None:
        self._spans = spans
        self._done: dict[JobId, set[int]] = {}  # loads in progress -> spans that are loaded
        self._unasked: set[str] = set()

    @property
    def loading(self) -> bool:
        """True if a layered load is in progress."""
        return bool(self._done)

    def start_load(self, job: JobId) -> None:
        """Count a layered load of this step, which begins."""
        if not self._done:
            self._unasked = set(self._spans)
        self._done[job] = set()

    def note_reports(self, reports: Iterable[Report]) -> None:
        """Note the engine's reports."""
        for report in reports:
            if isinstance(report, SpanLoaded):
                self._done[report.job_id].add(report.layer_start)
            elif isinstance(report, LoadDone):
                self._done.pop(report.job_id, None)

    def note_asked(self, layer_name: str) -> None:
        """Note that the model has waited and is about to compute this layer."""
        self._unasked.discard(layer_name)

    def ready(self, layer_name: str) -> bool:
        """Return True if no load writes into the layer's pages any more; true of unknown layers."""
        span = self._spans.get(layer_name)
        return span is None or all(span in done for done in self._done.values())

    @property
    def unasked(self) -> frozenset[str]:
        """Layers that have not waited; after the forward pass, those computed without waiting."""
        return frozenset(self._unasked)
