"""The SGLang handoff: rooms, and the bodies of both legs."""

import json

import pytest
from fakes import worker

from extproc.apis.json_object import Edits, LegEdits
from extproc.apis.request import InferenceRequest
from extproc.apis.table import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from extproc.handoff import sglang
from extproc.workers.worker import Role, Worker, WorkerUrl


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


def plan(request, prefill=PREFILL, edits=None, **options):
    return sglang.SglangHandoff().plan(request, prefill, both(edits or {}), **options)


def both(edits):
    """The same edits for both legs."""
    return LegEdits(Edits(edits), Edits(edits))


def test_both_legs_get_the_same_bytes_plus_the_bootstrap_fields():
    request = chat(model="tiny", temperature=0)
    made = plan(request)
    assert made.prefill == made.decode
    expected = b',"bootstrap_host":"127.0.0.1","bootstrap_port":8998,"bootstrap_room":%d,"rid":"%b"}'
    assert made.decode == request.body.raw[:-1] + expected % (made.rooms[0], made.names[0].encode())


def test_rooms_are_taken_until_the_plan_is_released():
    handoff = sglang.SglangHandoff()
    made = handoff.plan(read(COMPLETIONS, prompt=["a", "b"]), PREFILL)
    assert handoff.live == len(set(made.rooms)) == 2
    handoff.release(made)
    assert handoff.live == 0


def test_a_plan_that_cannot_be_made_takes_no_room():
    handoff = sglang.SglangHandoff()
    with pytest.raises(TypeError):
        handoff.plan(chat(), PREFILL, both({"n": None}))
    assert handoff.live == 0


def test_a_batch_gets_a_room_for_every_prompt():
    made = plan(read(COMPLETIONS, prompt=["a", "b", "c"]))
    body = json.loads(made.decode)
    assert body["bootstrap_host"] == ["127.0.0.1"] * 3
    assert body["bootstrap_port"] == [8998] * 3
    assert body["bootstrap_room"] == list(made.rooms)
    assert len(set(made.rooms)) == 3
    assert list(made.names) == [f"{body['rid']}_{i}" for i in range(3)]


def test_legs_are_ended_by_name():
    handoff = sglang.SglangHandoff()
    made = handoff.plan(read(COMPLETIONS, prompt=["a", "b"]), PREFILL)
    rid = json.loads(made.decode)["rid"]
    ends = [(path, json.loads(body)) for path, body in handoff.aborts(made)]
    assert ends == [(b"/abort_request", {"rid": f"{rid}_0"}), (b"/abort_request", {"rid": f"{rid}_1"})]
    assert len(handoff.aborts(handoff.plan(read(COMPLETIONS, prompt=["a"] * 500), PREFILL))) == sglang.MAX_ABORTS


def test_the_prefill_leg_is_never_streamed():
    made = plan(chat(stream=True, stream_options={"include_usage": True}))
    prefill, decode = json.loads(made.prefill), json.loads(made.decode)
    assert prefill["stream"] is False
    assert "stream_options" not in prefill
    assert decode["stream"] is True
    assert decode["stream_options"] == {"include_usage": True}


def test_a_port_that_is_not_known_is_null_and_left_to_the_engine():
    assert json.loads(plan(chat(), worker(Role.PREFILL, 1)).decode)["bootstrap_port"] is None


def test_an_ipv6_host_is_in_brackets():
    prefill = Worker(id="p", url=WorkerUrl.parse("http://[::1]:8000"), role=Role.PREFILL, bootstrap_port=8998)
    assert json.loads(plan(chat(), prefill).decode)["bootstrap_host"] == "[::1]"


def test_a_bootstrap_host_of_its_own():
    prefill = worker(Role.PREFILL, 1, bootstrap_port=8998, bootstrap_host="rdma0.prefill")
    bodies = plan(chat(), prefill)
    assert {json.loads(body)["bootstrap_host"] for body in (bodies.prefill, bodies.decode)} == {"rdma0.prefill"}


CLIENTS_OWN = {
    "bootstrap_host": "evil",
    "bootstrap_port": 1,
    "bootstrap_room": 2**63,
    "kv_transfer_params": {"x": 1},
    "routed_dp_rank": 7,
    "disagg_prefill_dp_rank": 7,
    "data_parallel_rank": 7,
    "bootstrap_pair_key": "k",
    "decode_tp_size": 2,
    "encoder_urls": ["http://10.0.0.1"],
    "http_worker_ipc": "x",
    "need_wait_for_mm_inputs": True,
    "num_items_assigned": [1],
}


def test_a_clients_control_fields_are_removed():
    made = plan(chat(**CLIENTS_OWN))
    assert json.loads(made.decode) == {
        "messages": [],
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": 8998,
        "bootstrap_room": made.rooms[0],
        "rid": made.names[0],
    }


def test_a_trusted_clients_ranks_stay_but_the_meeting_place_is_ours():
    made = plan(chat(**CLIENTS_OWN), trust_client=True)
    body = json.loads(made.decode)
    assert body["bootstrap_room"] == made.rooms[0]
    assert body["bootstrap_host"] == "127.0.0.1"
    assert body["routed_dp_rank"] == 7
    assert body["kv_transfer_params"] == {"x": 1}
    assert "bootstrap_pair_key" not in body


def test_edits_reach_both_legs():
    made = plan(chat(n=2, seed=5), edits={"n": b"1", "seed": b"6"})
    for leg in (made.prefill, made.decode):
        assert json.loads(leg) | {"n": 1, "seed": 6, "rid": made.names[0]} == json.loads(leg)


@pytest.mark.parametrize(("api", "key", "start"), [(RESPONSES, "request_id", "resp_"), (CHAT, "rid", "")])
def test_each_api_names_requests_by_its_own_key(api, key, start):
    made = plan(read(api, messages=[], input="x"))
    assert json.loads(made.decode)[key] == made.names[0]
    assert made.names[0].startswith(start)


def test_messages_cannot_be_named_and_a_clients_name_is_left_alone():
    assert list(plan(read(MESSAGES, messages=[])).names) == []
    made = plan(chat(rid="theirs"))
    assert list(made.names) == []
    assert json.loads(made.decode)["rid"] == "theirs"


def test_a_clients_name_with_a_samples_number_is_ours_to_end():
    made = plan(chat(rid="theirs", n=2), edits={"n": b"1", "rid": b'"theirs_1"'})
    assert list(made.names) == ["theirs_1"]
    assert json.loads(made.decode)["rid"] == "theirs_1"


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
    assert sglang.SglangHandoff().failed(body) is aborted


def test_names_are_all_of_one_length_so_that_none_begins_another():
    assert {len(plan(chat()).names[0]) for _ in range(200)} == {32}
