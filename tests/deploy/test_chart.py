"""configs/helm/kvpool: the defaults are configs/kubernetes; each value changes what its row says.

Rendered by Helm's own library, which is in the environment of scripts/setup-tools.sh. `ROWS` sets
every value of values.yaml and names the places of the manifests that differ then. A value without
a row fails.
"""

import copy
import json
import os
import re
import subprocess
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any, NamedTuple

import kubernetes_validate
import pytest
import yaml

from tests.test_kubernetes import DOCUMENTS, RELEASES, Document
from vllm_kvpool.config import read_config as read_engine_config
from vllm_kvpool.router.config import read_config
from vllm_kvpool.router.control.events import Mode
from vllm_kvpool.storage.tiers import tier_specs
from vllm_kvpool.storage.url import FileOptions

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
CHART = ROOT / "configs" / "helm" / "kvpool"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
TOOLS = ROOT / os.environ.get("TOOLS_VENV", ".venv-tools") / "bin"
RENDER = """
import json, sys
import helm_python
chart = sys.argv[1]
def render(values):
    try:
        found = helm_python.lint(
            chart, values, strict=True, namespace="kvpool", kube_version="v1.37.0"
        )
        files = helm_python.Chart.load(chart).render(values, name="kvpool", namespace="kvpool")
    except Exception as error:
        return {"error": str(error)}
    return {"lint": found, "files": files}
print(json.dumps([render(values) for values in json.load(sys.stdin)]))
"""
POD = "spec/template/spec"
ENGINES = ("StatefulSet/kvpool-prefill", "StatefulSet/kvpool-decode")
MASTER, ROUTER = "Deployment/kvpool-mooncake-master", "Deployment/kvpool-router"
POOL = "ConfigMap/kvpool-engines/data/kv-transfer-config/kv_connector_extra_config"
TOML = "ConfigMap/kvpool-router/data/router.toml"
PODS = (*ENGINES, MASTER, ROUTER)
TIERS = ["file:///tier?size=400GiB", "s3://bucket/kvpool?region=eu-west-1"]
TOLERATIONS = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
# Text that YAML reads as a boolean or a number unless the chart quotes the value.
YES, DIGITS = "on", "8001"

Values = Mapping[str, Any]


class Row(NamedTuple):
    """A value, and every place of the manifests that differs by the value."""

    value: Any
    changes: Mapping[str, Any]
    given: Values = MappingProxyType({})
    """Values without which this one has no effect."""


def of_engines(role: str) -> dict[str, Row]:
    engines = f"StatefulSet/kvpool-{role}"
    pod = f"{engines}/{POD}"
    engine = f"{pod}/containers/0"
    variable = {"name": "HF_HUB_OFFLINE", "value": "1"}
    volume = {"name": "tier", "hostPath": {"path": "/mnt/nvme"}}
    mount = {"name": "tier", "mountPath": "/tier"}
    memory = f"{engine}/resources/{{}}/memory"
    gpus = f"{engine}/resources/{{}}/nvidia.com~gpu"
    rows = {
        "replicas": Row(3, {f"{engines}/spec/replicas": 3}),
        "tensorParallelSize": Row(
            4,
            {
                f"{engine}/args/1": "--tensor-parallel-size=4",
                gpus.format("requests"): "4",
                gpus.format("limits"): "4",
            },
        ),
        "cpu": Row("16", {f"{engine}/resources/requests/cpu": "16"}),
        "memoryRequest": Row("96Gi", {memory.format("requests"): "96Gi"}),
        "memoryLimit": Row("128000000000", {memory.format("limits"): "128000000000"}),
        "extraArgs": Row(
            ["--block-size=64", '--override-generation-config={"top_k": 1}'],
            {
                f"{engine}/args/4": "--block-size=64",
                f"{engine}/args/5": '--override-generation-config={"top_k": 1}',
            },
        ),
        "extraEnv": Row([variable], {f"{engine}/env/6": variable}),
        "extraVolumes": Row([volume], {f"{pod}/volumes/3": volume}),
        "extraVolumeMounts": Row([mount], {f"{engine}/volumeMounts/4": mount}),
        **of_placement(engines),
    }
    return {f"{role}.{name}": row for name, row in rows.items()}


