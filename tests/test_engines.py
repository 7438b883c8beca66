"""Engines over gRPC: requests read back with the engines' own messages, and what their answers are taken for."""

import dataclasses
import json

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rpc_legs import PROTOS, response
from smg_grpc_proto.generated.vllm_engine_pb2 import TokenizedInput

from extproc.apis.request import InferenceRequest
from extproc.apis.table import CHAT, COMPLETIONS, GENERATE
from extproc.engines.engine import Params, Remote, Room
from extproc.engines.frames import frame, messages
from extproc.engines.prompt import delimited, packed, varint
from extproc.engines.sequences import sequences
from extproc.engines.status import CONSTRAINT_FAILED, http_of
from extproc.engines.table import engine_of
from extproc.errors import GatewayError
from extproc.generation.asked import Generation
from extproc.generation.events import Complete, Tokens, Usage
from extproc.generation.parse import parse
from extproc.generation.sampling import Constraint, Sampling, Shape
from extproc.workers.rpc.facts import metadata_of
from extproc.workers.rpc.services import SERVED
from extproc.workers.worker import Role

ENGINES = ("sglang", "vllm", "tokenspeed")
P, D, R = Role.PREFILL, Role.DECODE, Role.REGULAR
PLAIN = Generation((1, 70000, 3), Sampling(), "r")
ROOM = Room("10.0.0.1", 8998, 2**31 - 1)
ALL = Sampling(
    temperature=0.5,
    top_p=0.25,
    top_k=7,
    min_p=0.125,
    frequency_penalty=1.5,
    presence_penalty=-1.5,
    repetition_penalty=1.25,
    max_tokens=9,
    min_tokens=2,
    stop=("a", "b"),
    stop_token_ids=(5, 6),
    ignore_eos=True,
    include_stop=True,
    skip_special_tokens=False,
    spaces_between_special_tokens=False,
    seed=11,
    logit_bias=((3, 150.0), (4, -1.0)),
)


def sent(runtime, generation=PLAIN, meeting=None, role=R, rank=None):
    """A request as the engine's server reads it."""
    raw = engine_of(runtime).request(generation, meeting, role, "n", rank)
    return PROTOS[runtime].GenerateRequest.FromString(raw)


def of(sampling=None, **fields):
    return dataclasses.replace(PLAIN, sampling=sampling or Sampling(), **fields)


def params(runtime, sampling, role=R):
    return sent(runtime, of(sampling), role=role).sampling_params


# -- paths -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("service", SERVED, ids=lambda service: service.runtime)
def test_services_are_those_that_are_probed(service):
    engine = engine_of(service.runtime)
    assert (engine.runtime, engine.service) == (service.runtime, service.name)
    assert engine.generate_path.decode() == service.path("Generate")
    ((path, _),) = engine.abort(["a"])
    assert path.decode() == service.path("Abort")


# -- requests --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("runtime", ENGINES)
def test_every_engine_is_told_who_asks_and_of_what(runtime):
    found = sent(runtime, of(stream=True), rank=0)
    assert (found.request_id, list(found.tokenized.input_ids), found.stream) == ("n", [1, 70000, 3], True)
    assert (found.HasField("data_parallel_rank"), found.data_parallel_rank) == (True, 0)
    assert found.sampling_params.n == 1
    assert not sent(runtime).HasField("data_parallel_rank")
    assert not sent(runtime, of(stream=True), role=P).stream, "a prefill's answer is only waited for"


SHARED = {
    "temperature": 0.5,
    "top_p": 0.25,
    "top_k": 7,
    "min_p": 0.125,
    "frequency_penalty": 1.5,
    "presence_penalty": -1.5,
    "repetition_penalty": 1.25,
    "ignore_eos": True,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
}


@pytest.mark.parametrize("runtime", ENGINES)
def test_every_sampling_value_reaches_the_decode(runtime):
    for role in (D, R):
        found = params(runtime, ALL, role)
        assert {name: getattr(found, name) for name in SHARED} == SHARED
        assert (list(found.stop), list(found.stop_token_ids)) == (["a", "b"], [5, 6])
    names = {"vllm": ("max_tokens", "min_tokens", "include_stop_str_in_output")}
    limit, least, include = names.get(runtime, ("max_new_tokens", "min_new_tokens", "no_stop_trim"))
    assert (getattr(found, limit), getattr(found, least), getattr(found, include)) == (9, 2, True)


