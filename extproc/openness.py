"""What is open to whom, for want of a key: said at the start."""

from __future__ import annotations

import ipaddress
import logging
from typing import Final

from extproc.settings import Settings

_log: Final = logging.getLogger("extproc.service")


def warn_of_openness(settings: Settings) -> None:
    """Say what whoever reaches the gateway may do for want of a key."""
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
