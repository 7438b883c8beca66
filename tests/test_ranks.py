"""Data-parallel ranks on the request path: what legs say of them, where they fail over to, and whose load counts."""

import json
from collections import Counter

import pytest
from fakes import Asked, FakeFleet, Rig, mutated, ranks, rejection, released, worker

from extproc.apis.request import InferenceRequest
from extproc.apis.table import CHAT, COMPLETIONS
from extproc.exchange.attempts import RetryPolicy
from extproc.handoff import sglang
from extproc.policies.partners import CANDIDATES
from extproc.policies.placement import Placer
from extproc.policies.random_choice import RandomPolicy
from extproc.policies.round_robin import RoundRobinPolicy
from extproc.transport.interface import Lost
from extproc.workers.worker import MOONCAKE, NIXL, KvEngine, Role

TINY = Asked("tiny")
P, D = Role.PREFILL, Role.DECODE
PATH = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "Say hi"}]}
RANK = "x-data-parallel-rank"
RANK_FIELDS = ("routed_dp_rank", "data_parallel_rank", "disagg_prefill_dp_rank")


def read(api=CHAT, **fields):
    given = {CHAT: {"messages": []}, COMPLETIONS: {"prompt": ["a", "b"]}}[api] | fields
    return InferenceRequest.read(api, json.dumps(given).encode())


def said(body):
    """What a body says of ranks."""
    fields = json.loads(body)
    return {name: fields[name] for name in RANK_FIELDS if name in fields}


def sgl(role, port, size, version="0.5.23", **fields):
    return ranks(role, port, size, labels={"version": version}, **fields)


# -- SGLang's bodies ---------------------------------------------------------------------------------------------------


class TestSglang:
    def plan(self, prefill, decode, request=None, **options):
        return sglang.SglangHandoff().plan(request or read(), prefill, decode=decode, **options)

    def test_each_leg_has_its_rank_and_both_the_prefills(self):
        made = self.plan(sgl(P, 1, 4)[2], sgl(D, 11, 3)[1])
        assert said(made.prefill) == {"routed_dp_rank": 2, "disagg_prefill_dp_rank": 2}
        assert said(made.decode) == {"routed_dp_rank": 1, "disagg_prefill_dp_rank": 2}
        prefill, decode = json.loads(made.prefill), json.loads(made.decode)
        for name in RANK_FIELDS:
            prefill.pop(name, None)
            decode.pop(name, None)
        assert prefill == decode

    def test_rank_0_is_a_rank(self):
        made = self.plan(sgl(P, 1, 2)[0], sgl(D, 11, 2)[0])
        assert said(made.prefill) == said(made.decode) == {"routed_dp_rank": 0, "disagg_prefill_dp_rank": 0}
        assert made.prefill is made.decode

    def test_a_stream_too(self):
        made = self.plan(sgl(P, 1, 2)[1], sgl(D, 11, 2)[0], read(stream=True))
        assert said(made.prefill) == {"routed_dp_rank": 1, "disagg_prefill_dp_rank": 1}
        assert said(made.decode) == {"routed_dp_rank": 0, "disagg_prefill_dp_rank": 1}

    def test_between_a_rank_and_a_server_as_a_whole(self):
        whole = worker(P, 1), worker(D, 11)
        made = self.plan(whole[0], sgl(D, 12, 2)[1])
        assert (said(made.prefill), said(made.decode)) == ({}, {"routed_dp_rank": 1})
        made = self.plan(sgl(P, 2, 2)[1], whole[1])
        assert said(made.prefill) == {"routed_dp_rank": 1, "disagg_prefill_dp_rank": 1}
        assert said(made.decode) == {"disagg_prefill_dp_rank": 1}
        made = self.plan(*whole)
        assert (said(made.prefill), said(made.decode)) == ({}, {})

    def test_an_engine_with_one_field_is_told_by_it_on_the_prefill_leg_only(self):
        made = self.plan(sgl(P, 1, 4, "0.5.9")[3], worker(D, 11, labels={"version": "0.5.9"}))
        assert (said(made.prefill), said(made.decode)) == ({"data_parallel_rank": 3}, {})
        made = self.plan(sgl(P, 1, 4, "0.5.9")[3], sgl(D, 11, 2)[1])
        assert said(made.decode) == {"routed_dp_rank": 1, "disagg_prefill_dp_rank": 3}

    @pytest.mark.parametrize("version", ["dev", f"0.5.{'9' * 5000}"])
    def test_a_version_that_is_none_is_a_new_one(self, version):
        made = self.plan(sgl(P, 1, 4, version)[3], sgl(D, 11, 2, version)[1])
        assert said(made.decode) == {"routed_dp_rank": 1, "disagg_prefill_dp_rank": 3}

    @pytest.mark.parametrize("version", ["0.5.9", "0.5.23"])
    @pytest.mark.parametrize(("rank", "size"), [(0, 2), (1, 2), (6, 7), (1023, 1024)])
    def test_a_room_means_the_prefills_rank(self, rank, size, version):
        prefill = sgl(P, 1, size, version)[rank]
        for _ in range(50):
            rooms = json.loads(self.plan(prefill, worker(D, 11), read(COMPLETIONS)).decode)["bootstrap_room"]
            assert [room % size for room in rooms] == [rank, rank]
            assert all(0 < room <= sglang.LARGEST_ROOM for room in rooms)

    def test_no_room_is_too_large_or_none(self, monkeypatch):
        draws = iter([2**63 - 1, 1, 6])  # congruent to 2 modulo 3 they would be 2^63 + 1 (and 2); to 0, room 0
        monkeypatch.setattr("random.getrandbits", lambda _: next(draws))
        assert sglang.Rooms().mint(1, 2, 3) == (2,)
        assert sglang.Rooms().mint(1, 0, 3) == (6,)

    @pytest.mark.parametrize("trust", [False, True])
    def test_a_clients_own_ranks_are_not_kept(self, trust):
        theirs = {"routed_dp_rank": 7, "data_parallel_rank": 8, "disagg_prefill_dp_rank": 9}
        prefill, decode = sgl(P, 1, 2)[1], sgl(D, 11, 2)[0]
        made = self.plan(prefill, decode, read(**theirs), trust_client=trust)
        assert said(made.decode) == {"routed_dp_rank": 0, "disagg_prefill_dp_rank": 1}
        assert made.decode.count(b"routed_dp_rank") == 1
        kept = said(self.plan(worker(P, 1), worker(D, 11), read(**theirs), trust_client=trust).decode)
        assert kept == (theirs if trust else {})


