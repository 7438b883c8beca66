"""The late filter of a real Envoy: an answer of the service's own after its request was released to a worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio
from dataplane_rig import Answer, Request, Rig, Worker, answer, hang_up, never, unreachable
from dataplane_script import PASS, PATH, PATIENCE, Scripted, Stage, fields

from extproc.dataplane import ext_proc
from extproc.names import ERROR_CODE, LATE

pytestmark = pytest.mark.asyncio(loop_scope="module")

REPLY_SECONDS = 0.4  # instead of half a minute


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    rig = Rig(tmp_path_factory.mktemp("rig"), connect_timeout=2)
    rig.extproc = Scripted(rig.config.extproc)
    await rig.start()
    yield rig
    await rig.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hasty_rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    """One that does not wait long for the service."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ext_proc, "_REPLY_SECONDS", REPLY_SECONDS)
        rig = Rig(tmp_path_factory.mktemp("hasty"), request_timeout=2.5, timeout_margin=0.5)
        rig.extproc = Scripted(rig.config.extproc)
        await rig.start()
    yield rig
    await rig.stop()


@pytest_asyncio.fixture(loop_scope="module", params=["http1", "http2"])
async def stage(rig: Rig, request: pytest.FixtureRequest) -> AsyncIterator[Stage]:
    async with staged(rig, request.param) as stage:
        yield stage


@pytest_asyncio.fixture(loop_scope="module", params=["http1", "http2"])
async def hasty(hasty_rig: Rig, request: pytest.FixtureRequest) -> AsyncIterator[Stage]:
    async with staged(hasty_rig, request.param) as stage:
        yield stage


@asynccontextmanager
async def staged(rig: Rig, protocol: str) -> AsyncIterator[Stage]:
    assert isinstance(rig.extproc, Scripted)
    stage = Stage(rig, rig.extproc, protocol)
    yield stage
    await stage.close()


def ours(headers: list[tuple[str, str]]) -> dict[str, str]:
    """What a client gets to see of the gateway's own headers."""
    return {name: value for name, value in headers if name.startswith("x-pd-")}


async def has_left(worker: Worker) -> None:
    """Wait until Envoy has closed the connection of a worker that has not answered."""
    async with asyncio.timeout(PATIENCE):
        await worker.closed_early.wait()


# Nothing was answered yet


async def test_a_stream_instead_of_a_silent_worker(stage: Stage) -> None:
    worker = await stage.rig.worker(never)
    asked, first = await stage.released(worker)
    await first.give_up("one")
    second = await stage.second("one")
    await first.gone()
    await has_left(worker)
    await second.head(**{"content-type": "text/event-stream", "x-mine": "1"})
    await second.body(b"")  # Envoy keeps the head back until a piece of the body comes, be it an empty one
    reply = await asked.head()
    assert (reply.status, reply.header("content-type"), reply.header("x-mine")) == (200, "text/event-stream", "1")
    assert ours(reply.headers) == {}
    for piece in (b"data: 1\n\n", b"data: 2\n\n"):  # each arrives before the next is sent
        await second.body(piece)
        await asked.until(piece)
    await second.body(b"data: [DONE]\n\n", end=True)
    assert (await asked.whole()).events == ["1", "2", "[DONE]"]
    await second.gone()
    assert second.kinds == ["response_headers", "response_body"]


@pytest.mark.parametrize("status", [200, 404, 503])
async def test_a_whole_answer_instead_of_a_silent_worker(stage: Stage, status: int) -> None:
    asked, first = await stage.released(await stage.rig.worker(never))
    await first.give_up("one", 500)
    second = await stage.second("one")
    await second.head(status, **{"content-length": "2000000"})
    for _ in range(20):
        await second.body(b"x" * 100_000)
    await second.body(b"", end=True)
    reply = await asked.whole()
    assert (reply.status, reply.header("content-length"), reply.body) == (status, "2000000", b"x" * 2_000_000)
    await second.gone()


async def test_an_answer_instead_of_a_worker_that_cannot_be_reached(stage: Stage) -> None:
    with unreachable(refuses=False) as full:
        await stage.rig.know(full.endpoint)
        asked = await stage.ask()
        first = await stage.service.call()
        await first.release(full.address)
        await first.give_up("one")
        second = await stage.second("one")
        await asyncio.sleep(1.25 * stage.rig.config.connect_timeout)  # by then Envoy would have given up
        await second.head()
        await second.body(b"hello", end=True)
        reply = await asked.whole()
        assert (reply.status, reply.body) == (200, b"hello")


async def test_the_second_answer_may_take_its_time(hasty: Stage) -> None:
    """Longer than the service may hold an answer's head that comes from a worker."""
    asked, first = await hasty.released(await hasty.rig.worker(never))
    await first.give_up("one")
    second = await hasty.second("one")
    await asyncio.sleep(2 * REPLY_SECONDS)
    await second.head()
    await second.body(b"one")
    await asked.until(b"one")
    await asyncio.sleep(2 * REPLY_SECONDS)
    await second.body(b"two", end=True)
    assert (await asked.whole()).body == b"onetwo"
    await second.gone()


# An answer's head was there


