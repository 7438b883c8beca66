"""docs/grpc-requests.md says of each field, and of each status, what the code does."""

import re
from pathlib import Path

import grpc
import pytest

from extproc.engines.sglang import MOST_STOPS
from extproc.engines.status import CONSTRAINT_FAILED, CONSTRAINT_TRAILER, http_of
from extproc.engines.vllm import MOST_STOPS as MOST_STOPS_OF_VLLM
from extproc.generation import fields
from extproc.generation.native import DEFAULT_LIMIT as NATIVE_LIMIT
from extproc.generation.parse import DEFAULT_LIMIT
from extproc.handoff.grpc_rooms import RECEIVING_SECONDS, SGLANG_BITS, TOKENSPEED_BITS
from extproc.handoff.grpc_table import RpcHandoffs

TEXT = (Path(__file__).parent.parent / "docs/grpc-requests.md").read_text()
NO_FIELD = "what the engines have no field for"
WITHOUT_EFFECT = "what is without effect in Chat Completions"


def tables(title):
    """The tables of a section, each as rows of cells."""
    section = re.split(r"^## ", TEXT, flags=re.MULTILINE)
    (found,) = [part for part in section if part.startswith(title + "\n")]
    for table in re.findall(r"(?:^\|.*\n)+", found, flags=re.MULTILINE):
        yield [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()[2:]]


def kinds(rows):
    """The fields in the first column by what becomes of them, and the words there besides."""
    found = {"mapped": set(), "ignored": set(), "refused": set()}
    for names, what in rows:
        kind = "refused" if what.startswith("refused") else "ignored" if what.startswith("without") else "mapped"
        found[kind] |= set(re.findall(r"`([^`]+)`", names))
        if WITHOUT_EFFECT in names:
            found["ignored"] |= CHAT["ignored"] - {"parallel_tool_calls", "stream_reasoning"}
        if NO_FIELD in names:
            found["refused"] |= {row for row, why in fields.CHAT.refused.items() if "have no field" in why}
    return found


def of(rule):
    return {"mapped": set(rule.mapped), "ignored": set(rule.ignored), "refused": set(rule.refused)}


CHAT = kinds(next(tables("Chat Completions")))


def test_chat_completions():
    assert of(fields.CHAT) == CHAT


def test_completions_are_as_chat_but_for_what_is_said():
    own = kinds(next(tables("Completions")))
    named = set().union(*own.values())
    rule = fields.COMPLETIONS
    assert {name for name in rule.refused if name not in fields.CHAT.refused} <= named
    assert rule.mapped - fields.CHAT.mapped <= named
    assert own["refused"] - {"best_of"} <= rule.refused.keys()  # that depends on its value
    assert own["mapped"] <= rule.mapped
    assert rule.ignored <= CHAT["ignored"]
    shared = rule.mapped - own["mapped"] - {"best_of"}
    assert shared <= CHAT["mapped"]


def test_generate():
    top, sampling = [kinds(rows) for rows in tables("`/generate`")]
    assert of(fields.GENERATE) == top
    assert of(fields.SAMPLING_PARAMS) == sampling


@pytest.mark.parametrize("said", [f"{DEFAULT_LIMIT} unless said", f"{NATIVE_LIMIT} unless said"])
def test_limits_unless_said(said):
    assert said in TEXT


def test_other_numbers():
    assert f"up to {MOST_STOPS} strings, of vLLM {MOST_STOPS_OF_VLLM}" in TEXT
    assert f"no token after {RECEIVING_SECONDS:g} s" in TEXT
    assert f"SGLang's have {SGLANG_BITS} bits, because its message has no more; TokenSpeed's {TOKENSPEED_BITS}" in TEXT


def test_handoffs():
    (rows,) = tables("How the legs meet")
    said = {(row[1].strip("`"), "in turn" in row[2].split(",")[0]) for row in rows}
    assert said == {(handoff.name, handoff.in_turn) for handoff in RpcHandoffs()}
    assert len(rows) == len(list(RpcHandoffs()))


def test_statuses():
    (rows,) = tables("gRPC statuses")
    said = {}
    for names, status in rows:
        if "trailer" in names:
            assert f"`{CONSTRAINT_TRAILER.decode()}`" in names
            assert status.startswith(str(CONSTRAINT_FAILED))
        else:
            said |= dict.fromkeys(re.findall(r"`([^`]+)`", names), int(status[:3]))
    assert said == {code.name: http_of(code.value[0]) for code in grpc.StatusCode if code is not grpc.StatusCode.OK}