def of_placement(workload: str) -> dict[str, Row]:
    selector = {"gpu": YES}
    return {
        "nodeSelector": Row(selector, {f"{workload}/{POD}/nodeSelector": selector}),
        "tolerations": Row(TOLERATIONS, {f"{workload}/{POD}/tolerations": TOLERATIONS}),
    }


def in_policy(name: str, rule: int, port: str) -> dict[str, Any]:
    namespace = {"matchLabels": {"kubernetes.io/metadata.name": DIGITS}}
    admitted = {"from": [{"namespaceSelector": namespace}], "ports": [{"port": port}]}
    return {f"NetworkPolicy/{name}/spec/ingress/{rule}": admitted}


ROWS: Mapping[str, Row] = {
    "image": Row(
        "registry:5000/vllm@sha256:0f",
        {f"{each}/{POD}/containers/0/image": "registry:5000/vllm@sha256:0f" for each in PODS},
    ),
    "imagePullSecrets": Row(
        [{"name": "registry"}],
        {f"{each}/{POD}/imagePullSecrets": [{"name": "registry"}] for each in PODS},
    ),
    "model": Row("a/b", {"ConfigMap/kvpool-engines/data/model": "a/b"}),
    "pool.store": Row(TIERS, {f"{POOL}/store": TIERS}),
    "pool.staging_bytes": Row(2**31, {f"{POOL}/staging_bytes": 2**31}),
    "pool.save_decode": Row(False, {f"{POOL}/save_decode": False}),
    "shutdownTimeoutSeconds": Row(
        60,
        {
            "ConfigMap/kvpool-engines/data/shutdown-timeout": "60",
            f"{TOML}/front/shutdown_timeout_s": 60,
            **{
                f"{each}/{POD}/terminationGracePeriodSeconds": 90 for each in PODS if each != MASTER
            },
        },
    ),
    "weightsStorage": Row(
        "100000000000",
        {
            f"{each}/spec/volumeClaimTemplates/0/spec/resources/requests/storage": "100000000000"
            for each in ENGINES
        },
    ),
    "weightsStorageClass": Row(
        YES,
        {f"{each}/spec/volumeClaimTemplates/0/spec/storageClassName": YES for each in ENGINES},
    ),
    **of_engines("prefill"),
    **of_engines("decode"),
    "router.planner": Row("dry_run", {f"{TOML}/planner/mode": "dry_run"}),
    "router.adminSecret": Row(DIGITS, {f"{ROUTER}/{POD}/volumes/1/secret/secretName": DIGITS}),
    "router.extraConfig": Row(
        "[overload]\nttft_target_s = 3", {f"{TOML}/overload": {"ttft_target_s": 3}}
    ),
    **{f"router.{name}": row for name, row in of_placement(ROUTER).items()},
    "mooncakeMaster.enabled": Row(
        False, {"Deployment/kvpool-mooncake-master": None, "Service/kvpool-mooncake-master": None}
    ),
    **{f"mooncakeMaster.{name}": row for name, row in of_placement(MASTER).items()},
    "networkPolicy.enabled": Row(
        False,
        {f"NetworkPolicy/kvpool-{name}": None for name in ("router", "engines", "mooncake-master")},
    ),
    "networkPolicy.prometheusNamespace": Row(
        DIGITS,
        in_policy("kvpool-engines", 2, "http") | in_policy("kvpool-mooncake-master", 1, "metrics"),
    ),
    "serviceMonitor.enabled": Row(
        True,
        {
            "ServiceMonitor/kvpool": {
                "apiVersion": "monitoring.coreos.com/v1",
                "kind": "ServiceMonitor",
                "metadata": {
                    "name": "kvpool",
                    "namespace": "kvpool",
                    "labels": {"app.kubernetes.io/part-of": "kvpool"},
                },
                "spec": {
                    "selector": {"matchLabels": {"app.kubernetes.io/part-of": "kvpool"}},
                    "endpoints": [{"port": "http"}, {"port": "metrics"}],
                },
            }
        },
    ),
    "serviceMonitor.labels": Row(
        {"release": YES},
        {"ServiceMonitor/kvpool/metadata/labels/release": YES},
        {"serviceMonitor": {"enabled": True}},
    ),
}
OF_HELM = {"global"}  # Helm adds this value to every chart


