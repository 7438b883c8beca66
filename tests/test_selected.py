"""--mode select-only: workers are chosen and counted as ever; a header names the prefill, and nothing else is sent."""

import json

import pytest
from envoy.config.core.v3.base_pb2 import Metadata
from envoy.service.ext_proc.v3.external_processor_pb2 import HttpHeaders
from fakes import Rig, mooncake, mutated, nixl

from extproc.exchange.attempts import RetryPolicy
from extproc.names import PREFILLER

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Say hi"}]}
PATH = "/v1/chat/completions"
NAMES = [name.decode() for name in PREFILLER]


def rig(*workers, **config):
    return Rig(*(workers or nixl()), select_only=True, retry=RetryPolicy(attempts=1), retry_released=False, **config)


def released(client):
    """What Envoy was given: body, set headers, removed headers, destinations."""
    head, body = client.call.take()
    streamed = body.request_body.response.body_mutation.streamed_response
    assert streamed.end_of_stream
    removed = list(head.request_headers.response.header_mutation.remove_headers)
    return streamed.body, mutated(head), removed, head


def test_both_workers_are_named_and_no_leg_is_sent():
    it = rig()
    client = it.post(PATH, CHAT)
    body, headers, _, head = released(client)
    assert body == json.dumps(CHAT).encode(), "the client's bytes"
    assert {headers[name] for name in NAMES} == {"127.0.0.1:1"}
    assert head.dynamic_metadata["envoy.lb"]["x-gateway-destination-endpoint"] == "127.0.0.1:11,127.0.0.1:12"
    assert it.egress.legs == []
    assert [worker.load for worker in it.workers] == [1, 0, 1, 0]
    client.decode_head(headers=[("x-pd-upstream", "127.0.0.1:11")])
    (answer,) = client.call.take()
    named = mutated(answer)
    assert named["x-pd-prefill"] == "http://127.0.0.1:1"
    assert named["x-pd-decode"] == "http://127.0.0.1:11"
    assert (named["x-pd-handoff"], named["x-pd-kv"]) == ("llm-d", "unknown")
    client.close()
    it.assert_nothing_is_left()
    assert it.egress.legs == []


def test_the_destination_can_be_a_header():
    it = rig(destination_header=True, destination_metadata=False, destination_hosts=1)
    _, headers, _, head = released(it.post(PATH, CHAT))
    assert headers["x-gateway-destination-endpoint"] == "127.0.0.1:11"
    assert "envoy.lb" not in head.dynamic_metadata


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("workers", "in_turn"), [(nixl, True), (mooncake, False)])
def test_the_prefills_load_ends_where_the_answer_shows_it(workers, in_turn, stream):
    """A sidecar that sends both legs at once lets a stream's head through before the prefill is done."""
    it = rig(*workers())
    client = it.post(PATH, {**CHAT, "stream": stream})
    released(client)
    client.decode_head()
    shown = in_turn or not stream
    assert it.workers[0].load == (0 if shown else 1)
    assert it.workers[2].load == 1
    client.close()
    it.assert_nothing_is_left()


def test_a_client_cannot_name_workers():
    it = rig()
    sent = {"x-prefiller-host-port": "10.0.0.1:1", "x-llm-d-prefiller-host-port": "10.0.0.1:1"}
    more = {"x-encoder-hosts-ports": "10.0.0.1:1", "x-data-parallel-host-port": "10.0.0.1:1"}
    client = it.post(
        PATH, {**CHAT, "kv_transfer_params": {"remote_host": "10.0.0.1"}}, headers=[*sent.items(), *more.items()]
    )
    body, headers, removed, _ = released(client)
    assert {headers[name] for name in NAMES} == {"127.0.0.1:1"}
    assert set(more) <= set(removed)
    assert "kv_transfer_params" not in json.loads(body), "a sidecar without a prefill passes them on"


def test_without_the_mode_no_such_header_reaches_a_worker():
    it = Rig(*nixl())
    client = it.post(PATH, CHAT, headers=[("x-prefiller-host-port", "10.0.0.1:1")])
    assert not {name for name, _ in it.egress.legs[0].headers} & set(PREFILLER)
    it.egress.legs[0].answer(body=b'{"kv_transfer_params": {"remote_host": "h", "remote_block_ids": [1]}}')
    _, headers, removed, _ = released(client)
    assert "x-prefiller-host-port" in removed
    assert "x-prefiller-host-port" not in headers


