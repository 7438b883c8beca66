"""Whatever happens to requests and workers: no slot is lost, and nobody waits for one that is free."""

from __future__ import annotations

from fakes import Rig, hint, nixl, worker
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from test_in_turn import ANSWER

from extproc.admission.gate import GateSettings
from extproc.admission.legs import LegSettings
from extproc.exchange.attempts import RetryPolicy
from extproc.exchange.direct import DirectCourse
from extproc.policies.cache_aware import CacheAwarePolicy
from extproc.policies.names import PolicyName
from extproc.policies.placement import Placer
from extproc.policies.sticky import StickyPolicy
from extproc.policies.table import policy_of
from extproc.policies.tuning import Tuning
from extproc.transport.interface import Lost
from extproc.workers.worker import Role, Status

CHAT = "/v1/chat/completions"
LIMIT = 2
WINDOW = 3


class Storm(RuleBasedStateMachine):
    """One gateway; clients, engines and a fleet that do as they like."""

    engines = "sglang"

    @initialize(
        limit=st.sampled_from((0, 8)),
        attempts=st.sampled_from((1, 3)),
        prefill=st.sampled_from(PolicyName),
        decode=st.sampled_from([name for name in PolicyName if name is not PolicyName.BUCKET]),
        sticky=st.booleans(),
    )
    def begin(self, limit, attempts, prefill, decode, sticky):
        models = (("a",), ("a", "b"))
        if self.engines == "sglang":
            workers = [worker(Role.PREFILL, 1 + n, bootstrap_port=90 + n, model_ids=m) for n, m in enumerate(models)]
            workers += [worker(Role.DECODE, 11 + n, model_ids=m) for n, m in enumerate(models)]
        else:
            workers = nixl()
            for each, names in zip(workers, models * 2, strict=True):
                each.model_ids = names
        self.rig = Rig(
            *workers,
            gate=GateSettings(limit=limit, queue_timeout=20.0),
            legs=LegSettings(LIMIT, 4, 15.0, 10.0),
            retry=RetryPolicy(attempts=attempts, jitter=0),
            request_timeout=60.0,
        )
        tuning = Tuning(routing_key_override=sticky)
        self.policies = [
            policy_of(name, tuning, self.rig.clock.now, role)
            for name, role in ((prefill, Role.PREFILL), (decode, Role.DECODE))
        ]
        self.rig.gateway.placer = Placer(self.rig.fleet, *self.policies)
        for each in workers:
            each.limit = LIMIT if each.role is Role.PREFILL else WINDOW
        self.clients = []
        self.left = set()  # some may have a prefill leg for a moment yet

    def alive(self):
        self.clients = [client for client in self.clients if client.session.alive and client not in self.left]
        return self.clients

    def waiting(self):
        return [client for client in self.alive() if client.session._waiter is not None]

    @rule(
        model=st.sampled_from("aab"),
        samples=st.sampled_from((1, 1, 1, 2, 4)),
        key=st.sampled_from(("", "a", "b")),
        within=st.sampled_from((None, None, None, (1, 11), (2, 11, 12), (1, 2, 12))),
    )
    def come(self, model, samples, key, within):
        body = {"model": model, "messages": [{"role": "user", "content": "as always " * 60}], "n": samples}
        context = None if within is None else hint(*within)
        self.clients.append(self.rig.post(CHAT, body, headers=[("x-smg-routing-key", key)], context=context))

    @precondition(lambda self: self.rig.egress.out)
    @rule(which=st.integers(0, 99), how=st.sampled_from(("good", "good", "good", "bad", "busy", "lost")))
    def a_leg_ends(self, which, how):
        legs = self.rig.egress.out
        leg = legs[which % len(legs)]
        match how:
            case "good":
                leg.answer(body=ANSWER)
            case "bad":
                leg.answer(500)
            case "busy":
                leg.answer(429)
            case "lost":
                leg.receiver.lost(Lost.RESET, "x")

    @precondition(lambda self: self.released())
    @rule(which=st.integers(0, 99), status=st.sampled_from((200, 200, 200, 400, 500, 503)), second=st.booleans())
    def a_decode_answers(self, which, status, second):
        clients = self.released()
        client = clients[which % len(clients)]
        upstreams = client.session._course._upstreams
        client.decode_head(status, [("x-pd-upstream", upstreams[-1 if second else 0].endpoint)])

    def released(self):
        """Those that Envoy has, and of which no answer has come."""
        courses = [(client, client.session._course) for client in self.alive()]
        direct = [(client, course) for client, course in courses if isinstance(course, DirectCourse)]
        return [client for client, course in direct if course._released and not course._status]

    @precondition(lambda self: self.alive())
    @rule(which=st.integers(0, 99))
    def leave(self, which):
        self.close(self.clients[which % len(self.clients)])

    def close(self, client):
        """It leaves, the second call about its answer with it."""
        self.left.add(client)
        for late in list(self.rig.gateway.late.values()):
            if late._session is client.session:
                late.closed()
        client.close()

    @rule(seconds=st.sampled_from((0.0, 0.1, 3.0, 9.0)))
    def pass_time(self, seconds):
        self.rig.clock.advance(seconds)
        self.rig.gateway.expire()

    @rule(which=st.integers(0, 3), status=st.sampled_from((Status.READY, Status.READY, Status.NOT_READY)))
    def fleet_changes(self, which, status):
        self.rig.workers[which].status = status
        self.rig.gateway.legs.look_soon()

    @rule(which=st.integers(2, 3), window=st.sampled_from((0, 1, WINDOW, WINDOW)))
    def engine_speaks(self, which, window):
        decode = self.rig.workers[which]
        decode.limit = window
        decode.freed(decode)

    @invariant()
    def no_worker_has_more_than_it_may(self):
        if not hasattr(self, "rig"):
            return
        for each in self.rig.workers:
            assert each.promised >= 0
            assert each.load >= 0
            if each.role is Role.PREFILL and each.load > LIMIT:  # it is a batch, larger than any limit, and alone
                ids = {dict(leg.headers)[b"x-request-id"] for leg in self.legs_of(each)}
                assert len(ids) == 1, ids
        held = [client for client in {*self.clients, *self.left} if client.session._entered]
        assert self.rig.gateway.gate.in_flight == len(held)

    def legs_of(self, each):
        return [leg for leg in self.rig.egress.out if leg.destination == each.endpoint and leg.cluster == "prefill"]

    @invariant()
    def nobody_waits_for_a_worker_that_has_room(self):
        if not hasattr(self, "rig"):
            return
        self.rig.clock.advance(0)
        legs, placer = self.rig.gateway.legs, self.rig.gateway.placer
        taken = set()
        now = self.rig.clock.now()
        for queue in sorted(legs._queues.values(), key=lambda queue: legs._urgency(queue, now, classes=False)):
            seeking = queue.first.who
            workers = [w for role in (Role.PREFILL, Role.DECODE) for w in placer.usable(seeking._request, role)]
            full = {w for w in workers if not w.has_room(seeking._legs)}
            failed = seeking.need[1] if isinstance(seeking.need[1], tuple) else ()
            like = seeking.need[2]
            if isinstance(like, Role):  # one worker is enough
                assert all(w in full or w in taken for w in workers if w.role is like), queue.key
                continue
            assert not placer.has_pair(seeking._request, {*full, *failed, *taken}, like), queue.key
            taken.update(seeking.claims())

    @invariant()
    def each_line_is_in_order(self):
        if hasattr(self, "rig"):
            for queue in self.rig.gateway.legs._queues.values():
                assert queue
                numbers = [waiter.number for waiter in queue]
                assert numbers == sorted(numbers)

    def teardown(self):
        if not hasattr(self, "rig"):
            return
        for client in self.alive():
            self.close(client)
        self.rig.clock.advance(1000)
        self.rig.assert_nothing_is_left()
        for policy in self.policies:
            for each in (policy, getattr(policy, "_inner", policy)):
                if isinstance(each, StickyPolicy):
                    assert not any(assignment.under_way for assignment in each._assignments.values())
                if isinstance(each, CacheAwarePolicy):
                    assert not any(cache.pending for cache in each._index.caches.values())


class InTurn(Storm):
    """The same with a handoff in turn, where a decode keeps room for a leg to come."""

    engines = "nixl"


_SETTINGS = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestStorm = Storm.TestCase
TestStorm.settings = _SETTINGS
TestInTurn = InTurn.TestCase
TestInTurn.settings = _SETTINGS
