"""One gRPC server: which engine it is, how it is, what it is.

An engine is known by its service: the others' methods are not implemented. Its health is told by the service's own
``HealthCheck``, for which SGLang computes a token (``smg-grpc-servicer`` 0.14.1, ``sglang/servicer.py``); where a
server does not have it, by ``grpc.health.v1.Health/Check`` of the service.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from enum import Enum
from typing import Any, Final

from extproc.workers.metadata import Metadata, MismatchError, check_kind
from extproc.workers.no_answer import NoAnswerError
from extproc.workers.rank_life import RankLife
from extproc.workers.rpc.channels import Channels, StatusError, UnimplementedError
from extproc.workers.rpc.facts import metadata_of
from extproc.workers.rpc.services import (
    GET_LOADS,
    GET_MODEL_INFO,
    GET_SERVER_INFO,
    HEALTH_CHECK,
    REFUSED,
    SERVED,
    Service,
)
from extproc.workers.spec import WorkerSpec
from extproc.workers.worker import Worker

_STANDARD: Final = "/grpc.health.v1.Health/Check"
_SERVING: Final = b"\x08\x01"
_UNKNOWN_SERVICE: Final = "NOT_FOUND"


class _UnhealthyError(NoAnswerError):
    """The server says that it is not healthy."""


class _By(Enum):
    """What tells a server's health."""

    SERVICE = "its engine's service"
    STANDARD = "grpc.health.v1"


class GrpcContact:
    """Implements :class:`extproc.workers.contact.Contact`.

    Args:
        worker: the server's entry.
        channels: ask.
    """

    def __init__(self, worker: Worker, channels: Channels) -> None:
        self._worker = worker
        self._channels = channels
        self._service: Service | None = None
        self._by = _By.SERVICE

    async def probe(self, endpoint: str, *, ip: str, within: float) -> None:  # noqa: ARG002 -- HTTP's
        """See Contact."""
        service = self._service
        if service is None:
            try:
                await self._find(ip, within)
            except UnimplementedError:
                raise MismatchError(await self._stranger(ip, within)) from None
            return
        try:
            await self._check(service, ip, within)
        except UnimplementedError as error:
            self._service = None
            raise NoAnswerError(f"{error}; it was {service.title}, and is another server now") from None

    async def identify(self, spec: WorkerSpec, *, ip: str, within: float) -> Metadata:
        """See Contact."""
        try:
            service, model, server = await self._told(ip, within)
        except NoAnswerError as error:
            return Metadata(failed=(str(error),), busy=True)
        if spec.runtime not in (None, service.runtime):
            raise MismatchError(f"registered as {spec.runtime}, but the server is {service.title}")
        failed: tuple[str, ...] = ()
        version = ""
        try:
            version = await self._version(service, ip, within)
        except NoAnswerError as error:
            failed = (str(error),)
        found = replace(metadata_of(service, model, server, version), failed=failed)
        check_kind(spec.role, spec.kv.connector, found)
        return found

    async def sign_of_life(self, *, ip: str, within: float) -> str:
        """See Contact. Servers whose engine has been silent for long say so of their service (``health_probe.py``)."""
        service = self._service
        if service is None:
            return ""
        try:
            await self._check(service, ip, within)
            if self._by is _By.SERVICE:
                await self._check_standard(service.name, ip, within)
        except UnimplementedError:
            return ""
        except NoAnswerError as error:
            return str(error)
        return ""

    async def life_of(self, rank: Worker, *, ip: str, within: float) -> RankLife:  # noqa: ARG002
        """See Contact. None of the services tells it of one rank."""
        return RankLife.UNKNOWN

    async def _told(self, ip: str, within: float) -> tuple[Service, Any, Any]:
        """Which engine's service it is, and what that says of model and server; nothing where it has no such method.

        One that was known, and has neither method now, may be another: it is looked for again. Raises MismatchError,
        NoAnswerError.
        """
        while True:
            known = self._service
            service = known or await self._found(ip, within)
            if service is None:
                raise MismatchError(await self._stranger(ip, within))
            model = await self._ask_if_there(service, GET_MODEL_INFO, ip, within)
            server = await self._ask_if_there(service, GET_SERVER_INFO, ip, within)
            if known is None or model is not None or server is not None:
                model = service.response(GET_MODEL_INFO)() if model is None else model
                return service, model, service.response(GET_SERVER_INFO)() if server is None else server
            self._service = None

    async def _found(self, ip: str, within: float) -> Service | None:
        """Which engine it is, healthy or not; None: none that is known here. Raises NoAnswerError."""
        with suppress(UnimplementedError, _UnhealthyError):
            await self._find(ip, within)
        return self._service

    async def _find(self, ip: str, within: float) -> None:
        """Find out which engine it is; raises NoAnswerError when it is not healthy, UnimplementedError if it is none.

        A server of no engine known here is healthy when it says so of itself as a whole.
        """
        likely = sorted(SERVED, key=lambda service: service.runtime != self._worker.runtime)
        for by in _By:
            for service in likely:
                try:
                    await self._check(service, ip, within, by)
                except UnimplementedError:
                    continue
                except _UnhealthyError:
                    self._service, self._by = service, by
                    raise
                self._service, self._by = service, by
                return
        await self._check_standard("", ip, within)

    async def _check(self, service: Service, ip: str, within: float, by: _By | None = None) -> None:
        """Raise NoAnswerError unless the server says that it is healthy."""
        if (by or self._by) is _By.STANDARD:
            await self._check_standard(service.name, ip, within)
            return
        answer = await self._ask(service, HEALTH_CHECK, ip, within)
        if not answer.healthy:
            raise _UnhealthyError(f"{HEALTH_CHECK}: not healthy" + (f": {answer.message}" if answer.message else ""))

    async def _check_standard(self, name: str, ip: str, within: float) -> None:
        request = (b"\x0a" + bytes([len(name)]) + name.encode()) if name else b""
        try:
            answer = await self._channels.ask(self._worker, _STANDARD, request, bytes, within=within, ip=ip)
        except StatusError as error:
            if error.code == _UNKNOWN_SERVICE:
                raise UnimplementedError(str(error), error.code) from None
            raise
        if not answer.startswith(_SERVING):
            raise _UnhealthyError(f"Check: {name or 'the server'} is not serving")

    async def _stranger(self, ip: str, within: float) -> str:
        """What is to be said of a server that is no engine served here."""
        for service in REFUSED:
            try:
                await self._channels.ask(self._worker, service.path(HEALTH_CHECK), b"", bytes, within=within, ip=ip)
            except UnimplementedError:
                continue
            return f"the server is {service.title}, whose handoff is not known"
        return f"the server is none of {', '.join(service.title for service in SERVED)}"

    async def _version(self, service: Service, ip: str, within: float) -> str:
        """What version a server is that says it with its loads only; empty where it does not. Raises NoAnswerError."""
        if service.runtime != "vllm":
            return ""
        answer = await self._ask_if_there(service, GET_LOADS, ip, within)
        return "" if answer is None else str(answer.version)

    async def _ask_if_there(self, service: Service, method: str, ip: str, within: float) -> Any:
        """The answer; None of a server that does not have the method."""
        try:
            return await self._ask(service, method, ip, within)
        except UnimplementedError:
            return None

    async def _ask(self, service: Service, method: str, ip: str, within: float) -> Any:
        request, response = service.request(method), service.response(method)
        return await self._channels.ask(self._worker, service.path(method), request, response, within=within, ip=ip)
