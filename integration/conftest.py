"""Fixtures of the product's tests: one product per module, clean before and after every test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
import uvloop
from http2_client import Http2Client
from standstill import watched

import extproc  # noqa: F401  # which must come before the tests' grpcio

if TYPE_CHECKING:
    from product import Product
    from rpc_strict import StrictProduct

PRODUCT = ("test_product_", "test_vllm_")


def pytest_asyncio_loop_factories(
    config: pytest.Config,  # noqa: ARG001 - pytest's signature
    item: pytest.Item,
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The product runs on uvloop, in tests too."""
    if item.path.name.startswith(PRODUCT):
        return {"uvloop": uvloop.new_event_loop}
    return {"asyncio": asyncio.new_event_loop}


@pytest.fixture(scope="session", autouse=True)
def _machine() -> Iterator[None]:
    """What is to happen at once may be late by what the machine stands still; see standstill.Within."""
    with watched():
        yield


@pytest_asyncio.fixture(loop_scope="module")
async def product(running: Product) -> AsyncIterator[Product]:
    """The module's product (``running``), with nothing remembered from other tests; nothing of this one may be left."""
    await running.forget()
    yield running
    await running.client.close()
    await running.settled()


@pytest_asyncio.fixture(loop_scope="module")
async def http2(running: Product) -> AsyncIterator[Http2Client]:
    """One HTTP/2 connection to the module's product."""
    client = await Http2Client.connect(running.client.host, running.client.port)
    yield client
    await client.close()


@pytest_asyncio.fixture(loop_scope="module")
async def flow(product: StrictProduct) -> AsyncIterator[StrictProduct]:
    """The product, whose mocks' pace is as it was afterwards."""
    paces = [(mock, mock.pace) for mock in product.mocks]
    yield product
    for mock, pace in paces:
        mock.pace = pace
