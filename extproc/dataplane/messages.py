"""Small constructors for the Envoy messages that every part of the configuration is made of."""

from __future__ import annotations

from datetime import timedelta

from betterproto2 import Message
from envoy_data_plane.envoy.config.core.v3 import (
    Address as EnvoyAddress,
)
from envoy_data_plane.envoy.config.core.v3 import (
    DataSource,
    HeaderValue,
    HeaderValueOption,
    HeaderValueOptionHeaderAppendAction,
    Pipe,
    SocketAddress,
    TcpKeepalive,
    TypedExtensionConfig,
)
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import HttpFilter
from envoy_data_plane.google.protobuf import Any, Struct, Value

from extproc.transport.address import Address, UnixAddress


def any_of(message: Message) -> Any:
    """``message`` packed with its type URL."""
    return Any.pack(message)


def extension(name: str, message: Message) -> TypedExtensionConfig:
    """The extension ``name`` with its configuration."""
    return TypedExtensionConfig(name=name, typed_config=any_of(message))


def http_filter(name: str, message: Message, *, disabled: bool = False) -> HttpFilter:
    """The HTTP filter ``name``; a ``disabled`` one is off until a route has settings for it."""
    return HttpFilter(name=name, typed_config=any_of(message), disabled=disabled)


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


def socket_address(host: str, port: int) -> EnvoyAddress:
    """A TCP address. Dual stack when ``host`` is the IPv6 wildcard."""
    return EnvoyAddress(socket_address=SocketAddress(address=host, port_value=port, ipv4_compat=host == "::"))


def dead_peer_detection() -> TcpKeepalive:
    """Notice within a minute that a silent peer's machine is gone."""
    return TcpKeepalive(keepalive_probes=3, keepalive_time=30, keepalive_interval=10)


def envoy_address(address: Address, *, mode: int = 0) -> EnvoyAddress:
    """Our address as Envoy's; ``mode`` is for a unix socket that Envoy creates."""
    if isinstance(address, UnixAddress):
        return EnvoyAddress(pipe=Pipe(path=address.path, mode=mode))
    return socket_address(address.host, address.port)
