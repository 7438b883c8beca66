"""Requests under way per host, out of Envoy's ``/clusters``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_MARK: Final = b"::rq_active::"


class ActiveRequests:
    """Reads the page as text and in pieces, as they come.

    It has 19 lines of some 40 bytes for each host, of which one is needed: ``CLUSTER::IP:PORT::rq_active::COUNT``.
    (Measured with 1,000 hosts: 0.8 MB; asking and reading takes 2.3 ms of CPU, in pieces; as JSON reading alone takes
    3 to 10 ms, all at once.)
    """

    def __init__(self, roles: Mapping[str, str]) -> None:
        """``roles``: which clusters to look at, and what they count for."""
        self._roles = {name.encode(): role for name, role in roles.items()}
        self._rest = b""  # the beginning of a line
        self.found: dict[tuple[str, str], int] = {}  # by role and "ip:port"

    def feed(self, piece: bytes) -> None:
        """Read on."""
        end = piece.rfind(b"\n")
        if end < 0:
            self._rest += piece
            return
        lines, self._rest = self._rest + piece[:end], piece[end + 1 :]
        at = lines.find(_MARK)
        while at >= 0:
            cluster, _, address = lines[lines.rfind(b"\n", 0, at) + 1 : at].partition(b"::")
            stop = lines.find(b"\n", at)
            count = lines[at + len(_MARK) : stop if stop >= 0 else len(lines)]
            role = self._roles.get(cluster)
            if role is not None and count.isdigit():
                self.found[role, address.decode("ascii", "replace")] = int(count)
            at = lines.find(_MARK, at + len(_MARK))
