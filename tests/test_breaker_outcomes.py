"""Which outcomes of legs the circuit breakers hear of, and of whose: each of its own worker's only."""

import pytest
from fakes import Heard, Rig, nixl, released

from extproc.exchange.attempts import OnPrefillFailure, RetryPolicy
from extproc.handoff.sglang import HOLD_SECONDS
from extproc.transport.interface import Lost
from extproc.workers.breaker import Breaker, BreakerSettings, BreakerState
from extproc.workers.worker import Status

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hi"}], "model": "tiny"}
TWO = {**BODY, "n": 2}
ENVOY = [("x-pd-error-code", "decode_connection_lost"), ("x-pd-local-reply", "UC")]


def heard(rig):
    """The outcomes by port, and the pushbacks as ``b``."""
    found = {w.url.port: w.breaker.outcomes + "b" * w.breaker.pushbacks for w in rig.workers}
    return {port: outcomes for port, outcomes in found.items() if outcomes}


def listening(*workers, **config):
    rig = Rig(*workers, **{"retry_released": False, **config})
    for worker in rig.workers:
        worker.breaker = Heard()
    return rig


def lone(*workers, **config):
    """One attempt only."""
    return listening(*workers, retry=RetryPolicy(OnPrefillFailure.FAIL), **config)


def test_both_legs_of_a_request_that_goes_well():
    rig = listening()
    client = rig.post(CHAT, BODY)
    rig.egress.legs[0].answer()
    client.decode_head(headers=[("x-pd-upstream", "127.0.0.1:11")])
    client.close()
    assert heard(rig) == {1: "s", 11: "s"}
    assert [(w.answers, w.load) for w in rig.workers if w.answers] == [(1, 0), (1, 0)]


@pytest.mark.parametrize(
    ("status", "outcome"),
    [(500, "f"), (502, "f"), (504, "f"), (503, "b"), (429, "b"), (400, ""), (404, ""), (408, ""), (422, "")],
)
def test_what_a_prefills_status_says_of_it(status, outcome):
    rig = lone()
    client = rig.post(CHAT, BODY)
    rig.egress.legs[0].answer(status)
    client.close()
    assert heard(rig) == ({1: outcome} if outcome else {})
    assert rig.workers[0].answers == 1


@pytest.mark.parametrize(
    ("status", "outcome"), [(500, "f"), (504, "f"), (503, "b"), (429, "b"), (400, ""), (408, ""), (422, "")]
)
def test_what_a_decodes_status_says_of_it(status, outcome):
    rig = lone()
    client = rig.post(CHAT, BODY)
    rig.egress.legs[0].answer()
    client.decode_head(status, headers=[("x-pd-upstream", "127.0.0.1:11")])
    client.close()
    assert heard(rig) == {1: "s"} | ({11: outcome} if outcome else {})
    rig.assert_nothing_is_left()


def test_which_statuses_say_busy_is_the_workers_setting():
    rig = lone()
    rig.workers[0].breaker.settings = BreakerSettings(capacity=frozenset({529}))
    for status in (503, 529, 429):
        client = rig.post(CHAT, BODY)
        rig.fleet.workers[:2] = rig.workers[:1]
        rig.egress.legs[-1].answer(status)
        client.close()
    assert heard(rig) == {1: "fb"}


def test_a_prefill_that_says_that_it_was_aborted():
    rig = lone()
    client = rig.post(CHAT, BODY)
    rig.egress.legs[0].answer(200, b'{"choices": [{"finish_reason": "abort"}]}')
    client.close()
    assert heard(rig) == {1: "f"}
    assert rig.workers[0].answers == 1


def test_a_prefill_that_cannot_be_reached_or_breaks_off():
    rig = lone()
    rig.post(CHAT, BODY)
    rig.egress.legs[0].answer(503, headers=[(b"x-pd-local-reply", b"UF")])
    assert heard(rig) == {1: "f"}
    rig.post(CHAT, BODY)
    rig.egress.out[-1].receiver.lost(Lost.RESET, "gone")
    assert heard(rig) == {1: "f", 2: "f"}
    assert sum(w.answers for w in rig.workers) == 0


def test_an_egress_that_does_not_answer_is_no_workers_fault():
    rig = lone()
    rig.post(CHAT, BODY)
    rig.egress.legs[0].receiver.lost(Lost.UNREACHABLE, "no egress")
    assert heard(rig) == {}


