"""The compose files as documents: valid for both generations of Compose, and what must hold whatever runs them."""

from __future__ import annotations

import json
import re
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from extproc.control.discovery_metrics import DiscoveryMetrics
from extproc.control.kv_event_metrics import KvEventMetrics
from extproc.control.metrics import Metrics
from extproc.control.worker_metrics import WorkerMetrics
from extproc.discovery.state import DiscoveryState
from extproc.observe import RequestMetrics
from extproc.policies.event_prefixes import EventPrefixes
from extproc.sources import load_settings
from extproc.workers.kv_event_feed import KvEventFeed
from extproc.workers.kv_event_source import Common
from extproc.workers.registry import Registry

COMPOSE = Path(__file__).parent.parent / "compose"
MAIN = COMPOSE / "docker-compose.yaml"
OVERLAYS = sorted(file for file in COMPOSE.glob("*.yaml") if file != MAIN)
ENGINES = [file for file in OVERLAYS if file.stem != "monitoring"]
MOCKS = ("prefill", "decode", "vllm-prefill", "vllm-decode")
GIVEN = {"MODEL": "m", "TOKENSPEED_IMAGE": "t"}  # variables that the GPU overlays insist on
DASHBOARD = COMPOSE / "monitoring/dashboards/pd-extproc.json"
# Of Compose v2 only, so that docker-compose 1.29 refuses them.
TOO_NEW = {"configs", "secrets", "models", "start_interval", "develop", "attach", "required", "gpus", "provider"}


def substituted(text: str, environment: dict[str, str]) -> str:
    """``text`` with ``${NAME:-default}`` and ``${NAME:?message}`` replaced, as Compose does."""

    def value(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        name, operator, word = match["name"], match["operator"], match["word"]
        if environment.get(name):
            return environment[name]
        assert operator != ":?", f"{name}: {word}"
        assert operator == ":-", f"${{{name}}} has no default"
        return word

    found = re.sub(r"\$\$|\$\{(?P<name>\w+)(?P<operator>:[-?])?(?P<word>[^}]*)\}", value, text)
    assert "$" not in re.sub(r"\$\$|\$\{[^}]*\}", "", text), "a $ that Compose would take for a variable"
    return found


def walk(value: Any, environment: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: walk(inner, environment) for key, inner in value.items()}
    if isinstance(value, list):
        return [walk(inner, environment) for inner in value]
    return substituted(value, environment) if isinstance(value, str) else value


@cache
def document(file: Path) -> Any:
    # libyaml is stricter than the other loader, as the one of Compose v2 is: {NAME:} is no mapping there.
    return walk(yaml.load(file.read_text(), yaml.CSafeLoader), GIVEN)


@cache
def merged(overlay: Path) -> Any:
    """The services of the main file with an overlay's over them, as far as they are mappings."""
    services = {name: dict(service) for name, service in document(MAIN)["services"].items()}
    for name, service in document(overlay)["services"].items():
        known = services.setdefault(name, {})
        both = {"environment": {**known.get("environment", {}), **service.get("environment", {})}}
        known.update({**service, **(both if both["environment"] else {})})
    return services


def keys(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set(value).union(*map(keys, value.values()))
    return set().union(*map(keys, value)) if isinstance(value, list) else set()


@pytest.mark.parametrize("file", [MAIN, *OVERLAYS], ids=lambda file: file.stem)
def test_the_schema_of_the_specification_is_kept(file: Path) -> None:
    schema = resources.files("check_jsonschema").joinpath("builtin_schemas/vendor/compose-spec.json").read_text()
    jsonschema.Draft202012Validator(json.loads(schema)).validate(document(file))
    bare = {key: value for key, value in document(file).items() if not key.startswith("x-")}
    assert set(bare) <= {"services", "networks", "volumes"}
    assert not {key for service in bare["services"].values() for key in keys(service)} & TOO_NEW


@pytest.mark.parametrize("file", [MAIN, *OVERLAYS], ids=lambda file: file.stem)
def test_nothing_is_tied_to_a_machine(file: Path) -> None:
    """No path of a host but those beside the file, no names of containers, and ports on loopback unless one asks."""
    for name, service in document(file)["services"].items():
        assert not {"container_name", "privileged", "devices"} & set(service), name
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert source in document(file).get("volumes", {}) or (COMPOSE / source).exists(), volume
            assert not source.startswith(("/", "~", "..")), volume
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ())), name


