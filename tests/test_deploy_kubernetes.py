"""The manifests in deploy/kubernetes/: what an API server and the kubelet would make of them."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_objects import check, load

from extproc.cli import main
from extproc.settings import Settings

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "deploy/kubernetes"
# Written in full; those of mesh/ are patches, which only kustomize can read.
WHOLE = sorted(
    path
    for path in FOLDER.glob("*/*.yaml")
    if path.parent.name != "mesh" and path.name not in ("kustomization.yaml", "gateway.yaml", "envoy.yaml")
)
needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl, which has kustomize built in")


@cache
def built(name: str) -> list[Any]:
    """What ``kubectl apply --kustomize`` would send."""
    command = ["kubectl", "kustomize", str(FOLDER / name)]
    return list(yaml.safe_load_all(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


def deployment(objects: list[Any], name: str = "pd-extproc") -> Any:
    (found,) = [each for each in objects if each["kind"] == "Deployment" and each["metadata"]["name"] == name]
    return found["spec"]


BASE = deployment(load(FOLDER / "base/deployment.yaml"))
POD = BASE["template"]["spec"]


@pytest.mark.parametrize("path", WHOLE, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_an_api_server_would_take_it(path: Path) -> None:
    objects = load(path)
    assert objects
    for each in objects:
        check(each)


@pytest.mark.parametrize("folder", ["base", "mesh", "monitoring", "autoscaling", "demo"])
def test_kustomizations_name_what_is_there(folder: str) -> None:
    (said,) = load(FOLDER / folder / "kustomization.yaml")
    named = [*said.get("resources", ()), *(each["path"] for each in said.get("patches", ()) if "path" in each)]
    named += [file for each in said.get("configMapGenerator", ()) for file in each["files"]]
    assert all((FOLDER / folder / name).exists() for name in named)
    files = {path.name for path in (FOLDER / folder).iterdir()} - {"kustomization.yaml"}
    assert files == {name for name in named if "/" not in name}


@needs_kubectl
@pytest.mark.parametrize("name", ["base", "mesh", "demo"])
def test_what_kustomize_builds_would_be_taken(name: str) -> None:
    for each in built(name):
        check(each)


@needs_kubectl
def test_the_demo_is_whole() -> None:
    objects = built("demo")
    namespaced = [each for each in objects if each["kind"] != "Namespace"]
    assert {each["metadata"]["namespace"] for each in namespaced} == {"llm"}
    maps = {each["metadata"]["name"] for each in objects if each["kind"] == "ConfigMap"}
    used = {
        volume["configMap"]["name"]
        for volume in deployment(objects)["template"]["spec"]["volumes"]
        if "configMap" in volume
    }
    assert used == maps
    for role in ("prefill", "decode"):
        labels = deployment(objects, role)["template"]["metadata"]["labels"]
        assert _options("base")[f"{role}_selector"].items() <= labels.items()


@needs_kubectl
def test_in_a_mesh_there_is_no_envoy_of_ours() -> None:
    objects = built("mesh")
    pod = deployment(objects)["template"]["spec"]
    assert not pod.get("initContainers")
    assert [each["name"] for each in pod["containers"]] == ["pd-extproc"]
    assert {volume["name"] for volume in pod["volumes"]} == {"config", "run", "tmp"}
    assert [each["data"].keys() for each in objects if each["kind"] == "ConfigMap"] == [{"gateway.yaml"}]
    (service,) = [each["spec"] for each in objects if each["kind"] == "Service"]
    ports = {each["name"]: each["containerPort"] for each in pod["containers"][0]["ports"]}
    assert {each["port"]: ports[each["targetPort"]] for each in service["ports"]} == {
        port: port for port in (50051, 50052, 50053)
    }


def _options(folder: str) -> dict[str, Any]:
    (options,) = load(FOLDER / folder / "gateway.yaml")
    assert isinstance(options, dict)
    return options


@pytest.mark.parametrize("folder", ["base", "mesh"])
def test_the_options_are_options(folder: str) -> None:
    settings = Settings(**_options(folder))
    assert settings.no_envoy
    assert settings.service_discovery
    assert str(settings.run_dir) == "/run/pd-extproc"


def test_envoys_configuration_is_what_the_options_lead_to(capsys: pytest.CaptureFixture[str]) -> None:
    guide = (ROOT / "docs/deploy/kubernetes.md").read_text()
    (command,) = [line for line in guide.splitlines() if line.startswith("$ pd-extproc envoy-config ")]
    *arguments, mark, file = shlex.split(command)[2:]
    assert (mark, file) == (">", "deploy/kubernetes/base/envoy.yaml")
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert text == (ROOT / file).read_text()
    settings = Settings(**_options("base"))
    config = yaml.safe_load(text)
    listeners = {each["name"]: each["address"] for each in config["static_resources"]["listeners"]}
    assert listeners["egress"]["pipe"]["path"] == settings.egress_address.removeprefix("unix:")
    (envoy,) = POD["initContainers"]
    assert listeners["clients"]["socket_address"]["port_value"] == envoy["ports"][0]["containerPort"]
    ports = {
        cluster["name"]: cluster["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"]["address"][
            "socket_address"
        ]["port_value"]
        for cluster in config["static_resources"]["clusters"]
        if "load_assignment" in cluster
    }
    for name in ("extproc", "ads", "control"):
        assert getattr(settings, f"{name}_address").endswith(f":{ports[name]}")
    assert settings.envoy_admin_address == f"127.0.0.1:{config['admin']['address']['socket_address']['port_value']}"


def test_the_pod_outlives_its_requests() -> None:
    settings = Settings(**_options("base"))
    needed = settings.drain_settle_secs + settings.shutdown_grace_period_secs
    assert needed < POD["terminationGracePeriodSeconds"]
    (envoy,) = POD["initContainers"]
    assert envoy["restartPolicy"] == "Always"  # it ends after the main container


def test_nobody_has_more_rights_than_needed() -> None:
    assert POD["securityContext"]["runAsNonRoot"] is True
    assert POD["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in (*POD["initContainers"], *POD["containers"]):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert set(container["resources"]) == {"requests", "limits"}
    (role,) = load(FOLDER / "base/role.yaml")
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]


def test_selectors_find_the_pods() -> None:
    labels = BASE["template"]["metadata"]["labels"]
    (service,) = load(FOLDER / "base/service.yaml")
    assert service["spec"]["selector"] == BASE["selector"]["matchLabels"] == labels
    for path in ("base/poddisruptionbudget.yaml", "monitoring/podmonitor.yaml"):
        (each,) = load(FOLDER / path)
        assert each["spec"]["selector"]["matchLabels"] == labels
    (policy,) = load(FOLDER / "base/networkpolicy.yaml")
    assert policy["spec"]["podSelector"]["matchLabels"] == labels
    ports = {port["name"] for each in (*POD["initContainers"], *POD["containers"]) for port in each["ports"]}
    assert {each["port"] for each in policy["spec"]["ingress"][0]["ports"]} <= ports
    (monitor,) = load(FOLDER / "monitoring/podmonitor.yaml")
    assert {each["port"] for each in monitor["spec"]["podMetricsEndpoints"]} <= ports
    (scaler,) = load(FOLDER / "autoscaling/horizontalpodautoscaler.yaml")
    assert scaler["spec"]["scaleTargetRef"]["name"] == "pd-extproc"
    assert scaler["spec"]["metrics"][0]["containerResource"]["container"] == POD["containers"][0]["name"]


def test_the_demos_workers_are_mocks_that_start() -> None:
    for each in load(FOLDER / "demo/workers.yaml"):
        (container,) = each["spec"]["template"]["spec"]["containers"]
        command, *arguments = container["args"]
        assert command == "mock"
        with pytest.raises(SystemExit) as stopped:
            main([command, *arguments, "--help"])
        assert stopped.value.code == 0