@pytest.mark.parametrize("runtime", ["sglang", "tokenspeed"])
def test_a_prefill_that_samples_the_first_token_is_told_all_that_the_decode_is(runtime):
    said = dataclasses.replace(of(ALL), top_logprobs=2)
    prefill, decode = sent(runtime, said, ROOM, P), sent(runtime, said, ROOM, D)
    assert prefill == decode


def test_vllm_prefills_one_token_that_nothing_ends_before():
    found = params("vllm", dataclasses.replace(ALL, constraint=Constraint(Shape.REGEX, "a")), P)
    assert (found.max_tokens, found.min_tokens, found.ignore_eos) == (1, 0, True)
    assert not found.stop
    assert not found.stop_token_ids
    assert not found.logit_bias
    assert found.WhichOneof("constraint") is None
    assert not found.HasField("seed")
    assert not found.include_stop_str_in_output


def test_what_is_not_said_is_left_to_vllm():
    found = params("vllm", Sampling())
    assert not found.HasField("temperature")
    assert not found.HasField("max_tokens")
    assert not found.HasField("seed")
    assert not found.HasField("logprobs")
    assert (found.top_p, found.top_k, found.repetition_penalty, found.min_p) == (0, 0, 0, 0)  # its server's "not said"
    assert params("vllm", Sampling(top_k=-1)).top_k == 0
    assert params("vllm", Sampling(temperature=0.0)).HasField("temperature")


def test_sglang_is_told_what_changes_nothing_since_it_cannot_tell_0_from_nothing():
    found = params("sglang", Sampling())
    assert (found.temperature, found.top_p, found.top_k, found.min_p) == (1.0, 1.0, -1, 0.0)
    assert (found.frequency_penalty, found.presence_penalty, found.repetition_penalty) == (0.0, 0.0, 1.0)
    assert not found.HasField("max_new_tokens")
    assert found.skip_special_tokens
    assert found.spaces_between_special_tokens
    assert params("sglang", Sampling(temperature=0.0)).temperature == 0.0
    assert params("sglang", Sampling(max_tokens=0)).HasField("max_new_tokens")


def test_tokenspeed_is_told_what_is_said_and_no_more():
    found = params("tokenspeed", Sampling())
    said = {field.name for field, _ in found.ListFields()}
    assert said == {"n", "skip_special_tokens", "spaces_between_special_tokens"}
    assert params("tokenspeed", Sampling(temperature=0.0)).HasField("temperature")


def test_biases():
    assert dict(params("vllm", ALL).logit_bias) == {3: 100.0, 4: -1.0}  # its own server cuts off what is beyond
    assert dict(params("sglang", ALL).logit_bias) == {"3": 150.0, "4": -1.0}
    assert dict(params("tokenspeed", ALL).logit_bias) == {"3": 150.0, "4": -1.0}


@given(st.integers(-(2**63), 2**63 + 200))
def test_a_seed_is_folded_into_what_an_engine_takes(seed):
    found = params("vllm", Sampling(seed=seed)).seed
    assert found == seed if -(2**31) <= seed < 2**31 else (found - seed) % 2**31 == 0
    found = params("tokenspeed", Sampling(seed=seed))
    assert found.HasField("sampling_seed")
    assert (found.sampling_seed - seed) % 2**64 == 0


TAG = '{"type":"structural_tag"}'


@pytest.mark.parametrize(
    ("constraint", "of_vllm", "of_others"),
    [
        (Constraint(Shape.JSON_SCHEMA, "{}"), ("json_schema", "{}"), ("json_schema", "{}")),
        (Constraint(Shape.JSON_OBJECT), ("json_object", True), ("json_schema", '{"type": "object"}')),
        (Constraint(Shape.REGEX, "a+"), ("regex", "a+"), ("regex", "a+")),
        (Constraint(Shape.GRAMMAR, "g"), ("grammar", "g"), ("ebnf_grammar", "g")),
        (Constraint(Shape.STRUCTURAL_TAG, TAG), ("structural_tag", TAG), ("structural_tag", TAG)),
        (
            Constraint(Shape.CHOICE, '["a","b\\"c"]'),
            ("choice", ["a", 'b"c']),
            ("ebnf_grammar", 'root ::= "a" | "b\\"c"'),
        ),
    ],
)
def test_constraints(constraint, of_vllm, of_others):
    for runtime, expected in {"vllm": of_vllm, "sglang": of_others, "tokenspeed": of_others}.items():
        found = params(runtime, Sampling(constraint=constraint))
        kind = found.WhichOneof("constraint")
        value = getattr(found, kind)
        assert (kind, list(value.choices) if kind == "choice" else value) == expected