@pytest.mark.parametrize("file", [MAIN, *OVERLAYS], ids=lambda file: file.stem)
def test_every_service_that_stays_tells_its_health(file: Path) -> None:
    for name, service in merged(file).items() if file != MAIN else document(MAIN)["services"].items():
        test = service["healthcheck"].get("test")
        assert test or name == "envoy-config", name
        for needed, how in service.get("depends_on", {}).items():
            expected = "service_completed_successfully" if needed == "envoy-config" else "service_healthy"
            assert how == {"condition": expected}, name


@pytest.mark.parametrize("name", ["envoy", "sidecar", "envoy-config", *MOCKS])
def test_ours_are_locked_up(name: str) -> None:
    service = document(MAIN)["services"][name]
    assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
    assert service["security_opt"] == ["no-new-privileges:true"]


def test_only_the_client_port_is_published() -> None:
    published = {name: service["ports"] for name, service in document(MAIN)["services"].items() if "ports" in service}
    assert published == {"envoy": ["127.0.0.1:30000:30000"]}


@pytest.mark.parametrize("file", [MAIN, *ENGINES], ids=lambda file: file.stem)
def test_the_sidecar_takes_its_options_and_every_worker_is_a_service(file: Path) -> None:
    services = document(MAIN)["services"] if file == MAIN else merged(file)
    given = {name: value for name, value in services["sidecar"]["environment"].items() if value is not None}
    settings = load_settings({}, {name: value for name, value in given.items() if name.startswith("PD_EXTPROC_")})
    assert settings.prefill
    assert settings.decode
    for worker in (*settings.prefill, *settings.decode):
        service = services[worker.url.host]
        assert "profiles" not in service, f"{worker.url} is switched off"
        words = " ".join(map(str, service["command"]))
        assert str(worker.url.port) in words, worker.url
        if worker.bootstrap_port is not None:
            assert str(worker.bootstrap_port) in f"{words} {service.get('environment')}"


@pytest.mark.parametrize("file", ENGINES, ids=lambda file: file.stem)
def test_real_workers_take_the_place_of_the_mocks(file: Path) -> None:
    services = merged(file)
    assert all(services[name]["profiles"] == ["mocks"] for name in MOCKS)
    needed = {needed for service in services.values() for needed in service.get("depends_on", {})}
    assert not needed & set(MOCKS), "nothing may depend on what is switched off"


@pytest.mark.parametrize("file", ENGINES, ids=lambda file: file.stem)
def test_real_workers_that_died_are_started_again(file: Path) -> None:
    workers = [service for name, service in document(file)["services"].items() if name not in (*MOCKS, "sidecar")]
    assert len(workers) == 2
    assert [worker["restart"] for worker in workers] == ["unless-stopped"] * 2


def test_vllm_on_the_cpu_has_a_model_or_is_given_one() -> None:
    """That of its image, one of Hugging Face's that is kept in a volume, or one in a directory of this machine."""
    raw = yaml.load((COMPOSE / "vllm-cpu.yaml").read_text(), yaml.CSafeLoader)
    given = {"MODEL": "/models/m", "MODELS": "/srv/models"}
    expected = (({}, "/opt/engines/model", "models"), (given, "/models/m", "/srv/models"))
    for environment, model, source in expected:
        services = walk(raw, environment)["services"]
        workers = services["cpu-prefill"], services["cpu-decode"]
        assert {worker["command"][0] for worker in workers} == {model}
        assert {tuple(worker["volumes"]) for worker in workers} == {(f"{source}:/models",)}
    recipe = (COMPOSE / "vllm-cpu.Dockerfile").read_text()
    assert "/opt/recipe/setup.sh /opt/engines vllm" in recipe
    assert "HF_HOME=/models" in recipe


