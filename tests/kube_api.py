"""A Kubernetes API server as far as pods go: lists with pages, watches with bookmarks, and whatever goes wrong.

It speaks the protocol of https://kubernetes.io/docs/reference/using-api/api-concepts/ over real sockets, with TLS and
bearer tokens where asked for: versions grow with every change, a watch begins behind the version it names, and one that
is older than what is remembered gets 410.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

from aiohttp import web

Labels = dict[str, str]


def pod(
    name: str,
    labels: Labels,
    ip: str | None = "10.0.0.1",
    *,
    uid: str = "",
    namespace: str = "inference",
    annotations: Labels | None = None,
    ready: bool = True,
    phase: str = "Running",
    terminating: bool = False,
    created: str = "2026-01-01T00:00:00Z",
    node: str | None = None,
) -> dict[str, Any]:
    """A pod as the API shows it, with much that nobody here reads."""
    metadata: dict[str, Any] = {
        "name": name,
        "namespace": namespace,
        "uid": uid or f"uid-{name}",
        "creationTimestamp": created,
        "labels": labels,
        "ownerReferences": [{"kind": "ReplicaSet", "name": "rs", "controller": True}],
        "managedFields": [{"manager": "kubelet", "fieldsV1": {"f:status": {"f:podIP": {}}}}],
    }
    if annotations is not None:
        metadata["annotations"] = annotations
    if terminating:
        metadata["deletionTimestamp"] = "2026-01-01T01:00:00Z"
        metadata["deletionGracePeriodSeconds"] = 30
    status: dict[str, Any] = {
        "phase": phase,
        "conditions": [
            {"type": "PodScheduled", "status": "True", "lastProbeTime": None},
            {"type": "Ready", "status": "True" if ready else "False"},
        ],
        "containerStatuses": [{"name": "engine", "ready": ready, "restartCount": 0}],
    }
    if ip is not None:
        status |= {"podIP": ip, "podIPs": [{"ip": ip}]}
    spec: dict[str, Any] = {"containers": [{"name": "engine", "image": "engine"}]}
    if node is not None:
        spec["nodeName"] = node
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec, "status": status}


@dataclass(eq=False)
class _Watch:
    """One watch that is under way."""

    asked: dict[str, str]
    lines: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)
    abort: bool = False


@dataclass
class KubeApi:
    """See the module. What is a list of callables or statuses is used up, one for each request.

    Attributes:
        token: what must be borne; None: nothing.
        list_faults, watch_faults: what is answered instead, an HTTP status, or a status and headers.
        remembered: changes that a watch can begin before.
        page_limit: pods of a page, whatever is asked for.
    """

    token: str | None = None
    list_faults: list[int] = field(default_factory=list)
    watch_faults: list[int] = field(default_factory=list)
    fault_headers: Labels = field(default_factory=dict)
    remembered: int = 1_000_000
    page_limit: int = 1_000_000
    version: int = 1000
    requests: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    pods: dict[str, dict[str, Any]] = field(default_factory=dict)
    port: int = 0

    def __post_init__(self) -> None:
        self._log: list[tuple[int, str, dict[str, Any]]] = []
        self._watches: set[_Watch] = set()
        self._changed = asyncio.Event()

    # -- the cluster ----------------------------------------------------------------------------------------------

    def put(self, *pods: dict[str, Any]) -> None:
        """Make pods, or change those of the same names."""
        for each in pods:
            key = _key(each)
            kind = "MODIFIED" if key in self.pods else "ADDED"
            self.version += 1
            stored = copy.deepcopy(each)
            stored["metadata"]["resourceVersion"] = str(self.version)
            self.pods[key] = stored
            self._happened(kind, stored)

    def delete(self, each: dict[str, Any]) -> None:
        """End a pod."""
        stored = self.pods.pop(_key(each))
        self.version += 1
        stored["metadata"]["resourceVersion"] = str(self.version)
        self._happened("DELETED", stored)

    def bookmark(self) -> None:
        """Tell all watches how far they are."""
        said = {"kind": "Pod", "apiVersion": "v1", "metadata": {"resourceVersion": str(self.version)}}
        self.send("BOOKMARK", said)

    def forget(self) -> None:
        """Begin no watch any more before what is now."""
        self.remembered = 0

    # -- what goes wrong ------------------------------------------------------------------------------------------

    def send(self, kind: str, said: object) -> None:
        """Send a line to all watches."""
        self.raw(json.dumps({"type": kind, "object": said}).encode() + b"\n")

    def raw(self, data: bytes) -> None:
        """Send bytes to all watches."""
        for watch in self._watches:
            watch.lines.put_nowait(data)

    def end_watches(self, *, abort: bool = False) -> None:
        """End all watches, in order or by closing their connections in the middle."""
        for watch in self._watches:
            watch.abort = abort
            watch.lines.put_nowait(None)

    @property
    def watching(self) -> int:
        """How many watches are under way."""
        return len(self._watches)

    async def until(self, condition: Callable[[], object], within: float = 20.0) -> None:
        """Wait until ``condition`` holds; it is looked at after every request."""
        async with asyncio.timeout(within):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    # -- the server -----------------------------------------------------------------------------------------------

    async def start(self, tls: ssl.SSLContext | None = None, port: int = 0) -> None:
        """Listen on loopback."""
        app = web.Application()
        app.router.add_get("/api/v1/pods", self._pods)
        app.router.add_get("/api/v1/namespaces/{namespace}/pods", self._pods)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.01, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port or self.port, ssl_context=tls, reuse_address=True)
        await site.start()
        self.port = int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        """Listen no longer; connections are closed."""
        self.end_watches(abort=True)
        await self._runner.cleanup()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def kubeconfig(self, ca: str | None = None) -> dict[str, Any]:
        """How to get here."""
        cluster: Labels = {"server": f"{'https' if ca else 'http'}://127.0.0.1:{self.port}"}
        if ca:
            cluster["certificate-authority"] = ca
        user = {} if self.token is None else {"token": self.token}
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": cluster}],
            "users": [{"name": "u", "user": user}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }

    async def _pods(self, request: web.Request) -> web.StreamResponse:
        asked = dict(request.query)
        self.requests.append(asked)
        self.paths.append(request.path)
        try:
            bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
            self.tokens.append(bearer)
            if self.token is not None and bearer != self.token:
                return _failure(401, "Unauthorized")
            watch = asked.get("watch") in ("true", "True")
            faults = self.watch_faults if watch else self.list_faults
            if faults:
                return _failure(faults.pop(0), "as the test wants it", self.fault_headers)
            namespace = request.match_info.get("namespace", "")
            return await self._watch(request, asked, namespace) if watch else self._list(asked, namespace)
        finally:
            self._changed.set()

    def _list(self, asked: Labels, namespace: str) -> web.Response:
        chosen = [each for each in self.pods.values() if _selected(each, asked, namespace)]
        begin = int(asked.get("continue", "0"))
        size = min(int(asked.get("limit", "0")) or len(chosen), self.page_limit)
        page, left = chosen[begin : begin + size], len(chosen) - begin - size
        metadata: dict[str, Any] = {"resourceVersion": str(self.version)}
        if left > 0:
            metadata |= {"continue": str(begin + size), "remainingItemCount": left}
        return web.json_response({"kind": "PodList", "apiVersion": "v1", "metadata": metadata, "items": page})

    async def _watch(self, request: web.Request, asked: Labels, namespace: str) -> web.StreamResponse:
        begin = int(asked["resourceVersion"])
        if begin < self.version - self.remembered:
            return _failure(410, f"too old resource version: {begin} ({self.version})")
        response = web.StreamResponse(headers={"content-type": "application/json"})
        await response.prepare(request)
        watch = _Watch(asked | {"namespace": namespace})
        for version, kind, each in self._log:
            if version > begin:
                self._pass_on(watch, kind, each)
        self._watches.add(watch)
        self._changed.set()
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(int(asked["timeoutSeconds"])):
                    while (line := await watch.lines.get()) is not None:
                        await response.write(line)
            if watch.abort and request.transport is not None:
                request.transport.abort()
        finally:
            self._watches.discard(watch)
            self._changed.set()
        return response

    def _happened(self, kind: str, each: dict[str, Any]) -> None:
        self._log.append((self.version, kind, copy.deepcopy(each)))
        for watch in self._watches:
            self._pass_on(watch, kind, each)

    def _pass_on(self, watch: _Watch, kind: str, each: dict[str, Any]) -> None:
        if _selected(each, watch.asked, watch.asked["namespace"]):
            watch.lines.put_nowait(json.dumps({"type": kind, "object": each}).encode() + b"\n")


def _key(each: dict[str, Any]) -> str:
    return f"{each['metadata']['namespace']}/{each['metadata']['name']}"


def _selected(each: dict[str, Any], asked: Labels, namespace: str) -> bool:
    labels = each["metadata"]["labels"]
    within = not namespace or each["metadata"]["namespace"] == namespace
    return within and selects(asked.get("labelSelector", ""), labels)


def selects(selector: str, labels: Labels) -> bool:
    """Whether a ``labelSelector`` selects a pod with ``labels``."""
    return all(_holds(part, labels) for part in _requirements(selector))


def _requirements(selector: str) -> list[str]:
    parts: list[str] = []
    for part in selector.split(","):  # commas are also within "in (a,b)"
        if parts and "(" in parts[-1] and ")" not in parts[-1]:
            parts[-1] += f",{part}"
        elif part:
            parts.append(part)
    return parts


def _holds(requirement: str, labels: Labels) -> bool:
    if " in (" in requirement:
        name, values = requirement.removesuffix(")").split(" in (")
        return labels.get(name) in values.split(",")
    name, value = requirement.split("=")
    return labels.get(name) == value


def _failure(status: int, message: str, headers: Labels | None = None) -> web.Response:
    said = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": status}
    return web.json_response(said, status=status, headers=headers)
