"""Asking a worker something directly, past Envoy: probes, metadata, the few calls that are passed on."""

from __future__ import annotations

import asyncio
import errno
import os
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Self

import aiohttp
import orjson
from yarl import URL

from extproc.workers.no_answer import NoAnswerError, UnreachableError
from extproc.workers.one_request import BadAnswerError, ConnectionTimeoutError, Tls, Where
from extproc.workers.probe import status_of
from extproc.workers.quick_get import quick_get
from extproc.workers.rpc.channels import Channels
from extproc.workers.worker import Worker

__all__ = ["Answer", "NoAnswerError", "UnreachableError", "WorkerClient"]

_ANSWER_LIMIT = 16 << 20  # bytes; /server_info of a large engine is some hundred KB


@dataclass(frozen=True, slots=True)
class Answer:
    """A worker's HTTP answer."""

    status: int
    content_type: str
    body: bytes

    @property
    def ok(self) -> bool:
        """Any 2xx."""
        return 200 <= self.status < 300


class WorkerClient:
    """HTTP/1.1 to workers, one connection per question: a probe that reuses a connection would not see a dead listener.

    ``tls`` is what ``https://`` workers are verified with; None is the system's trust store. A connection must be made
    within ``connect_limit`` seconds, by default Envoy's own limit for workers.

    Attributes:
        rpc: the same for workers over gRPC.
    """

    def __init__(self, tls: ssl.SSLContext | None = None, connect_limit: float = 2.0) -> None:
        self._tls = tls
        self._connect_limit = connect_limit
        self._session: aiohttp.ClientSession | None = None
        self.rpc = Channels(tls, connect_limit)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def get(self, worker: Worker, path: str, *, within: float, ip: str | None = None) -> Answer:
        """``GET path`` of the worker, with its key as bearer; the whole answer must come ``within`` so many seconds.

        ``ip`` None asks where Envoy sends the worker's requests, or, of one that Envoy is not told of, where it was
        found last. Redirects are not followed. Raises NoAnswerError.
        """
        return await self._ask_worker(worker, "GET", path, {}, None, within, ip)

    async def get_often(
        self, worker: Worker, path: str, *, within: float, ip: str | None = None, most: int = _ANSWER_LIMIT
    ) -> Answer:
        """As :meth:`get`, at a third of the cost; of the answer ``most`` bytes at most, and not its content type."""
        where = self._where(worker, ip or _ip_of(worker))
        return await self._get_quickly(where, _request(worker, path), path, within, most)

    async def probe(self, worker: Worker, path: str, *, within: float, ip: str) -> int:
        """As :meth:`get`, for the status alone: at a third of the cost, and whatever the body may be."""
        with _told(path, within, self._connect_limit):
            async with asyncio.timeout(within):
                return await status_of(self._where(worker, ip), _request(worker, path))

    async def post(
        self,
        worker: Worker,
        path: str,
        body: object,
        *,
        within: float,
        ip: str | None = None,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> Answer:
        """``POST path`` with ``body`` as JSON, and ``headers`` besides those that every question has.

        Else as :meth:`get`.
        """
        own = {**headers, "content-type": "application/json"}
        return await self._ask_worker(worker, "POST", path, own, orjson.dumps(body), within, ip)

    async def get_beside(self, worker: Worker, port: int, path: str, *, within: float, ip: str | None = None) -> Answer:
        """``GET path`` of another server on the worker's bootstrap host: plain HTTP, and not shown the worker's key.

        ``ip`` is where the host of the worker's URL is. Else as :meth:`get_often`.
        """
        where = Where(_beside(worker, ip), port, self._connect_limit, None)
        request = _request_of(f"{worker.bootstrap_host}:{port}", path)
        return await self._get_quickly(where, request, path, within, _ANSWER_LIMIT)

    async def connect_beside(self, worker: Worker, port: int, *, ip: str | None = None) -> None:
        """Whether anything listens on a port of the worker's bootstrap host; raises UnreachableError when nothing does.

        ``ip`` is where the host of the worker's URL is.
        """
        try:
            async with asyncio.timeout(self._connect_limit):
                _, writer = await asyncio.open_connection(_beside(worker, ip), port)
        except TimeoutError:
            raise UnreachableError(f"no connection within {self._connect_limit:g} s") from None
        except OSError as error:
            raise UnreachableError(_cause(error)) from None
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()

    async def _ask_worker(
        self,
        worker: Worker,
        method: str,
        path: str,
        headers: dict[str, str],
        body: bytes | None,
        within: float,
        ip: str | None,
    ) -> Answer:
        own = {"host": worker.url.authority}
        if worker.api_key:
            own["authorization"] = f"Bearer {worker.api_key}"
        base = URL.build(scheme=worker.url.scheme, host=ip or _ip_of(worker), port=worker.url.port)
        tls_name = worker.url.host if worker.url.scheme == "https" else None
        return await self._ask(method, base, path, headers | own, body, within, tls_name)

    async def _ask(
        self,
        method: str,
        base: URL,
        path: str,
        headers: dict[str, str],
        body: bytes | None,
        within: float,
        tls_name: str | None = None,
    ) -> Answer:
        timeout = aiohttp.ClientTimeout(total=within, sock_connect=self._connect_limit)
        try:
            async with self._open().request(
                method,
                base.join(URL(path, encoded=True)),
                headers={**headers, "accept": "*/*"},
                data=body,
                allow_redirects=False,
                timeout=timeout,
                ssl=(self._tls or True) if tls_name else True,
                server_hostname=tls_name,
            ) as response:
                content_type = response.headers.get("content-type", "")
                return Answer(response.status, content_type, await _read(response))
        except aiohttp.ConnectionTimeoutError:
            raise UnreachableError(f"{method} {path}: no connection within {self._connect_limit:g} s") from None
        except TimeoutError:
            raise NoAnswerError(f"{method} {path}: no answer within {within:g} s") from None
        except (aiohttp.ClientConnectorError, aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
            raise UnreachableError(f"{method} {path}: {_cause(error)}") from None
        except (aiohttp.ClientError, ValueError) as error:
            raise NoAnswerError(f"{method} {path}: {_cause(error)}") from None

    async def _get_quickly(self, where: Where, request: bytes, path: str, within: float, most: int) -> Answer:
        with _told(path, within, self._connect_limit):
            async with asyncio.timeout(within):
                status, body = await quick_get(where, request, most=most)
        return Answer(status, "", body)

    def _where(self, worker: Worker, ip: str) -> Where:
        tls = Tls(self._default_tls(), worker.url.host) if worker.url.scheme == "https" else None
        return Where(ip, worker.url.port, self._connect_limit, tls)

    def _default_tls(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls

    async def close(self) -> None:
        """Close every connection."""
        if self._session is not None:
            await self._session.close()
            self._session = None
        await self.rpc.close()

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, force_close=True, loop=asyncio.get_running_loop()),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=True,
            )
        return self._session


@contextmanager
def _told(path: str, within: float, connect_limit: float) -> Iterator[None]:
    """Errors of a question in the words of this module."""
    try:
        yield
    except ConnectionTimeoutError:
        raise UnreachableError(f"GET {path}: no connection within {connect_limit:g} s") from None
    except TimeoutError:
        raise NoAnswerError(f"GET {path}: no answer within {within:g} s") from None
    except OSError as error:
        raise UnreachableError(f"GET {path}: {_cause(error)}") from None
    except BadAnswerError as error:
        raise NoAnswerError(f"GET {path}: {error}") from None


def _request(worker: Worker, path: str) -> bytes:
    """A GET on a connection of its own."""
    key = (f"authorization: Bearer {worker.api_key}",) if worker.api_key else ()
    return _request_of(worker.url.authority, path, *key)


def _request_of(host: str, path: str, *more: str) -> bytes:
    fields = [f"GET {path} HTTP/1.1", f"host: {host}", "accept: */*", "accept-encoding: identity", *more]
    return ("\r\n".join([*fields, "connection: close"]) + "\r\n\r\n").encode()


def _ip_of(worker: Worker) -> str:
    if worker.endpoint is not None:
        return worker.endpoint.rpartition(":")[0].strip("[]")
    if worker.ip is None:
        raise UnreachableError(f"worker {worker.url} has no address")
    return worker.ip


def _beside(worker: Worker, ip: str | None) -> str:
    """Where the worker's bootstrap server is: at ``ip`` too, unless it was registered with a host of its own."""
    if worker.bootstrap_host != worker.url.bracketed_host:
        return worker.bootstrap_host.strip("[]")
    return ip or _ip_of(worker)


async def _read(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > _ANSWER_LIMIT:
            raise NoAnswerError(f"answer of more than {_ANSWER_LIMIT} bytes")
    return bytes(body)


def _cause(error: Exception) -> str:
    """The system's word for its error where there is one: aiohttp adds what the reader knows, asyncio says less."""
    number = getattr(getattr(error, "os_error", error), "errno", None)
    of_tls = isinstance(error, aiohttp.ClientSSLError | ssl.SSLError)
    if isinstance(number, int) and number in errno.errorcode and not of_tls:
        return os.strerror(number)
    return str(error) or type(error).__name__
