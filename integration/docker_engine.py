"""A Docker engine of the tests' own, of Debian's packages, and the image built in it. Nothing of it outlives the tests.

The engine runs in PID and mount namespaces of its own: their first process is the engine, and with it the kernel ends
all that is in there, containers too, and takes their mounts away. It dies with the tests' process, however that ends.
Network rules and bridges are in the machine's own namespace, so that published ports can be reached: they are put back
at the end.

What is missing or does not work is ``UnavailableError``, with the reason: the tests are skipped then.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import docker
from docker.errors import APIError, BuildError, DockerException
from urllib3.exceptions import HTTPError

from extproc.dataplane import child

ROOT = Path(__file__).parent.parent
BASE, IMAGE = "python:3.11-slim", "pd-extproc"
CACHE_VARIABLE = "DOCKER_TEST_CACHE"  # a directory for the base image; unset: nothing is kept
_NETWORK = ("ip", "iptables", "iptables-save", "iptables-restore")
PROGRAMS = ("docker", "dockerd", "containerd", "runc", "debootstrap", "unshare", *_NETWORK)
_LOST = (DockerException, HTTPError, OSError)  # what the SDK raises where the engine does not answer
_COMPOSE = (("docker", "compose"), ("docker-compose",))
_START_SECONDS, _STOP_SECONDS, _BOOTSTRAP_SECONDS, _BUILD_SECONDS = 40, 30, 300, 240
_ANSWER_SECONDS = 5
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy", "PIP_INDEX_URL")
_CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
_FORWARDING = Path("/proc/sys/net/ipv4/ip_forward")
_NO_NETWORK = re.compile(
    r"NewConnectionError|ConnectTimeout|ReadTimeout|ProxyError|CERTIFICATE_VERIFY|name resolution|Could not fetch"
)
# containerd's shims have their sockets in a fixed place, where the machine's own may have theirs.
_START = """
mkdir -p /run/containerd && mount -t tmpfs tmpfs /run/containerd || exit
[ "$0" = disk ] || mount -t tmpfs tmpfs "$0" || exit
exec dockerd "$@"
"""
_MEMORY = 10 << 30  # bytes; with so much to spare, images are kept there: some 2 GB in 60,000 files
_NAMESPACES = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")


class UnavailableError(Exception):
    """There can be no engine here; the message says why."""


@cache
def compose_command() -> tuple[str, ...]:
    """Compose v2 if it is there, else docker-compose. Raises UnavailableError."""
    for command in _COMPOSE:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            if not _run(*command, "version", timeout=60).returncode:
                return command
    raise UnavailableError("neither docker compose nor docker-compose is installed")


@contextlib.contextmanager
def engine(*, on_disk: bool = False) -> Iterator[Engine]:
    """A running engine; ``on_disk``: its images are too large for memory. Raises UnavailableError."""
    _require()
    directory = Path(tempfile.mkdtemp(prefix="pd-docker-"))
    try:
        with _network_put_back():
            running = Engine(directory, on_disk=on_disk)
            try:
                running.start()
                yield running
            finally:
                running.stop()
    finally:
        shutil.rmtree(directory)


class Engine:
    """One dockerd with all its files in ``directory``."""

    def __init__(self, directory: Path, *, on_disk: bool = False) -> None:
        self.directory = directory
        self._on_disk = on_disk
        self.context = directory / "context"  # a copy of what images are built of, and of the compose files
        self.host = f"unix://{directory}/docker.sock"
        self._process: subprocess.Popen[bytes] | None = None
        self._client: docker.DockerClient | None = None

    @property
    def client(self) -> docker.DockerClient:
        """The SDK's client of it."""
        assert self._client is not None
        return self._client

    def start(self) -> None:
        """Start it and wait until it answers. Raises UnavailableError."""
        data = self.directory / "data"
        data.mkdir()
        place = "disk" if self._on_disk or _spare_memory() <= _MEMORY else str(data)
        arguments = ["--bridge", "none", "--data-root", str(data), "--exec-root"]
        arguments += [f"{self.directory}/exec", "--pidfile", f"{self.directory}/pid", "--host", self.host]
        unshare = shutil.which("unshare")
        assert unshare is not None
        command = [sys.executable, "-I", "-S", child.__file__, str(os.getpid()), unshare, *_NAMESPACES[1:]]
        with (self.directory / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [*command, "sh", "-c", _START, place, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + _START_SECONDS
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise UnavailableError(f"dockerd does not start: {self._last_words()}")
            time.sleep(0.1)
        self._client = docker.DockerClient(base_url=self.host, version="1.41", timeout=_BUILD_SECONDS)
        driver = self.client.info()["Driver"]
        if driver == "vfs":
            raise UnavailableError("the engine has no layered file system here, only copies of whole images (vfs)")

    def stop(self) -> None:
        """Remove its containers and networks, then end it with all that is left."""
        process = self._process
        if process is None:
            return
        if self._client is not None:
            if process.poll() is None:
                with contextlib.suppress(*_LOST):
                    self._remove_all()
            self._client.close()
        for number in (signal.SIGTERM, signal.SIGKILL):  # to the engine: unshare ends once its whole namespace has
            for pid in _children(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_SECONDS)
                return
        process.kill()
        process.wait(_STOP_SECONDS)

    def import_base(self) -> None:
        """Have a base image of Debian's packages. Raises UnavailableError."""
        cache = os.environ.get(CACHE_VARIABLE)
        kept = Path(cache or self.directory) / "base.tar"
        if not kept.exists():
            kept.parent.mkdir(parents=True, exist_ok=True)
            _make_base(self.directory / "root", kept)
        name, _, tag = BASE.partition(":")
        self.client.api.import_image(src=str(kept), repository=name, tag=tag)
        if not cache:
            kept.unlink()

    def copy_context(self) -> None:
        """Have ``context``, with what this machine trusts: a proxy's CA is among it."""
        context = self.context
        if context.exists():
            return
        context.mkdir()
        for name in ("Dockerfile", ".dockerignore", "pyproject.toml", "README.md"):
            shutil.copy(ROOT / name, context / name)
        for name in ("image", "extproc", "compose", "integration/engines"):
            shutil.copytree(ROOT / name, context / name, ignore=shutil.ignore_patterns("__pycache__", "*.crt"))
        if _CERTIFICATES.exists():
            shutil.copy(_CERTIFICATES, context / "image" / "machine.crt")

    def build(self, tag: str, target: str) -> Any:
        """An image of the Dockerfile's ``target``. Raises UnavailableError where the packages cannot be fetched."""
        self.copy_context()
        try:
            image, _ = self.client.images.build(
                path=str(self.context),
                tag=tag,
                target=target,
                network_mode="host",
                rm=True,
                forcerm=True,
                buildargs={name: os.environ[name] for name in _PROXIES if name in os.environ},
            )
        except BuildError as error:
            said = "".join(line.get("stream", "") for line in error.build_log)
            if found := _NO_NETWORK.search(said):
                raise UnavailableError(f"packages cannot be fetched inside a build ({found[0]})") from None
            raise AssertionError(f"{error}\n{said[-4000:]}") from None
        except APIError:  # an OSError, too
            raise
        except (HTTPError, OSError) as error:
            raise UnavailableError(f"a build comes to no end: {error}") from None
        return image

    def _answers(self) -> bool:
        """It listens before it knows whether it can be an engine here, and answers after that."""
        with socket.socket(socket.AF_UNIX) as probe:  # not by the SDK, which leaves those that fail open
            probe.settimeout(_ANSWER_SECONDS)
            try:
                probe.connect(self.host.removeprefix("unix://"))
                probe.sendall(b"GET /_ping HTTP/1.0\r\nHost: docker\r\n\r\n")
                return b" 200 " in probe.recv(16)
            except OSError:
                return False

    def _remove_all(self) -> None:
        for container in self.client.containers.list(all=True):
            container.remove(force=True, v=True)
        self.client.networks.prune()

    def _last_words(self) -> str:
        lines = (self.directory / "log").read_text(errors="replace").splitlines()
        return " / ".join(lines[-3:])


def _children(pid: int) -> list[int]:
    """None where the process has gone."""
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def _spare_memory() -> int:
    """Bytes that this machine, or the container it is, has for us."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    spare = [int(found[1]) << 10 if found else 0]
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # "max" is none
            spare.append(int(Path(limit).read_text()))
    return min(spare)


def _require() -> None:
    if sys.platform != "linux" or os.geteuid() != 0:
        raise UnavailableError("a Docker engine needs Linux and root")
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        raise UnavailableError(f"not installed: {', '.join(missing)} (Debian: docker.io iptables iproute2 debootstrap)")
    compose_command()
    if "dockerd" in _names_of_processes():
        raise UnavailableError("another Docker engine runs here; a second one would take its network rules away")
    probe = _tried(*_NAMESPACES, "true")
    if probe.returncode:
        raise UnavailableError(f"no namespaces of its own: {probe.stderr.decode(errors='replace').strip()}")


def _run(*command: str, given: bytes = b"", timeout: float = 30) -> subprocess.CompletedProcess[bytes]:
    """Run a program to its end. Raises TimeoutExpired."""
    return subprocess.run(command, input=given, capture_output=True, timeout=timeout, check=False)


def _tried(*command: str) -> subprocess.CompletedProcess[bytes]:
    """Run a program that may not work here. Raises UnavailableError where it does not end."""
    try:
        return _run(*command)
    except subprocess.TimeoutExpired as error:
        raise UnavailableError(str(error)) from None


def _names_of_processes() -> Iterator[str]:
    for comm in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):  # it may end in between
            yield comm.read_text().strip()


@contextlib.contextmanager
def _network_put_back() -> Iterator[None]:
    """At the end there are the rules and bridges that there were before. Raises UnavailableError."""
    saved = _tried("iptables-save")
    if saved.returncode:
        raise UnavailableError(f"iptables: {saved.stderr.decode(errors='replace').strip()}")
    links, forwarding = set(_bridges()), _FORWARDING.read_text()
    groups = set(_cgroups())
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            _FORWARDING.write_text(forwarding)
        rules = saved.stdout.decode()
        for table in ("filter", "nat"):  # which there may not have been: then all that is in them is the engine's
            if f"*{table}" not in rules:
                _run("iptables", "-t", table, "-F")
                _run("iptables", "-t", table, "-X")
        if "*filter" not in rules:
            _run("iptables", "-P", "FORWARD", "ACCEPT")
        _run("iptables-restore", given=saved.stdout)
        for link in set(_bridges()) - links:
            _run("ip", "link", "delete", link)
        for group in set(_cgroups()) - groups:
            with contextlib.suppress(OSError):
                group.rmdir()


def _bridges() -> Iterator[str]:
    return (link.name for link in Path("/sys/class/net").iterdir() if link.name.startswith(("br-", "veth", "docker")))


def _cgroups() -> Iterator[Path]:
    yield from Path("/sys/fs/cgroup").glob("docker")
    yield from Path("/sys/fs/cgroup").glob("*/docker")


def _mirror() -> str:
    """Where this machine's own packages are from, if it is a Debian."""
    for file in (Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*.sources"))):
        with contextlib.suppress(OSError):
            if found := re.search(
                r"^(?:deb|URIs:)\s.*?(https?://\S+/debian)/?(?:\s|$)", file.read_text(), re.MULTILINE
            ):
                return found[1]
    return "http://deb.debian.org/debian"


def _make_base(root: Path, archive: Path) -> None:
    """A Debian with Python in ``archive``. Raises UnavailableError."""
    packages = "--include=python3,python3-venv,ca-certificates"
    command = [*_NAMESPACES, "debootstrap", "--variant=minbase", packages, "bookworm", str(root), _mirror()]
    try:
        done = _run(*command, timeout=_BOOTSTRAP_SECONDS)
    except subprocess.TimeoutExpired:
        raise UnavailableError(f"debootstrap is not done after {_BOOTSTRAP_SECONDS} s") from None
    if done.returncode:
        raise UnavailableError(f"debootstrap: {done.stdout.decode(errors='replace').strip()[-300:]}")
    shutil.rmtree(root / "var/cache/apt", ignore_errors=True)
    packed = _run("tar", "-C", str(root), "-cf", f"{archive}.part", ".", timeout=120)
    assert not packed.returncode, packed.stderr
    Path(f"{archive}.part").rename(archive)
    shutil.rmtree(root)
