"""Connections to engines with short time limits."""

from vllm_kvpool.router.dataplane.upstream import Upstream


def quick_upstream(
    *, silence_timeout_s: float = 1.0, answer_timeout_s: float = 1.0, api_key: str = ""
) -> Upstream:
    """Return an upstream with short time limits. The caller closes it."""
    return Upstream(
        silence_timeout_s=silence_timeout_s, answer_timeout_s=answer_timeout_s, api_key=api_key
    )
