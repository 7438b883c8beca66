"""The types of option values, and how each is read from the text of a flag or a variable, or from YAML.

Messages are those of ``smg launch`` where it has the rule.
"""

from __future__ import annotations

import ipaddress
import os
import re
from enum import Enum
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, InstanceOf

from extproc.control.keys import ControlKey
from extproc.given_workers import items
from extproc.policies.names import PolicyName
from extproc.transport.address import TcpAddress, UnixAddress, parse_address
from extproc.workers.kv_config import KvConfig, kv_config
from extproc.workers.kv_event_source import Endpoint
from extproc.workers.worker import Role

EVENTS_OFF, EVENTS_AUTO = "off", "auto"  # of --kv-event-source
EGRESS_ENVOY, EGRESS_DIRECT = "envoy", "direct"  # of --egress
_UNIX_PATH_BYTES = 107  # sun_path without its terminating zero


class LegsMode(Enum):
    """Who sends the legs of a request: the gateway, or the routing sidecars of llm-d, which it tells the workers."""

    GATEWAY = "gateway"
    SELECT_ONLY = "select-only"


class Destination(Enum):
    """How Envoy is told where a released request goes; see extproc.names.DESTINATION."""

    METADATA = "metadata"
    HEADER = "header"
    BOTH = "both"


class PriorityName(Enum):
    """The classes of priority that a client may ask for, by the names of the peer."""

    SYSTEM = "system"
    INTERACTIVE = "interactive"
    DEFAULT = "default"
    BULK = "bulk"


class GrpcTransport(Enum):
    """Which implementation serves ext_proc: ngh2 is about eight times cheaper per request, grpcio the usual one."""

    NGH2 = "ngh2"
    GRPCIO = "grpcio"


class MooncakeDispatch(Enum):
    """When a Mooncake decode leg is sent: with its prefill leg, or after it."""

    CONCURRENT = "concurrent"
    SEQUENTIAL = "sequential"


def _port_in_range(port: int) -> int:
    if not 1 <= port <= 65535:
        raise ValueError("Port must be between 1 and 65535")
    return port


def _listening_port(port: int) -> int:
    if not 0 <= port <= 65535:
        raise ValueError("Port must be between 0 and 65535")
    return port


def _encode_policy(policy: PolicyName) -> PolicyName:
    if policy not in (PolicyName.RANDOM, PolicyName.ROUND_ROBIN, PolicyName.CONSISTENT_HASHING):
        raise ValueError("Encode policy supports random, round_robin, or consistent_hashing")
    return policy


def _header_names(value: object) -> object:
    """Header names in lower case, from a list or from text with commas or blanks between them."""
    parts: tuple[object, ...] = tuple(value) if isinstance(value, list | tuple) else (value,)
    names: list[str] = []
    for part in parts:
        if not isinstance(part, str):
            return value
        names += [name for name in re.split(r"[,\s]+", part.lower()) if name]
    return names


def _header_name(name: str) -> str:
    if not re.fullmatch(r"[!#$%&'*+.^_`|~0-9a-z-]+", name):
        raise ValueError(f"{name!r} is not a header name")
    return name


def _ip_address(host: str) -> str:
    """The IP address to listen on, without brackets; Envoy's listeners take no names."""
    bare = "127.0.0.1" if host == "localhost" else host.removeprefix("[").removesuffix("]")
    try:
        return str(ipaddress.ip_address(bare))
    except ValueError:
        raise ValueError("Must be an IP address or localhost") from None


def _address(text: str) -> str:
    match parse_address(text):
        case UnixAddress(path) as address:
            if not path.startswith("/"):
                raise ValueError("A unix socket's path must be absolute: unix:/path")
            if len(os.fsencode(path)) > _UNIX_PATH_BYTES:
                raise ValueError(f"A unix socket's path must not be longer than {_UNIX_PATH_BYTES} bytes")
        case TcpAddress(_, port) as address:
            _port_in_range(port)
    return str(address)


def _tcp_address(text: str) -> str:
    if text.startswith("unix:"):
        raise ValueError("Must be host:port")
    return _address(text)


def _egress(text: str) -> str:
    if text in (EGRESS_ENVOY, EGRESS_DIRECT):
        return text
    scheme, separator, address = text.partition("://")
    if scheme != "http" or not separator:
        raise ValueError("Must be envoy, direct or http://HOST:PORT")
    return f"http://{_tcp_address(address.removesuffix('/'))}"


def _path_of_url(path: str) -> str:
    if not re.fullmatch(r"/[!-~]*", path):
        raise ValueError("Must be a path that starts with /")
    return path


def _positive(number: float) -> float:
    if number <= 0:
        raise ValueError("Must be > 0")
    return number


def _not_negative(number: float) -> float:
    if number < 0:
        raise ValueError("Must be >= 0")
    return number


def _not_negative_count(number: int) -> int:
    return int(_not_negative(number))


def _at_least_one(number: int) -> int:
    if number < 1:
        raise ValueError("Must be >= 1")
    return number


def _limit(number: int) -> int:
    if number < -1:
        raise ValueError("Must be >= -1")
    return number


