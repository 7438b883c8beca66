"""The benchmark's load generator against its stand-in workers, and against servers that answer wrongly."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import pytest
from fleet import eventually

from bench import sglang, vllm, worker
from bench.client import LoadGenerator, dechunk, verify
from bench.engine import DecodeSteps, Kind
from bench.fleet import Seen
from bench.measure import CASES, LATE_CASES, missing_work
from bench.prompts import Answer, Prompts
from bench.request_body import Body

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from bench.engine import Engine

CHAT = sglang.chat_answer("decode")


@asynccontextmanager
async def engine(
    role: str = "decode", meeting: sglang.Rooms | vllm.Handed | None = None
) -> AsyncIterator[tuple[Engine, int]]:
    steps = {Answer.PACED: DecodeSteps(0.0001), Answer.BURST: DecodeSteps(0)}
    one: Engine
    if isinstance(meeting, vllm.Handed):
        one = vllm.Vllm(role, steps, meeting)
    else:
        one = sglang.Sglang(role, steps, meeting or sglang.Rooms())
    server = await asyncio.get_running_loop().create_server(partial(worker.Connection, one), "127.0.0.1", 0)
    async with server:
        yield one, server.sockets[0].getsockname()[1]


@asynccontextmanager
async def canned(answer: bytes) -> AsyncIterator[int]:
    """A server that answers every read with the same bytes, and closes if they are none."""

    class Canned(asyncio.Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            self.transport = transport

        def data_received(self, _data: bytes) -> None:
            if answer:
                self.transport.write(answer)
            else:
                self.transport.close()

    server = await asyncio.get_running_loop().create_server(Canned, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


HTTP_CASES = [case for case in CASES + LATE_CASES if not case.kind.is_grpc]


@pytest.mark.parametrize("case", HTTP_CASES, ids=lambda case: case.name)
async def test_every_case_is_answered_as_expected_and_counted(case):
    async with engine(meeting=vllm.Handed() if case.kind is Kind.VLLM else None) as (one, port):
        generator = await LoadGenerator(port, case.expected).open(3)
        load = await generator.run(case.prompts().bodies(), 7, limit=60)
        generator.close()
    assert not load.failures
    assert load.requests == len(load.first_bytes) == one.counts.legs == 7
    assert one.counts.body_bytes > 7 * case.prompt_bytes
    assert one.counts.handoffs == 0
    assert all(0 < first <= whole for first, whole in zip(load.first_bytes, load.latencies, strict=True))


class WatchedRooms(sglang.Rooms):
    def __init__(self) -> None:
        super().__init__()
        self.came = asyncio.Event()

    def when_prefilled(self, room: bytes, answer: Callable[[], None]) -> None:
        super().when_prefilled(room, answer)
        self.came.set()


@pytest.mark.parametrize("prefill_first", [True, False])
async def test_a_decode_leg_is_answered_when_its_prefill_leg_has_come(prefill_first):
    rooms = WatchedRooms()
    body = b'{"messages":[],"bootstrap_room":77}'
    async with engine("prefill", rooms) as (prefill, prefill_port), engine("decode", rooms) as (decode, decode_port):
        first = await LoadGenerator(prefill_port, sglang.chat_answer("prefill")).open(1)
        second = await LoadGenerator(decode_port, CHAT).open(1)
        if prefill_first:
            assert (await first.run(iter([body]), 1, limit=60)).requests == 1
            answered = await second.run(iter([body]), 1, limit=60)
        else:
            waiting = asyncio.ensure_future(second.run(iter([body]), 1, limit=60))
            await rooms.came.wait()
            assert (await first.run(iter([body]), 1, limit=60)).requests == 1
            answered = await waiting
        first.close()
        second.close()
    assert answered.requests == prefill.counts.handoffs == decode.counts.handoffs == 1


async def test_a_decode_leg_whose_prefill_leg_does_not_come_is_not_answered():
    async with engine() as (one, port):
        generator = await LoadGenerator(port, CHAT).open(1)
        load = await generator.run(iter([b'{"messages":[],"bootstrap_room":77}']), 1, limit=0.1)
        await eventually(lambda: one.counts.handoffs == 1)
    assert load.failures == {"not answered": 1}


async def exchange(port: int, body: dict[str, object]) -> tuple[int, dict]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    raw = json.dumps(body).encode()
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: w\r\ncontent-length: %d\r\n\r\n%s" % (len(raw), raw))
    head = await reader.readuntil(b"\r\n\r\n")
    answer = await reader.readexactly(int(head.lower().partition(b"content-length:")[2].split()[0]))
    writer.close()
    return int(head[9:12]), json.loads(answer)


ASK = {"do_remote_decode": True, "do_remote_prefill": False}
LONG = {"messages": [{"role": "user", "content": "x" * 100_000}], "max_tokens": 1}


async def test_a_vllm_decode_takes_what_a_prefill_answered_once_and_nothing_else():
    handed = vllm.Handed()
    async with engine("prefill", handed) as (prefill, prefill_port), engine("decode", handed) as (decode, decode_port):
        status, answer = await exchange(prefill_port, LONG | {"kv_transfer_params": ASK})
        params = answer["kv_transfer_params"]
        assert status == 200
        assert params["remote_num_tokens"] > 25_000
        assert len(params["remote_block_ids"][0]) == -(-params["remote_num_tokens"] // 16)
        less = {key: value for key, value in params.items() if key != "remote_host"}
        statuses = [
            (await exchange(decode_port, {"messages": [], "kv_transfer_params": told}))[0]
            for told in (params, params, less, ASK)
        ]
    assert statuses == [200, 400, 400, 400]
    assert prefill.counts.handoffs == decode.counts.handoffs == 1
    assert decode.counts.legs == 4


async def test_a_vllm_decode_refuses_parameters_that_are_not_whole():
    handed = vllm.Handed()
    async with engine("prefill", handed) as (_, prefill_port), engine("decode", handed) as (decode, decode_port):
        _, answer = await exchange(prefill_port, LONG | {"kv_transfer_params": ASK})
        params = answer["kv_transfer_params"] | {"remote_block_ids": [[10_000]]}
        status, _ = await exchange(decode_port, {"messages": [], "kv_transfer_params": params})
    assert status == 400
    assert decode.counts.handoffs == 0


async def test_vllm_workers_give_token_ids_to_who_asks_and_take_them_with_the_parameters():
    handed = vllm.Handed()
    async with engine("prefill", handed) as (_, prefill_port), engine("decode", handed) as (decode, decode_port):
        status, _ = await exchange(decode_port, LONG | {"kv_transfer_params": {"prompt_token_ids": []}})
        assert status == 400
        _, answer = await exchange(prefill_port, LONG | {"return_token_ids": True, "kv_transfer_params": ASK})
        assert len(answer["prompt_token_ids"]) == answer["kv_transfer_params"]["remote_num_tokens"]
        params = answer["kv_transfer_params"] | {"prompt_token_ids": answer["prompt_token_ids"]}
        status, _ = await exchange(decode_port, {"messages": [], "kv_transfer_params": params})
    assert status == 200
    assert decode.counts.handoffs == 1


@pytest.mark.parametrize("more", [{"max_tokens": 10}, {"max_tokens": None}, {"stream": True}])
async def test_a_vllm_prefill_leg_is_of_one_token_and_not_streamed(more):
    async with engine("prefill", vllm.Handed()) as (prefill, port):
        status, _ = await exchange(port, LONG | {"kv_transfer_params": ASK} | more)
    assert status == 400
    assert prefill.counts.handoffs == 0


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_vllm_leg_without_parameters_is_no_handoff(role):
    async with engine(role, vllm.Handed()) as (one, port):
        status, answer = await exchange(port, LONG)
    assert status == 200
    assert answer["kv_transfer_params"] is None
    assert (one.counts.legs, one.counts.handoffs) == (1, 0)


async def test_a_late_request_fails_in_its_first_prefill_leg_and_not_in_its_second():
    [late] = [case for case in LATE_CASES if case.answer is Answer.LATE]
    body = json.loads(next(late.prompts().bodies()))
    async with engine("prefill") as (_, port):
        statuses = [(await exchange(port, body | {"bootstrap_room": room}))[0] for room in (1, 2, 3)]
    assert statuses == [500, 200, 500]


async def test_a_prefill_answer_is_a_wrong_answer():
    async with engine("prefill") as (_, port):
        generator = await LoadGenerator(port, CHAT).open(1)
        load = await generator.run(Prompts.of_size(0, Answer.WHOLE).bodies(), 2, limit=60)
        generator.close()
    assert load.requests == 0
    assert load.failures.total() == 2
    assert next(iter(load.failures)).startswith("body differs")


async def test_a_closed_connection_fails_its_request_and_leaves_the_rest_unanswered():
    async with canned(b"") as port:
        generator = await LoadGenerator(port, CHAT).open(2)
        load = await generator.run(Prompts.of_size(0, Answer.WHOLE).bodies(), 5, limit=60)
    assert load.failures == {"connection closed before the answer was complete": 2, "not answered": 3}


async def test_a_silent_server_ends_at_the_limit():
    async with canned(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nab") as port:
        generator = await LoadGenerator(port, CHAT).open(2)
        load = await generator.run(Prompts.of_size(0, Answer.WHOLE).bodies(), 9, limit=0.05)
    assert load.requests == 0
    assert load.failures.total() == 9


@pytest.mark.parametrize("piece", [1, 2, 5, 1000])
async def test_answers_may_come_in_any_pieces(piece):
    """Whole heads, split heads, a last chunk in splinters: the generator sees one answer each time."""
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nHello\r\n7\r\n, world\r\n0\r\n\r\n"
    sized = b"HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\nHello, world"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for whole in (chunked, sized, chunked):
            await reader.readuntil(b'"}')
            for start in range(0, len(whole), piece):
                writer.write(whole[start : start + piece])
                await asyncio.sleep(0)  # a write of its own
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        generator = await LoadGenerator(server.sockets[0].getsockname()[1], b"Hello, world").open(1)
        load = await generator.run(iter([b'{"a":"b"}'] * 3), 3, limit=60)
        generator.close()
    assert load.requests == 3
    assert not load.failures


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 2\r\n\r\nno", "status 503: no"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nno", "body differs: 2 bytes that end in b'no', not 3"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nyesX\r\n0\r\n\r\n", "bad chunked body"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nyes\r\n0\r\n\r\n", None),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nyes", None),
    ],
)
def test_verify_names_what_is_wrong(answer, problem):
    found = verify(answer, b"yes")
    assert found is problem is None or found.startswith(problem)


@pytest.mark.parametrize(
    "broken", [b"", b"3\r\nyes", b"3\r\nyes\r\n", b"x\r\n\r\n", b"0\r\n\r\nmore", b"5\r\nyes\r\n0\r\n\r\n"]
)
def test_dechunk_refuses_broken_framing(broken):
    with pytest.raises(ValueError, match=r"not found|base 16|chunk"):
        dechunk(broken)


@pytest.mark.parametrize("ending", [b"1\r\n}\r\n0\r\n\r\n", b"1;x=y\r\n}\r\n0\r\nt: v\r\n\r\n"])
@pytest.mark.parametrize("piece", [1, 3, 10_000])
def test_the_worker_reads_chunked_bodies_in_any_pieces(ending, piece):
    text = b'{"bootstrap_room":1,' + b"x" * 700
    data = b"%x\r\n%s\r\n" % (len(text), text) + ending + b"NEXT"
    body = Body.of(b"\r\ntransfer-encoding: chunked\r\n", edge=512)
    rest = b""
    for start in range(0, len(data), piece):
        rest = body.feed(data[start : start + piece]) if not body.complete else rest + data[start : start + piece]
    assert body.complete
    assert body.size == len(text) + 1
    assert body.first == text[:512]
    assert body.last.endswith(b"xxx}")
    assert rest == b"NEXT"


def test_missing_work_is_noticed():
    whole = Seen(legs=10, handoffs=10, body_bytes=5000)
    assert missing_work("decode", whole, 10, 5000, handoff=True) == []
    assert len(missing_work("decode", Seen(9, 8, 4000), 10, 5000, handoff=True)) == 3
    assert missing_work("decode", Seen(10, 0, 5000), 10, 5000, handoff=False) == []


def test_a_first_attempt_s_decode_leg_may_not_have_arrived_but_its_prefill_leg_has():
    assert missing_work("decode", Seen(13, 13, 5000), 10, 5000, handoff=True, attempts=2) == []
    assert missing_work("prefill", Seen(20, 20, 5000), 10, 5000, handoff=True, attempts=2) == []
    assert missing_work("prefill", Seen(19, 19, 5000), 10, 5000, handoff=True, attempts=2)
    assert missing_work("decode", Seen(21, 21, 5000), 10, 5000, handoff=True, attempts=2)
