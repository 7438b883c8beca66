"""vLLM's handoffs: the legs' bodies, what a prefill's answer makes of the decode, and the orders."""

import json

import pytest
from fakes import ranks, worker
from hypothesis import given
from hypothesis import strategies as st

from extproc.apis.json_object import NO_EDITS
from extproc.apis.request import InferenceRequest
from extproc.apis.table import CHAT, COMPLETIONS, INFERENCE_GENERATE, MESSAGES, RESPONSES
from extproc.errors import GatewayError
from extproc.handoff.handoff import Kv
from extproc.handoff.mooncake import MooncakeHandoff
from extproc.handoff.nixl import NixlHandoff
from extproc.handoff.passthrough import PassthroughHandoff
from extproc.handoff.table import Handoffs
from extproc.workers.worker import MOONCAKE, NIXL, KvEngine, Role, WorkerUrl

NIXL_HANDOFF = NixlHandoff()
PREFILL = worker(Role.PREFILL, 1, runtime="vllm", kv_connector=NIXL)
PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [1, 2],
    "remote_engine_id": "e",
    "remote_request_id": "r",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
}


def read(api=CHAT, **fields):
    prompt = {CHAT: {"messages": []}, COMPLETIONS: {"prompt": "a"}, MESSAGES: {"messages": []}}
    return InferenceRequest.read(api, json.dumps({**prompt.get(api, {"input": "a"}), **fields}).encode())


def core(*ids, **fields):
    """A Mooncake prefill worker with these engine ids, in order of their ranks."""
    engines = tuple(KvEngine(rank, name) for rank, name in enumerate(ids))
    return worker(Role.PREFILL, 1, runtime="vllm", kv_connector=MOONCAKE, kv_engines=engines, **fields)


def handed(answer, handoff=NIXL_HANDOFF, request=None, **options):
    request = request or read()
    plan = handoff.plan(request, PREFILL)
    return handoff.handed(request, plan, NO_EDITS, answer, **options)


# -- which -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("runtime", "connector", "name"),
    [
        ("vllm", NIXL, "nixl"),
        ("vllm", MOONCAKE, "mooncake"),
        ("vllm", "LMCacheConnectorV1", "passthrough"),
        ("vllm", "", "passthrough"),
        ("sglang", "", "sglang"),
        ("sglang", NIXL, "sglang"),  # there the word means a transfer backend
    ],
)
def test_the_prefills_engine_and_connector_say_which_handoff(runtime, connector, name):
    assert Handoffs().of(worker(Role.PREFILL, 1, runtime=runtime, kv_connector=connector)).name == name


@pytest.mark.parametrize("in_turn", [True, False])
def test_mooncakes_legs_go_as_the_operator_says(in_turn):
    handoff = Handoffs(mooncake_in_turn=in_turn).of(core("e"))
    assert handoff.in_turn is in_turn
    assert handoff.lets_finish is not in_turn  # a decode that waits for the prefill would wait for ever


# -- NIXL ------------------------------------------------------------------------------------------------------------


def test_nixls_prefill_asks_for_remote_decode_and_all_that_older_engines_want():
    plan = NIXL_HANDOFF.plan(read(stream=True, max_tokens=50), PREFILL)
    body = json.loads(plan.prefill)
    assert body["kv_transfer_params"] == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    assert (body["stream"], body["max_tokens"]) == (False, 1)
    assert (plan.decode, plan.params) == (b"", b"")


def test_the_decode_is_the_clients_request_plus_the_parameters():
    request = InferenceRequest.read(CHAT, b'{ "messages" : [ ],  "temperature":0.10 , "stream":true}')
    params = json.dumps(PARAMS).encode()
    made = handed(b'{"kv_transfer_params":%b}' % params, request=request)
    assert made.kv is Kv.HANDED
    assert made.params == params
    assert made.decode == b'{ "messages" : [ ],  "temperature":0.10 , "stream":true,"kv_transfer_params":%b}' % params


SPACED = (
    b'{ "do_remote_prefill" : true,\n "remote_block_ids": [ [1,2], [] ],"remote_engine_id":"\\u00e4",'
    b'"remote_request_id":"r","remote_host":"h","remote_port":5600, "tp_size":1e0 , "new":{"deep":[null,1.50]}}'
)
LARGE = (
    b'{"remote_block_ids":[18446744073709551615,9223372036854775807],"do_remote_prefill":true,"remote_engine_id":"e",'
    b'"remote_request_id":"r","remote_host":"h","remote_port":1,"remote_num_tokens":12345678901234567890}'
)


