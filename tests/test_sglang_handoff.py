"""The SGLang handoff: rooms, and the bodies of both legs."""

import json

import pytest
from fakes import worker

from extproc.apis.request import InferenceRequest
from extproc.apis.table import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from extproc.handoff import sglang
from extproc.workers.worker import Role, WorkerUrl


def read(api, **fields):
    return InferenceRequest.read(api, json.dumps(fields).encode())


def chat(**fields):
    return read(CHAT, messages=[], **fields)


PREFILL = worker(Role.PREFILL, 1, bootstrap_port=8998)


def test_rooms_are_63_bits_and_never_two_alike(monkeypatch):
    draws = iter([5, 5, 0, 7, 5, 7, 0, 2**63 - 1])  # in room 0 the real decode never answers
    asked = []
    monkeypatch.setattr("random.getrandbits", lambda bits: asked.append(bits) or next(draws))
    rooms = sglang.Rooms()
    assert rooms.mint(2) == (5, 7)
    assert rooms.mint(1) == (2**63 - 1,)
    assert set(asked) == {63}
    rooms.release((5, 7))
    assert len(rooms) == 1


def test_both_legs_get_the_same_bytes_plus_the_bootstrap_fields():
    request = chat(model="tiny", temperature=0)
    legs = sglang.plan(request, PREFILL, (42,), "name")
    assert legs.prefill == legs.decode
    assert legs.decode == request.body.raw[:-1] + (
        b',"bootstrap_host":"127.0.0.1","bootstrap_port":8998,"bootstrap_room":42,"rid":"name"}'
    )


def test_a_batch_gets_a_room_for_every_prompt():
    request = read(COMPLETIONS, prompt=["a", "b", "c"])
    body = json.loads(sglang.plan(request, PREFILL, (1, 2, 3), "name").decode)
    assert body["bootstrap_host"] == ["127.0.0.1"] * 3
    assert body["bootstrap_port"] == [8998] * 3
    assert body["bootstrap_room"] == [1, 2, 3]
    assert sglang.abortable_rids(request, "name") == ["name_0", "name_1", "name_2"]


def test_the_prefill_leg_is_never_streamed():
    request = chat(stream=True, stream_options={"include_usage": True})
    legs = sglang.plan(request, PREFILL, (1,), "name")
    prefill, decode = json.loads(legs.prefill), json.loads(legs.decode)
    assert prefill["stream"] is False
    assert "stream_options" not in prefill
    assert decode["stream"] is True
    assert decode["stream_options"] == {"include_usage": True}


def test_a_port_that_is_not_known_is_null_and_left_to_the_engine():
    body = json.loads(sglang.plan(chat(), worker(Role.PREFILL, 1), (1,), None).decode)
    assert body["bootstrap_port"] is None
    assert "rid" not in body


def test_an_ipv6_host_is_in_brackets():
    prefill = worker(Role.PREFILL, 1, bootstrap_port=8998)
    prefill.url = WorkerUrl.parse("http://[::1]:8000")
    assert json.loads(sglang.plan(chat(), prefill, (1,), None).decode)["bootstrap_host"] == "[::1]"


CLIENTS_OWN = {
    "bootstrap_host": "evil",
    "bootstrap_port": 1,
    "bootstrap_room": 2**63,
    "kv_transfer_params": {"x": 1},
    "routed_dp_rank": 7,
    "disagg_prefill_dp_rank": 7,
    "data_parallel_rank": 7,
    "bootstrap_pair_key": "k",
}


def test_a_clients_control_fields_are_removed():
    body = json.loads(sglang.plan(chat(**CLIENTS_OWN), PREFILL, (9,), None).decode)
    assert body == {"messages": [], "bootstrap_host": "127.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 9}


def test_a_trusted_clients_ranks_stay_but_the_meeting_place_is_ours():
    body = json.loads(sglang.plan(chat(**CLIENTS_OWN), PREFILL, (9,), None, trust_client=True).decode)
    assert body["bootstrap_room"] == 9
    assert body["bootstrap_host"] == "127.0.0.1"
    assert body["routed_dp_rank"] == 7
    assert body["kv_transfer_params"] == {"x": 1}
    assert "bootstrap_pair_key" not in body


def test_edits_reach_both_legs():
    legs = sglang.plan(chat(n=2, seed=5), PREFILL, (9,), "r", edits={"n": b"1", "seed": b"6"})
    for leg in (legs.prefill, legs.decode):
        assert json.loads(leg) | {"n": 1, "seed": 6, "rid": "r"} == json.loads(leg)


@pytest.mark.parametrize(("api", "key"), [(RESPONSES, "request_id"), (CHAT, "rid")])
def test_each_api_names_requests_by_its_own_key(api, key):
    request = read(api, messages=[], input="x")
    assert json.loads(sglang.plan(request, PREFILL, (1,), "name").decode)[key] == "name"


def test_messages_cannot_be_named():
    assert MESSAGES.rid_key is None


@pytest.mark.parametrize(
    ("body", "aborted"),
    [
        (b'{"choices":[{"finish_reason":"abort"}]}', True),
        (b'{"meta_info":{"finish_reason": {"type": "abort", "message": "x"}}}', True),
        (b'[{"meta_info":{"finish_reason":null}},{"meta_info":{"finish_reason":{"type":"abort"}}}]', True),
        (b'{"choices":[{"finish_reason":"length"}]}', False),
        (json.dumps({"text": '"finish_reason":"abort"', "finish_reason": "stop"}).encode(), False),
        (b'{"choices":[{"message":{"content":"abort"},"finish_reason":"stop"}]}', False),
    ],
)
def test_an_aborted_answer_is_seen(body, aborted):
    assert sglang.answer_is_aborted(body) is aborted


def test_names_are_all_of_one_length_so_that_none_begins_another():
    assert {len(sglang.new_rid()) for _ in range(200)} == {32}
