"""Handoffs between gRPC servers: what both legs say, what a prefill's answer makes of the decode, and the orders."""

import dataclasses
import json

import pytest
from fakes import worker
from hypothesis import given
from hypothesis import strategies as st
from rpc_legs import PROTOS, abort_in, answer, request_in, response

from extproc.engines.frames import frame
from extproc.generation.asked import Generation
from extproc.generation.sampling import Sampling
from extproc.handoff.grpc import Sequences
from extproc.handoff.grpc_mooncake import MooncakeRpcHandoff
from extproc.handoff.grpc_rooms import RECEIVING_SECONDS, sglang_rooms, tokenspeed_rooms
from extproc.handoff.grpc_table import RpcHandoffs
from extproc.handoff.handoff import Kv, Plan
from extproc.workers.worker import MOONCAKE, NIXL, KvEngine, Role

GENERATION = Generation((1, 2, 3), Sampling(max_tokens=9), "chatcmpl-1", stream=True)
PREFILL = worker(Role.PREFILL, 1)
DECODE = worker(Role.DECODE, 2)
PARAMS = (
    '{"do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [1, 2], "remote_engine_id": "e", '
    '"remote_request_id": "r", "remote_host": "10.0.0.1", "remote_port": 5600, "of_a_newer_engine": [{}]}'
)
ROOMS = {"sglang": sglang_rooms, "tokenspeed": tokenspeed_rooms}


def vllm(connector, role=Role.PREFILL, **fields):
    return worker(role, 1 if role is Role.PREFILL else 2, runtime="vllm", kv_connector=connector, **fields)


def core(*ids, **fields):
    """A Mooncake prefill worker with these engine ids, in order of their ranks."""
    return vllm(MOONCAKE, kv_engines=tuple(KvEngine(rank, name) for rank, name in enumerate(ids)), **fields)


def ranked(made, rank, ranks):
    made.dp_rank, made.dp_size = rank, ranks
    return made


def vllm_handoff(connector, *, in_turn=False):
    prefill = core("e") if connector == MOONCAKE else vllm(connector)
    return RpcHandoffs(mooncake_in_turn=in_turn).of(prefill), prefill


def legs(runtime, plan):
    return request_in(runtime, plan.prefill), request_in(runtime, plan.decode)


# -- which -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prefill", "name", "in_turn"),
    [
        (worker(Role.PREFILL, 1, runtime="sglang"), "sglang", False),
        (worker(Role.PREFILL, 1, runtime="tokenspeed"), "tokenspeed", False),
        (vllm(NIXL), "nixl", True),
        (core("e"), "mooncake", False),
        (vllm(MOONCAKE), "mooncake", True),
        (vllm("LMCacheConnectorV1"), "passthrough", True),
        (vllm(""), "passthrough", True),
    ],
)
def test_which_handoff(prefill, name, in_turn):
    found = RpcHandoffs().of(prefill)
    assert (found.name, found.in_turn, found.engine.runtime) == (name, in_turn, prefill.runtime)


# -- rooms -----------------------------------------------------------------------------------------------------------


def place(runtime, request):
    return request.disaggregated_params if runtime == "sglang" else request.kv_bootstrap_info


@pytest.mark.parametrize("runtime", ROOMS)
@pytest.mark.parametrize("port", [None, 9000])
def test_both_legs_meet_in_one_room_of_the_prefill(runtime, port):
    handoff = ROOMS[runtime]()
    prefill = worker(Role.PREFILL, 1, runtime=runtime, bootstrap_port=port)
    plan = handoff.plan(GENERATION, prefill, DECODE)
    first, second = legs(runtime, plan)
    assert place(runtime, first) == place(runtime, second)
    found = place(runtime, first)
    assert (found.bootstrap_host, found.bootstrap_port) == ("127.0.0.1", port or 8998)
    assert (found.bootstrap_room,) == plan.rooms
    assert (first.stream, second.stream) == (False, True)
    assert first.request_id == second.request_id == plan.names[0]
    assert first.request_id.startswith("chatcmpl-1-")
    assert list(first.tokenized.input_ids) == list(second.tokenized.input_ids) == [1, 2, 3]
    assert first.sampling_params == second.sampling_params


