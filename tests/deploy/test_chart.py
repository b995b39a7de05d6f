"""configs/helm/kvpool: by default the manifests of configs/kubernetes, and valid with other values.

Rendered by Helm's own library, which is in the environment of scripts/setup-tools.sh.
"""

import copy
import json
import os
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.test_kubernetes import DOCUMENTS, RELEASES, Document
from vllm_kvpool.router.config import read_config
from vllm_kvpool.router.control.events import Mode

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
CHART = ROOT / "configs" / "helm" / "kvpool"
TOOLS = ROOT / os.environ.get("TOOLS_VENV", ".venv-tools") / "bin"
RENDER = """
import json, sys
import helm_python
chart, values = sys.argv[1], json.loads(sys.argv[2])
found = helm_python.lint(chart, values, strict=True, namespace="kvpool", kube_version="v1.37.0")
rendered = helm_python.Chart.load(chart).render(values, name="kvpool", namespace="kvpool")
print(json.dumps({"lint": found, "files": rendered}))
"""
WORKLOAD_KINDS = ("Deployment", "StatefulSet")
S3 = {"store": "s3://bucket/kvpool?region=eu-west-1"}


def helm(values: dict[str, Any]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [str(TOOLS / "python"), "-c", RENDER, str(CHART), json.dumps(values)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def render(values: dict[str, Any]) -> dict[tuple[str, str], Document]:
    done = helm(values)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["lint"]["errors"] == []
    assert [each for each in told["lint"]["messages"] if each["severity"] > 1] == []
    texts = [text for name, text in told["files"].items() if name.endswith(".yaml")]
    return by_name([doc for text in texts for doc in yaml.safe_load_all(text) if doc])


def by_name(documents: list[Document]) -> dict[tuple[str, str], Document]:
    named = {(doc["kind"], doc["metadata"]["name"]): doc for doc in documents}
    assert len(named) == len(documents)
    return named


def pool(documents: dict[tuple[str, str], Document]) -> Any:
    return json.loads(documents["ConfigMap", "kvpool-engines"]["data"]["kv-transfer-config"])


def test_the_defaults_are_the_manifests() -> None:
    rendered = render({})
    manifests = by_name([copy.deepcopy(doc) for doc in DOCUMENTS if doc["kind"] != "Namespace"])
    assert pool(rendered) == pool(manifests)
    for documents in (rendered, manifests):
        del documents["ConfigMap", "kvpool-engines"]["data"]["kv-transfer-config"]
    assert rendered == manifests


def test_other_values_are_valid_too() -> None:
    decode = {
        "replicas": 3,
        "tensorParallelSize": 4,
        "cpu": "16",
        "memoryRequest": "96Gi",
        "memoryLimit": "128Gi",
        "extraArgs": ["--block-size=64", '--override-generation-config={"top_k": 1}'],
    }
    rendered = render(
        {
            "pool": S3,
            "mooncakeMaster": {"enabled": False},
            "networkPolicy": {"enabled": False},
            "shutdownTimeoutSeconds": 60,
            "decode": decode,
            "router": {"planner": "dry_run", "extraConfig": "[overload]\nttft_target_s = 3"},
        }
    )
    for document in rendered.values():
        for release in RELEASES:
            assert kubernetes_validate.validate(document, release, strict=True) == release
    assert {kind for kind, _ in rendered} == {
        *("ConfigMap", "Deployment", "PodDisruptionBudget", "Service", "StatefulSet")
    }
    assert ("Deployment", "kvpool-mooncake-master") not in rendered
    assert pool(rendered)["kv_connector_extra_config"]["store"] == S3["store"]
    engines = rendered["StatefulSet", "kvpool-decode"]["spec"]
    (engine,) = engines["template"]["spec"]["containers"]
    assert engines["replicas"] == 3
    assert engine["args"][-2:] == decode["extraArgs"]
    assert engine["resources"]["limits"]["nvidia.com/gpu"] == "4"
    assert engines["template"]["spec"]["terminationGracePeriodSeconds"] == 90
    config = rendered["ConfigMap", "kvpool-router"]["data"]["router.toml"]
    read = read_config(tomllib.loads(config))
    assert (read.planner.mode, read.overload.ttft_target_s) == (Mode.DRY_RUN, 3)


def test_pods_are_placed_and_have_what_the_values_add() -> None:
    placed: dict[str, Any] = {
        "nodeSelector": {"gpu": "h200"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    }
    added: dict[str, Any] = {
        "extraEnv": [{"name": "HF_HUB_OFFLINE", "value": "1"}],
        "extraVolumes": [{"name": "tier", "hostPath": {"path": "/mnt/nvme"}}],
        "extraVolumeMounts": [{"name": "tier", "mountPath": "/var/cache/kvpool"}],
    }
    secrets = [{"name": "registry"}]
    rendered = render(
        {
            "imagePullSecrets": secrets,
            "weightsStorageClass": "fast",
            **dict.fromkeys(("prefill", "decode"), placed | added),
            **dict.fromkeys(("router", "mooncakeMaster"), placed),
        }
    )
    pods = {name: each for (kind, name), each in rendered.items() if kind in WORKLOAD_KINDS}
    assert len(pods) == 4
    for name, document in pods.items():
        assert kubernetes_validate.validate(document, RELEASES[-1], strict=True)
        spec = document["spec"]["template"]["spec"]
        assert spec["imagePullSecrets"] == secrets
        assert {key: spec[key] for key in placed} == placed
        if name in ("kvpool-prefill", "kvpool-decode"):
            (engine,) = spec["containers"]
            assert added["extraEnv"][0] in engine["env"]
            assert added["extraVolumes"][0] in spec["volumes"]
            assert added["extraVolumeMounts"][0] in engine["volumeMounts"]
            (claim,) = document["spec"]["volumeClaimTemplates"]
            assert claim["spec"]["storageClassName"] == "fast"


def test_prometheus_finds_each_service_and_the_policies_admit_it() -> None:
    values = {
        "networkPolicy": {"prometheusNamespace": "monitoring"},
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    }
    rendered = render(values)
    monitor = rendered["ServiceMonitor", "kvpool"]
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    selector = monitor["spec"]["selector"]["matchLabels"].items()
    scraped = {each["port"] for each in monitor["spec"]["endpoints"]}
    for (kind, name), document in rendered.items():
        if kind == "Service":
            assert selector <= document["metadata"]["labels"].items()
            assert scraped & {each["name"] for each in document["spec"]["ports"]}, name
        if kind == "NetworkPolicy":
            assert kubernetes_validate.validate(document, RELEASES[-1], strict=True)
    for name, port in (("kvpool-engines", "http"), ("kvpool-mooncake-master", "metrics")):
        rules = rendered["NetworkPolicy", name]["spec"]["ingress"]
        namespace = {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}
        assert {"from": [{"namespaceSelector": namespace}], "ports": [{"port": port}]} in rules


@pytest.mark.parametrize(
    "values",
    [
        {"replica": 3},
        {"router": {"tolerations": "all"}},
        {"prefill": {"replicas": "two"}},
        {"router": {"planner": "always"}},
        {"pool": {"store": None}},
    ],
)
def test_a_value_that_is_unknown_or_of_a_wrong_type_is_refused(values: dict[str, Any]) -> None:
    done = helm(values)
    assert done.returncode != 0
    assert "values don't meet the specifications of the schema" in done.stderr


def test_each_mode_of_the_planner_is_accepted() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    allowed = schema["properties"]["router"]["properties"]["planner"]["enum"]
    assert allowed == [mode.value for mode in Mode]
