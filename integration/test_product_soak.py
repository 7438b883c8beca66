"""Thousands of random requests, with random faults of both legs, clients that leave at random moments, and workers that
refuse, die, are removed and come back. Every answer is the right one or an error that a fault explains, and at the end
nothing is left.

``SOAK_SEED=N`` makes other requests (the seed is printed), ``SOAK_REQUESTS=N`` so many of them in a storm.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import count, islice

import pytest
from http2_client import Http2Client
from product import soon
from soak_clients import Book, Seen, Visitor, crowd
from soak_fleet import Absence, SoakedProduct, Turnover, Why
from soak_footprint import Footprint, at_rest, exchanges, gauge
from soak_lines import Http1Line, Http2Line
from soak_requests import End, Kind, Visit, visit

from extproc.exchange.record import Record
from extproc.mock import SglangMock

pytestmark = pytest.mark.soak

VISITORS = 40
WARM_UP = 200
CALM = 100  # requests after each storm: everybody is back and serves
MEMORY_MIB = 16  # on top in the second storm; seen: -1 to 8, after 12000 requests, too; leaked bodies move it by 80


@pytest.mark.parametrize(("transport", "storms", "requests"), [("ngh2", 2, 1300), ("grpcio", 1, 400)])
async def test_soak(transport: str, storms: int, requests: int, caplog: pytest.LogCaptureFixture) -> None:
    seed = int(os.environ.get("SOAK_SEED", "1"))
    requests = int(os.environ.get("SOAK_REQUESTS", requests))
    print(f"\nSOAK_SEED={seed}")
    caplog.set_level(logging.ERROR)  # what is kept
    async with (
        SoakedProduct(grpc_transport=transport) as product,
        SglangMock("regular", record_limit=10, keep_alive=600) as aggregated,
    ):
        soak = Soak(product, aggregated, seed)
        footprints = [await soak.warm_up()]
        for _ in range(storms):
            await soak.storm(requests)
            footprints.append(await at_rest(product, footprints[-1]))
        for name in ("memory", "envoy_memory"):
            sizes = [getattr(footprint, name) for footprint in footprints]
            print(f"{name}: {sizes} MiB")
            assert sizes[-1] - sizes[-2] < MEMORY_MIB or storms == 1, f"{name} grows: {sizes} MiB"
        assert await gauge(product, "server.envoy_bug_failures") == 0
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


class Soak:
    """One product, its visitors and what befalls its workers."""

    def __init__(self, product: SoakedProduct, aggregated: SglangMock, seed: int) -> None:
        self._product = product
        self._aggregated = aggregated
        self._name = f"soak-{seed}"
        self._seed = seed
        self._numbers = count()
        self._turnover = Turnover(product, random.Random(seed))

    async def warm_up(self) -> Footprint:
        """Use everything once. What a request leaves behind has to go without the garbage collector's help."""
        gc.collect()  # requests that earlier tests in this process have made, and kept in cycles of their own
        gc.disable()
        try:
            await self._make(WARM_UP)
            await soon(lambda: not exchanges(), "requests are over, but still in memory")
        finally:
            gc.enable()
        return await at_rest(self._product)

    async def storm(self, requests: int) -> None:
        """Make requests while workers go and come, and some more when all are back."""
        async with self._turnover:
            await self._make(requests, patient=requests // 2)
        await self._make(CALM)

    @asynccontextmanager
    async def _visitors(self) -> AsyncIterator[list[Visitor]]:
        """Clients with a connection each, and some that share two."""
        address = self._product.service.client_address
        shared = [await Http2Client.connect(*address) for _ in range(2)]
        lines = [Http1Line(address) if number % 4 else Http2Line(shared[number % 8 // 4]) for number in range(VISITORS)]
        try:
            yield [
                Visitor(line, Http1Line((self._aggregated.host, self._aggregated.port)), self._name) for line in lines
            ]
        finally:
            for client in shared:
                await client.close()

    def _visits(self, requests: int, patient: int) -> Iterator[Visit]:
        """The next ones; the clients of the first so many may be ``patient``: in the end nobody waits for them."""
        for place, number in enumerate(islice(self._numbers, requests)):
            yield visit(self._seed, number, patient=place < patient)

    async def _make(self, requests: int, *, patient: int = 0) -> None:
        began = time.monotonic()
        product, absences = self._product, self._turnover.absences
        async with self._visitors() as visitors:
            book = await crowd(visitors, self._visits(requests, patient))
        self._aggregated.clear()
        await product.records.until(lambda: product.gateway.alive == 0)
        seconds = time.monotonic() - began
        print(f"{requests} requests in {seconds:.1f} s: {dict(book.ends)}; {len(absences)} absences so far")
        check(book, product, absences)


def check(book: Book, product: SoakedProduct, absences: list[Absence]) -> None:
    """See that every visit ended as it may, and that the service has taken down the same."""
    records = product.records.all
    by_id = {record.request_id: record for record in records}
    assert len(by_id) == len(records), "a request was recorded twice"
    for absence in absences:
        absence.settle()
    odd = [seen for seen in book.odd if not explained(seen, by_id.get(seen.request_id), absences)]
    assert not odd, f"{len(odd)} ends are unexplained:\n" + "\n".join(
        [*map(str, odd[:10]), "workers meanwhile:", product.happened(odd[0].began, odd[-1].ended)]
    )
    for request_id, told in book.told.items():
        record = by_id[request_id]
        assert agree(told, (record.status, record.code)), f"{request_id!r} was told {told}, taken down is {record.code}"


def explained(seen: Seen, record: Record | None, absences: list[Absence]) -> bool:
    """Whether an absence explains what the request's own troubles do not."""
    served_by = {}  # of a request with several attempts, the record names the workers of the last
    if record is not None and record.attempts == 1:
        served_by = {"prefill": record.prefill, "decode": record.decode}
    felt = [
        absence
        for absence in absences
        if absence.felt(seen.began, seen.ended) and served_by.get(absence.role) in ("", None, absence.url)
    ]
    if not seen.wrong and any(seen.end in _explained_by(absence, seen) for absence in felt):
        return True
    seen.wrong += f" (served by {served_by}, felt {felt})"
    return False


def _explained_by(absence: Absence, seen: Seen) -> frozenset[End]:
    """The ends of a request whose worker refuses or dies. Its removal explains nothing; that it is back, of what Envoy
    says itself: a busy thread of its hears of an endpoint after another has acknowledged it.
    """
    question = seen.visit.question
    if question is None:  # while a worker that is back has not said what it serves, it may be any model
        unsure = End(Kind.ERROR, 503, "no_available_workers")
        return frozenset({unsure} if b'"huge"' in seen.visit.raw else ())
    role = absence.role
    if absence.why is Why.REMOVED:
        return question.broken(f"{role}_unreachable", 503) if b" (UH)" in seen.reply.body else frozenset()
    return question.broken(f"{role}_connection_lost") | question.broken(f"{role}_unreachable", 503)


def agree(told: tuple[int, str | None], recorded: tuple[int, str]) -> bool:
    """Whether the service has taken down what the client was told, as far as it can know.

    Where a worker breaks right after its head, Envoy answers the client itself, and ends the service's call. Where a
    prefill breaks just when the decode's answer is complete, the client may have it all before it can be cut.
    """
    status, code = told
    if status == 502 and code in ("decode_connection_lost", "prefill_connection_lost"):
        return recorded in ((0, ""), (200, "")) or recorded[1].startswith(("prefill_", "decode_"))
    return (status, code or "") == recorded or (told == (200, None) and recorded == (200, "prefill_connection_lost"))
