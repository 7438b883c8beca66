"""Conditional disaggregation: which requests do without a prefill leg, where they go, and what is said of it."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest
from fakes import Rig, mooncake, nixl, rejection, released, worker
from fleet import FakeEnvoy, add_ready, spec
from test_in_turn import ANSWER

from extproc.control.metrics import Metrics
from extproc.exchange.attempts import RetryPolicy
from extproc.exchange.clock import HEAD_SECONDS
from extproc.exchange.trial import Trial
from extproc.handoff.table import Handoffs
from extproc.lone_decodes import LoneDecodeWarnings
from extproc.observe import RequestMetrics
from extproc.policies.names import PolicyName
from extproc.policies.round_robin import RoundRobinPolicy
from extproc.policies.table import policy_of
from extproc.policies.tuning import Tuning
from extproc.workers.registry import Registry
from extproc.workers.worker import Role, Status

PATH = "/v1/completions"
SHORT = {"model": "tiny", "prompt": [1] * 9, "max_tokens": 8}
LONG = SHORT | {"prompt": [1] * 10}
STEADY = RetryPolicy(jitter=0)


class Knowing(RoundRobinPolicy):
    """Knows how many tokens of every prompt each worker holds, by port."""

    def __init__(self, **held: int) -> None:
        super().__init__()
        self.tokens = {int(port.removeprefix("at_")): tokens for port, tokens in held.items()}

    def held(self, request, workers):  # noqa: ARG002
        return {worker: self.tokens[worker.url.port] for worker in workers}


def conditional(*workers, at_11=0, at_12=0, **config):
    """A rig that knows what its decode workers hold; prompts of fewer than 10 tokens are short, unless told."""
    if "min_uncached_tokens" not in config:
        config.setdefault("min_prompt_tokens", 10)
    rig = Rig(*workers or nixl(), retry=STEADY, **config)
    rig.gateway.placer._decode = Knowing(at_11=at_11, at_12=at_12)
    return rig


def answered(rig, client):
    """The record of a request whose decode answers well."""
    _, _, (first, *_) = released(client)
    client.decode_head(headers=[("x-pd-upstream", first)])
    client.call.take()
    return end(rig, client)


def end(rig, client):
    client.close()
    rig.assert_nothing_is_left()
    return rig.records[-1]


# -- short prompts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [nixl, mooncake])
def test_a_short_prompt_runs_on_the_decode_worker_alone(workers):
    rig = conditional(*workers())
    client = rig.post(PATH, SHORT)
    body, _, destinations = released(client)
    assert rig.egress.legs == []
    assert json.loads(body) == SHORT
    assert destinations == ["127.0.0.1:11", "127.0.0.1:12"]
    client.decode_head(headers=[("x-pd-upstream", destinations[0])])
    (head,) = client.call.take()
    told = {o.header.key: o.header.raw_value for o in head.response_headers.response.header_mutation.set_headers}
    assert (told["x-pd-kv"], told["x-pd-decode"]) == (b"local", b"http://127.0.0.1:11")
    assert not {"x-pd-prefill", "x-pd-handoff"} & set(told)
    record = end(rig, client)
    assert (record.kv, record.note) == ("local", "about 9 prompt tokens, fewer than --pd-min-prompt-tokens")
    metrics = Metrics()
    RequestMetrics(metrics).finished(record)
    assert 'pd_kv_caches_total{handoff="",kv="local"} 1' in metrics.render().decode()


def test_one_that_is_not_short_does_not():
    rig = conditional()
    client = rig.post(PATH, LONG)
    (leg,) = rig.egress.out_at("prefill")
    leg.answer()
    assert released(client)
    assert end(rig, client).handoff == "nixl"


def test_it_takes_nobodys_turn_but_the_decode_workers():
    """Long and short prompts in turn: the long ones still go to every prefill worker."""
    rig = conditional()
    prefills, decodes = [], []
    for body in [SHORT, LONG] * 4:
        client = rig.post(PATH, body)
        for leg in rig.egress.out_at("prefill"):
            prefills.append(leg.destination)
            leg.answer()
        decodes.append(released(client)[2][0])
        end(rig, client)
    assert prefills == ["127.0.0.1:1", "127.0.0.1:2"] * 2
    assert set(decodes) == {"127.0.0.1:11", "127.0.0.1:12"}


def test_the_engine_is_told_its_own_form_of_our_id():
    rig = conditional()
    client = rig.post(PATH, SHORT)
    sent = released(client)[1]["x-request-id"]
    record = end(rig, client)
    assert record.request_id == b"cmpl-" + sent.encode()


def test_client_control_fields_are_removed_there_too():
    rig = conditional()
    client = rig.post(PATH, SHORT | {"kv_transfer_params": {"do_remote_prefill": True}})
    assert json.loads(released(client)[0]) == SHORT
    end(rig, client)


@pytest.mark.parametrize("more", [{"n": 3}, {"max_tokens": 1}, {"prompt": ["a", "b"]}, {"echo": True, "logprobs": 1}])
def test_whatever_else_it_asks_for_the_decode_serves_whole(more):
    rig = conditional(min_prompt_tokens=100)
    client = rig.post(PATH, SHORT | more)
    assert json.loads(released(client)[0]) == SHORT | more
    assert rig.egress.legs == []
    assert end(rig, client).kv == "local"


def test_a_response_that_goes_on_from_another_goes_to_its_keeper():
    rig = conditional(min_prompt_tokens=100)
    keeper = rig.workers[3]
    client = rig.post("/v1/responses", {"model": "tiny", "input": "hi", "request_id": "theirs"})
    released(client)
    client.decode_head(headers=[("x-pd-upstream", keeper.endpoint)])
    end(rig, client)
    for _ in range(2):
        client = rig.post("/v1/responses", {"model": "tiny", "input": "so?", "previous_response_id": "theirs"})
        assert released(client)[2] == [keeper.endpoint]
        end(rig, client)


def test_it_is_served_while_no_prefill_worker_is():
    rig = conditional()
    for prefill in rig.workers[:2]:
        prefill.endpoint = None
    assert answered(rig, rig.post(PATH, SHORT)).status == 200
    assert rejection(rig.post(PATH, LONG))[0] == 503


def test_another_decode_worker_when_the_first_one_fails():
    rig = conditional()
    client = rig.post(PATH, SHORT)
    _, _, destinations = released(client)
    client.decode_head(503, [("x-pd-upstream", destinations[0])])
    second = client.late()
    rig.clock.advance(max(STEADY.initial, HEAD_SECONDS))
    (leg,) = rig.egress.out
    assert (leg.cluster, leg.destination, leg.json) == ("decode", destinations[1], SHORT)
    leg.answer()
    assert second.answer()[0]["x-pd-kv"] == "local"
    second.close()
    record = end(rig, client)
    assert (record.kv, record.attempts) == ("local", 2)


# -- cached prompts ---------------------------------------------------------------------------------------------------


def test_a_prompt_of_which_a_decode_has_most_goes_there():
    rig = conditional(at_11=4, at_12=8, min_uncached_tokens=4)
    for _ in range(2):
        client = rig.post(PATH, LONG)
        body, _, destinations = released(client)
        assert json.loads(body) == LONG
        assert destinations == ["127.0.0.1:12"]
        record = end(rig, client)
        assert record.kv == "local"
        assert record.note == (
            "about 10 prompt tokens, 8 of them cached: fewer to compute than --pd-min-uncached-tokens"
        )


def test_of_several_that_have_most_each_has_its_turn():
    rig = conditional(at_11=9, at_12=8, min_uncached_tokens=4)
    seen = []
    for _ in range(4):
        client = rig.post(PATH, LONG)
        seen.append(released(client)[2][0])
        end(rig, client)
    assert seen == ["127.0.0.1:11", "127.0.0.1:12"] * 2


def test_one_that_no_decode_has_enough_of_goes_to_a_pair():
    rig = conditional(at_11=6, at_12=5, min_uncached_tokens=4)
    client = rig.post(PATH, LONG)
    (leg,) = rig.egress.out_at("prefill")
    leg.answer()
    released(client)
    assert end(rig, client).handoff == "nixl"


# -- room ---------------------------------------------------------------------------------------------------------


def limited(*, prefill=None, decode=None, **config):
    rig = conditional(*nixl((1,), (11,)), **config)
    rig.workers[0].limit, rig.workers[1].limit = prefill, decode
    return rig


CACHED = LONG | {"prompt": [2] * 10}  # of which a worker has most, where LONG is of another kind


@pytest.mark.parametrize("config", [{"min_prompt_tokens": 10}, {"min_uncached_tokens": 4, "at_11": 8}])
def test_who_needs_no_prefill_waits_for_none(config):
    """Nor behind those that do: its decode worker has room, and the prefill worker has none."""
    rig = limited(prefill=1, **config)
    body = SHORT if "min_prompt_tokens" in config else CACHED
    policy = rig.gateway.placer._decode
    known, policy.tokens = policy.tokens, {11: 0}
    first, behind = rig.post(PATH, LONG), rig.post(PATH, LONG)
    assert len(rig.egress.out_at("prefill")) == 1
    policy.tokens = known
    lone = rig.post(PATH, body)
    assert json.loads(released(lone)[0]) == body
    for client in (first, behind, lone):
        client.close()
    rig.clock.advance(1)
    rig.assert_nothing_is_left()


@pytest.mark.parametrize("config", [{"min_prompt_tokens": 10}, {"min_uncached_tokens": 4, "at_11": 8}])
def test_a_lone_decode_is_waited_for_while_it_has_no_room(config):
    rig = limited(decode=1, prefill=0, **config)  # nor is there a pair with room
    body = SHORT if "min_prompt_tokens" in config else CACHED
    first, second, late = [rig.post(PATH, body) for _ in range(3)]
    released(first)
    assert rig.workers[1].load == 1
    assert second.call.take() == []
    assert sum(rig.gateway.legs.queued.values()) == 2
    rig.clock.advance(3)
    first.close()
    rig.clock.advance(0)
    assert json.loads(released(second)[0]) == body
    rig.clock.advance(57)
    status, headers, _ = rejection(late)
    assert status == 503
    assert int(headers["retry-after"]) >= 1
    for client in (second, late):
        client.close()
    rig.assert_nothing_is_left()
    assert rig.records[0].queued == 0
    assert [record.queued for record in rig.records if record.status == 0] == [0, 3]


def test_a_cached_prompt_goes_to_a_pair_that_has_room_where_its_holder_has_none():
    rig = conditional(*nixl((1,), (11, 12)), min_uncached_tokens=4, at_11=8)
    rig.workers[1].limit = 1
    first, second = rig.post(PATH, CACHED), rig.post(PATH, CACHED)
    assert released(first)[2] == ["127.0.0.1:11"]
    (leg,) = rig.egress.out_at("prefill")
    leg.answer()
    assert released(second)[2][0] == "127.0.0.1:12"
    for client in (first, second):
        client.close()
    rig.assert_nothing_is_left()


def test_a_lone_leg_counts_and_is_given_back_however_it_ends():
    rig = limited(decode=1)
    for status in (0, 200, 500):
        client = rig.post(PATH, SHORT)
        released(client)
        assert (rig.workers[1].load, rig.workers[1].promised) == (1, 0)
        if status:
            client.decode_head(status, [("x-pd-upstream", "127.0.0.1:11")])
        end(rig, client)
        assert rig.workers[1].load == 0


def test_nobody_holds_more_than_there_is():
    rig = conditional(at_11=1000, min_uncached_tokens=1)
    client = rig.post(PATH, LONG)
    released(client)
    assert "10 of them cached" in end(rig, client).note


# -- sessions ---------------------------------------------------------------------------------------------------------


class Counted(RoundRobinPolicy):
    """Knows how often it was asked."""

    asked = 0

    def rank(self, candidates, limit, request):
        self.asked += 1
        return super().rank(candidates, limit, request)


def keyed(*workers, held=0, **config):
    """A rig with sticky sessions over round_robin, whose decode workers hold so many tokens of every prompt."""
    rig = Rig(*workers, retry=STEADY, **config)
    placer, tuning = rig.gateway.placer, Tuning(routing_key_override=True)
    for role, name in ((Role.PREFILL, "_prefill"), (Role.DECODE, "_decode")):
        setattr(placer, name, policy_of(PolicyName.ROUND_ROBIN, tuning, rig.clock.now, role))
    placer._decode._inner = Knowing(**{f"at_{w.url.port}": held for w in workers if w.role is Role.DECODE})
    placer._holders = [placer._prefill, placer._decode]
    return rig


def turn(rig, key, body):
    """A request of a session; its prefill leg, if there is one, is answered: client, and where both legs went."""
    client = rig.post(PATH, body, headers=[("x-smg-routing-key", key)])
    prefill = None
    for leg in rig.egress.out_at("prefill"):
        prefill = leg.destination
        leg.answer()
    return client, prefill, released(client)[2][0]


def finish(client, served):
    client.decode_head(headers=[("x-pd-upstream", served)])
    client.call.take()
    client.close()


def test_a_session_has_one_decode_worker_with_a_prefill_leg_and_without():
    rig = keyed(*nixl((1, 2), (11, 12, 13)), min_prompt_tokens=10)
    homes = {}
    for bodies in ([SHORT, LONG, SHORT], [LONG, SHORT, LONG], [SHORT] * 3):
        for key, body in zip("abc", bodies, strict=True):
            client, prefill, decode = turn(rig, key, body)
            assert (prefill is None) == (body is SHORT)
            finish(client, decode)
            assert homes.setdefault(key, decode) == decode
    assert len(set(homes.values())) == 3
    rig.assert_nothing_is_left()


def test_what_a_session_has_under_way_alone_counts_until_its_end():
    rig = keyed(*nixl((1, 2), (11, 12, 13)), min_prompt_tokens=10)
    first, _, home = turn(rig, "a", SHORT)
    first.decode_head(headers=[("x-pd-upstream", home)])
    second, _, same = turn(rig, "a", SHORT)
    third, _, other = turn(rig, "a", SHORT)
    assert same == home != other
    second.close()
    fourth, _, again = turn(rig, "a", SHORT)
    assert again == home
    for client in (first, third, fourth):
        client.close()
    rig.assert_nothing_is_left()


def test_a_session_follows_the_worker_that_took_over_alone():
    rig = keyed(*nixl((1, 2), (11, 12, 13)), min_prompt_tokens=10)
    client, _, failed = turn(rig, "a", SHORT)
    client.decode_head(503, [("x-pd-upstream", failed)])
    second = client.late()
    rig.clock.advance(max(STEADY.initial, HEAD_SECONDS))
    (leg,) = rig.egress.out
    served = leg.destination.partition(",")[0]
    assert served != failed
    leg.answer(headers=[(b"x-pd-upstream", served.encode())])
    second.close()
    client.close()
    for body in (SHORT, LONG):
        client, _, decode = turn(rig, "a", body)
        assert decode == served
        finish(client, decode)
    rig.assert_nothing_is_left()


def test_nobody_is_chosen_before_the_pause_is_over():
    """Whether anybody is left is no choice: it takes no turn, and moves no session."""
    rig = conditional(*nixl((1,), (11, 12, 13)))
    policy = rig.gateway.placer._decode = Counted()
    client = rig.post(PATH, SHORT)
    _, _, destinations = released(client)
    client.decode_head(503, [("x-pd-upstream", destinations[0])])
    second = client.late()
    assert policy.asked == 1
    rig.clock.advance(max(STEADY.initial, HEAD_SECONDS))
    assert policy.asked == 2
    (leg,) = rig.egress.out
    leg.answer()
    second.close()
    end(rig, client)


def test_a_prefill_worker_that_gets_no_leg_has_nothing_under_way():
    """Of two requests that run on the decode worker alone, though a pair was chosen, it has none."""
    rig = keyed(*nixl((1, 2), (11, 12)), min_uncached_tokens=4)
    client, home, decode = turn(rig, "a", LONG)
    finish(client, decode)
    known = rig.gateway.placer._decode._inner.tokens
    known.update(dict.fromkeys(known, 10))
    alone = [turn(rig, "a", LONG) for _ in range(2)]
    assert [prefill for _, prefill, _ in alone] == [None, None]
    known.update(dict.fromkeys(known, 0))
    client, prefill, _ = turn(rig, "a", LONG)
    assert prefill == home
    for each in (client, *(one for one, _, _ in alone)):
        each.close()
    rig.assert_nothing_is_left()


def test_nor_has_one_whose_pair_answers_samples_by_its_decode():
    rig = keyed(*nixl((1, 2), (11, 12)))
    client, home, decode = turn(rig, "a", LONG)
    finish(client, decode)
    alone = [turn(rig, "a", LONG | {"n": 2}) for _ in range(2)]
    assert [prefill for _, prefill, _ in alone] == [None, None]
    client, prefill, _ = turn(rig, "a", LONG)
    assert prefill == home
    for each in (client, *(one for one, _, _ in alone)):
        each.close()
    rig.assert_nothing_is_left()


# -- who cannot -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [{"min_prompt_tokens": 100}, {"min_uncached_tokens": 100}])
def test_sglang_serves_nothing_without_a_prefill(limit):
    """Nor is a turn taken: of two decode workers both serve."""
    rig = Rig(**limit)
    seen = set()
    for _ in range(4):
        client = rig.post(PATH, SHORT)
        (leg,) = rig.egress.out_at("prefill")
        assert "bootstrap_room" in leg.json
        seen.add(released(client)[2][0])
        leg.answer()
        end(rig, client)
    assert len(seen) == 2


def test_of_a_mixed_fleet_those_who_can():
    mixed = [*nixl((1,), (11,)), worker(Role.PREFILL, 2, bootstrap_port=8998), worker(Role.DECODE, 12)]
    rig = conditional(*mixed)
    for _ in range(3):
        client = rig.post(PATH, SHORT)
        assert released(client)[2] == ["127.0.0.1:11"]
        end(rig, client)


def test_a_trial_is_always_of_a_pair():
    rig = conditional(min_prompt_tokens=100_000)
    trial = Trial(rig.gateway, "tiny", lambda _: None)
    assert len(rig.egress.out_at("prefill")) == 1
    trial.leave()
    rig.clock.advance(1)


async def test_who_cannot_is_named_once(caplog):
    registry = Registry(FakeEnvoy().publish, drain_poll=0.001)
    caplog.set_level(logging.WARNING, "extproc.lone_decodes")
    LoneDecodeWarnings(registry, Handoffs(), "--pd-min-prompt-tokens")
    unable = add_ready(registry, Role.DECODE, "http://10.0.0.1:1")
    add_ready(registry, Role.PREFILL, "http://10.0.0.2:1")
    able = registry.add(spec(Role.DECODE, "http://10.0.0.3:1", runtime="vllm"))
    registry.set_status(able, Status.READY)
    registry.set_status(unable, Status.NOT_READY)
    registry.set_status(unable, Status.READY)
    (record,) = [record for record in caplog.records if record.name == "extproc.lone_decodes"]
    assert record.getMessage() == "--pd-min-prompt-tokens: not applied"
    assert record.__dict__["worker"] == unable.name
    await asyncio.sleep(0)
    await registry.close()


def test_a_prompt_that_one_worker_holds_does_not_make_that_one_busy():
    """Others take their part, by pairs, and hold it too then."""
    rig = conditional(*nixl((1, 2), (11, 12, 13, 14)), min_uncached_tokens=100)
    rig.gateway.placer._decode = policy_of(PolicyName.CACHE_AWARE, Tuning(), rig.clock.now, Role.DECODE)
    body = {"model": "tiny", "prompt": "a long beginning that all have in common. " * 200}
    clients = []
    for _ in range(60):
        client = rig.post(PATH, body)
        clients.append(client)
        for leg in rig.egress.out_at("prefill"):
            leg.answer(body=ANSWER)
        _, _, (first, *_) = released(client)
        client.decode_head(headers=[("x-pd-upstream", first)])
    loads = [each.load for each in rig.workers if each.role is Role.DECODE]
    assert sum(loads) == 60
    assert max(loads) <= 2 * (min(loads) + 1) + 1
    for client in clients:
        client.close()
    alone = [record.kv == "local" for record in rig.records]
    assert sum(alone) > 40
    rig.assert_nothing_is_left()


def test_a_busy_holder_serves_where_no_pair_has_room():
    rig = conditional(*nixl((1,), (11, 12)), min_uncached_tokens=4, at_11=8)
    prefill, holder, _ = rig.workers
    prefill.limit, prefill.load, holder.load = 1, 1, 9
    client = rig.post(PATH, CACHED)
    assert released(client)[2] == ["127.0.0.1:11"]
    prefill.load = 0
    other = rig.post(PATH, CACHED)
    (leg,) = rig.egress.out_at("prefill")
    leg.answer()
    assert released(other)[2][0] == "127.0.0.1:12"
    for each in (client, other):
        each.close()
    holder.load = 0
    rig.assert_nothing_is_left()