def begun(*pieces: bytes) -> Answer:
    """A worker's behaviour: a head, these pieces of a body, and no end."""

    async def behave(_: Request, writer: asyncio.StreamWriter) -> bool:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        for piece in pieces:
            await writer.drain()
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        await asyncio.Event().wait()
        return False

    return behave


@pytest.mark.parametrize(
    ("behave", "status", "code"),
    [
        (answer(b'{"e":1}', "503 Service Unavailable"), "503", None),
        (answer(b'{"e":1}'), "200", None),
        (answer(b"", "503 Service Unavailable"), "503", None),
        (begun(), "200", None),
        (begun(b"data: theirs\n\n", b"data: theirs\n\n"), "200", None),
        (hang_up, "502", "decode_connection_lost"),
    ],
)
async def test_an_answer_instead_of_one_that_was_put_off(
    stage: Stage, behave: Answer, status: str, code: str | None
) -> None:
    asked, first = await stage.released(await stage.rig.worker(behave))
    head = await first.put_off("two")
    assert (head[":status"], head.get(ERROR_CODE)) == (status, code)
    second = await stage.second("two")
    await second.head(**{"content-type": "text/event-stream"})
    for piece in (b"data: 1\n\n", b"data: 2\n\n"):
        await second.body(piece)
        await asked.until(piece)
    await second.body(b"", end=True)
    reply = await asked.whole()
    assert (reply.status, reply.header("content-type"), reply.events) == (200, "text/event-stream", ["1", "2"])
    assert ours(reply.headers) == {}
    await first.gone()
    await second.gone()


# Ends


async def test_a_client_that_leaves_ends_the_second_call(stage: Stage) -> None:
    asked, first = await stage.released(await stage.rig.worker(never))
    await first.give_up("one")
    second = await stage.second("one")
    await second.head()
    await second.body(b"begun")
    await asked.until(b"begun")
    asked.reset()
    await second.gone()


async def test_a_client_that_leaves_before_the_second_head(stage: Stage) -> None:
    asked, first = await stage.released(await stage.rig.worker(never))
    await first.give_up("one")
    second = await stage.second("one")
    asked.reset()
    await second.gone()


async def test_a_second_call_that_fails(stage: Stage) -> None:
    asked, first = await stage.released(await stage.rig.worker(never))
    await first.give_up("one")
    second = await stage.second("one")
    second.refused.set()
    reply = await asked.whole()
    assert (reply.status, reply.code) == (503, "extproc_unavailable")
    assert LATE not in dict(reply.headers)


async def test_a_second_call_that_fails_in_its_answer(stage: Stage) -> None:
    asked, first = await stage.released(await stage.rig.worker(never))
    await first.give_up("one")
    second = await stage.second("one")
    await second.head()
    await second.body(b"begun")
    await asked.until(b"begun")
    second.refused.set()
    assert await asked.cut() == b"begun"


async def test_a_second_call_that_says_nothing_ends_behind_our_own_deadline(hasty: Stage) -> None:
    asked, first = await hasty.released(await hasty.rig.worker(never))
    await first.give_up("one")
    second = await hasty.second("one")
    reply = await asked.whole()
    assert (reply.status, reply.code) == (504, "request_timeout")
    assert LATE not in dict(reply.headers)
    await second.gone()


# Everything else does without


async def test_an_ordinary_request_is_one_call(stage: Stage) -> None:
    worker = await stage.rig.worker(answer(b"hello"))
    for _ in range(3):
        asked, call = await stage.released(worker)
        await call.next("response_headers")
        await call.send(PASS)
        assert (await asked.whole()).body == b"hello"
        await call.gone()
    assert stage.service.calls.empty()


async def test_a_workers_own_header_asks_for_nothing(stage: Stage) -> None:
    asked, call = await stage.released(await stage.rig.worker(answer(b"hello", headers=f"{LATE}: one\r\n")))
    assert LATE not in fields(await call.next("response_headers"))
    await call.send(PASS)
    reply = await asked.whole()
    assert (reply.status, reply.body, reply.header(LATE)) == (200, b"hello", None)
    await call.gone()
    assert stage.service.calls.empty()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", PATH, 405), ("POST", "/nothing", 404), ("POST", "/v1/embeddings", 501), ("GET", "/workers", 200)],
)
async def test_what_envoy_and_the_control_api_answer_asks_for_nothing(
    stage: Stage, method: str, path: str, status: int
) -> None:
    asked = await stage.ask(path, method)
    assert (await asked.whole()).status == status
    assert stage.service.calls.empty()


async def test_many_in_a_row_on_one_connection(stage: Stage) -> None:
    worker = await stage.rig.worker(never)
    for turn in range(50):
        asked, first = await stage.released(worker)
        await first.give_up(f"turn-{turn}")
        second = await stage.second(f"turn-{turn}")
        await second.head()
        await second.body(b"%d " % turn)
        await second.body(b"end", end=True)
        reply = await asked.whole()
        assert (reply.status, reply.body) == (200, b"%d end" % turn)
    worker.behave = answer(b"hello")
    asked, call = await stage.released(worker)
    await call.next("response_headers")
    await call.send(PASS)
    assert (await asked.whole()).body == b"hello"
