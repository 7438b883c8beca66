"""The compose file as a running stack, in the tests' own Docker engine."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

from docker_engine import IMAGE, Engine, compose_command

FILE = "compose/docker-compose.yaml"
PATIENCE = 90.0  # seconds; containers start slowly where both cores are busy
KEY = "an-admins-key"
CHAT = "/v1/chat/completions"
_T = TypeVar("_T")


class Answer(NamedTuple):
    """What a client has got."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body, parsed."""
        return json.loads(self.body)


def ask(address: tuple[str, int], method: str, path: str, body: object = None, key: str | None = None) -> Answer:
    """One request on a connection of its own. Raises OSError or HTTPException."""
    connection = http.client.HTTPConnection(*address, timeout=30)
    headers = {"content-type": "application/json"} | ({} if key is None else {"authorization": f"Bearer {key}"})
    try:
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
    finally:
        connection.close()


def until(condition: Callable[[], _T], what: str, patience: float = PATIENCE) -> _T:
    """Wait until ``condition`` is true; its value. Errors of connections are 'not yet'. Fails after ``patience`` s."""
    deadline = time.monotonic() + patience
    last: object = None
    while time.monotonic() < deadline:
        try:
            if last := condition():
                return last
        except (OSError, http.client.HTTPException) as error:
            last = error
        time.sleep(0.2)  # nobody tells; containers and gateways are asked
    raise AssertionError(f"{what}: {last!r}")


class Stack:
    """One project of the compose file, with our image's Envoy in place of the official one.

    ``overlays`` are files laid over it, ``variables`` are added to the environment.
    """

    def __init__(self, engine: Engine, *overlays: str, **variables: str) -> None:
        self.engine = engine
        self._files = [word for file in (FILE, *overlays) for word in ("--file", file)]
        self._variables = variables
        self.project = f"pdtest{os.getpid()}"
        self.address = ("127.0.0.1", 0)

    @property
    def environment(self) -> dict[str, str]:
        """What compose files take from the environment, and what docker's programs do."""
        given = {name: value for name, value in os.environ.items() if name in ("PATH", "CI_RUN_MARK")}
        return given | {
            "HOME": str(self.engine.directory),
            "DOCKER_HOST": self.engine.host,
            "DOCKER_BUILDKIT": "0",
            "COMPOSE_PROJECT_NAME": self.project,
            "PD_EXTPROC_IMAGE": IMAGE,
            "ENVOY_IMAGE": IMAGE,
            "GATEWAY_ADDRESS": "127.0.0.1:",  # any free port
            "PD_EXTPROC_CONTROL_PLANE_API_KEYS": f"ops:Ops:admin:{KEY}",
            "PD_EXTPROC_LOG_JSON": "true",
            "PD_EXTPROC_POLICY": "round_robin",
            "MODEL": "a-model",  # overlays insist on it
            "TOKENSPEED_IMAGE": "an-image",
            **self._variables,
        }

    def compose(self, *arguments: str, timeout: float = 180) -> str:
        """Run docker compose; what it printed."""
        done = subprocess.run(
            [*compose_command(), *self._files, *arguments],
            cwd=self.engine.context,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == 0, f"docker compose {' '.join(arguments)}:\n{done.stdout}{done.stderr}"
        return done.stdout

    def up(self, workers: int = 4, patience: float = PATIENCE) -> None:
        """Start everything and wait until so many workers can serve."""
        self.compose("up", "--detach", "--no-build")
        self.find()
        until(lambda: self.ready["healthy_workers"] == workers, "not all workers are ready", patience)

    def scale(self, service: str, count: int) -> None:
        """Have so many containers of a service."""
        options = ("--detach", "--no-build", "--no-deps", "--no-recreate", "--scale", f"{service}={count}")
        self.compose("up", *options, service)

    def find(self) -> None:
        """Learn which port Envoy is published on."""
        (port,) = self.one("envoy").ports["30000/tcp"]
        self.address = (port["HostIp"], int(port["HostPort"]))

    @property
    def ready(self) -> Any:
        """What the gateway says of its readiness."""
        return {"healthy_workers": 0} | ask(self.address, "GET", "/readiness").json

    def ask(self, method: str, path: str, body: object = None, key: str | None = None) -> Answer:
        """One request to the gateway."""
        return ask(self.address, method, path, body, key)

    def chat(self, model: str = "tiny", **members: object) -> Answer:
        """One chat completion."""
        return self.ask("POST", CHAT, {"model": model, "messages": [{"role": "user", "content": "Hello!"}], **members})

    def containers(self, service: str | None = None) -> list[Any]:
        """The project's containers, of one service or of all, by name."""
        labels = [f"com.docker.compose.project={self.project}"]
        labels += [] if service is None else [f"com.docker.compose.service={service}"]
        found = self.engine.client.containers.list(all=True, filters={"label": labels})
        return sorted(found, key=lambda container: str(container.name))

    def one(self, service: str) -> Any:
        """The only container of a service."""
        (container,) = self.containers(service)
        return container

    def lines(self) -> Iterator[tuple[str, str]]:
        """What all containers have logged since their last start, and which service each line is of."""
        for container in self.containers():
            started = container.attrs["State"]["StartedAt"][:26]  # microseconds; as the lines' own stamps, in UTC
            for stamped in container.logs(timestamps=True).decode(errors="replace").splitlines():
                stamp, _, line = stamped.partition(" ")
                if stamp[:26] >= started:
                    yield container.labels["com.docker.compose.service"], line

    def left(self) -> list[str]:
        """What there is of the project in the engine."""
        client = self.engine.client
        named = [*client.networks.list(), *client.volumes.list()]
        return [*(str(c.name) for c in self.containers()), *(n.name for n in named if n.name.startswith(self.project))]
