"""The router's paths, against the routes of vLLM's own server."""

import logging
import warnings
from argparse import Namespace
from types import SimpleNamespace
from typing import NamedTuple, cast, get_args

import pytest
from fastapi import FastAPI

from vllm_kvpool.router.dataplane.data_plane import METHODS

ENTRYPOINTS = "vllm.entrypoints."
SWITCHES = ("VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_RUNTIME_LORA_UPDATING")
OPTIONS = {
    "enable_fault_tolerance": True,
    "enable_offline_docs": True,
    "enable_scale_out": True,
    "enable_tokenizer_info_endpoint": True,
    "tokens_only": True,
}
REFUSED_PARTS = {
    **dict.fromkeys(("rl", "serve.dev", "serve.elastic_ep", "serve.profile"), "an operator's"),
    **dict.fromkeys(("serve.fault_tolerance", "serve.lora"), "an operator's"),
    **dict.fromkeys(("fastapi", "serve.instrumentator.offline_docs"), "pages on one engine"),
    "scale_out": "between engines, with vLLM's switch",
    "speech_to_text": "bodies that are no JSON",
}
"""Modules whose routes the router refuses. Those of `cohere` need an SDK that is not installed."""
REFUSED_PATHS = {
    "/invocations": "SageMaker's; the body alone tells which other route is meant",
    "/kv_event_sources": "an operator's",
    "/load": "an operator's",
    "/static": "files of the pages on one engine",
    "/tokenizer_info": "with vLLM's switch",
    "/v1/chat/completions/batch": "decodes several chats, and has no stream",
    "/v1/responses/{response_id}": "one engine has it",
    "/v1/responses/{response_id}/cancel": "one engine has it",
    "/v1/systemone": "models of its own",
}


class Route(NamedTuple):
    """A route of vLLM's server; a part is a module, without what all names of parts begin with."""

    path: str
    method: str
    part: str

    @property
    def refused_part(self) -> str | None:
        """The entry of REFUSED_PARTS that names its part."""
        return next(
            (each for each in REFUSED_PARTS if f"{self.part}.".startswith(f"{each}.")), None
        )


@pytest.fixture(scope="module")
def routes() -> set[Route]:
    """Every route that vLLM's server can have, declared by vLLM with all switches on."""
    app, level = FastAPI(), logging.root.level
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        for name in SWITCHES:
            patch.setenv(name, "1")
        from vllm.config import ModelConfig, ProfilerConfig
        from vllm.entrypoints.launchers.api_server.routers import register_api_routers
        from vllm.tasks import FRONTEND_TASKS, POOLING_TASKS, GenerationTask

        app.state.args = Namespace(**OPTIONS, profiler_config=ProfilerConfig(profiler="cuda"))
        tasks = (*get_args(GenerationTask), *POOLING_TASKS, *FRONTEND_TASKS)
        model = cast("ModelConfig", SimpleNamespace(get_pooling_task=lambda tasks: "embed"))
        register_api_routers(app.state.args, app, tasks, model)
    logging.root.setLevel(level)  # SageMaker's library, which vLLM imports, raises it
    return {
        Route(getattr(route, "path", ""), method, part.removeprefix(ENTRYPOINTS))
        for route in app.routes
        for part in [getattr(getattr(route, "endpoint", None), "__module__", "")]
        for method in getattr(route, "methods", None) or ("GET",)  # a websocket, or files
    }


def test_route_of_vllm_is_served_or_refused_for_a_reason(routes: set[Route]) -> None:
    refused = {each for each in routes if each.refused_part or each.path in REFUSED_PATHS}
    served = {each for each in routes if each.method in METHODS.get(each.path, ())}
    assert routes == refused | served
    assert not {each for each in refused if each.path in METHODS}


def test_path_of_the_router_and_reason_is_of_a_route(routes: set[Route]) -> None:
    paths = {each.path for each in routes}
    assert paths >= METHODS.keys() | REFUSED_PATHS.keys()
    assert {each.refused_part for each in routes} >= REFUSED_PARTS.keys()