@pytest.mark.parametrize("raw", [SPACED, LARGE])
@pytest.mark.parametrize(
    "frame", [b'{"kv_transfer_params":%b}', b'{"id":"x", "kv_transfer_params"\t:\n %b , "b":[{}]}']
)
def test_parameters_are_relayed_byte_for_byte(raw, frame):
    made = handed(frame % raw)
    assert made.params == raw
    assert made.decode.endswith(b',"kv_transfer_params":%b}' % raw)


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=8),
        st.recursive(
            st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=8),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
            max_leaves=8,
        ),
        max_size=6,
    ),
    st.sampled_from([None, 1, " "]),
    st.booleans(),
)
def test_whatever_else_is_in_them_is_relayed(more, indent, ascii_only):
    raw = json.dumps({**more, **PARAMS}, indent=indent, ensure_ascii=ascii_only).encode()
    assert handed(b'{"choices":[],"kv_transfer_params":%b}' % raw).params == raw


@pytest.mark.parametrize("key", [key for key in PARAMS if key.startswith("remote_")])
@pytest.mark.parametrize("how", ["missing", "null"])
def test_incomplete_parameters_reach_no_decode(key, how):
    params = {k: v for k, v in PARAMS.items() if k != key} | ({key: None} if how == "null" else {})
    made = handed(json.dumps({"kv_transfer_params": params}).encode())
    assert (made.kv, made.params) == (Kv.RECOMPUTED, b"")
    assert "kv_transfer_params" not in json.loads(made.decode)


@pytest.mark.parametrize(
    "answer",
    [
        b"{}",
        b'{"kv_transfer_params":null}',
        b'{"kv_transfer_params":"x"}',
        b'{"kv_transfer_params":[]}',
        b"<html>",
        b"[1]",
        b"null",
        b"\xff",
        json.dumps({"kv_transfer_params": PARAMS | {"remote_block_ids": []}}).encode(),  # a whole prefix-cache hit
        json.dumps({"choices": [{"kv_transfer_params": PARAMS}]}).encode(),
    ],
)
def test_what_names_no_cache_has_it_recomputed(answer):
    made = handed(answer)
    assert (made.kv, made.params) == (Kv.RECOMPUTED, b"")
    assert "kv_transfer_params" not in json.loads(made.decode)


def test_without_a_prefill_the_decode_is_the_clients_request():
    request = read(stream=True)
    made = handed(b"", request=request)
    assert (made.kv, made.decode) == (Kv.RECOMPUTED, request.body.raw)


# -- what a client must not send ---------------------------------------------------------------------------------------

CLIENTS = {"kv_transfer_params": {"remote_host": "evil"}, "bootstrap_host": "evil", "data_parallel_rank": 7}


@pytest.mark.parametrize("handoff", [NIXL_HANDOFF, PassthroughHandoff(), MooncakeHandoff()])
@pytest.mark.parametrize("trust", [True, False])
def test_a_clients_parameters_reach_no_leg(handoff, trust):
    request = read(**CLIENTS)
    prefill = core("e")
    plan = handoff.plan(request, prefill, trust_client=trust)
    bodies = [plan.prefill]
    if handoff.in_turn:
        bodies += [handoff.handed(request, plan, NO_EDITS, b, trust_client=trust).decode for b in (b"", b"{}")]
    else:
        bodies.append(plan.decode)
    for body in bodies:
        assert b"remote_host" not in body.replace(b'"remote_host":null', b"")
        assert ("bootstrap_host" in json.loads(body)) is trust  # means nothing to vLLM


@pytest.mark.parametrize("transfer", ["kv_transfer_params", "ec_transfer_params"])
@pytest.mark.parametrize("api", [CHAT, COMPLETIONS, RESPONSES])
def test_parameters_hidden_in_vllm_xargs_are_refused(api, transfer):
    with pytest.raises(GatewayError) as refused:
        read(api, vllm_xargs={transfer: {}})
    assert (refused.value.status, refused.value.param) == (400, f"vllm_xargs.{transfer}")


@pytest.mark.parametrize("transfer", ["kv_transfer_params", "ec_transfer_params"])
def test_parameters_hidden_in_extra_args_are_refused(transfer):
    body = {"token_ids": [1], "sampling_params": {"extra_args": {transfer: None}}}
    with pytest.raises(GatewayError) as refused:
        InferenceRequest.read(INFERENCE_GENERATE, json.dumps(body).encode())
    assert (refused.value.status, refused.value.param) == (400, f"sampling_params.extra_args.{transfer}")


@pytest.mark.parametrize("value", [None, [], "kv_transfer_params", {"mine": {"kv_transfer_params": 1}}])
def test_other_things_there_are_the_engines_business(value):
    assert read(vllm_xargs=value).body.get("vllm_xargs") == value


