"""The command line: what parses, what is refused and how, what the help says."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from extproc import __version__, cli, logs
from extproc.envoy_config import dataplane_config, egress_target
from extproc.peer_options import INSTEAD, NOT_AVAILABLE_YET
from extproc.settings import PolicyName, Settings
from extproc.transport.address import TcpAddress
from extproc.workers.worker import WorkerUrl

PAIR = "--pd-disaggregation --prefill http://prefill:8000 8998 --decode http://decode:8001"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a command line led to: the settings that the service got, or the complaints."""

    code: int
    settings: Settings | None
    stderr: str

    @property
    def complaints(self) -> list[str]:
        return re.findall(r"^pd-extproc [a-z-]+: error: (.*)$", self.stderr, re.MULTILINE)


Launch = Callable[[str], Outcome]


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Launch:
    """``pd-extproc launch`` with everything real but the service and the logs."""
    served: list[Settings] = []
    service = ModuleType("extproc.service")

    def serve(settings: Settings) -> int:
        served.append(settings)
        return 0

    service.run = serve  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "extproc.service", service)
    monkeypatch.setattr(logs, "configure", lambda *_, **__: None)

    def run(options: str) -> Outcome:
        served.clear()
        try:
            code = cli.main(["launch", *shlex.split(options)])
        except SystemExit as stopped:
            code = int(stopped.code or 0)
        return Outcome(code, served[0] if served else None, capsys.readouterr().err)

    return run


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The standard output of a command that ends by itself with 0."""
    try:
        code = cli.main(argv)
    except SystemExit as stopped:
        code = int(stopped.code or 0)
    assert code == 0
    return capsys.readouterr().out


# --- the commands of the peer's user document ---


def test_one_pair(launch: Launch) -> None:
    outcome = launch(f"{PAIR} --host 0.0.0.0 --port 30000")
    assert outcome.code == 0
    assert outcome.settings is not None
    (prefill,) = outcome.settings.prefill
    assert (prefill.url, prefill.bootstrap_port) == (WorkerUrl("http", "prefill", 8000), 8998)
    assert [worker.url for worker in outcome.settings.decode] == [WorkerUrl("http", "decode", 8001)]
    assert (outcome.settings.host, outcome.settings.port) == ("0.0.0.0", 30000)


@pytest.mark.parametrize(
    ("options", "path"),
    [
        (
            """--pd-disaggregation --prefill grpc://prefill:50051 --decode grpc://decode:50052
               --model-path /path/to/model --host 0.0.0.0 --port 30000""",
            "/path/to/model",
        ),
        ("--pd-disaggregation --prefill grpc://prefill:50051 8998 --decode grpc://decode:50052 --model m", "m"),
    ],
)
def test_grpc_workers_and_their_model(launch: Launch, options: str, path: str) -> None:
    outcome = launch(options)
    assert outcome.code == 0
    assert outcome.settings is not None
    assert outcome.settings.model_path == path
    assert all(worker.url.is_grpc for worker in (*outcome.settings.prefill, *outcome.settings.decode))


def test_no_startup_workers(launch: Launch) -> None:
    outcome = launch("--pd-disaggregation --host 0.0.0.0 --port 30000")
    assert outcome.code == 0
    assert outcome.settings is not None
    assert outcome.settings.prefill == outcome.settings.decode == ()


MULTIPLE = """--pd-disaggregation --prefill http://prefill1:8000 8998 --prefill http://prefill2:8000 8998
              --decode http://decode1:8001 --decode http://decode2:8001"""
NOT_YET = "is an option of smg that is not available yet"


@pytest.mark.parametrize(
    ("options", "complaints"),
    [
        (
            """--epd-disaggregation --encode grpc://encode:50060 8995 --prefill grpc://prefill:50061 8998
               --decode grpc://decode:50062 --model-path $MODEL""",
            [
                f"--epd-disaggregation {NOT_YET}",
                f"--encode {NOT_YET}",
            ],
        ),
        (f"{PAIR} --enable-igw --router-selector a=b c=d", [f"--enable-igw {NOT_YET}", f"--router-selector {NOT_YET}"]),
    ],
)
def test_what_is_not_there_yet_is_refused_by_name(launch: Launch, options: str, complaints: list[str]) -> None:
    outcome = launch(options)
    assert outcome.code == 2
    assert outcome.settings is None
    assert outcome.complaints == complaints


@pytest.mark.parametrize("option", sorted(NOT_AVAILABLE_YET))
def test_each_missing_option_of_the_peer_is_refused(launch: Launch, option: str) -> None:
    for form in (f"--{option}", f"--{option} 1", f"--{option}=1"):
        outcome = launch(f"{PAIR} {form}")
        assert outcome.complaints == [f"--{option} {INSTEAD.get(option, NOT_YET)}"]
        assert outcome.code == 2