def test_a_failed_prefill_is_not_its_decodes_fault():
    rig = lone()
    client = rig.post(CHAT, BODY)
    released(client)
    rig.egress.legs[0].answer(500)
    client.decode_head(500, headers=[("x-pd-upstream", "127.0.0.1:11")])  # it crosses our word on the way
    client.close()
    assert heard(rig) == {1: "f"}


def test_a_decode_that_fails_is_not_its_prefills_fault():
    rig = lone()
    client = rig.post(CHAT, BODY)
    client.decode_head(500, headers=[("x-pd-upstream", "127.0.0.1:11")])
    rig.clock.advance(HOLD_SECONDS)
    client.close()
    assert heard(rig) == {11: "f"}


@pytest.mark.parametrize("relays", [False, True])
def test_a_decode_whose_prefill_is_dead_is_not_at_fault_for_want_of_its_cache(relays):
    rig = lone()
    client = rig.post(CHAT, TWO if relays else BODY)
    prefills, decodes = rig.egress.out_at("prefill"), rig.egress.out_at("decode")
    for leg in prefills:
        leg.answer(200, chat())
    rig.workers[0].status = Status.NOT_READY
    if relays:
        decodes[0].answer(500, headers=[(b"x-pd-upstream", b"127.0.0.1:11")])
    else:
        client.decode_head(500, headers=[("x-pd-upstream", "127.0.0.1:11")])
    client.close()
    assert heard(rig) == {1: "ss" if relays else "s"}
    rig.assert_nothing_is_left()


def test_who_refused_the_connection_before_another_served():
    rig = listening()
    client = rig.post(CHAT, BODY)
    rig.egress.legs[0].answer()
    client.decode_head(headers=[("x-pd-upstream", "127.0.0.1:12")])
    client.close()
    assert heard(rig) == {1: "s", 11: "f", 12: "s"}


def test_all_of_envoys_list_refused():
    rig = lone()
    client = rig.post(CHAT, BODY)
    rig.egress.legs[0].answer()
    unreachable = [("x-pd-error-code", "decode_unreachable"), ("x-pd-local-reply", "UF")]
    client.decode_head(503, headers=unreachable)
    client.close()
    assert heard(rig) == {1: "s", 11: "f", 12: "f"}


def test_a_decode_whose_connection_broke():
    rig = lone()
    client = rig.post(CHAT, BODY)
    rig.egress.legs[0].answer()
    client.decode_head(502, headers=ENVOY)
    client.close()
    assert heard(rig) == {1: "s", 11: "f"}


def test_a_decode_whose_connection_broke_after_another_had_refused():
    rig = lone()
    client = rig.post(CHAT, BODY)
    rig.egress.legs[0].answer()
    client.decode_head(502, headers=[*ENVOY, ("x-pd-upstream", "127.0.0.1:12")])
    client.close()
    assert heard(rig) == {1: "s", 11: "f", 12: "f"}
    assert [worker.url.port for worker in rig.failing] == [12]
    rig.assert_nothing_is_left()


def test_the_same_of_a_relayed_decode():
    rig = lone()
    client, _, decodes = relayed(rig)
    broken = [(b"x-pd-local-reply", b"UC"), (b"x-pd-upstream", b"127.0.0.1:12")]
    decodes[0].answer(502, headers=broken)
    client.close()
    assert heard(rig) == {11: "f", 12: "f"}
    assert [worker.url.port for worker in rig.failing] == [12]
    rig.assert_nothing_is_left()


def test_a_relayed_decode_that_nobody_accepts():
    rig = lone()
    client, _, decodes = relayed(rig)
    decodes[0].answer(503, headers=[(b"x-pd-local-reply", b"UF"), (b"x-pd-upstream", b"127.0.0.1:12")])
    client.close()
    assert heard(rig) == {11: "f", 12: "f"}
    rig.assert_nothing_is_left()


def test_a_client_that_leaves_decides_nothing():
    rig = listening()
    rig.post(CHAT, BODY).close()
    assert heard(rig) == {}
    rig.assert_nothing_is_left()


def relayed(rig):
    """Two pairs of legs of one request: prefill, prefill and decode, decode."""
    client = rig.post(CHAT, TWO)
    return client, rig.egress.out_at("prefill"), rig.egress.out_at("decode")


def chat(index=0):
    return b'{"choices": [{"index": %d, "message": {"content": "x"}}], "usage": {}}' % index


def test_all_legs_of_a_relayed_request():
    rig = listening()
    client, prefills, decodes = relayed(rig)
    for leg in (*prefills, *decodes):
        leg.answer(200, chat(), headers=[(b"x-pd-upstream", leg.destination.split(",")[0].encode())])
    client.close()
    assert heard(rig) == {1: "ss", 11: "ss"}
    rig.assert_nothing_is_left()