@pytest.mark.parametrize(("runtime", "bits"), [("sglang", 31), ("tokenspeed", 63)])
def test_rooms_fit_the_protos_and_none_is_given_twice(runtime, bits, monkeypatch):
    draws = iter([5, 5, 0, 2**bits - 1])
    handoff, asked = ROOMS[runtime](), []

    def draw(wanted):
        if wanted != bits:
            return 1  # of a name
        asked.append(wanted)
        return next(draws)

    monkeypatch.setattr("random.getrandbits", draw)
    plans = [handoff.plan(GENERATION, PREFILL, None) for _ in range(2)]
    assert [plan.rooms for plan in plans] == [(5,), (2**bits - 1,)]
    assert handoff.live == 2
    for plan in plans:
        assert place(runtime, request_in(runtime, plan.decode)).bootstrap_room == plan.rooms[0]
        handoff.release(plan)
    assert handoff.live == 0


@given(st.integers(1, 64).flatmap(lambda ranks: st.tuples(st.integers(0, ranks - 1), st.just(ranks))))
def test_a_room_is_the_prefills_rank_modulo_their_number(rank_of):
    rank, ranks = rank_of
    prefill = ranked(worker(Role.PREFILL, 1), rank, ranks)
    for runtime, made in ROOMS.items():
        handoff = made()
        plan = handoff.plan(GENERATION, prefill, ranked(worker(Role.DECODE, 2), 3, 4))
        first, second = legs(runtime, plan)
        assert plan.rooms[0] % ranks == rank
        assert 0 < plan.rooms[0] < 2**31 or runtime == "tokenspeed"
        assert (first.data_parallel_rank, second.data_parallel_rank) == (rank, 3)


@pytest.mark.parametrize("runtime", ROOMS)
def test_a_plan_that_cannot_be_made_takes_no_room(runtime):
    handoff = ROOMS[runtime]()
    with pytest.raises((TypeError, ValueError)):
        handoff.plan(dataclasses.replace(GENERATION, ids=(-1,)), PREFILL, None)
    assert handoff.live == 0


@pytest.mark.parametrize("runtime", ROOMS)
def test_a_pair_of_rooms_needs_both(runtime):
    handoff = ROOMS[runtime]()
    assert handoff.alone(dataclasses.replace(GENERATION, sampling=Sampling(max_tokens=1)), PREFILL) is None
    assert not handoff.waivable
    assert (handoff.forgets(b"{}"), handoff.unpins(Plan(b"", b""))) == ((), ())
    assert handoff.hold(GENERATION) == 0


def test_who_may_be_ended_while_it_receives():
    assert {handoff.name: handoff.receiving for handoff in RpcHandoffs()} == {
        "sglang": 0.0,
        "nixl": 0.0,
        "mooncake": 0.0,
        "passthrough": 0.0,
        "tokenspeed": RECEIVING_SECONDS,
    }


@given(st.lists(st.integers(0, 20), min_size=2, max_size=30))
def test_no_name_begins_with_anothers(numbers):
    """SGLang's scheduler ends all requests whose names begin with the one that is to be ended."""
    handoff = sglang_rooms()
    names = []
    for number in numbers:
        generation = dataclasses.replace(GENERATION, name=f"r-{number}")
        names += handoff.plan(generation, PREFILL, None).names
    assert not any(one.startswith(other) for i, one in enumerate(names) for j, other in enumerate(names) if i != j)


def test_no_name_is_that_of_a_probe():
    plan = sglang_rooms().plan(dataclasses.replace(GENERATION, name="HEALTH_CHECK_1"), PREFILL, None)
    assert plan.names[0].startswith("_HEALTH_CHECK_1-")


# -- vLLM ------------------------------------------------------------------------------------------------------------


def test_nixl_prefills_first_and_relays_what_comes_back_byte_for_byte():
    handoff, prefill = vllm_handoff(NIXL)
    plan = handoff.plan(GENERATION, ranked(prefill, 1, 2), ranked(vllm(NIXL, Role.DECODE), 0, 4))
    first = request_in("vllm", plan.prefill)
    asked = json.loads(first.kv_transfer_params_json)
    assert (asked["do_remote_decode"], asked["do_remote_prefill"]) == (True, False)
    assert (first.sampling_params.max_tokens, first.stream, first.data_parallel_rank) == (1, False, 1)
    assert (plan.decode, plan.rank) == (b"", 0)
    sent = plan._replace(prefill=b"")  # the exchange lets go of the bodies
    handed = handoff.handed(GENERATION, sent, answer("vllm", kv_transfer_params_json=PARAMS))
    assert (handed.kv, handed.params) == (Kv.HANDED, PARAMS.encode())
    second = request_in("vllm", handed.decode)
    assert second.kv_transfer_params_json == PARAMS
    assert (second.request_id, second.data_parallel_rank) == (first.request_id, 0)
    assert (second.sampling_params.max_tokens, second.stream) == (9, True)