# -- where a request may go --------------------------------------------------------------------------------------------


def placer(*workers, policy=RoundRobinPolicy):
    return Placer(FakeFleet(*workers), policy(), policy())


@pytest.mark.parametrize("policy", [RoundRobinPolicy, RandomPolicy])
def test_every_rank_gets_requests_independently_of_the_prefills(policy):
    prefills, decodes = ranks(P, 1, 2), ranks(D, 11, 3)
    place = placer(*prefills, *decodes, policy=policy)
    pairs = Counter()
    for _ in range(600):
        pair = place.pair(TINY)
        pairs[pair.prefill.dp_rank, pair.decodes[0].dp_rank] += 1
    assert set(pairs) == {(p, d) for p in range(2) for d in range(3)}


@pytest.mark.parametrize("policy", [RoundRobinPolicy, RandomPolicy])
def test_a_list_names_no_server_twice_and_one_rank_only(policy):
    servers = [ranks(D, port, size) for port, size in ((11, 4), (12, 4), (13, 2), (14, 4))]
    place = placer(worker(P, 1), worker(D, 15), *[entry for server in servers for entry in server], policy=policy)
    seen = Counter()
    for _ in range(400):
        decodes = place.pair(TINY).decodes
        assert len({entry.endpoint for entry in decodes}) == len(decodes)
        assert len({entry.dp_rank for entry in decodes}) == 1
        seen[decodes[0].name] += 1
        assert len(decodes) == {None: 1, 0: 4, 1: 4, 2: 3, 3: 3}[decodes[0].dp_rank]
    assert len(seen) == 15


def test_ranks_of_a_server_that_is_gone_are_taken_over_by_several():
    servers = [ranks(D, port, 2) for port in range(11, 17)]
    place = placer(worker(P, 1), *[entry for server in servers for entry in server])
    second = Counter(place.pair(TINY).decodes[1].server.url.port for _ in range(12))
    assert second == dict.fromkeys(range(11, 17), 2)
    assert all(len(place.pair(TINY).decodes) == CANDIDATES for _ in range(12))


