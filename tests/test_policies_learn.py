"""What a policy is told: which legs of a request were answered as they should be, and of no others."""

import pytest
from fakes import Rig, worker

from extproc.policies.placement import Placer
from extproc.policies.round_robin import RoundRobinPolicy
from extproc.transport.interface import Lost
from extproc.workers.worker import Role

PATH = "/v1/chat/completions"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Say hi"}]}


class Learning(RoundRobinPolicy):
    learns = True

    def __init__(self):
        super().__init__()
        self.learnt = []

    def learn(self, request, worker):
        self.learnt.append((request.prompt_bytes(), worker))


@pytest.fixture
def rig():
    rig = Rig(worker(Role.PREFILL, 1, bootstrap_port=8998), worker(Role.DECODE, 11))
    rig.policy = Learning()
    rig.gateway.placer = Placer(rig.fleet, rig.policy, rig.policy)
    return rig


def told(rig):
    return [worker.role for _, worker in rig.policy.learnt]


def test_each_leg_when_it_is_answered(rig):
    client = rig.post(PATH, CHAT)
    assert told(rig) == []
    rig.egress.legs[0].answer()
    assert told(rig) == [Role.PREFILL]
    client.decode_head(200, [("x-pd-upstream", "127.0.0.1:11")])
    assert told(rig) == [Role.PREFILL, Role.DECODE]
    assert rig.policy.learnt[0][0] == b'[{"role": "user", "content": "Say hi"}]'


@pytest.mark.parametrize("status", [400, 503])
def test_a_refusal_teaches_nothing(rig, status):
    client = rig.post(PATH, CHAT)
    rig.egress.legs[0].answer(status)
    client.close()
    assert told(rig) == []


def test_a_lost_leg_teaches_nothing(rig):
    client = rig.post(PATH, CHAT)
    rig.egress.legs[0].receiver.lost(Lost.RESET, "reset")
    client.close()
    assert told(rig) == []


def test_legs_of_an_answer_that_is_put_together(rig):
    rig.post(PATH, CHAT | {"n": 2})
    for leg in [leg for leg in rig.egress.legs if leg.cluster == "prefill"]:
        leg.answer()
    assert told(rig) == [Role.PREFILL] * 2
