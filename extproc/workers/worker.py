"""A worker: one engine process that runs prefill legs, decode legs, or both kinds' helpers."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from extproc.errors import InvalidUrlError
from extproc.workers.breaker import Breaker
from extproc.workers.load import EngineLoad
from extproc.workers.pairing_key import UNKNOWN, Pairing, enforces_handshake
from extproc.workers.topology import Place, place_of


def is_ip_address(host: str) -> bool:
    """Whether ``host`` (without brackets) is an IP address rather than a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


_HOST_NAME = re.compile(r"[A-Za-z0-9._-]+")
_DEFAULT_PORTS = {"http": 80, "https": 443, "grpc": 80, "grpcs": 443}
_CONNECTION_MODES = {"http": "http", "https": "http", "grpc": "grpc", "grpcs": "grpc"}
_TLS = ("https", "grpcs")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


class Role(Enum):
    """What a worker does in a disaggregated fleet; the values are those of the control API's ``worker_type``."""

    REGULAR = "regular"
    PREFILL = "prefill"
    DECODE = "decode"
    ENCODE = "encode"

    # Identity, in C: members are singletons, and Enum's own hash is a Python call that the request path would pay.
    __hash__ = object.__hash__


class Status(Enum):
    """Where a worker is in its life. Only READY workers are given requests."""

    PENDING = "pending"
    READY = "ready"
    NOT_READY = "not_ready"
    FAILED = "failed"
    DRAINING = "draining"


NIXL: Final = "NixlConnector"
MOONCAKE: Final = "MooncakeConnector"
MOONCAKE_BOOTSTRAP_PORT: Final = 8998  # the default of vLLM's VLLM_MOONCAKE_BOOTSTRAP_PORT
_TRANSPORTS: Final = {NIXL: "nixl", MOONCAKE: "mooncake", "MoRIIOConnector": "moriio"}


class KvEngine(NamedTuple):
    """One engine core of a worker, as the other side of a KV transfer must name it.

    Attributes:
        rank: its data-parallel rank.
        id: its ``engine_id``.
    """

    rank: int
    id: str


@dataclass(frozen=True, slots=True)
class WorkerUrl:
    """A worker's base URL, parsed once: ``scheme://host[:port]`` with nothing behind it."""

    scheme: str
    host: str  # without brackets, lower case
    port: int

    @classmethod
    def parse(cls, text: str) -> WorkerUrl:
        """Parse ``text``; raises InvalidUrlError with the peer's messages (smg config validation)."""
        if not text:
            raise InvalidUrlError(text, "URL cannot be empty")
        scheme = _SCHEME.match(text)
        if scheme is None or (scheme[1] not in _DEFAULT_PORTS and scheme[1].lower() in _DEFAULT_PORTS):
            raise InvalidUrlError(
                text, "URL must start with a lowercase http://, https://, grpc://, or grpcs:// scheme"
            )
        if scheme[1] not in _DEFAULT_PORTS:
            known = ", ".join(f"{served}://" for served in _DEFAULT_PORTS)
            raise InvalidUrlError(text, f"{scheme[1]}:// workers are not served; expected one of {known}")
        try:
            parts = urlsplit(text)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise InvalidUrlError(text, f"URL must have a valid host ({error})") from None
        if not host or not (_HOST_NAME.fullmatch(host) or is_ip_address(host)):
            raise InvalidUrlError(text, "URL must have a valid host")
        if parts.path not in ("", "/") or parts.query or parts.fragment or parts.username is not None:
            raise InvalidUrlError(text, "URL must be scheme://host[:port] without credentials, path, query or fragment")
        if parts.scheme in _TLS and is_ip_address(host):
            raise InvalidUrlError(text, f"{parts.scheme}:// needs a host name: the certificate is checked against it")
        if port == 0:
            raise InvalidUrlError(text, "Port must be between 1 and 65535")
        return cls(parts.scheme, host, port or _DEFAULT_PORTS[parts.scheme])

    @property
    def connection_mode(self) -> str:
        """By what requests and questions come: ``http`` or ``grpc``, as the control API has it."""
        return _CONNECTION_MODES[self.scheme]

    @property
    def is_grpc(self) -> bool:
        """Whether the worker is a gRPC server."""
        return self.connection_mode == "grpc"

    @property
    def tls(self) -> bool:
        """Whether connections are encrypted, and the server's certificate is checked."""
        return self.scheme in _TLS

    @property
    def bracketed_host(self) -> str:
        """The host as it stands in a URL: an IPv6 address in brackets."""
        return f"[{self.host}]" if ":" in self.host else self.host

    @property
    def authority(self) -> str:
        """``host:port`` as it stands in a URL and in a ``Host`` header."""
        return f"{self.bracketed_host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}"