@pytest.mark.parametrize(
    "said",
    [
        answer("vllm"),
        answer("vllm", kv_transfer_params_json="null"),
        answer("vllm", kv_transfer_params_json="{"),
        answer("vllm", kv_transfer_params_json="[]"),
        answer("vllm", kv_transfer_params_json="{}"),
        answer("vllm", kv_transfer_params_json=PARAMS.replace("[1, 2]", "[]")),
        answer("vllm", kv_transfer_params_json=PARAMS.replace("remote_engine_id", "other")),
        b"\x00\x00",
        frame(b"\xff\xff"),
    ],
)
def test_what_a_decode_would_not_survive_is_not_relayed(said):
    handoff, prefill = vllm_handoff(NIXL)
    handed = handoff.handed(GENERATION, handoff.plan(GENERATION, prefill, None), said)
    assert (handed.kv, handed.params) == (Kv.RECOMPUTED, b"")
    assert not request_in("vllm", handed.decode).HasField("kv_transfer_params_json")


@pytest.mark.parametrize("connector", [NIXL, MOONCAKE, ""])
def test_a_decode_without_a_prefill_computes_all_that_is_asked_for(connector):
    handoff, _ = vllm_handoff(connector)
    generation = dataclasses.replace(GENERATION, prompt_logprobs=2)
    decode = ranked(worker(Role.DECODE, 2, runtime="vllm"), 1, 2)
    plan = Sequences(handoff, [generation]).unaided(decode)
    handed = handoff.handed(generation, plan, b"")
    found = request_in("vllm", handed.decode)
    assert ((found.request_id,), found.data_parallel_rank) == (plan.names, 1)
    assert handed.kv is Kv.RECOMPUTED
    assert found.sampling_params.prompt_logprobs == 2
    assert not found.HasField("kv_transfer_params_json")


def test_another_connector_is_asked_for_nothing_and_what_it_says_is_relayed():
    handoff, prefill = vllm_handoff("LMCacheConnectorV1")
    plan = handoff.plan(GENERATION, prefill, None)
    assert not request_in("vllm", plan.prefill).HasField("kv_transfer_params_json")
    handed = handoff.handed(GENERATION, plan, answer("vllm", kv_transfer_params_json='{"a": 1}'))
    assert (handed.kv, request_in("vllm", handed.decode).kv_transfer_params_json) == (Kv.HANDED, '{"a": 1}')
    handed = handoff.handed(GENERATION, plan, answer("vllm"))
    assert handed.kv is Kv.UNKNOWN
    assert not request_in("vllm", handed.decode).HasField("kv_transfer_params_json")


def test_prompt_log_probabilities_are_the_prefills():
    handoff, prefill = vllm_handoff(NIXL)
    generation = dataclasses.replace(GENERATION, prompt_logprobs=2, top_logprobs=1)
    plan = handoff.plan(generation, prefill, None)
    assert request_in("vllm", plan.prefill).sampling_params.prompt_logprobs == 2
    handed = handoff.handed(generation, plan, answer("vllm", kv_transfer_params_json=PARAMS))
    found = request_in("vllm", handed.decode).sampling_params
    assert (found.HasField("prompt_logprobs"), found.logprobs) == (False, 1)


@pytest.mark.parametrize("in_turn", [False, True])
def test_mooncake_legs_meet_under_an_id_of_ours(in_turn):
    handoff, prefill = vllm_handoff(MOONCAKE, in_turn=in_turn)
    assert (handoff.in_turn, handoff.lets_finish, handoff.pushes) == (in_turn, not in_turn, True)
    plan = handoff.plan(GENERATION, prefill, None)
    first, second = legs("vllm", plan)
    asked, told = json.loads(first.kv_transfer_params_json), json.loads(second.kv_transfer_params_json)
    transfer = asked["transfer_id"]
    assert transfer.startswith("xfer-")
    assert asked == {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer}
    assert told == {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_engine_id": "e",
        "remote_bootstrap_addr": "http://127.0.0.1:8998",
        "transfer_id": transfer,
    }
    assert json.loads(plan.params) == told
    assert handoff.plan(GENERATION, prefill, None).params != plan.params
    handed = handoff.handed(GENERATION, plan._replace(decode=b""), answer("vllm"))
    assert (handed.kv, request_in("vllm", handed.decode)) == (Kv.HANDED, second)


