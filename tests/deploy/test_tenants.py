"""Tenants of the router's keys in front of a real engine: whose room their cells take."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.deployment import MODEL, START_TIMEOUT_S, Deployment, DeploymentSpec
from tests.support.metrics_page import MetricsPage, wait_for_metrics
from tests.support.stream_client import words

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(900)]

CHUNK_TOKENS = 64
KEYS = {"search": "key-of-search-0123456789", "ads": "key-of-ads-0123456789ab"}
LIMIT_S = 60.0
TENANT_TOKENS = "vllm:kvpool_tenant_tokens_total"


def asked(seed: int) -> list[tuple[str, dict[str, Any]]]:
    """A request for each API: each has its own prompt, and a tenant that the router must drop."""
    texts = [words(seed + number, 150) for number in range(5)]
    talks = [[{"role": "user", "content": text}] for text in texts]
    own = {"model": MODEL, "kv_transfer_params": {"kvpool": {"tenant": "stolen"}}}
    return [
        ("/v1/completions", {**own, "prompt": texts[0], "max_tokens": 2}),
        ("/v1/completions", {**own, "prompt": texts[1], "max_tokens": 2, "stream": True}),
        ("/v1/chat/completions", {**own, "messages": talks[2], "max_tokens": 2}),
        ("/v1/responses", {**own, "input": talks[3], "max_output_tokens": 2, "store": False}),
        ("/v1/messages", {**own, "messages": talks[4], "max_tokens": 2}),
    ]


def test_cells_of_a_request_are_its_keys_tenants(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text("".join(f'[[tenants]]\nname = "{n}"\nkey = "{k}"\n' for n, k in KEYS.items()))
    keys.chmod(0o600)
    store = f"file://{tmp_path}/pool?size=1GiB&shares=tenant"
    spec = DeploymentSpec(
        is_lean=True,
        prefill=0,
        pool={"store": store},
        sections={"front": {"keys_file": str(keys)}},
    )
    deployment = Deployment.start(spec, tmp_path / "deployment")
    try:
        for seed, (tenant, key) in enumerate(KEYS.items()):
            for path, body in asked(seed=10 * seed)[: 5 - seed]:
                headers = {"Authorization": f"Bearer {key}"}
                url = deployment.front + path
                answer = httpx.post(url, json=body, headers=headers, timeout=START_TIMEOUT_S)
                assert answer.status_code == 200, (tenant, path, answer.text)
        least = {"search": 5 * 2 * CHUNK_TOKENS, "ads": 4 * 2 * CHUNK_TOKENS}
        assert least.keys() == KEYS.keys()
        command = [sys.executable, "-m", "vllm_kvpool", "inspect", "--json", "--store", store]

        def stored() -> dict[str, Any]:
            (content,) = json.loads(subprocess.check_output(command, timeout=LIMIT_S))
            return dict(content)

        def chunks(content: dict[str, Any]) -> dict[str, int]:
            return {each["owner"]: each["chunks"] for each in content.get("shares", ())}

        def are_saved(page: MetricsPage) -> bool:
            """Return True once the store has what the engine counts as saved."""
            saved, found = page.by(TENANT_TOKENS, "tenant", direction="save"), chunks(stored())
            return all(
                saved.get(name, 0) == found.get(name, 0) * CHUNK_TOKENS >= least[name]
                for name in KEYS
            )

        (replica,) = deployment.state()["replicas"]
        wait_for_metrics(replica["url"], are_saved, limit_s=LIMIT_S)
        content = stored()
        assert chunks(content).keys() - KEYS.keys() <= {"-"}  # the namespace's manifest
        printed = json.dumps(content)
        assert not any(key in printed for key in KEYS.values())
    finally:
        deployment.stop()