def test_a_list_is_of_one_key():
    servers = [ranks(D, 11, 2, api_key="a"), ranks(D, 12, 2, api_key="b"), ranks(D, 13, 2, api_key="a")]
    place = placer(worker(P, 1), *[entry for server in servers for entry in server])
    for _ in range(6):
        decodes = place.pair(TINY).decodes
        assert {entry.api_key for entry in decodes} == {decodes[0].api_key}
        assert len(decodes) == (2 if decodes[0].api_key == "a" else 1)


def test_a_list_is_of_one_kind():
    servers = [ranks(D, port, 2, model_ids=(model,)) for port, model in ((11, "a"), (12, "b"), (13, "a"))]
    servers.append(ranks(D, 14, 2, model_ids=("a",), labels={"page_size": "1"}))
    servers.append(ranks(D, 15, 2, model_ids=("a",), labels={"page_size": "64"}))  # no partner
    decodes = [entry for server in servers for entry in server]
    place = placer(worker(P, 1, model_ids=("a", "b"), labels={"page_size": "1"}), *decodes)
    for model in (None, "a"):
        for _ in range(12):
            (first, *others) = place.pair(Asked(model)).decodes
            kind = {11, 13, 14} if first.model_ids == ("a",) else {12}
            assert {w.url.port for w in others} == kind - {first.url.port}


def test_a_list_goes_on_with_the_same_rank_of_the_nearest_servers():
    places = ((11, "b"), (12, "a"), (13, "c"), (14, "a"), (15, "b"))
    servers = [ranks(D, port, 2, labels={"zone": "z", "rack": rack}) for port, rack in places]
    place = placer(worker(P, 1, labels={"zone": "z", "rack": "a"}), *[entry for server in servers for entry in server])
    for _ in range(8):
        decodes = place.pair(TINY).decodes
        assert {w.url.port for w in decodes[:2]} == {12, 14}
        assert len({w.url.port for w in decodes}) == CANDIDATES
        assert {w.dp_rank for w in decodes} == {decodes[0].dp_rank}


def test_a_list_of_another_attempt_leaves_out_what_failed():
    servers = [ranks(D, port, 2) for port in (11, 12, 13)]
    place = placer(worker(P, 1), *[entry for server in servers for entry in server])
    for _ in range(8):
        decodes = place.pair(TINY, [*servers[0], servers[1][0]]).decodes
        assert {w.name.rpartition(":")[2] for w in decodes} in ({"12@1", "13@1"}, {"13@0"})
    assert len(place.pair(TINY).decodes) == 3


def test_prefills_and_those_who_take_over_likewise():
    servers = [ranks(P, port, 2) for port in (1, 2, 3)]
    entries = [entry for server in servers for entry in server]
    place = placer(*entries, worker(D, 11))
    assert {len(place.prefills(TINY)) for _ in range(6)} == {3}
    chosen = place.prefills(TINY, entries[3])
    assert chosen[0] is entries[3]
    assert {entry.dp_rank for entry in chosen} == {1}
    others = place.alike(TINY, entries[0], servers[0])
    assert (others[0].server in {servers[1][0], servers[2][0]}, len(others)) == (True, 2)


# -- SGLang requests ---------------------------------------------------------------------------------------------------


@pytest.fixture
def rig():
    """Two prefill and two decode servers of two ranks each."""
    servers = [sgl(P, port, 2, bootstrap_port=9000) for port in (1, 2)] + [sgl(D, port, 2) for port in (11, 12)]
    return Rig(*[entry for server in servers for entry in server])


def entry(rig, name):
    return next(w for w in rig.workers if w.name == f"http://127.0.0.1:{name}")


def test_a_leg_counts_on_its_rank_and_is_named_after_it(rig):
    client = rig.post(PATH, BODY)
    body, headers, destinations = released(client)
    assert RANK not in headers
    assert destinations == ["127.0.0.1:11", "127.0.0.1:12"]
    assert said(body) == {"routed_dp_rank": 0, "disagg_prefill_dp_rank": 0}
    assert {w.name: w.load for w in rig.workers if w.load} == {"http://127.0.0.1:1@0": 1, "http://127.0.0.1:11@0": 1}
    rig.egress.legs[0].answer()
    client.decode_head(headers=[("x-pd-upstream", "127.0.0.1:11")])
    named = mutated(client.call.take()[0])
    assert (named["x-pd-prefill"], named["x-pd-decode"]) == ("http://127.0.0.1:1@0", "http://127.0.0.1:11@0")
    client.close()
    rig.assert_nothing_is_left()


