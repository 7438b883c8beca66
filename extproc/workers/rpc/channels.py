"""gRPC channels to workers: one for each, made when it is first asked, closed when it leaves or a question fails.

Measured on grpcio 1.85: a channel with its connection takes 26 KB, all of them together 7 threads; a question over one
that is open costs 0.5 ms of CPU, over a new one 1.7. So it is kept, unlike the connection of an HTTP probe.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]

from extproc.workers.no_answer import NoAnswerError, UnreachableError
from extproc.workers.worker import Worker

_ANSWER_LIMIT: Final = 16 << 20  # bytes
_OF_TLS: Final = "OPENSSL_internal:"
_ERROR_NUMBER: Final = re.compile(r" \(\d+\)$")  # behind the system's own words, which come last
# Words of UNAVAILABLE that the library says itself; the rest a server says, which there is then.
_NO_CONNECTION: Final = ("failed to connect", "socket closed", "connection", "goaway", "handshake", "fd shutdown")
_GRACE: Final = 5.0  # seconds for other questions under way over a channel that is given up
_TIMED_OUT: Final = ("timed out", "timeout", "deadline")


class StatusError(NoAnswerError):
    """The server answered with an error; ``code`` is the name of its gRPC status."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class UnimplementedError(StatusError):
    """The server has no such method."""


@dataclass(slots=True, eq=False)
class _Line:
    """An open channel, and where it leads."""

    ip: str
    channel: Any


