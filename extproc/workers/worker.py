"""A worker: one engine process that runs prefill legs, decode legs, or both kinds' helpers."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from extproc.errors import InvalidUrlError


def is_ip_address(host: str) -> bool:
    """Whether ``host`` (without brackets) is an IP address rather than a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


_HOST_NAME = re.compile(r"[A-Za-z0-9._-]+")
_DEFAULT_PORTS = {"http": 80, "https": 443}
_SCHEMES = ("http", "https", "grpc", "grpcs", "ipc")


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


UNKNOWN: Final = "?"  # a part of a pairing key that nobody has said
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


class Pairing(NamedTuple):
    """What must agree between a prefill and a decode worker; see :mod:`extproc.workers.pairing`.

    Attributes:
        runtime: the engine.
        transport: how it moves KV cache: ``nixl``, ``mooncake``, another connector's name in lower case, or ``?``.
        protocol: the operator's own word for all of it (label ``pairing_protocol``), empty where there is none.
    """

    runtime: str
    transport: str
    protocol: str


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
        if not text.startswith(tuple(f"{scheme}://" for scheme in _SCHEMES)):
            raise InvalidUrlError(
                text, "URL must start with a lowercase http://, https://, grpc://, grpcs://, or ipc:// scheme"
            )
        try:
            parts = urlsplit(text)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise InvalidUrlError(text, f"URL must have a valid host ({error})") from None
        if not host or not (_HOST_NAME.fullmatch(host) or is_ip_address(host)):
            raise InvalidUrlError(text, "URL must have a valid host")
        if parts.scheme not in _DEFAULT_PORTS:
            raise InvalidUrlError(text, f"{parts.scheme}:// workers are not served yet; use http:// or https://")
        if parts.path not in ("", "/") or parts.query or parts.fragment or parts.username is not None:
            raise InvalidUrlError(text, "URL must be scheme://host[:port] without credentials, path, query or fragment")
        if parts.scheme == "https" and is_ip_address(host):
            raise InvalidUrlError(text, "https:// needs a host name: Envoy checks the certificate against it")
        if port == 0:
            raise InvalidUrlError(text, "Port must be between 1 and 65535")
        return cls(parts.scheme, host, port or _DEFAULT_PORTS[parts.scheme])

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


@dataclass(slots=True, eq=False)
class Worker:
    """One registered worker. Mutable by the registry only; the request path reads it and counts ``load``."""

    id: str
    url: WorkerUrl
    role: Role
    model_ids: tuple[str, ...] = ()  # empty: serves any model (identity not known)
    bootstrap_port: int | None = None
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
    # vLLM decode: a chat's ``kv_transfer_params.prompt_token_ids`` stand for its prompt: no chat template is applied,
    # nothing is tokenised again. Found out by asking (:mod:`extproc.workers.token_ids`).
    takes_token_ids: bool = False
    status: Status = Status.PENDING
    # "ip:port" under which Envoy knows the worker, IPv6 in brackets; None until the host name is resolved and Envoy
    # has acknowledged an endpoint list that contains it.
    endpoint: str | None = None
    load: int = 0  # legs in flight that this process sent
    reason: str = ""  # why the worker is not usable, or what is wrong although it is; for people
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
    name: str = field(init=False)  # the same, with ``@rank`` where there is one
    pairing: Pairing = field(init=False)  # plain, because the request path compares it

    def __post_init__(self) -> None:
        self.base_url = self.name = str(self.url)
        self.update_pairing()

    def update_pairing(self) -> None:
        """To be called whenever runtime, connector or labels are others."""
        self.pairing = Pairing(self.runtime, self.transport, self.labels.get("pairing_protocol", ""))

    @property
    def server(self) -> Worker:
        """The entry that is probed, asked and placed for the whole server: of several ranks the first one's."""
        return self.ranks[0] if self.ranks else self

    @property
    def usable(self) -> bool:
        """May be given a request now."""
        return self.status is Status.READY and self.endpoint is not None

    @property
    def transport(self) -> str:
        """How the worker moves KV cache; see Pairing. Of SGLang a label may say it."""
        said = self.kv_connector or self.labels.get("disaggregation_transfer_backend", "")
        return _TRANSPORTS.get(said, said.lower()) or UNKNOWN