def test_after_a_fail_over_the_same_rank_of_the_other_server_counts(rig):
    rig.post(PATH, BODY)
    client = rig.post(PATH, BODY)  # the second prefill and decode rank of the first servers
    body, _, destinations = released(client)
    assert destinations == ["127.0.0.1:11", "127.0.0.1:12"]
    assert said(body)["routed_dp_rank"] == 1
    client.decode_head(headers=[("x-pd-upstream", "127.0.0.1:12")])
    assert (entry(rig, "11@1").load, entry(rig, "12@0").load, entry(rig, "12@1").load) == (0, 0, 1)
    assert rig.unreachable == [entry(rig, "11@1")]
    assert mutated(client.call.take()[0])["x-pd-decode"] == "http://127.0.0.1:12@1"


def test_a_client_that_leaves_gives_every_rank_its_load_back(rig):
    clients = [rig.post(PATH, BODY) for _ in range(8)]
    assert [w.load for w in rig.workers] == [2] * 8
    for client in clients:
        client.close()
    rig.assert_nothing_is_left()
    assert {destination for _, destination in {(leg.cluster, leg.destination) for leg in rig.egress.orders}} == {
        f"127.0.0.1:{port}" for port in (1, 2, 11, 12)
    }


@pytest.mark.parametrize("how", ["lost", "unreachable"])
def test_a_server_that_is_gone_is_gone_with_all_its_ranks(rig, how):
    client = rig.post(PATH, BODY)
    released(client)
    (leg,) = rig.egress.out
    if how == "lost":
        leg.receiver.lost(Lost.RESET, "reset")
    else:
        leg.answer(503, headers=[(b"x-pd-local-reply", b"UF")])
    client.decode_head()
    late = client.late()
    rig.clock.advance(1)
    again = next(leg for leg in rig.egress.out if leg.cluster == "prefill")
    assert again.destination == "127.0.0.1:2"
    late.close()
    client.close()
    rig.assert_nothing_is_left()


def test_a_rank_that_turns_a_request_away_is_not_its_server(rig):
    client = rig.post(PATH, BODY)
    released(client)
    rig.egress.out[0].answer(429)
    client.decode_head()
    late = client.late()
    rig.clock.advance(1)
    again = next(leg for leg in rig.egress.out if leg.cluster == "prefill")
    assert (again.destination, again.json["routed_dp_rank"]) == ("127.0.0.1:1", 1)
    late.close()
    client.close()


OUT_OF_RANGE = b'{"object":"error","message":"routed_dp_rank=0 out of range [0, 1)","type":"BadRequestError"}'


def test_a_prefill_that_has_no_such_rank_any_more_is_our_mistake(rig):
    client = rig.post(PATH, BODY)
    released(client)
    rig.egress.out[0].answer(400, OUT_OF_RANGE)
    assert rig.doubted == [entry(rig, "1@0")]
    client.decode_head()
    late = client.late()
    rig.clock.advance(1)
    assert [leg.cluster for leg in rig.egress.out] == ["prefill", "decode"]
    late.close()
    client.close()


def test_another_400_is_the_clients_and_has_the_server_asked_once_more_how_many_ranks_it_has(rig):
    client = rig.post(PATH, BODY)
    released(client)
    rig.egress.out[0].answer(400, b'{"message":"temperature"}')
    status, headers, body = rejection(client)
    assert (status, headers["x-pd-error-code"], body) == (400, "prefill_rejected", b'{"message":"temperature"}')
    assert rig.doubted == [entry(rig, "1@0")]


def test_of_a_server_as_a_whole_it_says_nothing():
    rig = Rig()
    client = rig.post(PATH, BODY)
    released(client)
    rig.egress.out[0].answer(400, OUT_OF_RANGE)
    assert rejection(client)[0] == 400
    assert rig.failing == rig.doubted == []


def test_a_decodes_400_has_it_asked_too(rig):
    client = rig.post(PATH, BODY)
    released(client)
    client.decode_head(400, headers=[("x-pd-upstream", "127.0.0.1:11")])
    assert rig.doubted == [entry(rig, "11@0")]


def test_samples_and_lists_of_prompts_stay_on_one_pair_of_ranks(rig):
    client = rig.post("/v1/completions", {"model": "tiny", "prompt": ["a", "b"], "n": 2})
    legs = rig.egress.out
    assert len({(leg.cluster, leg.destination) for leg in legs}) == 2
    assert [said(leg.body) for leg in legs] == [{"routed_dp_rank": 0, "disagg_prefill_dp_rank": 0}] * len(legs)
    client.close()
    rig.assert_nothing_is_left()


