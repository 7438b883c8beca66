"""Make the comparisons that the unit tests use importable here; what the tests of all engines share."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest
import rig
import rpc_servers
import servers
import sglang_servers
import vllm_servers
from rpc_pairs import RpcPair
from vllm_rig import Pair, known
from vllm_servers import VllmServer

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    """A client of anything."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        yield session


@pytest.fixture(scope="session")
def aggregated() -> Iterator[VllmServer]:
    """A vLLM server that does all by itself."""
    server = vllm_servers.aggregated()
    with servers.running(server):
        yield server


@pytest.fixture(scope="session", params=list(vllm_servers.CONNECTORS))
def vllm_workers(request: pytest.FixtureRequest) -> Iterator[tuple[str, VllmServer, VllmServer]]:
    """A connector, a prefill and a decode worker that use it."""
    workers = vllm_servers.prefill(request.param), vllm_servers.decode(request.param)
    with servers.running(*workers):
        yield request.param, *workers


@pytest.fixture(scope="session")
def started_pair(
    vllm_workers: tuple[str, VllmServer, VllmServer], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    """The two behind a gateway that does not know them yet."""
    with rig.gateway(tmp_path_factory.mktemp("gateway")) as url:
        yield Pair(*vllm_workers, url)


@pytest.fixture
async def pair(started_pair: Pair, client: aiohttp.ClientSession) -> Pair:
    """The two, registered."""
    await known(client, started_pair.url, started_pair.prefill, started_pair.decode)
    return started_pair


@pytest.fixture(scope="session")
def in_turn_gateway(
    vllm_workers: tuple[str, VllmServer, VllmServer], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """A gateway that starts Mooncake's legs one after the other."""
    if vllm_workers[0] != "mooncake":
        pytest.skip("only Mooncake has a choice")
    with rig.gateway(tmp_path_factory.mktemp("gateway"), "--mooncake-dispatch", "sequential") as url:
        yield url


@pytest.fixture
async def in_turn(
    in_turn_gateway: str, vllm_workers: tuple[str, VllmServer, VllmServer], client: aiohttp.ClientSession
) -> str:
    """Its URL, with the pair registered."""
    await known(client, in_turn_gateway, *vllm_workers[1:])
    return in_turn_gateway


@pytest.fixture(scope="session", params=rpc_servers.KINDS)
def started_rpc_pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RpcPair]:
    """A prefill and a decode server that speak gRPC, behind a gateway that does not know them yet."""
    kind = request.param
    engine = rpc_servers.engine_of(kind)
    if not servers.installed(engine):
        pytest.skip("not installed: make integration-engines")
    with rpc_servers.running(kind) as (prefill, decode), rig.gateway(tmp_path_factory.mktemp("gateway")) as url:
        yield RpcPair(kind, engine, prefill, decode, url)


@pytest.fixture
async def rpc_pair(started_rpc_pair: RpcPair, client: aiohttp.ClientSession) -> RpcPair:
    """The same, registered."""
    await known(client, started_rpc_pair.url, started_rpc_pair.prefill, started_rpc_pair.decode)
    await rig.ready(client, started_rpc_pair.url)
    return started_rpc_pair


@pytest.fixture(scope="session")
def single(started_rpc_pair: RpcPair) -> Iterator[servers.Server]:
    """The same engine as one HTTP server that does all by itself."""
    engine = started_rpc_pair.engine
    server = vllm_servers.aggregated() if engine == "vllm" else sglang_servers.engines().aggregated
    with servers.running(server):
        yield server
