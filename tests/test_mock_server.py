"""What every mock worker has: a server that records, and that misbehaves when asked to."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from extproc.mock import Fault, Outcome, Point, Rule, SglangMock
from extproc.mock.connection import Connection
from extproc.mock.faults import FaultError
from tests.mock_client import Answer, Call, ask, dialling

CHAT = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "Say hi"}], "max_tokens": 4}


Dial = Callable[[SglangMock], Awaitable[Call]]


@pytest.fixture
async def dial() -> AsyncIterator[Dial]:
    async with dialling() as dial:
        yield dial


@pytest.fixture
async def mock() -> AsyncIterator[SglangMock]:
    async with SglangMock("regular") as mock:
        yield mock


# --- requests and records ---


async def test_records_what_it_receives(mock: SglangMock) -> None:
    await ask(mock, CHAT + "?a=1", BODY, headers={"X-Request-Id": "abc", "traceparent": "00-1"})
    (record,) = await mock.received(1)
    assert (record.method, record.path, record.query) == ("POST", CHAT, "a=1")
    assert record.json == BODY
    assert record.body == json.dumps(BODY).encode()
    assert record.header("x-request-id") == "abc"
    assert ("traceparent", "00-1") in record.headers
    assert record.status == 200
    assert record.outcome is Outcome.COMPLETED
    times = [record.arrived, record.received, record.head_sent, record.first_byte, record.ended]
    assert times == sorted(times, key=lambda time: time or 0)


async def test_probes_are_recorded_but_are_no_legs(mock: SglangMock) -> None:
    await ask(mock, "/health")
    await ask(mock, CHAT, BODY)
    assert [record.path for record in mock.requests] == ["/health", CHAT]
    assert [record.path for record in mock.legs] == [CHAT]
    assert len(await mock.received(1, path="/health")) == 1
    mock.clear()
    assert mock.requests == []


async def test_one_connection_serves_many_requests(dial: Dial, mock: SglangMock) -> None:
    call = await dial(mock)
    for _ in range(3):
        call.send("POST", CHAT, BODY)
        assert (await call.answer()).status == 200


async def test_pipelined_requests_are_answered_in_order(dial: Dial, mock: SglangMock) -> None:
    call = await dial(mock)
    for number in range(5):
        call.send("POST", CHAT, {**BODY, "rid": f"r{number}"})
    assert [(await call.answer()).json["id"] for _ in range(5)] == [f"r{number}" for number in range(5)]


async def test_chunked_upload_in_small_pieces(dial: Dial, mock: SglangMock) -> None:
    call = await dial(mock)
    data = json.dumps(BODY).encode()
    pieces = [data[at : at + 7] for at in range(0, len(data), 7)]
    raw = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    raw += b"transfer-encoding: chunked\r\n\r\n"
    raw += b"".join(b"%x;ext=1\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\ntrailer: 1\r\n\r\n"
    for byte in raw:
        call.writer.write(bytes([byte]))
        await call.writer.drain()
    assert (await call.answer()).status == 200
    assert mock.legs[0].body == data


async def test_expect_continue(dial: Dial, mock: SglangMock) -> None:
    call = await dial(mock)
    data = json.dumps(BODY).encode()
    head = f"POST {CHAT} HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n"
    call.writer.write(f"{head}expect: 100-continue\r\n\r\n".encode())
    assert (await call.head()).status == 100
    call.writer.write(data)
    assert (await call.answer()).status == 200


async def test_large_body(mock: SglangMock) -> None:
    body = {**BODY, "messages": [{"role": "user", "content": "x" * 400_000}]}
    assert (await ask(mock, CHAT, body)).json["usage"]["prompt_tokens"] > 100_000
    assert mock.legs[0].json == body


@pytest.mark.parametrize("raw", [b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\nno-colon\r\n\r\n", b"GET /\r\n\r\n"])
async def test_what_is_no_request_is_refused(dial: Dial, mock: SglangMock, raw: bytes) -> None:
    call = await dial(mock)
    call.writer.write(raw)
    assert (await call.answer()).status == 400
    assert await call.ended() == b""


async def test_connection_close(dial: Dial, mock: SglangMock) -> None:
    call = await dial(mock)
    call.send("POST", CHAT, BODY, {"connection": "close"})
    answer = await call.answer()
    assert answer.complete
    assert answer.headers["connection"] == "close"
    assert await call.ended() == b""


async def test_idle_connections_are_closed_but_busy_ones_are_not(dial: Dial) -> None:
    async with SglangMock("regular", keep_alive=0.5, first_token_delay=1) as mock:
        idle, busy = await dial(mock), await dial(mock)
        busy.send("POST", CHAT, BODY)
        assert await idle.ended() == b""
        assert (await busy.answer()).complete


async def test_a_client_that_leaves_is_noticed_at_once(dial: Dial, mock: SglangMock) -> None:
    mock.fail(Fault(hang=Point.BEFORE_HEAD))
    call = await dial(mock)
    call.send("POST", CHAT, BODY)
    (record,) = await mock.received(1)
    assert record.outcome is Outcome.LIVE
    await call.close()
    await mock.idle()
    assert record.outcome is Outcome.CLIENT_CLOSED


async def test_a_client_that_leaves_during_the_upload(dial: Dial, mock: SglangMock) -> None:
    call = await dial(mock)
    call.writer.write(f"POST {CHAT} HTTP/1.1\r\ncontent-length: 100\r\n\r\nhalf".encode())
    (record,) = await mock.arrived(1)
    await call.close()
    await mock.idle()
    assert record.outcome is Outcome.CLIENT_CLOSED
    assert record.received is None


async def test_a_client_that_leaves_in_a_stream(dial: Dial, mock: SglangMock) -> None:
    mock.fail(Fault(delay_token=60))
    call = await dial(mock)
    call.send("POST", CHAT, {**BODY, "stream": True})
    assert (await call.head()).status == 200
    await call.close()
    await mock.idle()
    assert mock.legs[0].outcome is Outcome.CLIENT_CLOSED
    assert mock.engine.live == {}


async def test_a_slow_reader_holds_the_stream_back(dial: Dial) -> None:
    async with SglangMock("regular") as mock:
        call = await dial(mock)
        call.writer.transport.pause_reading()  # type: ignore[attr-defined]
        call.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        parameters = {"max_new_tokens": 1000, "ignore_eos": True}  # some 6 MB, as every event repeats the text
        call.send("POST", "/generate", {"text": "Once", "stream": True, "sampling_params": parameters})
        await mock.arrived(1)

        async def congested() -> None:
            while not any(entry.congested for entry in mock._server.connections):  # noqa: ASYNC110 - no event for it
                await asyncio.sleep(0)

        async with asyncio.timeout(60):
            await congested()
        call.writer.transport.resume_reading()  # type: ignore[attr-defined]
        answer = await call.answer()
        assert answer.complete
        assert len(answer.events) == 1001


# --- life ---


async def test_stop_lets_requests_finish_within_the_grace(dial: Dial) -> None:
    mock = SglangMock("regular", first_token_delay=0.1)
    await mock.start()
    call = await dial(mock)
    call.send("POST", CHAT, BODY)
    await mock.received(1)
    stopping = asyncio.create_task(mock.stop(grace=60))
    assert (await call.answer()).complete
    await stopping
    assert mock.legs[0].outcome is Outcome.COMPLETED


async def test_stop_breaks_what_outlives_the_grace(dial: Dial, mock: SglangMock) -> None:
    mock.fail(Fault(hang=Point.BEFORE_HEAD))
    call = await dial(mock)
    call.send("POST", CHAT, BODY)
    await mock.received(1)
    await mock.stop(grace=0.05)
    assert await call.ended() == b""
    assert mock.legs[0].outcome is Outcome.STOPPED


async def test_a_dead_worker_accepts_nobody_who_waited_for_it(mock: SglangMock) -> None:
    mock.crash()
    ours, theirs = socket.socketpair()
    await asyncio.get_running_loop().create_connection(lambda: Connection(mock._server), sock=theirs)
    reader, writer = await asyncio.open_connection(sock=ours)
    async with asyncio.timeout(60):
        assert await reader.read() == b""
    writer.close()
    assert not mock._server.connections


async def test_a_crash_breaks_everything_and_frees_the_port(dial: Dial, mock: SglangMock) -> None:
    mock.fail(Fault(hang=Point.BEFORE_HEAD))
    call = await dial(mock)
    call.send("POST", CHAT, BODY)
    await mock.received(1)
    mock.crash()
    assert await call.ended() == b""
    assert mock.crashed.is_set()
    assert mock.legs[0].outcome is Outcome.CRASHED
    with pytest.raises(ConnectionRefusedError):
        await dial(mock)
    async with SglangMock("regular", port=mock.port) as next_life:
        assert (await ask(next_life, "/health")).status == 200


async def test_refuse_and_accept_on_the_same_port(dial: Dial, mock: SglangMock) -> None:
    port = mock.port
    idle = await dial(mock)
    await mock.refuse()
    assert await idle.ended() == b""
    with pytest.raises(ConnectionRefusedError):
        await dial(mock)
    await mock.accept()
    assert mock.port == port
    assert (await ask(mock, "/health")).status == 200


async def test_listens_on_ipv6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 on this machine")
    async with SglangMock("prefill", host="::1") as prefill, SglangMock("decode") as decode:
        assert prefill.url == f"http://[::1]:{prefill.port}"
        room = {"bootstrap_host": "[::1]", "bootstrap_port": prefill.bootstrap_port, "bootstrap_room": 7}
        answers = await asyncio.gather(ask(prefill, CHAT, BODY | room), ask(decode, CHAT, BODY | room))
        assert [answer.status for answer in answers] == [200, 200]


# --- faults ---


async def _faulty(mock: SglangMock, fault: Fault, *, stream: bool = False) -> Answer | None:
    """The answer under a fault; None: the connection ended before one began."""
    mock.fail(fault)
    try:
        return await ask(mock, CHAT, {**BODY, "stream": stream})
    except (asyncio.IncompleteReadError, ConnectionResetError):
        return None


async def test_status_with_body_and_retry_after(mock: SglangMock) -> None:
    answer = await _faulty(mock, Fault(status=429, body='{"slow":1}', headers=(("retry-after", "3"),)))
    assert answer is not None
    assert (answer.status, answer.json, answer.headers["retry-after"]) == (429, {"slow": 1}, "3")
    assert answer.headers["content-type"] == "application/json"


@pytest.mark.parametrize("stream", [False, True])
async def test_drop_before_the_head(mock: SglangMock, *, stream: bool) -> None:
    assert await _faulty(mock, Fault(drop=Point.BEFORE_HEAD), stream=stream) is None
    assert mock.legs[0].outcome is Outcome.FAULT


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("point", [Point.AFTER_HEAD, Point.MID_BODY])
async def test_drop_later(mock: SglangMock, point: Point, *, stream: bool) -> None:
    answer = await _faulty(mock, Fault(drop=point), stream=stream)
    assert answer is not None
    assert answer.status == 200
    assert not answer.complete
    assert bool(answer.body) is (point is Point.MID_BODY)
    assert mock.legs[0].outcome is Outcome.FAULT


@pytest.mark.parametrize("stream", [False, True])
async def test_truncated_answer(mock: SglangMock, *, stream: bool) -> None:
    answer = await _faulty(mock, Fault(truncate=True, after_chunks=2), stream=stream)
    assert answer is not None
    assert answer.body
    assert not answer.complete
    assert len(answer.chunks) == (2 if stream else 1)


async def test_drop_during_the_upload(dial: Dial, mock: SglangMock) -> None:
    mock.fail(Fault(drop=Point.UPLOAD))
    call = await dial(mock)
    call.writer.write(f"POST {CHAT} HTTP/1.1\r\ncontent-length: 1000\r\n\r\n".encode())
    assert await call.ended() == b""
    assert mock.legs[0].outcome is Outcome.FAULT


async def test_hang_during_the_upload(dial: Dial, mock: SglangMock) -> None:
    mock.fail(Fault(hang=Point.UPLOAD))
    call = await dial(mock)
    call.send("POST", CHAT, BODY)
    (record,) = await mock.arrived(1)
    await call.close()
    await mock.idle()
    assert (record.received, record.outcome) == (None, Outcome.CLIENT_CLOSED)


@pytest.mark.parametrize("point", [Point.BEFORE_HEAD, Point.AFTER_HEAD, Point.MID_BODY])
async def test_hang_until_the_client_leaves(dial: Dial, mock: SglangMock, point: Point) -> None:
    mock.fail(Fault(hang=point))
    call = await dial(mock)
    call.send("POST", CHAT, {**BODY, "stream": True})
    (record,) = await mock.received(1)
    if point is not Point.BEFORE_HEAD:
        await call.head()
    if point is Point.MID_BODY:
        assert await call.reader.readuntil(b"\n\n")
    assert record.outcome is Outcome.LIVE
    await call.close()
    await mock.idle()
    assert record.outcome is Outcome.CLIENT_CLOSED


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("point", [Point.BEFORE_HEAD, Point.AFTER_HEAD, Point.MID_BODY])
async def test_what_hangs_goes_on_when_it_is_told_to(
    dial: Dial, mock: SglangMock, point: Point, *, stream: bool
) -> None:
    body = {**BODY, "stream": stream}
    whole = await ask(mock, CHAT, body)
    call = await dial(mock)
    for count in (2, 3):
        go_on = asyncio.Event()
        mock.fail(Fault(hang=point, until=go_on), times=1)
        call.send("POST", CHAT, body)
        await mock.received(count)
        answer = None if point is Point.BEFORE_HEAD else await call.head()
        assert mock.legs[-1].outcome is Outcome.LIVE
        go_on.set()
        answer = answer or await call.head()
        await call._read_body(answer)
        assert answer.complete
        assert len(answer.chunks) == len(whole.chunks) or not stream
        await mock.idle()
        assert mock.legs[-1].outcome is Outcome.COMPLETED


async def test_slow_upload(mock: SglangMock) -> None:
    mock.fail(Fault(upload_rate=10_000_000))
    body = {**BODY, "messages": [{"role": "user", "content": "x" * 300_000}]}
    assert (await ask(mock, CHAT, body)).status == 200
    record = mock.legs[0]
    assert record.received is not None
    assert record.received - record.arrived > 0.02


async def test_delays(mock: SglangMock) -> None:
    await _faulty(mock, Fault(delay_head=0.05))
    head = mock.legs[0]
    assert head.head_sent is not None
    assert head.received is not None
    assert head.head_sent - head.received > 0.045
    mock.behave()
    await _faulty(mock, Fault(delay_first_token=0.05, delay_token=0.02, tokens=4), stream=True)
    stream = mock.legs[1]
    assert stream.first_byte is not None
    assert stream.received is not None
    assert stream.ended is not None
    assert stream.first_byte - stream.received > 0.045
    assert stream.ended - stream.first_byte > 0.05


async def test_a_head_that_is_held_until_it_is_let_go(mock: SglangMock) -> None:
    go_on = asyncio.Event()
    asking = asyncio.create_task(_faulty(mock, Fault(status=503, until=go_on)))
    (leg,) = await mock.received(1)
    for _ in range(10):
        await asyncio.sleep(0)
    assert leg.head_sent is None
    go_on.set()
    answer = await asking
    assert answer is not None
    assert answer.status == 503


async def test_a_stream_that_is_let_go_chunk_by_chunk(mock: SglangMock, dial: Dial) -> None:
    passes = asyncio.Semaphore(0)

    class OneByOne:
        async def wait(self) -> None:
            await passes.acquire()

    mock.fail(Fault(hang=Point.MID_BODY, after_chunks=0, until=OneByOne(), tokens=9))
    call = await dial(mock)
    call.send("POST", CHAT, {**BODY, "stream": True})
    await call.head()
    (leg,) = mock.legs
    assert leg.first_byte is None
    for _ in range(3):
        passes.release()
        assert await call.reader.readuntil(b"\n\n\r\n")
        assert leg.ended is None
    for _ in range(9):
        passes.release()
    await mock.idle()
    assert leg.outcome is Outcome.COMPLETED


async def test_what_is_waited_for_cannot_be_said_in_json() -> None:
    with pytest.raises(FaultError, match="unknown fields: until"):
        Fault.parse({"until": 1})


async def test_garbage_and_early_head(mock: SglangMock) -> None:
    garbage = await _faulty(mock, Fault(garbage=True))
    assert garbage is not None
    with pytest.raises(ValueError, match="Expecting value"):
        json.loads(garbage.body)
    mock.behave()
    early = await _faulty(mock, Fault(early_head=True, status=500, body='{"error":1}'), stream=True)
    assert early is not None
    assert (early.status, early.events, early.complete) == (200, [{"error": 1}], True)


async def test_number_of_tokens_per_request(mock: SglangMock) -> None:
    mock.fail(Fault(tokens=40))
    answer = await ask(mock, CHAT, {**BODY, "max_tokens": 100})
    assert answer.json["usage"]["completion_tokens"] == 40


async def test_rules_match_path_body_and_count(mock: SglangMock) -> None:
    mock.fail(Rule(Fault(status=503), body_contains=b"poison", times=1))
    mock.fail(Fault(status=504), path="/v1/completions")
    assert (await ask(mock, CHAT, BODY)).status == 200
    poison = {**BODY, "user": "poison"}
    assert [(await ask(mock, CHAT, poison)).status for _ in range(2)] == [503, 200]
    assert (await ask(mock, "/v1/completions", {"prompt": "x"})).status == 504
    assert (await ask(mock, "/health")).status == 200


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ('{"status": 500}', 500),
        ('{"regular": {"status": 501, "retry_after": 2}}', 501),
        ('{"prefill": {"status": 501}}', 200),
        ('{"nonsense": 1}', 400),
        ("{", 400),
    ],
)
async def test_fault_by_header(mock: SglangMock, header: str, status: int) -> None:
    assert (await ask(mock, CHAT, BODY, headers={"x-mock-fault": header})).status == status


async def test_a_header_is_about_the_leg_not_its_abort(mock: SglangMock) -> None:
    for header in ('{"status": 500}', '{"drop": "upload"}', '{"hang": "after_head"}'):
        assert (await ask(mock, "/abort_request", {"rid": "a"}, headers={"x-mock-fault": header})).status == 200


async def test_faults_over_http(mock: SglangMock) -> None:
    rule: dict[str, Any] = {"status": 503, "retry_after": 2, "path": CHAT, "times": 1}
    assert (await ask(mock, "/_mock/faults", [rule])).status == 200
    answer = await ask(mock, CHAT, BODY)
    assert (answer.status, answer.headers["retry-after"]) == (503, "2")
    assert (await ask(mock, "/_mock/faults", {"drop": "nowhere"})).status == 400
    await ask(mock, "/_mock/faults", {"status": 500})
    await ask(mock, "/_mock/faults", method="DELETE")
    assert (await ask(mock, CHAT, BODY)).status == 200


async def test_requests_over_http(mock: SglangMock) -> None:
    await ask(mock, CHAT, BODY)
    (seen,) = (await ask(mock, "/_mock/requests")).json
    assert (seen["method"], seen["target"], seen["outcome"]) == ("POST", CHAT, "completed")
    assert json.loads(seen["body"]) == BODY
    assert (await ask(mock, "/_mock/received?count=1")).status == 200
    assert (await ask(mock, "/_mock/idle")).status == 200
    await ask(mock, "/_mock/requests", method="DELETE")
    assert (await ask(mock, "/_mock/requests")).json == []
    assert (await ask(mock, "/_mock/nothing")).status == 404


async def test_listener_and_crash_over_http(
    dial: Dial, mock: SglangMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, accept = asyncio.Event(), mock.accept

    async def accept_when_seen() -> None:
        await seen.wait()
        await accept()

    monkeypatch.setattr(mock, "accept", accept_when_seen)
    await ask(mock, "/_mock/listener", {"refuse_seconds": 0.02})
    with pytest.raises(ConnectionRefusedError):
        await dial(mock)
    seen.set()

    async def accepted() -> Call:
        while True:
            try:
                return await dial(mock)
            except ConnectionRefusedError:
                await asyncio.sleep(0.005)

    async with asyncio.timeout(60):
        call = await accepted()
    call.send("POST", "/_mock/crash", {})
    await mock.crashed.wait()