@pytest.mark.parametrize("flag", ["--sticky-sessions", "--routing-key-override"])
def test_options_with_two_names(launch: Launch, flag: str) -> None:
    settings = launch(f"{PAIR} {flag} --sticky-key-idle-secs 9 --routing-key-headers X-One x-two").settings
    assert settings is not None
    assert (settings.routing_key_override, settings.max_idle_secs) == (True, 9)
    assert settings.routing_key_headers == ("x-one", "x-two")
    settings = launch(f"{PAIR} {flag} {flag.replace('--', '--no-', 1)}").settings
    assert settings is not None
    assert not settings.routing_key_override


def test_several_workers_with_a_policy_for_each_role(launch: Launch) -> None:
    settings = launch(f"{MULTIPLE} --prefill-policy cache_aware --decode-policy power_of_two").settings
    assert settings is not None
    assert [worker.url.host for worker in settings.prefill] == ["prefill1", "prefill2"]
    assert [worker.url.host for worker in settings.decode] == ["decode1", "decode2"]
    assert settings.prefill_policy is PolicyName.CACHE_AWARE
    assert settings.decode_policy is PolicyName.POWER_OF_TWO


# --- forms ---


@pytest.mark.parametrize(
    ("form", "port"),
    [
        ("--prefill http://p:8000", None),
        ("--prefill http://p:8000 8998", 8998),
        ("--prefill http://p:8000 none", None),
        ("--prefill http://p:8000 NONE", None),
        ("--prefill=http://p:8000", None),
        ("--prefill=http://p:8000 8998", 8998),
        ("--prefill http://p:8000 --port 8998", None),
    ],
)
def test_forms_of_prefill(launch: Launch, form: str, port: int | None) -> None:
    settings = launch(f"--pd-disaggregation {form}").settings
    assert settings is not None
    (worker,) = settings.prefill
    assert (str(worker.url), worker.bootstrap_port) == ("http://p:8000", port)


@pytest.mark.parametrize("port", ["x", "8998x", "http://other:1", "-1"])
def test_a_bootstrap_port_that_is_none(launch: Launch, port: str) -> None:
    (complaint,) = launch(f"--pd-disaggregation --prefill http://p:8000 {port}").complaints
    assert complaint.startswith(f"--prefill: Invalid bootstrap port: {port}. Must be a number or 'none'")


