"""``scripts/launch-pd-workers.sh``: what it would start, what it refuses, and that nothing it started outlives it."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import select
import shlex
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest

from extproc.control.worker_spec import parse_worker_spec
from extproc.flags import add_arguments, read_settings, split_prefill
from extproc.settings import Settings
from extproc.workers.spec import WorkerSpec
from extproc.workers.worker import Role

SCRIPT = Path(__file__).parent.parent / "scripts/launch-pd-workers.sh"
LONG = 60.0  # seconds; how long a test waits for what should be there in less than one
PORT_OPTIONS = ("--port", "--disaggregation-bootstrap-port")
PORT_VARIABLES = ("VLLM_NIXL_SIDE_CHANNEL_PORT", "VLLM_MOONCAKE_BOOTSTRAP_PORT")


@dataclass(frozen=True, slots=True)
class Command:
    """One command of the output."""

    environment: dict[str, str]
    words: tuple[str, ...]

    @classmethod
    def parse(cls, line: str) -> Command:
        words = shlex.split(line)
        environment = {}
        while re.match(r"[A-Z_]+=", words[0]):
            name, _, environment[name] = words.pop(0).partition("=")
        return cls(environment, tuple(words))

    def option(self, name: str) -> str:
        """The word behind ``name``, which must be there once."""
        assert self.words.count(name) == 1, (name, self.words)
        return self.words[self.words.index(name) + 1]

    @property
    def kv_config(self) -> dict[str, Any]:
        found = json.loads(self.option("--kv-transfer-config"))
        assert isinstance(found, dict)
        return found

    @property
    def ports(self) -> list[int]:
        found = [self.environment[name] for name in PORT_VARIABLES if name in self.environment]
        return [int(port) for port in [*found, *(self.option(name) for name in PORT_OPTIONS if name in self.words)]]


@dataclass(frozen=True, slots=True)
class Plan:
    """The output of a dry run."""

    text: str
    workers: list[Command]
    launch: Command
    registrations: list[bytes]

    @property
    def settings(self) -> Settings:
        """What our own command line makes of the printed one."""
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        return read_settings(parser.parse_args(split_prefill(self.launch.words[2:])))

    @property
    def specs(self) -> list[WorkerSpec]:
        """What our own control API makes of the printed registrations."""
        return [parse_worker_spec(body) for body in self.registrations]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {"PATH": os.environ["PATH"], **environment}
    return subprocess.run(
        [str(SCRIPT), *arguments], env=variables, capture_output=True, text=True, timeout=LONG, check=False
    )


def plan(*arguments: str, **environment: str) -> Plan:
    done = run("--dry-run", *arguments, **environment)
    assert (done.returncode, done.stderr) == (0, "")
    lines = re.sub(r" \\\n +", " ", done.stdout).splitlines()
    commands = [Command.parse(line) for line in lines if line and not line.startswith("#")]
    (launch,) = [command for command in commands if command.words[:2] == ("pd-extproc", "launch")]
    posts = [command for command in commands if command.words[0] == "curl"]
    assert {post.words[1:4] for post in posts} <= {
        ("-X", "POST", f"http://localhost:{launch.option('--port')}/workers")
    }
    workers = [command for command in commands if command is not launch and command not in posts]
    return Plan(done.stdout, workers, launch, [post.option("-d").encode() for post in posts])


def test_vllm_with_nixl_over_http_as_the_documents_have_it() -> None:
    made = plan("vllm", "/path/to/model")
    prefill, decode = made.workers
    for worker in made.workers:
        assert worker.words[:3] == ("vllm", "serve", "/path/to/model")
        assert worker.option("--host") == "0.0.0.0"
    assert [worker.option("--port") for worker in made.workers] == ["8000", "8001"]
    assert [worker.environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] for worker in made.workers] == ["5600", "5601"]
    assert [worker.environment["CUDA_VISIBLE_DEVICES"] for worker in made.workers] == ["0", "1"]
    assert prefill.kv_config.items() >= {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}.items()
    assert decode.kv_config.items() >= {"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}.items()
    assert made.settings.pd_disaggregation
    assert made.settings.prefill == made.settings.decode == ()
    assert [orjson.loads(body) for body in made.registrations] == [
        {"url": "http://127.0.0.1:8000", "worker_type": "prefill", "kv_connector": "NixlConnector"},
        {"url": "http://127.0.0.1:8001", "worker_type": "decode", "kv_connector": "NixlConnector"},
    ]


def test_every_rank_has_a_side_channel_port_and_its_gpus() -> None:
    sizes = {"PREFILL_WORKERS": "2", "DECODE_WORKERS": "2", "TP_SIZE": "2", "DP_SIZE": "3"}
    made = plan("vllm", "m", **sizes, DECODE_GPUS=",".join(map(str, range(20, 32))))
    ports = [int(worker.environment["VLLM_NIXL_SIDE_CHANNEL_PORT"]) for worker in made.workers]
    assert ports == [5600, 5603, 5606, 5609]
    gpus = [worker.environment["CUDA_VISIBLE_DEVICES"] for worker in made.workers]
    assert gpus == ["0,1,2,3,4,5", "6,7,8,9,10,11", "20,21,22,23,24,25", "26,27,28,29,30,31"]
    assert {worker.option("--tensor-parallel-size") for worker in made.workers} == {"2"}
    assert {worker.option("--data-parallel-size") for worker in made.workers} == {"3"}


def test_gpus_not_given_are_those_that_the_other_role_leaves() -> None:
    environments = [worker.environment for worker in plan("vllm", "m", PREFILL_GPUS="1", DECODE_WORKERS="2").workers]
    assert [environment["CUDA_VISIBLE_DEVICES"] for environment in environments] == ["1", "0", "2"]
    environments = [worker.environment for worker in plan("vllm", "m", PREFILL_GPUS="none", DECODE_GPUS="none").workers]
    assert not any("CUDA_VISIBLE_DEVICES" in environment for environment in environments)


@pytest.mark.parametrize(
    ("inherited", "given", "expected"),
    [
        ("4,5,6", {}, ["4", "5"]),
        ("GPU-0a1b,GPU-2c3d", {}, ["GPU-0a1b", "GPU-2c3d"]),
        ("4,5,6", {"DECODE_GPUS": "4"}, ["5", "4"]),
        ("4,5", {"PREFILL_GPUS": "0", "DECODE_GPUS": "1"}, ["0", "1"]),
        ("4,5,6,7", {"TP_SIZE": "2"}, ["4,5", "6,7"]),
        ("", {}, [None, None]),  # none is to be used: so it is inherited
        ("-1", {}, [None, None]),
        ("4,5", {"PREFILL_GPUS": "none", "DECODE_GPUS": "none"}, [None, None]),
    ],
)
def test_gpus_are_taken_from_those_that_the_script_may_use(
    inherited: str, given: dict[str, str], expected: list[str | None]
) -> None:
    workers = plan("vllm", "m", CUDA_VISIBLE_DEVICES=inherited, **given).workers
    assert [worker.environment.get("CUDA_VISIBLE_DEVICES") for worker in workers] == expected


def test_mooncake_is_registered_with_the_engine_ids_and_ports_that_it_is_started_with() -> None:
    made = plan("vllm", "m", KV_BACKEND="mooncake", PREFILL_WORKERS="2", DECODE_WORKERS="2")
    started = [
        (worker.kv_config["engine_id"], int(worker.environment["VLLM_MOONCAKE_BOOTSTRAP_PORT"]))
        for worker in made.workers[:2]
    ]
    registered = [(spec.kv.engine_id, spec.bootstrap_port) for spec in made.specs if spec.role is Role.PREFILL]
    assert registered == started
    assert [port for _, port in started] == [8998, 8999]
    assert {worker.kv_config["kv_connector"] for worker in made.workers} == {"MooncakeConnector"}
    assert {spec.kv.connector for spec in made.specs} == {"MooncakeConnector"}
    assert [spec.url.port for spec in made.specs] == [int(worker.option("--port")) for worker in made.workers]
    assert not any("VLLM_MOONCAKE_BOOTSTRAP_PORT" in worker.environment for worker in made.workers[2:])


@pytest.mark.parametrize("backend", ["nixl", "mooncake"])
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_the_gateway_balances_over_ranks_where_there_are_several(backend: str, ranks: str) -> None:
    assert plan("vllm", "m", KV_BACKEND=backend, DP_SIZE=ranks).settings.dp_aware is (ranks == "2")


def test_the_ranks_of_a_mooncake_worker_are_registered() -> None:
    made = plan("vllm", "m", KV_BACKEND="mooncake", DP_SIZE="2")
    assert [spec.labels for spec in made.specs] == [{"dp_size": "2"}] * 2
    assert [spec.labels for spec in plan("vllm", "m", DP_SIZE="2").specs] == [{}] * 2  # NIXL's need not be known


@pytest.mark.parametrize("backend", ["nixl", "mooncake"])
def test_an_engine_id_is_used_for_one_start(backend: str) -> None:
    ids = [
        worker.kv_config["engine_id"]
        for _ in range(2)
        for worker in plan("vllm", "m", KV_BACKEND=backend, PREFILL_WORKERS="2").workers
    ]
    assert len(set(ids)) == 6
    assert [re.sub("-[0-9]+-[0-9a-f]{4}$", "", engine_id) for engine_id in ids[:3]] == [
        "prefill-0",
        "prefill-1",
        "decode-0",
    ]


def test_more_of_the_transfer_config() -> None:
    more = ' { "kv_connector_extra_config": {"mooncake_protocol": "tcp"} } '
    for worker in plan("vllm", "m", KV_BACKEND="mooncake", KV_EXTRA_CONFIG=more).workers:
        assert worker.kv_config["kv_connector_extra_config"] == {"mooncake_protocol": "tcp"}
        assert worker.kv_config.keys() > {"kv_connector", "kv_role", "engine_id"}


@pytest.mark.parametrize(("given", "backend"), [({}, "mooncake"), ({"KV_BACKEND": "nixl"}, "nixl")])
def test_sglang_over_http(given: dict[str, str], backend: str) -> None:
    made = plan("sglang", "m", PREFILL_WORKERS="2", TP_SIZE="2", **given)
    prefills, decode = made.workers[:2], made.workers[2]
    for worker in made.workers:
        assert worker.words[:3] == ("python3", "-m", "sglang.launch_server")
        assert worker.option("--model-path") == "m"
        assert worker.option("--disaggregation-transfer-backend") == backend
        assert worker.option("--tp-size") == "2"
        assert "--smg-grpc-mode" not in worker.words
    assert [worker.option("--disaggregation-mode") for worker in made.workers] == ["prefill", "prefill", "decode"]
    settings = made.settings
    assert [(worker.url.port, worker.bootstrap_port) for worker in settings.prefill] == [
        (int(worker.option("--port")), int(worker.option("--disaggregation-bootstrap-port"))) for worker in prefills
    ]
    assert [worker.url.port for worker in settings.decode] == [int(decode.option("--port"))]
    assert made.registrations == []


@pytest.mark.parametrize(
    ("engine", "command", "environment", "given"),
    [
        ("vllm", "vllm serve m --grpc", {}, ["grpc://127.0.0.1:50051"]),
        ("vllm", "vllm serve m --grpc", {"KV_BACKEND": "mooncake"}, ["grpc://127.0.0.1:50051", "8998"]),
        ("sglang", "python3 -m sglang.launch_server", {}, ["grpc://127.0.0.1:50051", "8998"]),
        ("tokenspeed", "python3 -m smg_grpc_servicer.tokenspeed", {}, ["grpc://127.0.0.1:50061", "8998"]),
    ],
)
def test_grpc(engine: str, command: str, environment: dict[str, str], given: list[str]) -> None:
    made = plan(engine, "m", GRPC="1", **environment)
    assert plan("--grpc", engine, "m", **environment).launch == made.launch
    assert all(" ".join(worker.words).startswith(f"{command} ") for worker in made.workers)
    assert all(("--smg-grpc-mode" in worker.words) == (engine == "sglang") for worker in made.workers)
    words = list(made.launch.words)
    assert words[words.index("--prefill") + 1 : words.index("--decode")] == given
    assert made.launch.option("--model-path") == "m"
    assert made.registrations == []


def test_over_grpc_the_gateway_is_told_the_model() -> None:
    made = plan("tokenspeed", "m")
    assert made.settings.model_path == "m"


def test_sglang_over_grpc_leaves_a_gap_for_its_sidecars() -> None:
    made = plan("sglang", "m", GRPC="1", PREFILL_WORKERS="2", DECODE_WORKERS="2")
    ports = sorted(int(worker.option("--port")) for worker in made.workers)
    assert min(after - before for before, after in itertools.pairwise(ports)) > 1


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tokenspeed"])
@pytest.mark.parametrize("backend", ["nixl", "mooncake"])
@pytest.mark.parametrize("grpc", ["0", "1"])
def test_no_port_is_used_twice_and_the_output_is_a_script(engine: str, backend: str, grpc: str) -> None:
    if (engine, backend) == ("tokenspeed", "nixl"):
        return  # refused
    made = plan(engine, "m", KV_BACKEND=backend, GRPC=grpc, PREFILL_WORKERS="3", DECODE_WORKERS="3")
    ports = [port for worker in made.workers for port in worker.ports]
    assert len(set(ports)) == len(ports) >= 6
    subprocess.run(["bash", "-n"], input=made.text, text=True, check=True)  # noqa: S607 - the shell that is meant


def test_addresses_and_ports_can_be_chosen() -> None:
    ports = {"PREFILL_PORT": "7000", "DECODE_PORT": "7100", "SIDE_CHANNEL_PORT": "7200", "GATEWAY_PORT": "7300"}
    made = plan("vllm", "m", HOST="::", ADVERTISE_HOST="fd00::5", PREFILL_WORKERS="2", **ports)
    assert {worker.option("--host") for worker in made.workers} == {"::"}
    assert {worker.environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] for worker in made.workers} == {"fd00::5"}
    assert [worker.environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] for worker in made.workers] == ["7200", "7201", "7202"]
    assert [str(spec.url) for spec in made.specs] == [
        "http://[fd00::5]:7000",
        "http://[fd00::5]:7001",
        "http://[fd00::5]:7100",
    ]
    assert made.settings.port == 7300
    assert [worker.url.port for worker in plan("sglang", "m", BOOTSTRAP_PORT="7400").settings.prefill] == [8000]
    assert [worker.bootstrap_port for worker in plan("sglang", "m", BOOTSTRAP_PORT="7400").settings.prefill] == [7400]


def test_arguments_behind_the_dashes_are_the_engines_and_quoted() -> None:
    arguments = ("--served-model-name", "it's a model", "--dry-run", "--max-model-len=4096")
    made = plan("vllm", "a model", "--", *arguments)
    for worker in made.workers:
        assert worker.words[-4:] == arguments
        assert worker.words[2] == "a model"


@pytest.mark.parametrize(
    ("arguments", "environment", "complaint"),
    [
        ("trtllm m", {}, "unknown engine trtllm: expected vllm, sglang or tokenspeed"),
        ("vllm", {}, "expected an engine and a model, got 1 words"),
        ("vllm m more", {}, "got 3 words"),
        ("vllm m --enforce-eager", {}, "unknown option --enforce-eager; arguments of the engine go behind --"),
        ("vllm m -- --port 1", {}, "--port is given by this script"),
        ("vllm m -- --kv_transfer_config={}", {}, "--kv_transfer_config is given by this script"),
        ("vllm m -- -dp 2", {}, "-dp is given by this script: set DP_SIZE"),
        ("vllm m", {"KV_BACKEND": "lmcache"}, "KV_BACKEND=lmcache: expected nixl or mooncake"),
        ("tokenspeed m", {"KV_BACKEND": "nixl"}, "TokenSpeed moves the KV cache with mooncake only"),
        ("sglang m", {"DP_SIZE": "2"}, "DP_SIZE is for vllm"),
        ("sglang m", {"KV_EXTRA_CONFIG": '{"a":1}'}, "KV_EXTRA_CONFIG is for vllm"),
        ("vllm m", {"KV_EXTRA_CONFIG": "a=1"}, "KV_EXTRA_CONFIG: expected a JSON object"),
        ("vllm m", {"KV_EXTRA_CONFIG": '{"engine_id": "e"}'}, "engine_id is given by this script"),
        ("vllm m", {"GRPC": "yes"}, "GRPC=yes: expected 0 or 1"),
        ("vllm m", {"PREFILL_WORKERS": "0"}, "PREFILL_WORKERS=0: expected a whole number from 1 to 1000"),
        ("vllm m", {"TP_SIZE": "two"}, "TP_SIZE=two: expected a whole number"),
        ("vllm m", {"TP_SIZE": "2", "PREFILL_GPUS": "0"}, "PREFILL_GPUS=0: 1 GPU ids for 1 worker(s)"),
        (
            "vllm m",
            {"CUDA_VISIBLE_DEVICES": "4"},
            "DP_SIZE=1: 1 needed beside the other role's; or set DECODE_GPUS",
        ),
        ("vllm m", {"CUDA_VISIBLE_DEVICES": "4"}, "CUDA_VISIBLE_DEVICES=4: 0 GPU ids for 1 worker(s)"),
        ("vllm m", {"CUDA_VISIBLE_DEVICES": "0, 1"}, "CUDA_VISIBLE_DEVICES=0, 1: ' 1' is no GPU id"),
        ("vllm m", {"DECODE_WORKERS": "2", "DECODE_GPUS": "4,5,6"}, "DECODE_GPUS=4,5,6: 3 GPU ids for 2 worker(s)"),
        ("vllm m", {"PREFILL_GPUS": "0;1"}, "'0;1' is no GPU id"),
        ("vllm m", {"PREFILL_PORT": "70000"}, "PREFILL_PORT=70000: expected a whole number from 1 to 65535"),
        ("vllm m", {"SIDE_CHANNEL_PORT": "65535"}, "port 65536 for the side channel of decode-0: above 65535"),
        ("vllm m", {"DECODE_PORT": "8000"}, "port 8000 is both prefill-0's and decode-0's"),
        ("vllm m", {"PREFILL_PORT": "30000"}, "port 30000 is both the gateway's and prefill-0's"),
        (
            "--grpc sglang m",
            {"DECODE_PORT": "50052"},
            "port 50052 is both the HTTP sidecar of prefill-0's and decode-0's",
        ),
        ("--grpc sglang m", {"PREFILL_PORT": "60000"}, "SGLang wants port 60000 + 10000 with gRPC"),
        ("vllm m", {"ADVERTISE_HOST": "[::1]"}, "ADVERTISE_HOST=[::1]: expected a host name or an IP address"),
    ],
)
def test_wrong_usage(arguments: str, environment: dict[str, str], complaint: str) -> None:
    done = run("--dry-run", *shlex.split(arguments), **environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("launch-pd-workers.sh: error: ")
    assert complaint in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_gpu_for_two_workers_is_warned_of() -> None:
    done = run("--dry-run", "vllm", "m", PREFILL_GPUS="3", DECODE_GPUS="3")
    assert (done.returncode, done.stderr) == (
        0,
        "launch-pd-workers.sh: warning: prefill-0 and decode-0 share GPU 3\n",
    )


def test_the_help_names_every_variable() -> None:
    done = run("--help")
    assert done.returncode == 0
    read = set(re.findall(r"\$\{([A-Z_]+):?[=-]", SCRIPT.read_text())) - {"BASH_SOURCE", "TMPDIR"}
    assert len(read) > 15
    assert read <= set(re.findall(r"\b[A-Z_]+\b", done.stdout))


# ---- With fake engines

# /health answers 503 as often as FAKE_UNREADY says, then 200. Its child stands for an engine's other processes.
ENGINE = f"""#!{sys.executable}
import os, signal, subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    unready = int(os.environ.get("FAKE_UNREADY", "0"))

    def do_GET(self):
        if self.path == "/die":
            print("out of memory", flush=True)
            os._exit(3)
        ready, Handler.unready = Handler.unready <= 0, Handler.unready - 1
        self.send_response(200 if ready else 503)
        self.end_headers()

