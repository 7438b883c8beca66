"""Several models in one fleet, and other names for them."""

import json

import pytest
from fakes import Rig, mooncake, rejection, released, worker

from extproc.workers.worker import Role

PATH = "/v1/chat/completions"
ALIASES = {"gpt": "org/big", "tini": "tiny", "nobody": "served"}


def fleet(kind=worker):
    """Two models, each by one pair."""
    models = {1: "tiny", 2: "org/big", 11: "tiny", 12: "org/big"}
    return [kind(Role.PREFILL if port < 10 else Role.DECODE, port, model_ids=(m,)) for port, m in models.items()]


@pytest.mark.parametrize(("name", "port"), [("tiny", 1), ("org/big", 2), ("gpt", 2), ("tini", 1)])
def test_each_model_has_its_own_workers(name, port):
    rig = Rig(*fleet(), model_aliases=ALIASES)
    for _ in range(3):
        client = rig.post(PATH, {"model": name, "messages": []})
        body, _, destinations = released(client)
        leg = rig.egress.legs[-1]
        assert (leg.destination, destinations) == (f"127.0.0.1:{port}", [f"127.0.0.1:{port + 10}"])
        assert json.loads(body)["model"] == leg.json["model"] == ALIASES.get(name, name)


def test_only_the_name_is_changed_of_what_a_client_sends():
    rig = Rig(*mooncake((1,), (11,)), model_aliases=ALIASES)
    text = b'"messages":[{"role":"user","content":"\\u00e9 \xc3\xa9"}]'
    members = (b'"seed":12345678901234567890', text, b'"x": 1.0')
    body, _, _ = released(rig.post(PATH, b'{%b, %b, "model": "tini", %b}' % members))
    for leg in body, rig.egress.out[0].body:
        assert all(member in leg for member in members)
        assert json.loads(leg)["model"] == "tiny"
        assert b"tini" not in leg


def test_the_log_has_the_model_that_served():
    rig = Rig(*fleet(), model_aliases=ALIASES)
    client = rig.post(PATH, {"model": "gpt", "messages": []})
    client.decode_head()
    rig.egress.out[0].answer()
    client.close()
    assert [record.model for record in rig.records] == ["org/big"]


def test_samples_and_requests_that_one_worker_answers_are_for_the_model_too():
    rig = Rig(*fleet(), model_aliases=ALIASES)
    rig.post(PATH, {"model": "gpt", "messages": [], "n": 2})
    assert [leg.json["model"] for leg in rig.egress.out] == ["org/big"] * 4
    client = rig.post("/tokenize", {"model": "gpt", "prompt": "x"})
    body, _, destinations = released(client)
    assert (json.loads(body)["model"], destinations) == ("org/big", ["127.0.0.1:2"])


def test_a_model_that_nobody_serves_is_another_error_than_one_that_is_down():
    rig = Rig(*fleet(), model_aliases=ALIASES)
    for name in ("none", "nobody"):
        status, headers, body = rejection(rig.post(PATH, {"model": name, "messages": []}))
        assert (status, headers["x-pd-error-code"]) == (404, "model_not_found")
        assert json.loads(body)["error"]["param"] == "model"
    for down in rig.workers[0], rig.workers[2]:
        down.endpoint = None
        status, headers, _ = rejection(rig.post(PATH, {"model": "tini", "messages": []}))
        assert (status, headers["x-pd-error-code"], headers["retry-after"]) == (503, "no_available_workers", "1")
    assert rig.post(PATH, {"model": "gpt", "messages": []}).call.take()  # which has nothing to do with that


def test_an_alias_wins_over_a_model_of_its_name():
    """Which workers come and go must not decide what a name means."""
    rig = Rig(*fleet(), model_aliases={"tiny": "org/big"})
    body, _, destinations = released(rig.post(PATH, {"model": "tiny", "messages": []}))
    assert (json.loads(body)["model"], destinations) == ("org/big", ["127.0.0.1:12"])


def test_without_a_model_nothing_is_renamed():
    rig = Rig(*fleet(), model_aliases=ALIASES)
    body, _, _ = released(rig.post(PATH, {"messages": []}))
    assert "model" not in json.loads(body)
