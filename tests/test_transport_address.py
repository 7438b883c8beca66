"""Addresses as the command line gives them, and who may take a socket file."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from extproc.transport.address import SocketFile, TcpAddress, UnixAddress, claim_socket_file, parse_address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("unix:/run/x.sock", UnixAddress("/run/x.sock")),
        ("unix:///run/x.sock", UnixAddress("/run/x.sock")),
        ("unix:relative.sock", UnixAddress("relative.sock")),
        ("127.0.0.1:50051", TcpAddress("127.0.0.1", 50051)),
        ("localhost:0", TcpAddress("localhost", 0)),
        ("[::1]:50051", TcpAddress("::1", 50051)),
        ("[::]:65535", TcpAddress("::", 65535)),
    ],
)
def test_addresses(text: str, address: UnixAddress | TcpAddress) -> None:
    assert parse_address(text) == address
    assert parse_address(str(address)) == address


@pytest.mark.parametrize(
    "text", ["", "unix:", "50051", ":50051", "host", "host:", "host:http", "host:65536", "host:-1", "::1:50051", "[]:1"]
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected|port|empty"):
        parse_address(text)


def bound(path: Path) -> socket.socket:
    """A socket bound to ``path`` that does not listen."""
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(path))
    return stale


async def test_a_free_path_is_claimed_without_a_trace(tmp_path: Path) -> None:
    await claim_socket_file(str(tmp_path / "s"))
    assert list(tmp_path.iterdir()) == []  # noqa: ASYNC240


async def test_a_stale_file_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    bound(path).close()
    await claim_socket_file(str(path))
    assert not path.exists()


async def test_a_served_file_is_refused_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with bound(path) as server:
        server.listen()
        with pytest.raises(OSError, match="another server") as caught:
            await claim_socket_file(str(path))
        assert caught.value.filename == str(path)
        assert path.exists()


async def test_another_kind_of_file_is_refused_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text("data")
    with pytest.raises(OSError, match="not a socket"):
        await claim_socket_file(str(path))
    assert path.read_text() == "data"


def test_only_our_own_file_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with bound(path):
        ours = SocketFile.bound(str(path))
        path.unlink()
        with bound(path):
            ours.remove()
            assert path.exists()
            SocketFile.bound(str(path)).remove()
            assert not path.exists()
            ours.remove()  # gone already: no harm