port = int(sys.argv[sys.argv.index("--port") + 1])
if os.environ.get("FAKE_STUBBORN"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
subprocess.Popen(["sleep", "60"], close_fds=False)
if port == int(os.environ["PREFILL_PORT"]) + int(os.environ.get("FAKE_BROKEN", "-1")):
    sys.exit("no such model")
HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def free_ports(count: int) -> int:
    """The first of ``count`` ports in a row that nobody listens on; the kernel gives none of these to connections."""
    for first in random.sample(range(20000, 30000 - count), 100):
        with suppress(OSError), ExitStack() as held:
            for port in range(first, first + count):
                held.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
    raise RuntimeError("no free ports found")


@dataclass(slots=True)
class Launched:
    """The script at work.

    Attributes:
        lives: the reading end of a pipe that all its descendants hold: it ends when the last one is gone.
    """

    process: subprocess.Popen[str]
    first_port: int
    logs: Path
    lives: int

    def read_to(self, text: str) -> list[str]:
        """Its lines up to the one that has ``text`` in it."""
        assert self.process.stdout is not None
        lines: list[str] = []
        for line in self.process.stdout:
            lines.append(line.rstrip("\n"))
            if text in line:
                return lines
        raise AssertionError(f"no {text!r} in {lines}")

    def end(self) -> tuple[int, str]:
        """Its exit code and standard error, when it has ended and everybody with it."""
        _, stderr = self.process.communicate(timeout=LONG)
        ready, _, _ = select.select([self.lives], [], [], LONG)
        assert ready, "a process is left over"
        assert os.read(self.lives, 1) == b""
        return self.process.returncode, stderr


Launch = Callable[..., Launched]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Starts the script with fake engines, a prefill and a decode worker unless told otherwise."""
    engine = tmp_path / "bin/vllm"
    engine.parent.mkdir()
    engine.write_text(ENGINE)
    engine.chmod(0o755)
    with ExitStack() as stack:

        def start(*arguments: str, **environment: str) -> Launched:
            first = free_ports(8)
            variables = {
                "PATH": f"{engine.parent}:{os.environ['PATH']}",
                "PYTHON": str(engine),
                "HOST": "127.0.0.1",
                "PREFILL_PORT": str(first),
                "SIDE_CHANNEL_PORT": str(first + 4),
                "BOOTSTRAP_PORT": str(first + 4),
                "GATEWAY_PORT": str(first + 7),
                "LOG_DIR": str(tmp_path / "logs"),
                **environment,
            }
            reading, writing = os.pipe()
            stack.callback(os.close, reading)
            process = subprocess.Popen(
                [str(SCRIPT), *arguments],
                env=variables,
                pass_fds=[writing],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            os.close(writing)
            stack.enter_context(process)
            stack.callback(process.terminate)
            return Launched(process, first, tmp_path / "logs", reading)

        yield start


def test_it_waits_until_all_are_ready_then_says_what_to_run(launch: Launch) -> None:
    launched = launch("vllm", "org/model", FAKE_UNREADY="2", KV_BACKEND="mooncake")
    lines = launched.read_to("All workers are up")
    for name in ("prefill-0", "decode-0"):
        log = launched.logs / f"{name}.log"
        assert any(line.startswith(f"# {name}: http://127.0.0.1:") and line.endswith(f"log {log}") for line in lines)
        assert re.findall(r'"GET /health [^"]*" (\d+)', log.read_text()) == ["503", "503", "200"]
    assert "# prefill-0 is up" in lines
    text = "\n".join(launched.read_to("DELETE"))
    assert "pd-extproc launch" in text
    assert text.count("curl -X POST") == 2
    launched.process.terminate()
    assert launched.end() == (143, "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_all(launch: Launch, number: signal.Signals) -> None:
    launched = launch("vllm", "org/model", PREFILL_WORKERS="2")
    launched.read_to("All workers are up")
    launched.process.send_signal(number)
    assert launched.end() == (128 + number, "")


@pytest.mark.parametrize("moment", ["prefill-0: http", "decode-0: http"])
def test_a_signal_while_they_load_ends_all(launch: Launch, moment: str) -> None:
    launched = launch("vllm", "org/model", FAKE_UNREADY="1000")
    launched.read_to(moment)
    launched.process.terminate()
    assert launched.end() == (143, "")


def test_those_that_do_not_obey_are_killed(launch: Launch) -> None:
    launched = launch("vllm", "org/model", FAKE_STUBBORN="1", STOP_SECONDS="1")
    launched.read_to("All workers are up")
    launched.process.terminate()
    assert launched.end() == (143, "")


def test_a_worker_that_ends_ends_the_others(launch: Launch) -> None:
    launched = launch("vllm", "org/model")
    launched.read_to("All workers are up")
    with pytest.raises(OSError, match=r"."):
        urllib.request.urlopen(f"http://127.0.0.1:{launched.first_port}/die", timeout=LONG)
    code, stderr = launched.end()
    assert code == 1
    assert "out of memory" in stderr
    assert "prefill-0 has ended with exit code 3" in stderr
    assert f"{launched.logs / 'prefill-0.log'}" in stderr


def test_a_worker_that_does_not_start_ends_the_others(launch: Launch) -> None:
    code, stderr = launch("vllm", "org/model", FAKE_BROKEN="1", FAKE_UNREADY="1000").end()
    assert code == 1
    assert "no such model" in stderr
    assert "decode-0 has ended with exit code 1" in stderr


def test_a_worker_that_loads_too_long_ends_all(launch: Launch) -> None:
    code, stderr = launch("vllm", "org/model", FAKE_UNREADY="1000", READY_SECONDS="1").end()
    assert code == 1
    assert "prefill-0 is not up after READY_SECONDS=1" in stderr


def test_a_grpc_worker_is_up_when_it_listens(launch: Launch) -> None:
    launched = launch("tokenspeed", "org/model", FAKE_UNREADY="1000")
    launched.read_to("All workers are up")
    launched.process.terminate()
    assert launched.end() == (143, "")


def test_a_port_in_use_is_refused_before_anything_starts(launch: Launch) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        launched = launch("vllm", "org/model", DECODE_PORT=str(port))
        code, stderr = launched.end()
    assert (code, stderr) == (1, f"launch-pd-workers.sh: error: port {port} for decode-0: in use\n")
    assert not launched.logs.exists()


def test_what_is_not_there_is_refused(launch: Launch) -> None:
    code, stderr = launch("vllm", "/no/such/model").end()
    assert (code, stderr) == (2, "launch-pd-workers.sh: error: model /no/such/model: no such file or directory\n")
    code, stderr = launch("sglang", "org/model", PYTHON="no-such-python").end()
    assert (code, stderr) == (1, "launch-pd-workers.sh: error: no-such-python: command not found\n")