def _nobody_waits(worker: Worker) -> None:
    """What is told of room while nobody asked to be."""


@dataclass(slots=True, eq=False)
class Worker:
    """One registered worker. Mutable by the registry only; the request path reads it and counts ``load``."""

    id: str
    url: WorkerUrl
    role: Role
    model_ids: tuple[str, ...] = ()  # empty: nobody has said; its watch does not let it become READY then
    bootstrap_port: int | None = None
    bootstrap_host: str = ""  # where that port is, IPv6 in brackets: the URL's host unless registered
    api_key: str | None = field(default=None, repr=False)
    priority: int = 50
    cost: float = 1.0
    labels: dict[str, str] = field(default_factory=dict)
    runtime: str = "sglang"
    # vLLM: the KV connector that moves the cache (a MultiConnector's one child that does), empty while nobody has said;
    # its role; and, for Mooncake, the engine cores that a decode must be told of, in order of their ranks.
    kv_connector: str = ""
    kv_role: str = ""
    kv_engines: tuple[KvEngine, ...] = ()
    kv_engine_id: str = ""  # the engine's id before vLLM appends a rank, where the server tells it itself (over gRPC)
    enforces_handshake: bool = True  # NIXL: takes the cache of no engine unlike itself, unless a label says otherwise
    # vLLM decode: a chat's ``kv_transfer_params.prompt_token_ids`` stand for its prompt: no chat template is applied,
    # nothing is tokenised again. Found out by asking (:mod:`extproc.workers.token_ids`).
    takes_token_ids: bool = False
    status: Status = Status.PENDING
    # "ip:port" under which Envoy knows the worker, IPv6 in brackets; None until the host name is resolved and Envoy
    # has acknowledged an endpoint list that contains it.
    endpoint: str | None = None
    load: int = 0  # legs in flight that this process sent
    tokens: int = field(default=0, init=False)  # of their prompts, about
    # What its engine last said of its own load (:mod:`extproc.workers.load_poll`), and how many requests Envoy has
    # under way to it, those of other sidecars behind the same Envoy among them. None: not known, or not any more.
    engine_load: EngineLoad | None = field(default=None, init=False, repr=False)
    envoy_active: int | None = field(default=None, init=False)
    load_then: int = field(default=0, init=False)  # ``load`` and ``tokens`` when ``engine_load`` was said
    tokens_then: int = field(default=0, init=False)
    # Why it is given no more than it must be (:mod:`extproc.workers.overload`), for people; empty while it has room.
    overloaded: str = field(default="", init=False)
    # Admission (:mod:`extproc.admission.room`): how many legs it may have at once, None for any number; for how many
    # that are not out yet it keeps room; and who is told, where it is limited, when a leg has ended.
    limit: int | None = field(default=None, init=False)
    promised: int = field(default=0, init=False)
    freed: Callable[[Worker], None] = field(default=_nobody_waits, init=False, repr=False)
    answers: int = 0  # that legs had of it, whatever they say: whether it still gives any
    breaker: Breaker = field(default_factory=Breaker, repr=False)
    reason: str = ""  # why the worker is not usable, or what is wrong although it is; for people
    unserved: str = ""  # why it is given no requests however healthy it is; for people. Envoy is not told of it
    # Why it is given no new requests for now although it is well; for people. All that is known of it holds meanwhile.
    cordoned: str = field(default="", init=False)
    # Over gRPC: why prompts for it cannot be made tokens (:mod:`extproc.text.library`), for people; empty: they can.
    no_tokenizer: str = ""
    ip: str | None = None  # where its host name leads, without brackets; None until it is resolved
    # What the control API shows as ``models``: one card per model, from the registration or from the worker itself.
    cards: tuple[Mapping[str, object], ...] = ()
    # The entries of its own ``/v1/models``, each with an ``id``.
    listed: tuple[Mapping[str, object], ...] = ()
    # Data parallelism, set by :mod:`extproc.workers.ranks` alone: the rank that this entry stands for, None for a
    # server as a whole; of how many; and the entries of all ranks of the server, itself among them, in order.
    dp_rank: int | None = None
    dp_size: int = 1
    ranks: tuple[Worker, ...] = field(default=(), repr=False)
    base_url: str = field(init=False)  # the URL as text, made once
    over_grpc: bool = field(init=False)  # as the URL says, plain, because the request path asks
    name: str = field(init=False)  # the same, with ``@rank`` where there is one
    pairing: Pairing = field(init=False)  # plain, because the request path compares it
    place: Place = field(init=False)

    def __post_init__(self) -> None:
        self.base_url = self.name = str(self.url)
        self.over_grpc = self.url.is_grpc
        self.bootstrap_host = self.bootstrap_host or self.url.bracketed_host
        self.update_pairing()

    def update_pairing(self) -> None:
        """To be called whenever runtime, connector or labels are others."""
        handshake = (
            self.runtime == "vllm"
            and self.kv_connector == NIXL
            and (self.role is not Role.DECODE or (self.enforces_handshake and enforces_handshake(self.labels)))
        )
        self.pairing = Pairing.of(
            self.runtime, self.transport, self.labels, handshake=handshake, connection_mode=self.url.connection_mode
        )
        self.place = place_of(self.labels)

    def begin(self, tokens: int = 0) -> int:
        """A leg with a prompt of about so many tokens goes out to it.

        What is returned goes to :meth:`end`, once, with the tokens (measured: 0.1 µs each).
        """
        self.load += 1
        self.tokens += tokens
        breaker = self.breaker
        return breaker.begin() if breaker.wary else 0

    def end(self, turn: int, tokens: int = 0) -> None:
        """The leg that began with ``turn`` is over, however it ended."""
        self.load -= 1
        self.tokens -= tokens
        if turn:
            self.breaker.end(turn)
        if self.limit is not None:
            self.freed(self)

    def has_room(self, legs: int = 1) -> bool:
        """Whether so many legs more may go to it; of more than it may ever have, whether it has none of ours."""
        limit = self.limit
        if limit is None or legs == 1:  # most requests; asked of many workers for one
            return limit is None or self.load + self.promised < limit
        return self.load + self.promised + max(1, min(legs, limit)) <= limit

    def answered(self, turn: int) -> None:
        """It answered the leg that began with ``turn`` as it should (measured: 0.06 µs)."""
        self.answers += 1
        if self.breaker.wary:
            self.breaker.succeeded(turn)

    @property
    def server(self) -> Worker:
        """The entry that is probed, asked and placed for the whole server: of several ranks the first one's."""
        return self.ranks[0] if self.ranks else self

    @property
    def works(self) -> bool:
        """Is well, and has requests under way or may have some."""
        return self.status is Status.READY and self.endpoint is not None and not self.unserved

    @property
    def usable(self) -> bool:
        """May be given a request now."""
        return self.works and not self.cordoned

    @property
    def sought(self) -> bool:
        """Is given requests now: may be, and its circuit breaker does not advise against it."""
        return self.usable and not self.breaker.shuts_out

    @property
    def transport(self) -> str:
        """How the worker moves KV cache; see Pairing. Of SGLang a label may say it."""
        said = self.kv_connector or self.labels.get("disaggregation_transfer_backend", "")
        return _TRANSPORTS.get(said, said.lower()) or UNKNOWN