def test_meetings():
    found = sent("vllm", meeting=Params(b'{"a":1}'))
    assert found.kv_transfer_params_json == '{"a":1}'
    assert not found.HasField("kv_transfer_params")
    found = sent("vllm", meeting=Remote("h", 8998)).kv_transfer_params
    assert (found.remote_host, found.remote_port) == ("h", 8998)
    assert not sent("vllm").HasField("kv_transfer_params_json")
    found = sent("sglang", meeting=ROOM).disaggregated_params
    assert (found.bootstrap_host, found.bootstrap_port, found.bootstrap_room) == ROOM
    large = Room("h", 1, 2**63 - 1)
    assert sent("tokenspeed", meeting=large).kv_bootstrap_info.bootstrap_room == 2**63 - 1
    assert not sent("sglang").HasField("disaggregated_params")
    assert not sent("tokenspeed").HasField("kv_bootstrap_info")


@pytest.mark.parametrize(
    ("top", "prompt", "start", "role", "expected"),
    [
        (None, None, None, R, (False, -1, 0)),
        (0, None, None, D, (True, -1, 0)),
        (3, None, None, P, (True, -1, 3)),
        (3, 3, None, P, (True, 0, 3)),
        (3, 3, None, D, (True, -1, 3)),
        (3, 5, 2, R, (True, 2, 5)),
        (None, 1, None, P, (True, 0, 1)),
        (None, 1, None, D, (False, -1, 0)),
    ],
)
def test_log_probabilities_of_sglang(top, prompt, start, role, expected):
    said = of(top_logprobs=top, prompt_logprobs=prompt, logprob_start=start)
    found = sent("sglang", said, role=role)
    assert (found.return_logprob, found.logprob_start_len, found.top_logprobs_num) == expected


@pytest.mark.parametrize(("role", "expected"), [(P, (None, 5)), (D, (3, None)), (R, (3, 5))])
def test_log_probabilities_of_vllm(role, expected):
    found = sent("vllm", of(top_logprobs=3, prompt_logprobs=5), role=role).sampling_params
    said = [getattr(found, name) if found.HasField(name) else None for name in ("logprobs", "prompt_logprobs")]
    assert tuple(said) == expected


def test_log_probabilities_of_tokenspeed():
    found = sent("tokenspeed", of(top_logprobs=3))
    assert (found.return_logprob, found.top_logprobs_num, found.HasField("logprob_start_len")) == (True, 3, False)
    assert not sent("tokenspeed").return_logprob


# -- prompts ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=400))
def test_packed_ids_are_protobufs(ids):
    raw = delimited(2, packed(ids))
    assert raw == TokenizedInput(input_ids=ids).SerializeToString()
    for runtime in ENGINES:
        said = dataclasses.replace(PLAIN, ids=tuple(ids))
        beforehand = dataclasses.replace(said, packed=packed(ids))
        assert list(sent(runtime, said).tokenized.input_ids) == ids
        assert sent(runtime, beforehand) == sent(runtime, said)


@given(st.integers(0, 2**64 - 1))
def test_varints(value):
    found = varint(value)
    assert sum((byte & 0x7F) << 7 * index for index, byte in enumerate(found)) == value
    assert [byte >> 7 for byte in found] == [1] * (len(found) - 1) + [0]


# -- sequences -------------------------------------------------------------------------------------------------------


def asked(api=COMPLETIONS, **fields):
    prompt = {CHAT: {"messages": [{"role": "user", "content": "a"}]}, COMPLETIONS: {"prompt": "a"}}
    return parse(InferenceRequest.read(api, json.dumps({**prompt.get(api, {"text": "a"}), **fields}).encode()))


def split(request, prompts=((1, 2),), runtime="vllm", labels=()):
    return sequences(request, prompts, engine_of(runtime), dict(labels), "cmpl-1")


def test_one_sequence_has_the_requests_name_and_options():
    (found,) = split(asked(stream=True, logprobs=2, echo=True, temperature=0.5))
    assert (found.name, found.ids, found.stream) == ("cmpl-1", (1, 2), True)
    assert (found.top_logprobs, found.prompt_logprobs, found.sampling.temperature) == (3, 3, 0.5)