def test_mooncake_names_the_chosen_ranks_core():
    prefill = ranked(vllm(MOONCAKE, kv_engines=(KvEngine(1, "e_dp1"),), bootstrap_port=9000), 1, 2)
    first, second = legs("vllm", MooncakeRpcHandoff().plan(GENERATION, prefill, None))
    told = json.loads(second.kv_transfer_params_json)
    assert (told["remote_engine_id"], told["remote_bootstrap_addr"]) == ("e_dp1", "http://127.0.0.1:9000")
    assert first.data_parallel_rank == 1


def test_mooncake_of_several_cores_none_chosen_hands_nothing_over():
    handoff = MooncakeRpcHandoff()
    found = handoff.alone(GENERATION, core("e_dp0", "e_dp1"))
    assert (found.role, found.kv, found.unknown) == (Role.DECODE, Kv.RECOMPUTED, True)
    assert handoff.alone(GENERATION, vllm(MOONCAKE)).unknown  # only after a retry: see the table
    assert handoff.alone(GENERATION, core("e")) is None


def test_a_mooncake_that_reports_no_engine_id_is_told_the_former_parameters():
    prefill = vllm(MOONCAKE, bootstrap_port=9000)
    handoff = RpcHandoffs().of(prefill)
    plan = handoff.plan(GENERATION, prefill, ranked(vllm(MOONCAKE, Role.DECODE), 1, 2))
    assert not request_in("vllm", plan.prefill).HasField("kv_transfer_params_json")
    handed = handoff.handed(GENERATION, plan._replace(prefill=b"", decode=b""), answer("vllm"))
    found = request_in("vllm", handed.decode)
    assert (found.kv_transfer_params.remote_host, found.kv_transfer_params.remote_port) == ("127.0.0.1", 9000)
    assert (handed.kv, handed.params, found.data_parallel_rank) == (Kv.UNKNOWN, b"", 1)
    assert handoff.forgets(plan.params) == ()
    handed = handoff.handed(GENERATION, plan, answer("vllm", kv_transfer_params_json=PARAMS))
    assert request_in("vllm", handed.decode).kv_transfer_params_json == PARAMS


@pytest.mark.parametrize("connector", [NIXL, MOONCAKE, ""])
@pytest.mark.parametrize(("limit", "role"), [(0, Role.PREFILL), (1, Role.PREFILL), (2, None), (None, None)])
def test_an_answer_of_one_token_ends_with_the_prefill(connector, limit, role):
    handoff, prefill = vllm_handoff(connector)
    generation = dataclasses.replace(GENERATION, sampling=Sampling(max_tokens=limit), prompt_logprobs=1)
    found = handoff.alone(generation, prefill)
    assert (found and found.role) == role
    sent = request_in("vllm", handoff.single(generation, ranked(prefill, 1, 2)).decode)
    assert (sent.sampling_params.prompt_logprobs, sent.stream, sent.data_parallel_rank) == (1, True, 1)


# -- orders ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("runtime", ["sglang", "tokenspeed", "vllm"])
def test_both_legs_are_ended_by_their_name(runtime):
    prefill = worker(Role.PREFILL, 1, runtime=runtime, kv_connector=NIXL if runtime == "vllm" else "")
    handoff = RpcHandoffs().of(prefill)
    plan = handoff.plan(GENERATION, prefill, None)
    (order,) = handoff.aborts(plan)
    path, found = abort_in(runtime, order)
    assert path == handoff.engine.abort_path
    assert (list(found.request_ids) if runtime == "vllm" else [found.request_id]) == list(plan.names)
    assert not handoff.aborts(Plan(b"", b""))


@pytest.mark.parametrize("connector", [NIXL, MOONCAKE, ""])
@pytest.mark.parametrize("params", [PARAMS.encode(), b"null"])
def test_a_decode_has_a_cache_freed_by_refusing_a_request(connector, params):
    handoff, _ = vllm_handoff(connector)
    ((path, body),) = handoff.forgets(params)
    found = request_in("vllm", body)
    assert path == handoff.engine.generate_path
    assert found.kv_transfer_params_json == params.decode()
    assert (found.sampling_params.HasField("max_tokens"), found.sampling_params.max_tokens) == (True, 0)
    assert not handoff.forgets(b"")


