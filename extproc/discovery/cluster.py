"""The Kubernetes API as this process may use it: where it is, its certificates, our token, and two questions.

``kubernetes_asyncio`` finds all that out (kubeconfig with its plugins and OIDC, or a pod's service account, whose token
is read again every minute) and makes the requests. Its models are not used: they take 8 ms a pod (measured) on the loop
that requests are served on, and :mod:`extproc.discovery.pod`, which has the few fields that matter, 13 µs.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import aiohttp
import msgspec
from kubernetes_asyncio.client import ApiClient, Configuration, CoreV1Api
from kubernetes_asyncio.config import load_kube_config
from kubernetes_asyncio.config.incluster_config import (
    SERVICE_HOST_ENV_NAME,
    SERVICE_PORT_ENV_NAME,
    InClusterConfigLoader,
)

from extproc.discovery.errors import ApiError, DiscoveryError, GoneError
from extproc.discovery.pod import FAILURE

_SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_KUBECONFIG: Final = "KUBECONFIG"
_PAGE: Final = 250  # pods; to decode so many holds the loop for some 10 ms
_CONNECT_SECONDS: Final = 10.0
_LIST_SECONDS: Final = 60.0
_LONGEST_LINE: Final = 32 << 20  # bytes; etcd takes objects of 1.5 MB
_SHOWN: Final = 300  # characters of what the API says of an error
_GONE: Final = 410
_LONGEST_RETRY_AFTER: Final = 300.0  # seconds


@dataclass(frozen=True, slots=True)
class Access:
    """How to get at the API.

    Attributes:
        kubeconfig: the file or files, as ``KUBECONFIG`` names them; empty: as a pod of the cluster.
        service_account: a pod's directory with ``token`` and ``ca.crt``.
        environ: has ``KUBERNETES_SERVICE_HOST`` and ``..._PORT``.
    """

    kubeconfig: str = ""
    service_account: Path = _SERVICE_ACCOUNT
    environ: Mapping[str, str] | None = None

    @classmethod
    def found(cls, environ: Mapping[str, str] = os.environ, service_account: Path = _SERVICE_ACCOUNT) -> Access:
        """``KUBECONFIG`` if it is set; else a pod's service account; else ``~/.kube/config``. Raises DiscoveryError."""
        if environ.get(_KUBECONFIG):
            return cls(environ[_KUBECONFIG])
        if environ.get(SERVICE_HOST_ENV_NAME) and environ.get(SERVICE_PORT_ENV_NAME):
            if not (service_account / "token").is_file():
                raise DiscoveryError(
                    f"no token in {service_account}: the pod needs a service account, and automountServiceAccountToken"
                )
            return cls(service_account=service_account, environ=environ)
        usual = Path("~/.kube/config").expanduser()
        if usual.is_file():
            return cls(str(usual))
        raise DiscoveryError(f"no Kubernetes cluster: this is no pod of one, there is no {usual}, and no {_KUBECONFIG}")

    def __str__(self) -> str:
        return f"kubeconfig {self.kubeconfig}" if self.kubeconfig else "service account"


class Cluster:
    """Asks for pods of ``namespace`` (empty: all) that ``selector`` selects. Everything is read when it is entered.

    Whatever fails raises ApiError, GoneError, aiohttp.ClientError, OSError, TimeoutError or what a plugin raises.
    """

    def __init__(self, access: Access, namespace: str, selector: str) -> None:
        self._access = access
        self._namespace = namespace
        self._selector = selector

    async def __aenter__(self) -> Self:
        self._client = ApiClient(await _configuration(self._access))
        self._api = CoreV1Api(self._client)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.close()

    async def page(self, more: str | None) -> bytes:
        """A page of the list of pods, the first one or what continues it."""
        options = {"_continue": more} if more else {}
        limits = aiohttp.ClientTimeout(total=_LIST_SECONDS, connect=_CONNECT_SECONDS)
        answer = await self._ask(limits, limit=_PAGE, **options)
        async with answer:
            return await answer.read()

    async def watch(self, version: str, seconds: int, grace: float) -> AsyncGenerator[bytes, None]:
        """Lines of a watch from ``version`` on, for ``seconds`` at most; the first is empty: it has begun.

        Whoever does not end it ``grace`` seconds later, or says nothing for so long, is cut off: TimeoutError. A line
        that is cut short is left out.
        """
        limits = aiohttp.ClientTimeout(total=seconds + grace, connect=_CONNECT_SECONDS, sock_read=seconds + grace)
        answer = await self._ask(
            limits, watch=True, resource_version=version, allow_watch_bookmarks=True, timeout_seconds=seconds
        )
        async with answer:
            yield b""
            rest = bytearray()
            async for chunk in answer.content.iter_any():
                rest += chunk
                *lines, last = rest.split(b"\n")
                rest = last
                if len(rest) > _LONGEST_LINE:
                    raise ApiError(0, f"a line of a watch is longer than {_LONGEST_LINE} bytes")
                for line in lines:
                    if line.strip():
                        yield bytes(line)

    async def _ask(self, limits: aiohttp.ClientTimeout, **options: Any) -> aiohttp.ClientResponse:
        if self._selector:
            options["label_selector"] = self._selector
        options |= {"_preload_content": False, "_request_timeout": limits}
        asking: Any = (
            self._api.list_namespaced_pod(self._namespace, **options)
            if self._namespace
            else self._api.list_pod_for_all_namespaces(**options)
        )
        answer: aiohttp.ClientResponse = await asking
        if answer.status == 200:
            return answer
        async with answer:
            said = _said(await answer.read())
            if answer.status == _GONE:
                raise GoneError(said)
            raise ApiError(answer.status, said, _retry_after(answer))


async def _configuration(access: Access) -> Configuration:
    configuration: Configuration = Configuration()
    if access.kubeconfig:
        await load_kube_config(access.kubeconfig, client_configuration=configuration, persist_config=False)
    else:
        InClusterConfigLoader(
            str(access.service_account / "token"),
            str(access.service_account / "ca.crt"),
            environ=dict(access.environ or os.environ),
        ).load_and_set(configuration)
    return configuration


async def check(access: Access) -> None:
    """Whether there is anything to begin with. Raises DiscoveryError; whether the API answers does not matter."""
    try:
        await _configuration(access)
    except Exception as error:  # noqa: BLE001 - files that people write, and plugins, fail in every way
        raise DiscoveryError(f"{access}: {' '.join(str(error).split()) or type(error).__name__}") from None


def _said(body: bytes) -> str:
    """What the API says of an error."""
    try:
        message = FAILURE.decode(body).message
    except msgspec.MsgspecError:
        message = body.decode("utf-8", "replace")
    return " ".join(message.split())[:_SHOWN]


def _retry_after(answer: aiohttp.ClientResponse) -> float:
    text = answer.headers.get("retry-after", "")
    return min(float(text), _LONGEST_RETRY_AFTER) if text.isascii() and text.isdecimal() else 0.0