def test_the_cpu_pair_differs_in_its_roles_only() -> None:
    """Workers that cut the cache into other blocks are no pair for each other."""
    services = document(COMPOSE / "vllm-cpu.yaml")["services"]
    prefill, decode = (services[f"cpu-{role}"]["command"] for role in ("prefill", "decode"))
    assert prefill[:-1] == decode[:-1]
    configs = json.loads(prefill[-1]), json.loads(decode[-1])
    assert [config.pop("kv_role") for config in configs] == ["kv_producer", "kv_consumer"]
    assert configs[0] == configs[1]


def test_envoy_and_the_sidecar_are_told_the_same() -> None:
    """What renders Envoy's configuration has the sidecar's options, but for where the sidecar is."""
    services = document(MAIN)["services"]
    sidecar, envoy, config = (services[name]["environment"] for name in ("sidecar", "envoy", "envoy-config"))
    assert sidecar == envoy
    assert {name for name in sidecar if sidecar[name] != config[name]} == {"PD_EXTPROC_EXTPROC_ADDRESS"}
    port = sidecar["PD_EXTPROC_EXTPROC_ADDRESS"].split(":")[1]
    assert config["PD_EXTPROC_EXTPROC_ADDRESS"] == f"sidecar:{port}"


# --- Prometheus and Grafana


def families() -> dict[str, Any]:
    """Every family of the gateway's metrics, by name."""
    metrics, registry = Metrics(), Registry(lambda _: None)
    RequestMetrics(metrics)
    WorkerMetrics(registry, metrics)
    DiscoveryMetrics(DiscoveryState("file"), metrics)
    prefixes = EventPrefixes(1)
    KvEventMetrics(registry, KvEventFeed(registry, prefixes, Common()), prefixes, metrics)
    return dict(metrics._families)


def expressions() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


def test_every_metric_of_the_dashboard_is_there_and_every_metric_is_shown() -> None:
    known = families()
    used = set(re.findall(r"\bpd_\w+", " ".join(expressions())))
    shown = {re.sub(r"_bucket$", "", name) if re.sub(r"_bucket$", "", name) in known else name for name in used}
    assert shown == set(known)


@pytest.mark.parametrize("expression", expressions())
def test_labels_are_those_of_the_metric(expression: str) -> None:
    names = re.findall(r"\b(pd_\w+)\{([^}]*)\}", expression)
    for name, selectors in names:
        family = families()[re.sub(r"_bucket$", "", name)]
        own = {"instance", "le", *family._label_names}
        assert set(re.findall(r"(\w+)(?:=~|!=|=)", selectors)) <= own
        by = re.search(r"by \(([^)]*)\)", expression)
        assert set(re.findall(r"\w+", by[1] if by else "")) <= own
        if family._kind == "counter":
            assert re.search(rf"(rate|increase)\({name}", expression)


def test_the_dashboards_panels_have_a_place_each() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) == 23
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    used = set(re.findall(r"\$\{?([a-z]+)", json.dumps(panels)))
    assert used == variables


def test_prometheus_asks_whom_the_compose_file_has_serve() -> None:
    jobs = yaml.safe_load((COMPOSE / "monitoring/prometheus.yaml").read_text())["scrape_configs"]
    targets = {(job.get("metrics_path", "/metrics"), *job["static_configs"][0]["targets"]) for job in jobs}
    settings = load_settings({}, {})
    port = document(MAIN)["services"]["sidecar"]["environment"]["PD_EXTPROC_ENVOY_STATUS_PORT"]
    expected = {("/metrics", f"sidecar:{settings.prometheus_port}"), ("/stats/prometheus", f"envoy:{port}")}
    assert targets == expected