def _limit_or_none(number: int) -> int:
    if number != -1 and number < 1:
        raise ValueError("Must be -1 (off) or >= 1")
    return number


def _growing(number: float) -> float:
    if number < 1:
        raise ValueError("Must be >= 1")
    return number


def _boundaries(value: object) -> object:
    """Whole numbers from a list, or from text with commas or blanks between them."""
    parts: tuple[object, ...] = tuple(value) if isinstance(value, list | tuple) else (value,)
    numbers: list[object] = []
    for part in parts:
        numbers += [number for number in re.split(r"[,\s]+", part) if number] if isinstance(part, str) else [part]
    return numbers


def _rising(numbers: tuple[int, ...]) -> tuple[int, ...]:
    if any(number < 1 for number in numbers) or list(numbers) != sorted(set(numbers)):
        raise ValueError("Must be >= 1, each more than the one before")
    return numbers


def _share(number: float) -> float:
    if not 0 <= number <= 1:
        raise ValueError("Must be between 0 and 1")
    return number


def _portion(number: float) -> float:
    if not 0 < number <= 1:
        raise ValueError("Must be above 0 and at most 1")
    return number


def _event_source(text: str) -> str:
    if text not in (EVENTS_OFF, EVENTS_AUTO):
        _event_endpoint(text)
    return text


def _event_endpoint(text: str) -> str:
    Endpoint.parse(text)  # raises a ValueError
    return text


def _connector(name: str) -> str:
    return kv_config(Role.PREFILL, KvConfig(_not_empty(name))).connector


def _not_empty(text: str) -> str:
    if not text:
        raise ValueError("Must not be empty")
    return text


def _header_text(text: str) -> str:
    """What can stand in a header. A key that was read from a file often ends in a newline."""
    if not text.isascii() or not text.isprintable():
        raise ValueError("Must be visible ASCII characters (no newline at the end)")
    return _not_empty(text)


def _chat_template(text: str) -> str:
    """A template's file, or a name, which cannot be told from another before the model is known."""
    path = Path(_not_empty(text)).expanduser()
    if path.is_file():
        if not path.stat().st_size:
            raise ValueError(f"The file {text} is empty")
        return str(path.absolute())
    if "/" in text or "." in text:
        raise ValueError(f"There is no file {text}")
    return text


def _control_key(value: object) -> object:
    return ControlKey.parse(value) if isinstance(value, str) else value


def _absolute(path: Path) -> Path:
    if not path.parts:
        raise ValueError("Must not be empty")
    return path.expanduser().absolute()


Port = Annotated[int, AfterValidator(_listening_port)]
WorkerPort = Annotated[int, AfterValidator(_port_in_range)]
Count = Annotated[int, AfterValidator(_at_least_one)]
Tally = Annotated[int, AfterValidator(_not_negative_count)]
Duration = Annotated[float, Field(allow_inf_nan=False), AfterValidator(_positive)]  # seconds
Grace = Annotated[float, Field(allow_inf_nan=False), AfterValidator(_not_negative)]  # seconds, may be none
Limit = Annotated[int, AfterValidator(_limit)]  # -1: the default
LimitOrNone = Annotated[int, AfterValidator(_limit_or_none)]  # -1: none
Key = Annotated[str, AfterValidator(_header_text)]
File = Annotated[Path, AfterValidator(_absolute)]
IpAddress = Annotated[str, AfterValidator(_ip_address)]
AddressText = Annotated[str, AfterValidator(_address)]
TcpAddressText = Annotated[str, AfterValidator(_tcp_address)]
EgressText = Annotated[str, AfterValidator(_egress)]
UrlPath = Annotated[str, AfterValidator(_path_of_url)]
EncodePolicy = Annotated[PolicyName, AfterValidator(_encode_policy)]
HeaderNames = Annotated[tuple[Annotated[str, AfterValidator(_header_name)], ...], BeforeValidator(_header_names)]
Weight = Annotated[float, Field(allow_inf_nan=False), AfterValidator(_not_negative)]
Growth = Annotated[float, Field(allow_inf_nan=False), AfterValidator(_growing)]
Boundaries = Annotated[tuple[int, ...], BeforeValidator(_boundaries), AfterValidator(_rising)]  # tokens
Share = Annotated[float, Field(allow_inf_nan=False), AfterValidator(_share)]
Portion = Annotated[float, Field(allow_inf_nan=False), AfterValidator(_portion)]
EventSource = Annotated[str, AfterValidator(_event_source)]
EventEndpoint = Annotated[str, AfterValidator(_event_endpoint)]
Text = Annotated[str, AfterValidator(_not_empty)]
ChatTemplate = Annotated[str, AfterValidator(_chat_template)]
Connector = Annotated[str, AfterValidator(_connector)]
ControlKeys = Annotated[
    tuple[Annotated[InstanceOf[ControlKey], BeforeValidator(_control_key)], ...], BeforeValidator(items)
]
EngineIds = Annotated[tuple[Annotated[str, AfterValidator(_not_empty)], ...], BeforeValidator(items)]
