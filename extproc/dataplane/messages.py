"""Small constructors for the Envoy messages that every part of the configuration is made of."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from envoy_data_plane.envoy.config.core.v3 import (
    Address,
    DataSource,
    HeaderValue,
    HeaderValueOption,
    HeaderValueOptionHeaderAppendAction,
    Pipe,
    SocketAddress,
    TypedExtensionConfig,
)
from envoy_data_plane.google.protobuf import Any, Struct, Value

if TYPE_CHECKING:
    from betterproto2 import Message

_UNIX = "unix:"


def any_of(message: Message) -> Any:
    """``message`` packed with its type URL."""
    return Any.pack(message)


def extension(name: str, message: Message) -> TypedExtensionConfig:
    """The extension ``name`` with its configuration."""
    return TypedExtensionConfig(name=name, typed_config=any_of(message))


def seconds(value: float) -> timedelta:
    """A duration."""
    return timedelta(seconds=value)


def set_header(name: str, value: str) -> HeaderValueOption:
    """Set a header, whatever its value was. ``value`` may hold Envoy's ``%COMMANDS%``."""
    return HeaderValueOption(
        header=HeaderValue(key=name, value=value),
        append_action=HeaderValueOptionHeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD,
    )


def inline(text: str) -> DataSource:
    """Text that stands in the configuration itself."""
    return DataSource(inline_string=text)


def struct(**fields: bool | str) -> Struct:
    """A flat Struct."""
    return Struct(
        fields={
            key: Value(bool_value=value) if isinstance(value, bool) else Value(string_value=value)
            for key, value in fields.items()
        }
    )


def is_unix(address: str) -> bool:
    """Is ``address`` a unix socket rather than ``host:port``?"""
    return address.startswith(_UNIX)


def split_host_port(address: str) -> tuple[str, int]:
    """``host:port`` with an IPv6 host in brackets; the host comes back without them. Raises ValueError."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{address!r} is neither unix:/path nor host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def socket_address(host: str, port: int) -> Address:
    """A TCP address. Dual stack when ``host`` is the IPv6 wildcard."""
    return Address(socket_address=SocketAddress(address=host, port_value=port, ipv4_compat=host == "::"))


def parse_address(address: str, *, mode: int = 0) -> Address:
    """``unix:/path`` or ``host:port``; ``mode`` is for a unix socket that Envoy creates. Raises ValueError."""
    if is_unix(address):
        return Address(pipe=Pipe(path=address.removeprefix(_UNIX), mode=mode))
    return socket_address(*split_host_port(address))
