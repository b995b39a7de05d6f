"""The router's paths, against the routes of vLLM's own server."""

import importlib
import warnings
from pathlib import Path

import pytest
from fastapi import APIRouter
from fastapi.routing import APIRoute

from vllm_kvpool.router.dataplane.data_plane import METHODS

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm import entrypoints

FILES = ("api_router.py", "basic.py", "health.py")
REFUSED_PARTS = {
    **dict.fromkeys(("rl", "serve.dev", "serve.elastic_ep", "serve.profile"), "an operator's"),
    **dict.fromkeys(("serve.fault_tolerance", "serve.lora"), "an operator's"),
    "cohere": "an own form of chats, with vLLM's switch",
    "scale_out": "between engines, with vLLM's switch",
    "speech_to_text": "bodies that are no JSON",
}
REFUSED_PATHS = {
    "/kv_event_sources": "an operator's",
    "/load": "an operator's",
    "/v1/chat/completions/batch": "decodes several chats, and has no stream",
    "/v1/responses/{response_id}": "one engine has it",
    "/v1/responses/{response_id}/cancel": "one engine has it",
    "/v1/systemone": "models of its own",
}


def routes() -> list[tuple[str, APIRoute]]:
    """Return vLLM's routes, each with its part of the server."""
    found = {}
    (folder,) = map(Path, entrypoints.__path__)
    files = [path for name in FILES for path in sorted(folder.rglob(name))]
    for path in files:
        part = ".".join(path.relative_to(folder).with_suffix("").parts)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = importlib.import_module(f"{entrypoints.__name__}.{part}")
        for value in vars(module).values():
            for route in value.routes if isinstance(value, APIRouter) else ():
                if isinstance(route, APIRoute):
                    found[route.path] = part, route
    return list(found.values())


ROUTES = routes()


@pytest.mark.parametrize(("part", "route"), ROUTES, ids=[route.path for _, route in ROUTES])
def test_route_of_vllm_is_served_or_refused_for_a_reason(part: str, route: APIRoute) -> None:
    is_refused = route.path in REFUSED_PATHS or any(
        f"{part}.".startswith(f"{each}.") for each in REFUSED_PARTS
    )
    assert (route.path in METHODS) is not is_refused
    assert is_refused or route.methods <= {*METHODS[route.path]}


def test_routes_are_those_of_a_whole_server() -> None:
    assert len(ROUTES) > 50
    assert {route.path for _, route in ROUTES} >= REFUSED_PATHS.keys()