def test_switches_can_be_turned_back(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PD_EXTPROC_NO_ENVOY", "true")
    monkeypatch.setenv("PD_EXTPROC_LOG_JSON", "true")
    settings = launch(f"{PAIR} --envoy --no-log-json --no-response-headers").settings
    assert settings is not None
    assert (settings.no_envoy, settings.log_json, settings.response_headers) == (False, False, False)


def test_engine_ids_and_connectors_go_with_their_workers(launch: Launch) -> None:
    settings = launch(
        """--pd-disaggregation --prefill http://p:1 --prefill-kv-engine-id a --prefill http://p:2 9000
           --prefill-kv-engine-id b --prefill-kv-connector MooncakeConnector"""
    ).settings
    assert settings is not None
    assert settings.prefill_kv_engine_id == ("a", "b")
    assert (settings.prefill_kv_connector, settings.decode_kv_connector) == ("MooncakeConnector", None)


def test_request_id_headers(launch: Launch) -> None:
    settings = launch(f"{PAIR} --request-id-headers X-One x-two --port 31000").settings
    assert settings is not None
    assert settings.request_id_headers == ("x-one", "x-two")
    assert settings.port == 31000


def test_flags_environment_and_file_meet(launch: Launch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text("pd_disaggregation: true\nport: 1001\nlog_level: warn\nenvoy_admin_port: 1002\n")
    monkeypatch.setenv("PD_EXTPROC_PORT", "2001")
    monkeypatch.setenv("PD_EXTPROC_ENVOY_ADMIN_PORT", "2002")
    settings = launch(f"--config {file} --port 3001").settings
    assert settings is not None
    assert (settings.port, settings.envoy_admin_port, settings.log_level.value) == (3001, 2002, "warn")


def test_the_mode_must_be_named(launch: Launch) -> None:
    outcome = launch("--prefill http://p:1 --decode http://d:1")
    assert outcome.complaints == ["only prefill/decode mode is available yet: add --pd-disaggregation"]
    assert outcome.code == 2


@pytest.mark.parametrize("options", ["--no-such-option", "--por 1", "stray", "--port", "--log-json=1"])
def test_unknown_options_and_stray_words_are_usage_errors(launch: Launch, options: str) -> None:
    outcome = launch(f"{PAIR} {options}")
    assert outcome.code == 2
    assert outcome.settings is None
    assert "usage: pd-extproc launch" in outcome.stderr


# --- help ---


def test_help_of_launch_has_one_line_per_setting(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "launch", "--help")
    lines = [line for line in text.splitlines() if line.startswith("  --")]
    for name, field in Settings.model_fields.items():
        flag = name.replace("_", "-")
        shown = f"--[no-]{flag}" if field.annotation is bool and name != "no_envoy" else f"--{flag}"
        (line,) = [line for line in lines if line.split()[0] == shown]
        assert re.search(r"\S  +\S.*\[default: .+\]$", line), line
    assert len(lines) == len(Settings.model_fields) + 1  # --config
    assert max(map(len, text.splitlines())) <= 128


def test_help_does_not_list_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    words = set(re.findall(r"--[a-z-]+", printed(capsys, "launch", "--help")))
    assert not words & {f"--{option}" for option in NOT_AVAILABLE_YET}


def test_defaults_in_help_are_the_models(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "launch", "--help")
    for flag, default in [
        ("--port PORT", "30000"),
        ("--max-payload-size BYTES", "536870912"),
        ("--request-id-headers NAME", "x-request-id x-correlation-id x-trace-id request-id"),
        ("--policy NAME", "cache_aware"),
        (r"--\[no-\]response-headers", "on"),
        ("--no-envoy", "off"),
    ]:
        assert re.search(rf"^  {flag}.*\[default: {default}\]$", text, re.MULTILINE), flag


def test_python_dash_m_is_the_command() -> None:
    command = [sys.executable, "-m", "extproc", "--version"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == f"pd-extproc {__version__}\n"


def test_help_and_version_load_nothing_heavy() -> None:
    program = (
        "import sys, extproc.cli\n"
        "try: extproc.cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "print([name for name in ('pydantic', 'yaml', 'grpc', 'aiohttp', 'asyncio') if name in sys.modules])\n"
    )
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert output.endswith("[]\n")
    for command in cli.COMMANDS:
        assert re.search(rf"^    {command} +\S", output, re.MULTILINE), command


@pytest.mark.parametrize("argv", [[], ["no-such-command"], ["--no-such-option"]])
def test_no_command_is_a_usage_error(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(argv)
    assert stopped.value.code == 2
    assert "usage: pd-extproc" in capsys.readouterr().err


# --- envoy-config ---


def test_envoy_config_prints_what_the_settings_say(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "envoy-config", "--port", "31007", "--envoy-admin-port", "31008", "--run-dir", "/srv/pd")
    config = yaml.safe_load(text)
    ports = [
        listener["address"]["socket_address"]["port_value"]
        for listener in config["static_resources"]["listeners"]
        if "socket_address" in listener["address"]
    ]
    assert ports == [31007]
    assert config["admin"]["address"]["socket_address"] == {"address": "127.0.0.1", "port_value": 31008}
    for name in ("extproc", "ads", "control", "egress"):
        assert f"/srv/pd/{name}.sock" in text


def test_envoy_on_the_same_host_reaches_a_wildcard_address_by_loopback() -> None:
    config = dataplane_config(Settings(extproc_address="0.0.0.0:50051", ads_address="[::]:50052"))
    assert (config.extproc, config.ads, config.control) == ("127.0.0.1:50051", "[::1]:50052", "127.0.0.1:50053")


@pytest.mark.parametrize(
    ("address", "listens", "connects"),
    [
        ("unix:/run/e.sock", "unix:/run/e.sock", "/run/e.sock"),
        ("envoy:50054", "0.0.0.0:50054", TcpAddress("envoy", 50054)),
        ("127.0.0.1:50054", "127.0.0.1:50054", TcpAddress("127.0.0.1", 50054)),
        ("0.0.0.0:50054", "0.0.0.0:50054", TcpAddress("127.0.0.1", 50054)),
        ("[::]:50054", "[::]:50054", TcpAddress("::1", 50054)),
    ],
)
def test_envoy_listens_for_legs_where_the_sidecar_connects(address: str, listens: str, connects: object) -> None:
    settings = Settings(egress_address=address)
    assert dataplane_config(settings).egress == listens
    assert egress_target(settings) == connects


def test_what_envoy_tells_is_on_a_port_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--envoy-status-port", "31009", "--prometheus-host", "127.0.0.2", "--run-dir", "/srv/pd")
    config = yaml.safe_load(printed(capsys, "envoy-config", *options))["static_resources"]
    (status,) = [each for each in config["listeners"] if each["name"] == "status"]
    assert status["address"]["socket_address"] == {"address": "127.0.0.2", "port_value": 31009}
    (admin,) = [each for each in config["clusters"] if each["name"] == "admin"]
    assert "'address': '127.0.0.1', 'port_value': 9901" in str(admin)
    assert "status" not in str(yaml.safe_load(printed(capsys, "envoy-config", "--run-dir", "/srv/pd"))["admin"])


def test_envoy_config_refuses_wrong_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["envoy-config", "--port", "x"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("pd-extproc envoy-config: error: --port: ")
