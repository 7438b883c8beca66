"""Log probabilities of long prompts are made JSON in a thread, while the decode leg goes on."""

import json

import pytest
from fakes import rejection, released
from rpc_rig import MESSAGES, Answer, RpcRig, frame, ids
from test_relayed import relayed

from extproc.errors import GatewayError
from extproc.exchange.attempts import RetryPolicy
from extproc.exchange.clock import PREFILL_WORD_SECONDS

LONG = "a" * 200
PATH = "/generate"
ASKED = {"model": "tiny", "text": LONG, "return_logprob": True, "logprob_start_len": 0}
SEVERAL = ASKED | {"sampling_params": {"n": 2}}
HEAD = [("content-type", "application/grpc"), ("x-pd-upstream", "127.0.0.1:11")]
PB = MESSAGES["sglang"]


@pytest.fixture
def rig():
    return RpcRig("sglang", retry=RetryPolicy(attempts=1))


def prefill_says(prompt=LONG):
    end = PB.GenerateComplete(output_ids=[1], finish_reason="length", prompt_tokens=len(LONG), completion_tokens=1)
    for at, token in enumerate(ids(prompt)):
        end.input_logprobs.token_ids.append(token)
        value = end.input_logprobs.token_logprobs.add()
        if at:
            value.value = -0.5
    return frame(PB.GenerateResponse(complete=end))


def decode_says():
    end = PB.GenerateComplete(output_ids=ids("hi"), finish_reason="stop", completion_tokens=2)
    for _ in "hi":
        end.output_logprobs.token_logprobs.append(-0.25)
        end.output_logprobs.token_ids.append(1)
    return frame(PB.GenerateResponse(complete=end))


def rows(body):
    found = json.loads(body)
    return [len(each["meta_info"]["input_token_logprobs"]) for each in (found if isinstance(found, list) else [found])]


def begun(rig):
    client = rig.post(PATH, ASKED)
    released(client)
    (prefill,) = rig.prefills
    client.decode_head(headers=HEAD)
    return client, prefill, Answer(rig, client)


def over(rig, client, answer=None):
    client.close()
    if answer is not None:
        answer.close()
    rig.clock.advance(0.05)
    rig.assert_nothing_is_left()
    assert rig.texts.working == []


@pytest.mark.parametrize("decode_first", [False, True])
def test_the_answer_waits_for_what_is_made_of_the_prompt(rig, decode_first):
    client, prefill, answer = begun(rig)
    steps = [lambda: rig.answered(prefill, prefill_says()), lambda: (answer.feed(decode_says()), answer.trailers())]
    for step in reversed(steps) if decode_first else steps:
        step()
    answer.look()
    assert answer.status == 0
    rig.clock.advance(2 * PREFILL_WORD_SECONDS)  # however long it takes
    (made,) = rig.texts.working
    rig.texts.working.clear()
    made()
    answer.look()
    assert (answer.status, answer.ended, rows(answer.body)) == (200, True, [200])
    over(rig, client, answer)


def test_the_decode_may_come_behind_it(rig):
    client, prefill, answer = begun(rig)
    rig.answered(prefill, prefill_says())
    rig.texts.working.pop()()
    answer.feed(decode_says())
    answer.trailers()
    assert rows(answer.body) == [200]
    over(rig, client, answer)


def test_a_short_prompts_are_made_at_once(rig):
    client = rig.post(PATH, ASKED | {"text": "ab"})
    released(client)
    (prefill,) = rig.prefills
    client.decode_head(headers=HEAD)
    answer = Answer(rig, client)
    rig.answered(prefill, prefill_says("ab"))
    assert rig.texts.working == []
    answer.feed(decode_says())
    answer.trailers()
    assert rows(answer.body) == [2]
    over(rig, client, answer)


def test_who_leaves_meanwhile_has_it_dropped(rig):
    client, prefill, answer = begun(rig)
    rig.answered(prefill, prefill_says())
    answer.feed(decode_says())
    over(rig, client, answer)


def test_what_goes_wrong_with_it_is_the_answer(rig):
    rig.texts.run = lambda _work, _size, then: rig.texts.working.append(then) or (lambda: None)
    client, prefill, answer = begun(rig)
    rig.answered(prefill, prefill_says())
    answer.feed(decode_says())
    answer.trailers()
    rig.texts.working.pop()(GatewayError("tokenization_queue_full", "too much to do"))
    answer.look()
    assert (answer.status, answer.headers["x-pd-error-code"]) == (503, "tokenization_queue_full")
    over(rig, client, answer)


@pytest.mark.parametrize("decode_first", [False, True])
def test_each_of_several_sequences_waits_for_its_own(rig, decode_first):
    client = rig.post(PATH, SEVERAL)
    prefills, decodes = rig.prefills, rig.decodes
    for leg in decodes if decode_first else prefills:
        rig.answered(leg, decode_says() if decode_first else prefill_says())
    for leg in prefills if decode_first else decodes:
        rig.answered(leg, prefill_says() if decode_first else decode_says())
    assert client.call.take() == []
    while rig.texts.working:
        rig.texts.working.pop()()
    _, body, ended = relayed(client)
    assert (rows(body), ended) == ([200, 200], True)
    over(rig, client)


def test_several_sequences_of_who_leaves_meanwhile(rig):
    client = rig.post(PATH, SEVERAL)
    for leg in rig.prefills:
        rig.answered(leg, prefill_says())
    assert len(rig.texts.working) == 2
    over(rig, client)


def test_what_goes_wrong_with_one_of_several(rig):
    rig.texts.run = lambda _work, _size, then: rig.texts.working.append(then) or (lambda: None)
    client = rig.post(PATH, SEVERAL)
    for leg in rig.prefills:
        rig.answered(leg, prefill_says())
    rig.texts.working.pop()(GatewayError("tokenization_queue_full", "too much to do"))
    assert rejection(client)[0] == 503
    rig.texts.working.clear()
    over(rig, client)
