"""What is open to whom, for want of a key: said at the start."""

from __future__ import annotations

import ipaddress
import logging
from typing import Final

from extproc.settings import Settings
from extproc.transport.address import TcpAddress, parse_address
from extproc.values import EGRESS_ENVOY
from extproc.workers.resolver import literal

_log: Final = logging.getLogger("extproc.service")


def warn_of_openness(settings: Settings) -> None:
    """Say what whoever reaches the gateway may do for want of a key."""
    egress = parse_address(settings.egress_address)
    if settings.egress == EGRESS_ENVOY and isinstance(egress, TcpAddress) and not _is_loopback(egress.host):
        _log.warning("whoever reaches %s can send requests to every worker: keep it on a network of their own", egress)
    if settings.api_key is not None or ipaddress.ip_address(settings.host).is_loopback:
        return
    _log.warning("no --api-key: whoever reaches %s can send requests", settings.host)
    if not settings.control_plane_api_keys:
        who = "whoever reaches it" if settings.control_plane_open else "whoever is on this machine"
        _log.warning(
            "THE CONTROL API IS OPEN: %s can register workers, which are then sent requests; "
            "close it with --api-key or --control-plane-api-keys",
            who,
        )


def _is_loopback(host: str) -> bool:
    return host == "localhost" or (literal(host) is not None and ipaddress.ip_address(host).is_loopback)
