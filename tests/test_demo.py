"""The demo's parts: what is refused, what an answer says, how the page is laid out."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import orjson
import pytest

import extproc
from extproc import cli
from extproc.demo.asking import Answer, Choice, Seen, read
from extproc.demo.page import Page
from extproc.demo.real import differences

USAGE = {"prompt_tokens": 3, "completion_tokens": 2}


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Page:
    """A page of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    return Page()


# -- the command line -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("--port 65536", "--port 65536: Port must be between 1 and 65535"),
        ("--kv-connector nixl", "--kv-connector is for --engine vllm"),
        ("--engine vllm-cpu --kv-connector nixl", "--kv-connector is for --engine vllm"),
        ("--engine vllm --engines-dir /tmp", "--engines-dir is for --engine vllm-cpu"),
    ],
)
def test_options_that_do_not_go_together(options: str, complaint: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["demo", *options.split()]) == 2
    assert capsys.readouterr().err == f"pd-extproc demo: error: {complaint}\n"


def test_real_engines_need_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(extproc, "__file__", str(tmp_path / "site-packages/extproc/__init__.py"))
    assert cli.main(["demo", "--engine", "vllm-cpu", "--engines-dir", str(tmp_path / "engines")]) == 2
    assert "run it from a checkout" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


# -- answers ----------------------------------------------------------------------------------------------------------


def seen(*events: object, status: int = 200, end: bool = True) -> Seen:
    """An answer in one piece, or, where there are several events, streamed."""
    if len(events) == 1:
        return Seen(status, {"Content-Type": "application/json"}, body=orjson.dumps(events[0]))
    lines = [orjson.dumps(event) for event in events] + [b"[DONE]"] * end
    body = b"".join(b"data: " + line + b"\n\n" for line in lines)
    return Seen(status, {"Content-Type": "text/event-stream; charset=utf-8"}, body=body)


def chunk(index: int, text: str, finish: str | None = None) -> dict[str, object]:
    return {"choices": [{"index": index, "delta": {"content": text}, "finish_reason": finish}]}


def test_an_answer_says_the_same_streamed_or_not():
    whole = seen(
        {
            "choices": [{"index": 0, "message": {"content": "ab"}, "finish_reason": "stop"}],
            "usage": USAGE | {"prompt_tokens_details": {"cached_tokens": 2}},
        }
    )
    streamed = seen(chunk(0, "a"), chunk(0, "b", "stop"), {"choices": [], "usage": USAGE})
    assert read(whole) == read(streamed) == Answer([Choice("ab", "stop")], USAGE)


def test_choices_come_by_their_indexes():
    texts = [{"index": 1, "text": "b", "finish_reason": "length"}, {"index": 0, "text": "a", "finish_reason": "stop"}]
    answer = Answer([Choice("a", "stop"), Choice("b", "length")], {})
    assert read(seen({"choices": texts})) == answer
    assert read(seen(chunk(1, "b", "length"), chunk(0, "a"), chunk(0, "", "stop"))) == answer


def test_what_failed_or_broke_off_says_nothing():
    assert read(seen({"error": {"message": "no"}}, status=500)) == Answer([], {})
    assert read(seen(chunk(0, "a"), chunk(0, "b", "stop"), end=False)) == Answer([], {})


@pytest.mark.parametrize(
    ("text", "kv", "fetched", "problems"),
    [
        ("a", "handed", 3, []),
        ("b", "handed", 3, ["the answers differ"]),
        ("a", "handed", 2, ["the KV cache was not fetched from the prefill worker"]),
        ("a", "recomputed", 3, ["the KV cache was not fetched from the prefill worker"]),
    ],
)
def test_what_real_engines_must_show(text: str, kv: str, fetched: int, problems: list[str]):
    ours, alone = (
        seen({"choices": [{"index": 0, "text": said, "finish_reason": "stop"}], "usage": USAGE}) for said in (text, "a")
    )
    ours.headers = {**ours.headers, "x-pd-kv": kv}
    assert differences(ours, alone, fetched) == problems


def test_two_servers_that_fail_alike_are_not_equal():
    failed = seen({"error": {}}, status=500)
    failed.headers = {"x-pd-kv": "handed"}
    assert differences(failed, failed, 5) == ['no answer: 500 {"error":{}}']


# -- the page ---------------------------------------------------------------------------------------------------------


def test_a_leg_shows_what_the_gateway_added_and_changed(page: Page, capsys: pytest.CaptureFixture[str]):
    sent = {"model": "m", "max_tokens": 1, "kv_transfer_params": {"a": True, "none": None}}
    page.leg("prefill leg", "http://w", sent, {"model": "m", "max_tokens": 9})
    marks = {line[6:].split()[0]: line[4] for line in capsys.readouterr().out.splitlines()[1:] if line}
    assert marks == {"model": " ", "max_tokens": "~", "kv_transfer_params": "+"}


def test_long_parameters_are_wrapped_and_an_answers_are_cut(page: Page, capsys: pytest.CaptureFixture[str]):
    params = {"remote_engine_id": "x" * 100, "nothing": None, **{f"number_{index}": index for index in range(9)}}
    page.leg("leg", "http://w", {"kv_transfer_params": params}, {}, {"kv_transfer_params": params})
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    wrapped, (answered,) = [line for line in lines if "◄" not in line], [line for line in lines if "◄" in line]
    text = " ".join(wrapped)
    assert "x" * 23 + "…" in text
    assert '"number_8":8}' in text
    assert "nothing" not in text
    assert answered.endswith("…}")


def test_columns_stand_side_by_side_and_wrap(page: Page, capsys: pytest.CaptureFixture[str]):
    page.beside("text", "a" * 40, "b" * 10)
    page.beside("header", "c" * 50)
    first, second, third = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"  text +(a+) +(b+)", first)
    assert first.count("a") + second.count("a") == 40
    assert "b" not in second
    assert third.count("c") == 50


def test_steps_are_told_in_their_order(page: Page, capsys: pytest.CaptureFixture[str]):
    page.steps(100.0, [(100.5, "late"), (None, "never"), (100.001, "early")])
    _, *steps = capsys.readouterr().out.splitlines()
    assert [line.split() for line in steps] == [
        ["0.0", "ms", "request", "sent"],
        ["1.0", "ms", "early"],
        ["500.0", "ms", "late"],
    ]


async def test_waiting_shows_signs_of_life(
    page: Page, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("extproc.demo.page._QUIET_SECONDS", 0.001)
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()

    def detail() -> str:
        loop.call_soon_threadsafe(asked.set)
        return "1 GB"

    async with page.waiting("installing", detail):
        await asked.wait()
        asked.clear()
        await asked.wait()  # so the first line has been printed
    assert re.fullmatch(r"  installing: \d+ s, 1 GB", capsys.readouterr().out.splitlines()[0])