@pytest.mark.parametrize(
    "raw",
    [
        b'{"messages":[],"vllm_xargs":{},"vllm_xargs":{"kv_transfer_params":{}}}',
        b'{"messages":[],"vllm_\\u0078args":{"kv_transfer_params":{}}}',
        b'{"messages":[],"vllm_xargs":{"kv_transfer_\\u0070arams":{}}}',
    ],
)
def test_no_spelling_hides_them(raw):
    with pytest.raises(GatewayError):
        InferenceRequest.read(CHAT, raw)


# -- Mooncake --------------------------------------------------------------------------------------------------------


def test_mooncakes_legs_share_an_id_and_the_decode_is_told_where():
    plan = MooncakeHandoff().plan(read(), core("engine-a", bootstrap_port=9100))
    prefill, decode = (json.loads(body)["kv_transfer_params"] for body in (plan.prefill, plan.decode))
    transfer = prefill["transfer_id"]
    assert prefill == {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer}
    assert decode == {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_engine_id": "engine-a",
        "remote_bootstrap_addr": "http://127.0.0.1:9100",
        "transfer_id": transfer,
    }
    assert json.loads(plan.params) == decode


def test_every_attempt_has_its_own_transfer():
    handoff, request, prefill = MooncakeHandoff(), read(), core("e")
    made = {json.loads(handoff.plan(request, prefill).params)["transfer_id"] for _ in range(50)}
    assert len(made) == 50


@pytest.mark.parametrize(
    ("host", "port", "address"),
    [
        ("::1", 9000, "http://[::1]:9000"),
        ("fe80::2", None, "http://[fe80::2]:8998"),
        ("prefill.example", None, "http://prefill.example:8998"),
    ],
)
def test_bootstrap_addresses(host, port, address):
    prefill = core("e", bootstrap_port=port)
    prefill.bootstrap_host = WorkerUrl("http", host, 8000).bracketed_host
    plan = MooncakeHandoff().plan(read(), prefill)
    assert json.loads(plan.params)["remote_bootstrap_addr"] == address


def test_with_several_engine_cores_the_decode_is_alone():
    alone = MooncakeHandoff().alone(read(), core("e_dp0", "e_dp1"))
    assert (alone.role, alone.kv, alone.unknown) == (Role.DECODE, Kv.RECOMPUTED, True)
    assert "--dp-aware" in alone.why


def test_a_response_whose_rank_nobody_can_choose_is_left_to_the_decode():
    engines = (KvEngine(0, "e_dp0"), KvEngine(1, "e_dp1"))
    prefill, _ = ranks(Role.PREFILL, 1, 2, runtime="vllm", kv_connector=MOONCAKE, kv_engines=engines)
    whole = core("e")
    response = read(RESPONSES, input="Say hi")
    assert MooncakeHandoff().alone(response, prefill).kv is Kv.RECOMPUTED
    assert MooncakeHandoff().alone(response, whole) is None
    assert MooncakeHandoff().alone(read(), prefill) is None
    assert NIXL_HANDOFF.alone(response, prefill) is None  # the prefill's answer says where its cache is


def test_without_an_engine_id_the_decode_is_alone():
    alone = MooncakeHandoff().alone(read(), core())
    assert (alone.role, alone.kv) == (Role.DECODE, Kv.RECOMPUTED)
    assert "engine id" in alone.why
    assert MooncakeHandoff().alone(read(), core("e")) is None


def test_in_turn_the_decode_is_told_what_was_planned():
    handoff, request = MooncakeHandoff(in_turn=True), read()
    plan = handoff.plan(request, core("e"))
    made = handoff.handed(request, plan, NO_EDITS, b"{}")
    assert (made.kv, made.params) == (Kv.HANDED, b"")
    assert json.loads(made.decode)["kv_transfer_params"] == json.loads(plan.params)
    waived = handoff.handed(request, plan, NO_EDITS, b"")
    assert (waived.kv, waived.params, waived.decode) == (Kv.RECOMPUTED, b"", request.body.raw)


def test_a_waiting_decode_is_freed_by_another_prompt_under_the_same_transfer():
    handoff = MooncakeHandoff()
    plan = handoff.plan(read(), core("e"))
    ((path, body),) = handoff.unpins(plan)
    order = json.loads(body)
    assert path == b"/v1/completions"
    assert order["kv_transfer_params"] == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "transfer_id": json.loads(plan.params)["transfer_id"],
    }
    assert order["max_tokens"] == 1


# -- a shared store --------------------------------------------------------------------------------------------------