class Channels:
    """Asks workers over gRPC.

    Args:
        tls: what ``grpcs://`` workers are verified with; None is the system's trust store.
        connect_limit: seconds within which a connection must be made.
    """

    def __init__(self, tls: ssl.SSLContext | None = None, connect_limit: float = 2.0) -> None:
        self._tls = tls
        self._connect_limit = connect_limit
        self._credentials: Any = None
        self._lines: dict[str, _Line] = {}  # by id of the worker that stands for the server
        self._closing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """How many channels there are."""
        return len(self._lines)

    async def ask(
        self,
        worker: Worker,
        path: str,
        request: Any,
        response: Any,
        *,
        within: float,
        ip: str | None = None,
    ) -> Any:
        """Call a method of one request and one answer, with the worker's key as bearer.

        Args:
            worker: whose server.
            path: the method, ``/package.Service/Method``.
            request: a message, or its bytes.
            response: the type of the answer; ``bytes`` leaves it unread.
            within: seconds that it may take.
            ip: where the server is; None: where the worker was last found.

        Raises:
            UnimplementedError: there is no such method.
            StatusError: the server says so.
            UnreachableError: there is no connection.
            NoAnswerError: there is no answer in time.
        """
        name = path.rpartition("/")[2]
        ip = ip or worker.ip
        if ip is None:
            raise UnreachableError(f"worker {worker.url} has no address")
        line = self._line(worker, ip)
        method = line.channel.unary_unary(
            path,
            request_serializer=None if isinstance(request, bytes) else type(request).SerializeToString,
            response_deserializer=None if response is bytes else response.FromString,
        )
        with self._told_of(worker, line, name, within):
            return await method(request, timeout=within, metadata=_metadata(worker))

    async def gather(
        self, worker: Worker, path: str, request: Any, response: Any, *, within: float
    ) -> AsyncIterator[Any]:
        """Call a method of one request and many answers, which are given out as they come. Else as :meth:`ask`."""
        name = path.rpartition("/")[2]
        if worker.ip is None:
            raise UnreachableError(f"worker {worker.url} has no address")
        line = self._line(worker, worker.ip)
        method = line.channel.unary_stream(
            path, request_serializer=type(request).SerializeToString, response_deserializer=response.FromString
        )
        with self._told_of(worker, line, name, within):
            async for message in method(request, timeout=within, metadata=_metadata(worker)):
                yield message

    @contextmanager
    def _told_of(self, worker: Worker, line: _Line, name: str, within: float) -> Iterator[None]:
        """Failures of a call, as :meth:`ask` raises them."""
        try:
            yield
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                self._drop(worker, line)  # a channel that failed to connect would say so again without trying
            raise self._told(name, error, within) from None
        except grpc.aio.UsageError as error:  # closed meanwhile
            raise UnreachableError(f"{name}: {error}") from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise UnreachableError(f"{name}: the channel was closed") from None  # which the library calls so, too

    def forget(self, worker: Worker) -> None:
        """Close the worker's channel, if it has one."""
        line = self._lines.get(worker.id)
        if line is not None:
            self._drop(worker, line)

    async def close(self) -> None:
        """Close all channels; returns when they are."""
        lines, self._lines = list(self._lines.values()), {}
        await asyncio.gather(*(line.channel.close() for line in lines), *self._closing)

    def _line(self, worker: Worker, ip: str) -> _Line:
        line = self._lines.get(worker.server.id)
        if line is not None and line.ip == ip:
            return line
        if line is not None:
            self._drop(worker, line)
        line = self._lines[worker.server.id] = _Line(ip, self._open(worker, ip))
        return line

    def _drop(self, worker: Worker, line: _Line) -> None:
        if self._lines.get(worker.server.id) is line:
            del self._lines[worker.server.id]
        task = asyncio.get_running_loop().create_task(line.channel.close(_GRACE), name=f"close-{worker.name}")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _open(self, worker: Worker, ip: str) -> Any:
        url = worker.url
        milliseconds = int(self._connect_limit * 1000)
        options: list[tuple[str, str | int]] = [
            ("grpc.default_authority", url.authority),
            ("grpc.enable_http_proxy", 0),
            ("grpc.use_local_subchannel_pool", 1),  # else channels to one address share its failures
            ("grpc.max_receive_message_length", _ANSWER_LIMIT),
            ("grpc.min_reconnect_backoff_ms", milliseconds),  # which is how long connecting may take
            ("grpc.initial_reconnect_backoff_ms", milliseconds),
            ("grpc.enable_retries", 0),
        ]
        target = f"ipv6:[{ip}]:{url.port}" if ":" in ip else f"ipv4:{ip}:{url.port}"
        if not url.tls:
            return grpc.aio.insecure_channel(target, options=options)
        options.append(("grpc.ssl_target_name_override", url.host))
        if self._credentials is None:
            self._credentials = grpc.ssl_channel_credentials(root_certificates=pem_roots(self._tls))
        return grpc.aio.secure_channel(target, self._credentials, options=options)

    def _told(self, name: str, error: Any, within: float) -> NoAnswerError:
        """The failure in the words that questions over HTTP have for it."""
        code, details = error.code(), error.details() or ""
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return UnimplementedError(f"{name}: not implemented", code.name)
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return NoAnswerError(f"{name}: no answer within {within:g} s")
        if code is grpc.StatusCode.UNAVAILABLE and any(words in details.lower() for words in _NO_CONNECTION):
            if any(words in details.lower() for words in _TIMED_OUT):
                return UnreachableError(f"{name}: no connection within {self._connect_limit:g} s")
            return UnreachableError(f"{name}: {_cause(details)}")
        return StatusError(f"{name}: {code.name}" + (f": {details}" if details else ""), code.name)


def _cause(details: str) -> str:
    """The system's own word for why there is no connection, or that of TLS, out of the library's words around it."""
    details = details.removesuffix(": OK")
    _, marker, of_tls = details.partition(_OF_TLS)
    return of_tls if marker else _ERROR_NUMBER.sub("", details.rpartition(": ")[2])


def pem_roots(tls: ssl.SSLContext | None) -> bytes | None:
    """The certificates that ``tls`` trusts, None being the system's; None when there are none to be had.

    Those of a directory are not in a context before they are needed, so they are read from there.
    """
    context = tls or ssl.create_default_context()
    found = context.get_ca_certs(binary_form=True)
    if found:
        return "".join(ssl.DER_cert_to_PEM_cert(certificate) for certificate in found).encode()
    directory = ssl.get_default_verify_paths().capath if tls is None else None
    files = sorted(Path(directory).glob("*.0")) if directory else []
    return b"\n".join(file.read_bytes() for file in files) or None


def _metadata(worker: Worker) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {worker.api_key}"),) if worker.api_key else ()
