"""The seam between what serves clients and what decides: `ControlPlane`."""

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from vllm_kvpool.router.control.events import RequestEvent
from vllm_kvpool.router.control.requests import RequestId, RequestSpec
from vllm_kvpool.router.control.states import ReplicaId
from vllm_kvpool.router.ops.request_log import RequestLog

if TYPE_CHECKING:
    from vllm_kvpool.router.dataplane.request_handler import RequestHandler


class ControlPlane(Protocol):
    """The decisions that a data plane asks for, in its loop."""

    @property
    def tokens_per_byte(self) -> float:
        """Prompt tokens by byte of a request's body, as learned."""

    def model_length(self, model: str) -> int | None:
        """Return the most tokens of a sequence of a model, as engines list it.

        The result is None if it is unknown.
        """

    def begin(self, ask: RequestSpec, handler: "RequestHandler") -> None:
        """Take a request that waits for a directive; `over` follows."""

    def post(self, event: RequestEvent) -> None:
        """Take the begin or end of a call to an engine, or that the client has gone."""

    def over(self, request_id: RequestId, course: RequestLog) -> None:
        """Forget an ended request, and count it in the metrics."""

    def note_refusal(self, status: int, why: str) -> None:
        """Count a refused request for the log."""

    def url_of(self, replica: ReplicaId) -> str:
        """Return the URL of a replica that a directive has named."""

    def others(self, replica: ReplicaId) -> list[str]:
        """Return the URLs of engines that answer, that of `replica` last."""

    def forward_to(self, model: str) -> list[AbstractContextManager[str]]:
        """Return engines for what is only passed on, the least busy first.

        Each is entered while it is asked, and gives its URL.
        """

    def models(self) -> list[dict[str, Any]]:
        """Return the models that engines list."""

    def health(self) -> tuple[int, bytes]:
        """Return the status and body for `/health`."""

    def metrics(self) -> tuple[str, bytes]:
        """Return the content type and body for `/metrics`."""