# -- vLLM --------------------------------------------------------------------------------------------------------------


def vllm(connector, **config):
    """A prefill server of two ranks, and two decode servers of three."""
    cores = (KvEngine(0, "e_dp0"), KvEngine(1, "e_dp1")) if connector == MOONCAKE else ()
    common = {"runtime": "vllm", "kv_connector": connector}
    prefill = ranks(P, 1, 2, kv_engines=cores, bootstrap_port=8001, **common)
    decodes = [entry for port in (11, 12) for entry in ranks(D, port, 3, **common)]
    return Rig(*prefill, *decodes, retry=RetryPolicy(attempts=1), **config)


def rank_of(leg):
    (value,) = [value for name, value in leg.headers if name == RANK.encode()]
    return int(value)


PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [1],
    "remote_engine_id": "e_dp1",
    "remote_request_id": "r",
    "remote_host": "10.0.0.1",
    "remote_port": 5601,
}


def test_nixl_each_leg_names_its_rank_in_a_header_and_what_is_told_is_relayed():
    rig = vllm(NIXL)
    rig.post(PATH, BODY)
    client = rig.post(PATH, BODY, headers=[(RANK, "7")])
    leg = rig.egress.out[-1]
    assert rank_of(leg) == 1
    leg.answer(body=json.dumps({"kv_transfer_params": PARAMS}).encode())
    body, headers, destinations = released(client)
    assert headers[RANK] == "1"
    assert destinations == ["127.0.0.1:11", "127.0.0.1:12"]
    assert json.loads(body)["kv_transfer_params"] == PARAMS
    assert {w.name.rpartition(":")[2]: w.load for w in rig.workers if w.load} == {"1@0": 1, "11@1": 1}


def test_a_clients_header_is_overwritten_and_not_removed():
    rig = vllm(NIXL)
    client = rig.post(PATH, BODY, headers=[(RANK, "7"), ("x-override-rid", "x")])
    rig.egress.out[0].answer()
    head, _ = client.call.take()
    mutation = head.request_headers.response.header_mutation
    assert mutated(head)[RANK] == "0"
    assert list(mutation.remove_headers) == ["x-override-rid"]


def test_mooncake_the_decode_is_told_the_engine_core_of_the_prefills_rank():
    rig = vllm(MOONCAKE)
    for rank in (0, 1, 0):
        client = rig.post(PATH, BODY)
        body, headers, _ = released(client)
        leg = rig.egress.legs[-1]
        assert rank_of(leg) == rank
        assert json.loads(body)["kv_transfer_params"]["remote_engine_id"] == f"e_dp{rank}"
        assert headers[RANK] in {"0", "1", "2"}


def test_mooncake_a_release_goes_to_the_rank_of_the_leg_that_failed():
    rig = vllm(MOONCAKE)
    rig.post(PATH, BODY)
    client = rig.post(PATH, BODY)
    released(client)
    rig.egress.legs[-1].answer(500)
    client.close()
    rig.clock.advance(5)
    assert [rank_of(order) for order in rig.egress.orders] == [1]


def test_what_a_decode_answers_alone_names_its_rank_too():
    rig = vllm(NIXL)
    client = rig.post(PATH, {**BODY, "n": 2})
    _, headers, _ = released(client)
    assert headers[RANK] == "0"
    client = rig.post(PATH, {**BODY, "max_tokens": 1})  # the prefill alone
    _, headers, destinations = released(client)
    assert (headers[RANK], destinations) == ("1", ["127.0.0.1:1"])


def test_a_stored_response_is_its_servers_whichever_rank_made_it():
    rig = vllm(NIXL)
    client = rig.post("/v1/responses", {"model": "tiny", "input": "Say hi"})
    rig.egress.out[0].answer(body=json.dumps({"kv_transfer_params": PARAMS}).encode())
    body, _, _ = released(client)
    name = json.loads(body)["request_id"]
    client.decode_head(headers=[("x-pd-upstream", "127.0.0.1:11")])
    for asked in (11, 12):
        keeper = rig.gateway.stored.keeper(name, [w for w in rig.workers if w.role is D and w.url.port == asked][1:])
        assert (keeper is not None) is (asked == 11)