def test_passthrough_says_nothing_and_relays_what_comes_back():
    handoff = PassthroughHandoff()
    plan = handoff.plan(read(max_tokens=9), PREFILL)
    assert "kv_transfer_params" not in json.loads(plan.prefill)
    assert json.loads(plan.prefill)["max_tokens"] == 1
    odd = b'{ "disagg_spec":{"receiver_id":1e0}}'
    made = handed(b'{"kv_transfer_params":%b}' % odd, handoff)
    assert (made.kv, made.params) == (Kv.HANDED, odd)
    made = handed(b"{}", handoff)
    assert (made.kv, made.params) == (Kv.UNKNOWN, b"")
    assert handed(b"", handoff).kv is Kv.RECOMPUTED


# -- orders and failures ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("handoff", [NIXL_HANDOFF, PassthroughHandoff(), MooncakeHandoff()])
def test_a_decode_is_made_to_refuse_what_is_to_be_freed(handoff):
    assert handoff.forgets(b"") == []
    ((path, body),) = handoff.forgets(SPACED)
    assert path == b"/v1/completions"
    assert b'"kv_transfer_params":' + SPACED in body
    assert json.loads(body)["max_tokens"] < 0  # refused only where the parameters are known already
    assert handoff.aborts(handoff.plan(read(), core("e"))) == ()  # the closed connection is enough


@pytest.mark.parametrize(
    "answer",
    [
        b'{"choices":[{"index":0,"finish_reason":"abort"}]}',
        b'{"choices":[{"index":0,"finish_reason" : "error"}]}',
        b'{"stop_reason":"abort"}',
        b'{"id":"resp_1","status":"failed"}',
        b'{"id":"resp_1","status": "cancelled"}',
    ],
)
def test_answers_of_failed_prefills(answer):
    assert NIXL_HANDOFF.failed(answer)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b'{"choices":[{"index":0,"finish_reason":"length"}]}',
        b'{"status":"incomplete"}',
        json.dumps({"text": '"finish_reason":"abort"', "finish_reason": "length"}).encode(),
        json.dumps({"status": "completed", "metadata": {"status": "failed", "finish_reason": "abort"}}).encode(),
        json.dumps({"status": "completed", "tools": [{"stop_reason": "error"}]}).encode(),
        b'{"choices":[{"finish_reason":"abort"}',
        json.dumps({"text": "error", "logprobs": ["abort", "failed"]}).encode(),
    ],
)
def test_answers_that_only_look_like_it(answer):
    assert not NIXL_HANDOFF.failed(answer)


# -- who needs no pair -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("api", "fields"),
    [
        (CHAT, {"max_tokens": 1}),
        (CHAT, {"max_completion_tokens": 1, "max_tokens": 9}),
        (COMPLETIONS, {"max_tokens": 0, "echo": True}),
        (MESSAGES, {"max_tokens": 1}),
    ],
)
def test_one_token_is_the_prefills(api, fields):
    alone = NIXL_HANDOFF.alone(read(api, **fields), PREFILL)
    assert (alone.role, alone.kv) == (Role.PREFILL, Kv.NONE)


@pytest.mark.parametrize(
    ("api", "fields", "why"),
    [
        (CHAT, {"n": 2}, "several sequences"),
        (COMPLETIONS, {"best_of": 2}, "several sequences"),
        (CHAT, {"use_beam_search": True}, "several sequences"),
        (CHAT, {"truncate_prompt_tokens": -1}, "cut"),
        (RESPONSES, {"truncation": "auto"}, "cut"),
        (RESPONSES, {"previous_response_id": "resp_1"}, "goes on from"),
    ],
)
def test_what_no_handoff_can_serve_is_the_decodes(api, fields, why):
    alone = NIXL_HANDOFF.alone(read(api, **fields), PREFILL)
    assert (alone.role, alone.kv) == (Role.DECODE, Kv.RECOMPUTED)
    assert why in alone.why


@pytest.mark.parametrize(
    ("api", "fields"),
    [
        (CHAT, {"max_tokens": 2}),
        (CHAT, {"max_tokens": True}),
        (CHAT, {"max_tokens": 1, "max_completion_tokens": 5}),
        (CHAT, {"n": 1, "max_tokens": None}),
        (RESPONSES, {"max_output_tokens": 1, "truncation": "disabled", "previous_response_id": None}),
        (COMPLETIONS, {"prompt": ["a", "b"], "best_of": 1}),
    ],
)
def test_all_else_is_a_pairs(api, fields):
    assert NIXL_HANDOFF.alone(read(api, **fields), PREFILL) is None


@pytest.mark.parametrize(("stream", "seconds"), [(True, 20.0), (False, 0.0)])
def test_only_a_streams_head_says_nothing(stream, seconds):
    assert MooncakeHandoff().hold(read(stream=stream)) == seconds
