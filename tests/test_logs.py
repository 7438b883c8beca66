"""What log lines look like, and that writing them never holds the loop."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
from collections.abc import Iterator

import pytest

from extproc.logs import HumanFormatter, JsonFormatter, LogLevel, TickHandler, configure

PIPE_SIZE = 64 * 1024


def record(message: str = "request", **fields: object) -> logging.LogRecord:
    made = logging.makeLogRecord({"name": "extproc.exchange", "levelno": logging.INFO, "msg": message, "created": 0.25})
    made.__dict__.update(fields)
    return made


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    yield reader, writer
    os.close(reader)
    os.close(writer)


@pytest.fixture
def restored_logging() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("extproc")
    switches = ("_srcfile", "logThreads", "logProcesses", "logMultiprocessing")
    before = root.handlers[:], root.level, ours.level, {name: getattr(logging, name) for name in switches}
    root.handlers[:] = []
    yield
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    ours.setLevel(before[2])
    for name, value in before[3].items():
        setattr(logging, name, value)


def test_the_human_line() -> None:
    line = HumanFormatter().format(record(request_id="chatcmpl-1", prefill="http://a:1", prefill_ms=12.34567, rank=0))
    assert line == (
        "1970-01-01T00:00:00.250Z INFO  extproc.exchange request"
        " request_id=chatcmpl-1 prefill=http://a:1 prefill_ms=12.346 rank=0"
    )


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("two words", '"two words"'),
        ("a=b", '"a=b"'),
        ("", '""'),
        ('say "x"', r'"say \"x\""'),
        ("line\nbreak", r'"line\nbreak"'),
        ("\x1b[31m", r'"\u001b[31m"'),
        ("größe", "größe"),
        ("\ud800", '"?"'),
    ],
)
def test_values_cannot_break_out_of_their_field(value: str, shown: str) -> None:
    line = HumanFormatter().format(record(model=value))
    assert line.endswith(f" model={shown}")
    assert "\n" not in line


def test_fields_that_are_none_are_left_out() -> None:
    assert HumanFormatter().format(record(model=None)).endswith(" request")
    assert "model" not in json.loads(JsonFormatter().format(record(model=None)))


def test_a_message_of_several_lines_stays_one_line() -> None:
    assert HumanFormatter().format(record("a\nb")).endswith(r' "a\nb"')


def test_the_json_line() -> None:
    assert json.loads(JsonFormatter().format(record(request_id="r", total_ms=1.5, room=2**63 - 1))) == {
        "time": "1970-01-01T00:00:00.250Z",
        "level": "info",
        "logger": "extproc.exchange",
        "message": "request",
        "request_id": "r",
        "total_ms": 1.5,
        "room": 2**63 - 1,
    }


@pytest.mark.parametrize("value", ["\ud800", 2**70])
def test_what_json_cannot_hold_is_shown_all_the_same(value: object) -> None:
    entry = json.loads(JsonFormatter().format(record(model=value)))
    assert entry["message"] == "request"
    assert entry["model"] in ("?", str(2**70))


@pytest.mark.parametrize("formatter", [HumanFormatter(), JsonFormatter()])
def test_a_traceback_is_kept(formatter: logging.Formatter) -> None:
    made = record()
    try:
        raise RuntimeError("boom")
    except RuntimeError as error:
        made.exc_info = (type(error), error, error.__traceback__)
    text = formatter.format(made)
    assert "RuntimeError: boom" in text
    if isinstance(formatter, JsonFormatter):
        assert "Traceback" in json.loads(text)["exception"]


@pytest.mark.usefixtures("restored_logging")
def test_levels(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    configure(LogLevel.INFO, descriptor=writer)
    logging.getLogger("extproc.exchange").debug("hidden")
    logging.getLogger("extproc.exchange").info("shown")
    logging.getLogger("aiohttp.access").info("hidden")
    logging.getLogger("asyncio").warning("shown")
    lines = os.read(reader, PIPE_SIZE).decode().splitlines()
    assert [re.sub(r"^\S+ ", "", line) for line in lines] == ["INFO  extproc.exchange shown", "WARN  asyncio shown"]


@pytest.mark.usefixtures("restored_logging")
async def test_the_lines_of_one_tick_leave_together(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = pipe
    configure(LogLevel.INFO, descriptor=writer)
    writes: list[bytes] = []
    really_write = os.write

    def write(descriptor: int, data: bytes) -> int:
        writes.append(bytes(data))
        return really_write(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    log = logging.getLogger("extproc.exchange")
    log.info("one")
    log.info("two")
    assert writes == []
    await asyncio.sleep(0)
    assert len(writes) == 1
    assert [line.rsplit(" ")[-1] for line in os.read(reader, PIPE_SIZE).decode().splitlines()] == ["one", "two"]


async def test_a_reader_that_sleeps_does_not_stop_the_loop(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = pipe
    monkeypatch.setattr("extproc.logs._MAX_PENDING_BYTES", 100_000)
    handler = TickHandler(writer)
    handler.setFormatter(HumanFormatter())
    for number in range(3000):
        handler.handle(record("x" * 60, number=number))
        if number % 100 == 0:
            await asyncio.sleep(0)  # returns: the pipe is full long before the end

    received = bytearray()
    async with asyncio.timeout(60):
        while b"lines=" not in received:
            try:
                received += os.read(reader, PIPE_SIZE)
            except BlockingIOError:
                await asyncio.sleep(0.005)  # the handler looks again every 20 ms
    lines = received.decode().splitlines()
    numbers = [int(match[1]) for line in lines if (match := re.search(r" number=(\d+)$", line))]
    assert numbers == list(range(len(numbers))), "what was taken came out whole and in order"
    (notice,) = [line for line in lines if "log lines dropped" in line]
    assert notice.endswith(f" lines={3000 - len(numbers)}")
    handler.close()


def test_a_reader_that_is_gone_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    handler = TickHandler(writer)
    handler.setFormatter(HumanFormatter())
    handler.handle(record())
    handler.flush()
    handler.close()
    os.close(writer)


def test_a_wrong_log_call_does_not_break_its_caller(pipe: tuple[int, int], capsys: pytest.CaptureFixture[str]) -> None:
    handler = TickHandler(pipe[1])
    handler.setFormatter(HumanFormatter())
    made = record("%d")
    made.args = ("not a number",)
    handler.handle(made)
    assert "Logging error" in capsys.readouterr().err


async def test_what_waits_is_written_at_the_end(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    handler = TickHandler(writer)
    handler.setFormatter(HumanFormatter())
    handler.handle(record("last words"))
    handler.flush()
    assert os.read(reader, PIPE_SIZE).decode().endswith("last words\n")