def leaves(values: Values, at: str = "") -> Iterator[str]:
    """Names of the values that have no values below."""
    for name, value in values.items():
        below = isinstance(value, dict) and value
        yield from leaves(value, f"{at}{name}.") if below else [at + name]


def schema_leaves(schema: Values, at: str = "") -> Iterator[str]:
    for name, each in schema["properties"].items():
        each = SCHEMA["definitions"][each["$ref"].rpartition("/")[2]] if "$ref" in each else each
        yield from schema_leaves(each, f"{at}{name}.") if "properties" in each else [at + name]


def nested(name: str, value: Any) -> dict[str, Any]:
    for part in reversed(name.split(".")):
        value = {part: value}
    return dict(value)


def merge(one: Values, other: Values) -> dict[str, Any]:
    """Return both values, as Helm merges them: of lists and scalars the second."""
    merged = {**one, **other}
    for name in one.keys() & other.keys():
        if isinstance(one[name], dict) and isinstance(other[name], dict):
            merged[name] = merge(one[name], other[name])
    return merged


def helm(many: Sequence[Values]) -> list[dict[str, Any]]:
    done = subprocess.run(
        [str(TOOLS / "python"), "-c", RENDER, str(CHART)],
        input=json.dumps(many),
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    answers: list[dict[str, Any]] = json.loads(done.stdout)
    return answers


def manifests(answer: Mapping[str, Any]) -> dict[str, Document]:
    """Documents of an answer, whose values and templates are without a fault."""
    assert "error" not in answer, answer["error"]
    assert answer["lint"]["errors"] == []
    assert [each for each in answer["lint"]["messages"] if each["severity"] > 1] == []
    texts = [text for name, text in answer["files"].items() if name.endswith(".yaml")]
    return by_name([doc for text in texts for doc in yaml.safe_load_all(text) if doc])


def render(values: Values) -> dict[str, Document]:
    return manifests(helm([values])[0])


def by_name(documents: Sequence[Document]) -> dict[str, Document]:
    """Documents by kind and name; configurations within them as structures, not as text."""
    named = {f"{doc['kind']}/{doc['metadata']['name']}": doc for doc in documents}
    assert len(named) == len(documents)
    for name, key, read in (
        ("kvpool-engines", "kv-transfer-config", json.loads),
        ("kvpool-router", "router.toml", tomllib.loads),
    ):
        data = named[f"ConfigMap/{name}"]["data"]
        data[key] = read(data[key])
    return named


def changes(old: Any, new: Any, at: str = "") -> dict[str, Any]:
    """Return the places that differ, each with what is new there; None for what is gone."""
    if type(old) is not type(new) or not isinstance(old, dict | list):
        return {} if (type(old), old) == (type(new), new) else {at: new}
    pairs = [dict(enumerate(each)) if isinstance(each, list) else each for each in (old, new)]
    found: dict[str, Any] = {}
    for name in pairs[0].keys() | pairs[1].keys():
        place = f"{at}/{str(name).replace('/', '~')}" if at else str(name)
        found |= changes(pairs[0].get(name), pairs[1].get(name), place)
    return found


def assert_valid(document: Document, releases: Sequence[str]) -> None:
    text = {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in document.get("data", {}).items()
    }
    if document["kind"] == "ServiceMonitor":  # of an operator, not of Kubernetes
        return
    for release in releases:
        plain = document | {"data": text} if text else document
        assert kubernetes_validate.validate(plain, release, strict=True) == release


@cache
def rendered_rows() -> Mapping[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Helm's answers without and with each row's value."""
    many = []
    for name, row in ROWS.items():
        many += [merge(row.given, {}), merge(row.given, nested(name, row.value))]
    answers = iter(helm(many))
    return dict(zip(ROWS, zip(answers, answers, strict=True), strict=True))


def test_values_each_have_a_row_and_a_schema() -> None:
    assert set(ROWS) == set(leaves(VALUES))
    free = {name for name in ROWS if name.startswith("pool.")}  # options of the connector
    assert set(schema_leaves(SCHEMA)) - OF_HELM == set(ROWS) - free | {"pool"}


@pytest.mark.parametrize("name", ROWS)
def test_a_value_changes_what_its_row_says_and_nothing_else(name: str) -> None:
    before, after = map(manifests, rendered_rows()[name])
    assert changes(before, after) == ROWS[name].changes
    for place in {"/".join(each.split("/")[:2]) for each in ROWS[name].changes}:
        if place in after:
            assert_valid(after[place], RELEASES[-1:])


def test_the_defaults_are_the_manifests() -> None:
    kept = [copy.deepcopy(doc) for doc in DOCUMENTS if doc["kind"] != "Namespace"]
    assert render({}) == by_name(kept)


def test_all_values_together_are_valid() -> None:
    values: dict[str, Any] = {}
    for name, row in ROWS.items():
        if row.value is not False or name.startswith("pool."):
            values = merge(values, nested(name, row.value))
    rendered = render(values)
    for document in rendered.values():
        assert_valid(document, RELEASES)
    engines = rendered["ConfigMap/kvpool-engines"]["data"]["kv-transfer-config"]
    read_engine_config(engines["kv_connector_extra_config"], env={})
    read = read_config(rendered["ConfigMap/kvpool-router"]["data"]["router.toml"])
    assert (read.planner.mode, read.overload.ttft_target_s) == (Mode.DRY_RUN, 3)


EXAMPLES = re.findall(r"^```yaml\n(.*?)^```$", (CHART / "README.md").read_text(), re.M | re.S)


@pytest.mark.parametrize("text", EXAMPLES, ids=range(len(EXAMPLES)))
def test_engines_of_a_readme_example_can_open_their_stores(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment has what a store asks for, and a directory lies in a volume."""
    rendered = render(yaml.safe_load(text))
    for document in rendered.values():
        assert_valid(document, RELEASES[-1:])
    config = rendered["ConfigMap/kvpool-engines"]["data"]["kv-transfer-config"]
    for name in ENGINES:
        (engine,) = rendered[name]["spec"]["template"]["spec"]["containers"]
        mounts = {each["mountPath"] for each in engine["volumeMounts"]}
        with monkeypatch.context() as patch:
            for variable in [each for each in os.environ if each.startswith("AWS_")]:
                patch.delenv(variable)
            for each in engine["env"]:
                patch.setenv(each["name"], "x")
            specs = tier_specs(read_engine_config(config["kv_connector_extra_config"], env={}))
        for options in (each.options for each in specs.stores):
            if isinstance(options, FileOptions):
                path = PurePosixPath(options.path)
                assert mounts & set(map(str, (path, *path.parents)))


def test_prometheus_finds_each_service() -> None:
    rendered = render({"serviceMonitor": {"enabled": True}})
    monitor = rendered["ServiceMonitor/kvpool"]["spec"]
    selector = monitor["selector"]["matchLabels"].items()
    scraped = {each["port"] for each in monitor["endpoints"]}
    for name, document in rendered.items():
        if document["kind"] == "Service":
            assert selector <= document["metadata"]["labels"].items()
            assert scraped & {each["name"] for each in document["spec"]["ports"]}, name


def test_the_notes_name_what_is_rendered() -> None:
    [answer] = helm([{"router": {"adminSecret": "own-secret"}}])
    rendered = manifests(answer)
    [notes] = [text for name, text in answer["files"].items() if name.endswith("NOTES.txt")]
    named = re.findall(r"\b(statefulset|deployment)/([\w-]+)", notes)
    kinds = {kind.lower(): kind for kind in ("StatefulSet", "Deployment")}
    assert {f"{kinds[kind]}/{name}" for kind, name in named} == {*ENGINES, ROUTER}
    assert "http://kvpool-router.kvpool " in notes
    assert "Service/kvpool-router" in rendered
    assert "own-secret" in notes


def test_a_value_that_is_unknown_or_of_a_wrong_type_is_refused() -> None:
    """No value is a fraction."""
    wrong = [nested(name, 0.5) for name in ROWS if not name.startswith("pool.")]
    wrong += [{"replica": 3}, {"router": {"planner": "always"}}, {"pool": {"store": None}}]
    for values, answer in zip(wrong, helm(wrong), strict=True):
        assert "values don't meet the specifications of the schema" in answer["error"], values


def test_each_mode_of_the_planner_is_accepted() -> None:
    allowed = SCHEMA["properties"]["router"]["properties"]["planner"]["enum"]
    assert allowed == [mode.value for mode in Mode]