def test_mooncakes_prefill_is_given_something_to_send():
    handoff, prefill = vllm_handoff(MOONCAKE)
    plan = handoff.plan(GENERATION, prefill, None)
    ((_, body),) = handoff.unpins(plan)
    found = request_in("vllm", body)
    assert json.loads(found.kv_transfer_params_json)["transfer_id"] == json.loads(plan.params)["transfer_id"]
    assert (found.sampling_params.max_tokens, found.sampling_params.ignore_eos) == (1, True)
    assert list(found.tokenized.input_ids) == [0]
    nixl, prefill = vllm_handoff(NIXL)
    assert nixl.unpins(nixl.plan(GENERATION, prefill, None)) == ()


# -- answers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("runtime", ["sglang", "tokenspeed", "vllm"])
def test_whether_a_prefill_that_ended_well_failed_all_the_same(runtime):
    handoff = RpcHandoffs().of(worker(Role.PREFILL, 1, runtime=runtime))
    good = answer(runtime)
    assert not handoff.failed(good)
    assert not handoff.failed(answer(runtime, finish_reason="stop"))
    assert handoff.failed(answer(runtime, finish_reason="abort"))
    assert handoff.failed(answer(runtime, finish_reason="error"))
    assert handoff.failed(b"")
    assert handoff.failed(frame(b"\xff"))
    chunk = frame(response(runtime, chunk=PROTOS[runtime].GenerateStreamChunk(token_ids=[1])))
    assert handoff.failed(chunk), "no end"
    assert not handoff.failed(chunk + good)
    assert handoff.failed(good[:-1]), "cut short"
    assert handoff.failed(b"\x01" + good[1:]), "compressed, though that was not offered"


# -- for the exchange ------------------------------------------------------------------------------------------------


def test_sequences_are_a_handoff_part_by_part():
    other = dataclasses.replace(GENERATION, ids=(7,), name="chatcmpl-2")
    handoff = sglang_rooms()
    whole = Sequences(handoff, [GENERATION, other])
    assert (whole.name, whole.path, whole.in_turn) == ("sglang", handoff.engine.generate_path, False)
    plans = [whole.part(index).plan(None, PREFILL, decode=DECODE) for index in range(2)]
    assert [list(request_in("sglang", plan.decode).tokenized.input_ids) for plan in plans] == [[1, 2, 3], [7]]
    assert whole.live == 2
    for plan in plans:
        whole.release(plan)
    assert whole.live == 0
    assert whole.part(1).part(0).plan(None, PREFILL).names[0].startswith("chatcmpl-2-")


@pytest.mark.parametrize(
    ("limits", "connector", "role"),
    [
        ([1, 1], NIXL, Role.PREFILL),
        ([1, 9], NIXL, None),
        ([9, 1], NIXL, None),
        ([1, 1], MOONCAKE, Role.PREFILL),
        ([1, 9], MOONCAKE, Role.DECODE),
    ],
)
def test_a_prefill_worker_answers_alone_only_if_it_does_so_for_all(limits, connector, role):
    handoff, _ = vllm_handoff(connector)
    prefill = core("e_dp0", "e_dp1") if connector == MOONCAKE else vllm(connector)
    parts = [dataclasses.replace(GENERATION, sampling=Sampling(max_tokens=limit)) for limit in limits]
    found = Sequences(handoff, parts).alone(None, prefill)
    assert (found and found.role) == role


def test_sequences_hand_over_part_by_part():
    handoff, prefill = vllm_handoff(NIXL)
    whole = Sequences(handoff, [GENERATION])
    plan = whole.plan(None, prefill)
    handed = whole.handed(None, plan, None, answer("vllm", kv_transfer_params_json=PARAMS), trust_client=False)
    assert handed.kv is Kv.HANDED
    assert whole.alone(None, prefill) is None
    assert not whole.named_by_client(None)
    assert whole.hold(None) == handoff.hold(GENERATION) > 0
    assert (whole.failed(b""), whole.receiving, whole.prefixes_ids) == (True, 0.0, False)
    assert whole.aborts(plan) == handoff.aborts(plan)
    assert request_in("vllm", whole.single(prefill).decode).stream