def test_a_relayed_decode_that_breaks_off_in_its_answer():
    rig = lone()
    client, _, decodes = relayed(rig)
    decodes[0].receiver.head(200, [(b"x-pd-upstream", b"127.0.0.1:12")])
    decodes[0].receiver.lost(Lost.RESET, "gone")
    client.close()
    assert heard(rig) == {11: "f", 12: "f"}  # the first refused, by Envoy's word
    rig.assert_nothing_is_left()


def test_a_relayed_decode_that_refuses():
    rig = lone()
    client, _, decodes = relayed(rig)
    decodes[0].answer(500, headers=[(b"x-pd-upstream", b"127.0.0.1:11")])
    rig.clock.advance(HOLD_SECONDS)
    client.close()
    assert heard(rig) == {11: "f"}
    rig.assert_nothing_is_left()


def half_open(rig):
    for worker in rig.workers:
        worker.breaker = Breaker(BreakerSettings(failure_threshold=1, success_threshold=3))
        worker.breaker.failed(0)
        worker.breaker.rested()
    return rig


def states(rig):
    return {w.url.port: w.breaker.state.value for w in rig.workers if w.breaker.state is not BreakerState.HALF_OPEN}


@pytest.mark.parametrize("in_turn", [False, True])
@pytest.mark.parametrize("moment", ["at once", "prefilled", "answering", "at the end"])
def test_a_trials_slot_is_given_back_however_the_request_ends(in_turn, moment):
    rig = half_open(listening(*(nixl() if in_turn else ())))
    client = rig.post(CHAT, BODY)
    assert rig.workers[0].breaker.trials == 1
    if moment != "at once":
        rig.egress.legs[0].answer()
    if moment in ("answering", "at the end"):
        client.decode_head(headers=[("x-pd-upstream", "127.0.0.1:12")])
        assert [w.breaker.trials for w in rig.workers] == [0, 0, 0, 1]
    client.close()
    rig.clock.advance(10)
    rig.assert_nothing_is_left()
    assert states(rig) == ({11: "open"} if moment in ("answering", "at the end") else {})


@pytest.mark.parametrize("moment", ["at once", "prefilled", "answering", "failed"])
def test_the_same_of_a_relayed_request(moment):
    rig = half_open(lone())
    client, prefills, decodes = relayed(rig)
    assert [w.breaker.trials for w in rig.workers] == [2, 0, 2, 0]
    if moment != "at once":
        prefills[0].answer(200, chat())
    if moment in ("answering", "failed"):
        decodes[0].receiver.head(200, [(b"x-pd-upstream", b"127.0.0.1:12")])
        assert [w.breaker.trials for w in rig.workers][3] == 1
    if moment == "failed":
        decodes[0].receiver.lost(Lost.RESET, "gone")
    client.close()
    rig.clock.advance(10)
    rig.assert_nothing_is_left()


def test_trials_that_succeed_close_the_breakers_of_both():
    rig = half_open(listening())
    for worker in (rig.workers[1], rig.workers[3]):
        rig.fleet.workers.remove(worker)
    for _ in range(3):
        client = rig.post(CHAT, BODY)
        rig.egress.out[-1].answer()
        client.decode_head(headers=[("x-pd-upstream", "127.0.0.1:11")])
        client.close()
    assert states(rig) == {1: "closed", 11: "closed"}


def test_a_decode_that_was_shut_out_while_the_prefill_ran_is_not_named_to_envoy():
    rig = listening(*nixl())
    client = rig.post(CHAT, BODY)
    rig.workers[2].breaker.shuts_out = True
    rig.egress.legs[0].answer(200, b'{"kv_transfer_params": {"remote_engine_id": "e", "remote_block_ids": [1]}}')
    assert released(client)[2] == ["127.0.0.1:12"]
    client.decode_head(headers=[("x-pd-upstream", "127.0.0.1:12")])
    client.close()
    assert heard(rig) == {1: "s", 12: "s"}
    rig.assert_nothing_is_left()


def test_where_all_were_shut_out_meanwhile_they_are_named_all_the_same():
    rig = listening(*nixl())
    client = rig.post(CHAT, BODY)
    for worker in rig.workers[2:]:
        worker.breaker.shuts_out = True
    rig.egress.legs[0].answer(200, b'{"kv_transfer_params": {"remote_engine_id": "e", "remote_block_ids": [1]}}')
    assert released(client)[2] == ["127.0.0.1:11", "127.0.0.1:12"]
    client.close()
    rig.assert_nothing_is_left()