@pytest.mark.parametrize(
    ("api", "fields", "labels", "expected"),
    [
        # vLLM's own server tells the token and so many others of completions; of chat it counts the token.
        (COMPLETIONS, {"logprobs": 5}, {}, (6, None)),
        (COMPLETIONS, {"logprobs": 0}, {}, (0, None)),
        (COMPLETIONS, {}, {}, (None, None)),
        (COMPLETIONS, {"prompt_logprobs": 2}, {}, (None, 3)),
        (CHAT, {"logprobs": True, "top_logprobs": 2, "prompt_logprobs": 2}, {}, (2, 3)),
        (GENERATE, {"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0}, {}, (2, 2)),
        # No more than it gives.
        (COMPLETIONS, {"logprobs": 19}, {}, (20, None)),
        (COMPLETIONS, {"logprobs": 20}, {}, (20, None)),
        (COMPLETIONS, {"logprobs": 21}, {}, (21, None)),  # which it refuses
        (COMPLETIONS, {"logprobs": 5}, {"max_logprobs": "5"}, (5, None)),
        (COMPLETIONS, {"logprobs": 50}, {"max_logprobs": "100"}, (51, None)),
    ],
)
def test_vllm_is_asked_for_as_many_alternatives_as_make_its_own_answer(api, fields, labels, expected):
    (found,) = split(asked(api, **fields), labels=labels)
    assert (found.top_logprobs, found.prompt_logprobs) == expected
    (others,) = split(asked(api, **fields), runtime="sglang", labels=labels)
    wanted = asked(api, **fields)
    assert (others.top_logprobs, others.prompt_logprobs) == (wanted.top_logprobs, wanted.prompt_logprobs)


def test_samples_of_a_prompt_come_one_after_the_other_each_with_a_seed_of_its_own():
    found = split(asked(prompt=["a", "b"], n=2, seed=7), ((1,), (2, 3)))
    assert [(part.ids, part.sampling.seed, part.name) for part in found] == [
        ((1,), 7, "cmpl-1-0"),
        ((1,), 8, "cmpl-1-1"),
        ((2, 3), 7, "cmpl-1-2"),
        ((2, 3), 8, "cmpl-1-3"),
    ]
    assert found[2].packed is found[3].packed, "encoded once"


def test_prompts_with_sampling_of_their_own():
    request = asked(GENERATE, text=["a", "b"], sampling_params=[{"top_k": 1}, {"top_k": 2}])
    assert [part.sampling.top_k for part in split(request, ((1,), (2,)), "sglang")] == [1, 2]


MODELS = {
    "default_sampling_params_json": '{"temperature":0.25,"top_k":20}',
    "preferred_sampling_params": '{"top_p":0.5}',
}


@pytest.mark.parametrize(
    ("runtime", "api", "expected"),
    [
        ("vllm", CHAT, (0.25, 20, None)),
        ("vllm", COMPLETIONS, (0.25, 20, None)),
        ("vllm", GENERATE, (0.25, 20, None)),
        ("sglang", CHAT, (0.25, 20, None)),
        ("sglang", COMPLETIONS, (None, None, None)),
        ("sglang", GENERATE, (None, None, 0.5)),
        ("tokenspeed", CHAT, (0.25, 20, None)),
    ],
)
def test_what_is_not_said_is_what_the_engines_own_server_would_take(runtime, api, expected):
    (found,) = split(asked(api), runtime=runtime, labels=MODELS)
    assert (found.sampling.temperature, found.sampling.top_k, found.sampling.top_p) == expected


def test_what_is_said_is_not_overruled():
    (found,) = split(asked(temperature=1.0), labels=MODELS)
    assert (found.sampling.temperature, found.sampling.top_k) == (1.0, 20)


@pytest.mark.parametrize("label", ["", "{", "[]", '{"temperature":"hot","top_k":true}'])
def test_defaults_that_cannot_be_read_are_none(label):
    (found,) = split(asked(CHAT), labels={"default_sampling_params_json": label})
    assert found.sampling == Sampling()


def test_a_server_without_a_tokenizer_is_told_of_no_stop_strings():
    labels = {"skip_tokenizer_init": "true"}
    (found,) = split(asked(stop=["a"]), runtime="sglang", labels=labels)
    assert found.sampling.stop == ()


@pytest.mark.parametrize(
    ("runtime", "fields", "code", "param"),
    [
        ("vllm", {"temperature": 2.5}, "invalid_value", "temperature"),
        ("vllm", {"temperature": 0, "n": 2}, "invalid_value", "n"),
        ("vllm", {"stop": ["a", "b", "c", "d", "e"]}, "invalid_value", "stop"),
        ("sglang", {"repetition_penalty": 2.5}, "invalid_value", "repetition_penalty"),
        ("sglang", {"seed": 1}, "unsupported_parameter", "seed"),
        ("tokenspeed", {"echo": True, "logprobs": 1}, "unsupported_parameter", "echo"),
        ("tokenspeed", {"prompt_logprobs": 1}, "unsupported_parameter", "prompt_logprobs"),
        ("vllm", {"stop_token_ids": [99, 100]}, "invalid_value", "stop_token_ids"),
        ("sglang", {"logit_bias": {"100": 1}}, "invalid_value", "logit_bias"),
        ("sglang", {"prompt": [1, 100]}, "invalid_value", "prompt"),
    ],
)
def test_what_one_engine_does_not_take(runtime, fields, code, param):
    with pytest.raises(GatewayError) as caught:
        split(asked(**fields), runtime=runtime, labels={"vocab_size": "100"})
    assert (caught.value.fault.code, caught.value.param) == (code, param)


@pytest.mark.parametrize(
    ("runtime", "sampling", "param"),
    [
        ("vllm", {"temperature": 2.5}, "temperature"),
        ("sglang", {"sampling_seed": 1}, "sampling_seed"),
        ("sglang", {"stop_token_ids": [100]}, "stop_token_ids"),
    ],
)
def test_fields_are_named_as_the_client_names_them(runtime, sampling, param):
    with pytest.raises(GatewayError) as caught:
        split(asked(GENERATE, sampling_params=sampling), runtime=runtime, labels={"vocab_size": "100"})
    assert caught.value.param == f"sampling_params.{param}"


@pytest.mark.parametrize(
    ("runtime", "fields"),
    [
        ("sglang", {"temperature": 3}),
        ("sglang", {"temperature": 0, "n": 2}),
        ("sglang", {"seed": 1, "temperature": 0}),
        ("sglang", {"seed": 1, "top_k": 1}),
        ("sglang", {"stop": ["a", "b", "c", "d", "e"]}),
        ("vllm", {"repetition_penalty": 2.5}),
        ("vllm", {"stop": ["a", "b", "c", "d"]}),
        ("vllm", {"stop_token_ids": [99], "logit_bias": {"99": 1}, "prompt": [99]}),
        ("tokenspeed", {"seed": -1, "logprobs": 3}),
    ],
)
def test_what_the_same_or_another_does(runtime, fields):
    assert split(asked(**fields), runtime=runtime, labels={"vocab_size": "100"})


@pytest.mark.parametrize("service", SERVED, ids=lambda service: service.runtime)
def test_what_is_needed_of_a_worker_is_among_its_labels(service):
    pb = PROTOS[service.runtime]
    said = {"default_sampling_params_json": '{"top_k":20}', "preferred_sampling_params": '{"top_p":0.5}'}
    known = pb.GetModelInfoResponse.DESCRIPTOR.fields_by_name.keys()
    model = pb.GetModelInfoResponse(vocab_size=7, **{name: value for name, value in said.items() if name in known})
    server = pb.GetServerInfoResponse()
    if service.runtime != "vllm":
        server.server_args.update({"skip_tokenizer_init": True})
    labels = metadata_of(service, model, server, "").labels
    assert labels["vocab_size"] == "7"
    assert {name: labels[name] for name in said if name in known} == {n: v for n, v in said.items() if n in known}
    assert (labels.get("skip_tokenizer_init") == "true") is (service.runtime != "vllm")


# -- answers ---------------------------------------------------------------------------------------------------------


def event(runtime, **fields):
    return engine_of(runtime).event(response(runtime, **fields))


@pytest.mark.parametrize("runtime", ENGINES)
def test_tokens(runtime):
    pb = PROTOS[runtime]
    chunk = pb.GenerateStreamChunk(token_ids=[5, 6], prompt_tokens=9, completion_tokens=2, cached_tokens=4)
    found = event(runtime, chunk=chunk)
    assert isinstance(found, Tokens)
    assert (list(found.ids), found.logprobs, found.prompt_logprobs) == ([5, 6], None, None)
    assert found.usage == Usage(9, 2, 4)


@pytest.mark.parametrize("runtime", ENGINES)
def test_log_probabilities(runtime):
    pb = PROTOS[runtime]
    tops = [pb.TopLogProbs(token_ids=[5, 7], values=[-0.5, -1.5])]
    rows = pb.OutputLogProbs(token_logprobs=[-0.5], token_ids=[5], top_logprobs=tops)
    for found in (
        event(runtime, chunk=pb.GenerateStreamChunk(token_ids=[5], output_logprobs=rows)),
        event(runtime, complete=pb.GenerateComplete(output_ids=[5], output_logprobs=rows)),
    ):
        assert (list(found.logprobs.values), list(found.logprobs.ids)) == ([-0.5], [5])
        assert [(list(ids), list(values)) for ids, values in found.logprobs.tops] == [([5, 7], [-0.5, -1.5])]


@pytest.mark.parametrize("runtime", ["sglang", "vllm"])
def test_log_probabilities_of_the_prompt(runtime):
    pb = PROTOS[runtime]
    values = [pb.InputTokenLogProb(), pb.InputTokenLogProb(value=0.0), pb.InputTokenLogProb(value=-2.5)]
    rows = pb.InputLogProbs(token_logprobs=values, token_ids=[1, 2, 3])
    for found in (
        event(runtime, chunk=pb.GenerateStreamChunk(input_logprobs=rows)),
        event(runtime, complete=pb.GenerateComplete(input_logprobs=rows)),
    ):
        assert found.prompt_logprobs.values == [None, 0.0, -2.5]
        assert list(found.prompt_logprobs.ids) == [1, 2, 3]


@pytest.mark.parametrize("runtime", ENGINES)
@pytest.mark.parametrize(
    ("said", "matched"), [({}, None), ({"matched_token_id": 2}, 2), ({"matched_stop_str": "END"}, "END")]
)
def test_the_end(runtime, said, matched):
    complete = PROTOS[runtime].GenerateComplete(
        output_ids=[5, 6], finish_reason="stop", prompt_tokens=3, completion_tokens=2, cached_tokens=1, **said
    )
    found = event(runtime, complete=complete)
    assert isinstance(found, Complete)
    assert (list(found.ids), found.finish, found.matched) == ([5, 6], "stop", matched)
    assert (found.usage, found.logprobs, found.kv_params) == (Usage(3, 2, 1), None, b"")


def test_what_only_some_engines_say():
    complete = PROTOS["vllm"].GenerateComplete(kv_transfer_params_json='{"a": 1}')
    assert event("vllm", complete=complete).kv_params == b'{"a": 1}'
    pb = PROTOS["sglang"]
    assert event("sglang", complete=pb.GenerateComplete(reasoning_tokens=4)).usage.reasoning == 4
    assert event("sglang", chunk=pb.GenerateStreamChunk(reasoning_tokens=4)).usage.reasoning == 4


@pytest.mark.parametrize("runtime", ENGINES)
@pytest.mark.parametrize("message", [b"", b"\xff\xff\xff", b"not protobuf"])
def test_a_message_that_is_none(runtime, message):
    with pytest.raises(GatewayError) as caught:
        engine_of(runtime).event(message)
    assert caught.value.fault.code == "decode_bad_reply"


# -- aborts, frames, statuses ----------------------------------------------------------------------------------------


def test_aborts():
    ((_, message),) = engine_of("vllm").abort(["a", "b"])
    assert list(PROTOS["vllm"].AbortRequest.FromString(message).request_ids) == ["a", "b"]
    for runtime in ("sglang", "tokenspeed"):
        orders = engine_of(runtime).abort(["a", "b"])
        assert [PROTOS[runtime].AbortRequest.FromString(raw).request_id for _, raw in orders] == ["a", "b"]
    assert not any(engine_of(runtime).abort([]) for runtime in ENGINES)


@given(st.lists(st.binary(max_size=300), max_size=5))
def test_frames(bodies):
    raw = b"".join(frame(body) for body in bodies)
    assert messages(raw) == bodies
    for cut in range(1, min(len(raw), 5)):
        with pytest.raises(GatewayError):
            messages(raw[:-cut] if bodies[-1] else raw[:-1])


def test_a_compressed_message_was_not_asked_for():
    with pytest.raises(GatewayError):
        messages(b"\x01\x00\x00\x00\x00")


def test_every_status_has_a_meaning_and_a_cancelled_call_is_not_the_clients_fault():
    codes = {code.value[0]: code.name for code in grpc.StatusCode}
    found = {name: http_of(code) for code, name in codes.items() if code}
    assert found["CANCELLED"] == 502
    assert all(400 <= status < 600 for status in found.values())
    assert http_of(99) == 500
    assert http_of(9, constraint=True) == CONSTRAINT_FAILED