def test_a_short_prompt_names_no_prefill():
    it = rig(min_prompt_tokens=1000)
    client = it.post(PATH, CHAT)
    _, headers, _, _ = released(client)
    assert not set(NAMES) & set(headers)
    assert [worker.load for worker in it.workers] == [0, 0, 1, 0]
    client.decode_head()
    (answer,) = client.call.take()
    assert mutated(answer)["x-pd-kv"] == "local"
    client.close()
    it.assert_nothing_is_left()


@pytest.mark.parametrize("tokens", [0, 1000], ids=["pair", "decode alone"])
def test_a_response_has_the_name_that_its_engine_gives_it(tokens):
    it = rig(min_prompt_tokens=tokens)
    sent = json.dumps({"model": "tiny", "input": "Say hi"}).encode()
    body, *_ = released(it.post("/v1/responses", sent))
    assert body == sent


@pytest.mark.parametrize("body", [{"max_tokens": 1}, {"n": 2}, {"prompt_logprobs": 1}])
def test_what_we_would_split_or_send_to_one_is_the_sidecars_to_do(body):
    it = rig()
    client = it.post(PATH, {**CHAT, **body})
    sent, headers, _, _ = released(client)
    assert json.loads(sent) == {**CHAT, **body}
    assert headers[NAMES[0]] == "127.0.0.1:1"


@pytest.mark.parametrize(("status", "failures"), [(502, 1), (500, 1), (503, 0), (400, 0)])
def test_a_failure_is_charged_to_both(status, failures):
    it = rig()
    client = it.post(PATH, CHAT)
    released(client)
    client.decode_head(status=status, headers=[("x-pd-upstream", "127.0.0.1:11")])
    client.close()
    it.assert_nothing_is_left()
    prefill, _, decode, _ = it.workers
    assert [prefill.breaker._failures, decode.breaker._failures] == [failures, failures]
    assert it.records[0].status == status


def test_a_sidecar_that_cannot_be_reached_says_nothing_of_the_prefill():
    it = rig()
    client = it.post(PATH, CHAT)
    released(client)
    client.decode_head(status=503, headers=[("x-pd-error-code", "decode_unreachable")])
    client.close()
    it.assert_nothing_is_left()
    prefill, _, decode, other = it.workers
    assert (prefill.breaker._failures, decode.breaker._failures, other.breaker._failures) == (0, 1, 1)


def test_a_client_that_leaves_gives_everything_back():
    it = rig()
    client = it.post(PATH, CHAT)
    released(client)
    client.close()
    it.assert_nothing_is_left()
    assert it.egress.legs == []


def test_an_answer_that_is_shown_is_given_back_as_it_is():
    """Endpoint pickers are shown bodies in full duplex, too: whoever does not echo them swallows the answer."""
    it = rig()
    client = it.post(PATH, CHAT)
    released(client)
    client.decode_head()
    client.call.take()
    client.tell(response_body={"body": b"abc"})
    client.tell(response_body={"body": b"", "end_of_stream": True})
    pieces = [m.response_body.response.body_mutation.streamed_response for m in client.call.take()]
    assert [(piece.body, piece.end_of_stream) for piece in pieces] == [(b"abc", False), (b"", True)]
    client.close()
    it.assert_nothing_is_left()


@pytest.mark.parametrize("ours", [False, True])
def test_who_served_may_be_said_in_metadata(ours):
    """As endpoint pickers are told; a header of ours would know better."""
    it = rig()
    client = it.post(PATH, CHAT)
    released(client)
    head = HttpHeaders()
    head.headers.headers.add(key=":status", raw_value=b"200")
    if ours:
        head.headers.headers.add(key="x-pd-upstream", raw_value=b"127.0.0.1:11")
    context = Metadata()
    context.filter_metadata["envoy.lb"].update({"x-gateway-destination-endpoint-served": "127.0.0.1:12"})
    client.tell(response_headers=head, metadata_context=context)
    (answer,) = client.call.take()
    assert mutated(answer)["x-pd-decode"] == f"http://127.0.0.1:{11 if ours else 12}"
    assert it.workers[2].breaker._failures == (0 if ours else 1), "it has refused the connection"
    client.close()
    it.assert_nothing_is_left()
