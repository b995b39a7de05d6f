"""Bodies of clients, as small as they may be."""

import json
from typing import Any

from vllm_kvpool.router.dataplane.request_body import ApiPath, ClientRequest, parse_request

COMPLETION: dict[str, Any] = {"model": "m", "prompt": "Say"}
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Say"}]}


def request(body: dict[str, Any], **more: Any) -> ClientRequest:
    """Parse the body as the router does for a trusted client."""
    kind = ApiPath.CHAT if "messages" in body else ApiPath.COMPLETION
    return parse_request(kind, json.dumps({**body, **more}).encode(), is_trusted=True)
