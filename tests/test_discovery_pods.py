"""From a pod to its workers, and from pods to a fleet: all that is pure."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.discovery.pod import POD, Pod, PodState
from extproc.discovery.pod_table import PodTable
from extproc.discovery.pod_workers import Annotations, ModelIdSource, PodReading, PodRules, read_pod
from extproc.discovery.selectors import Selector, query
from extproc.discovery.steps import Step, steps
from extproc.discovery.wanted import Key, Wanted, by_key
from extproc.workers.registration import registration
from extproc.workers.worker import Role
from tests import kube_api

PREFILL, DECODE = {"app": "x", "role": "prefill"}, {"app": "x", "role": "decode"}
SELECTORS = {Role.PREFILL: Selector.of(PREFILL), Role.DECODE: Selector.of(DECODE)}
RULES = PodRules(SELECTORS, port=8000)


def pod(name: str = "p", labels: dict[str, str] = PREFILL, ip: str | None = "10.0.0.1", **more: Any) -> Pod:
    version = more.pop("version", "7")
    made = kube_api.pod(name, labels, ip, **more)
    made["metadata"]["resourceVersion"] = version
    return POD.decode(json.dumps(made).encode())


def read(one: Pod, rules: PodRules = RULES) -> PodReading:
    reading = read_pod(one, rules)
    assert reading is not None
    return reading


def annotated(labels: dict[str, str] = PREFILL, rules: PodRules = RULES, **annotations: str) -> PodReading:
    names = {"bootstrap": "sglang.ai/bootstrap-port", "ports": "smg.ai/worker-ports"}
    names |= {"connector": "smg.ai/kv-connector", "engine": "smg.ai/kv-engine-id"}
    return read(pod(labels=labels, annotations={names[key]: value for key, value in annotations.items()}), rules)


# --- selectors ---


def test_a_selector_wants_all_its_labels() -> None:
    selector = Selector.parse(["app=x", "tier="])
    assert selector.matches({"app": "x", "tier": "", "other": "y"})
    assert not selector.matches({"app": "x"})
    assert not selector.matches({"app": "y", "tier": ""})


@pytest.mark.parametrize(
    ("selectors", "asked"),
    [
        ([["app=x", "role=a"], ["app=x", "role=b"]], "app=x,role in (a,b)"),
        ([["app=x", "role=a"], ["app=x", "part=b"]], "app=x"),
        ([["role=a"], ["part=b"]], ""),
        ([["app=x"]], "app=x"),
        ([["a.b/c=x"], ["a.b/c="]], "a.b/c in (,x)"),
        ([], ""),
    ],
)
def test_what_the_api_is_asked_for(selectors: list[list[str]], asked: str) -> None:
    assert query([Selector.parse(items) for items in selectors]) == asked


_LABELS = st.dictionaries(st.sampled_from("abc"), st.sampled_from("xyz"), max_size=3)


@given(st.lists(_LABELS.filter(bool).map(Selector.of), min_size=1, max_size=4), _LABELS)
def test_what_is_asked_for_leaves_out_nothing_that_is_selected(
    selectors: list[Selector], labels: dict[str, str]
) -> None:
    if any(selector.matches(labels) for selector in selectors):
        assert kube_api.selects(query(selectors), labels)


@given(_LABELS.filter(bool).map(Selector.of), _LABELS.filter(bool).map(Selector.of), _LABELS)
def test_who_covers_another_selects_what_that_selects(one: Selector, other: Selector, labels: dict[str, str]) -> None:
    if one.covers(other) and other.matches(labels):
        assert one.matches(labels)


def test_a_pod_of_several_selectors_has_the_first_role() -> None:
    rules = PodRules(
        {
            Role.REGULAR: Selector.of({"app": "x"}),
            Role.DECODE: Selector.of({"d": "1"}),
            Role.PREFILL: Selector.of({"p": "1"}),
            Role.ENCODE: Selector.of({"e": "1"}),
        }
    )
    labels = {"app": "x", "d": "1", "p": "1", "e": "1"}
    for name, role in (("e", Role.ENCODE), ("p", Role.PREFILL), ("d", Role.DECODE), ("app", Role.REGULAR)):
        assert rules.role_of(labels) is role
        del labels[name]
    assert rules.role_of(labels) is None


# --- how far a pod is ---


@pytest.mark.parametrize(
    ("more", "state"),
    [
        ({}, PodState.READY),
        ({"ready": False}, PodState.NOT_READY),
        ({"phase": "Pending"}, PodState.NOT_READY),
        ({"ip": None}, PodState.NOT_READY),
        ({"phase": "Failed"}, PodState.FINISHED),
        ({"phase": "Succeeded", "ready": False}, PodState.FINISHED),
        ({"terminating": True}, PodState.TERMINATING),
        ({"terminating": True, "ready": False, "phase": "Failed"}, PodState.TERMINATING),
    ],
)
def test_states(more: dict[str, Any], state: PodState) -> None:
    reading = read(pod(**more))
    assert reading.state is state
    # One that starts, or does not answer its probe, may have a worker; one that goes does not.
    assert [wanted.ready for wanted in reading.workers] == {
        PodState.READY: [True],
        PodState.NOT_READY: [] if more.get("ip", "") is None else [False],
    }.get(state, [])


def test_a_pod_of_which_little_is_known() -> None:
    bare = POD.decode(b'{"metadata": {"name": "p", "namespace": "n", "labels": {"app": "x", "role": "prefill"}}}')
    assert read(bare) == PodReading(Role.PREFILL, PodState.NOT_READY)
    assert read_pod(POD.decode(b'{"metadata": {"name": "p", "labels": null, "annotations": null}}'), RULES) is None


# --- its workers ---


def test_a_worker_is_what_its_pod_says() -> None:
    labels = PREFILL | {"topology.kubernetes.io/zone": "z1", "pod-template-hash": "abc"}
    found = pod("p-0", labels, node="node-7", annotations={"sglang.ai/bootstrap-port": "8998"}, created="2026-02-01")
    (wanted,) = read(found, PodRules(SELECTORS, port=8000, api_key="secret")).workers
    assert wanted.spec == registration(
        {
            "url": "http://10.0.0.1:8000",
            "worker_type": "prefill",
            "bootstrap_port": 8998,
            "api_key": "secret",
            "labels": {
                "smg.ai/discovery-provider": "kubernetes",
                "smg.ai/pod-namespace": "inference",
                "smg.ai/pod-name": "p-0",
                "smg.ai/pod-uid": "uid-p-0",
                "topology.kubernetes.io/zone": "z1",
                "kubernetes.io/hostname": "node-7",
            },
        }
    )
    assert (wanted.name, wanted.owner, wanted.since) == ("inference/p-0", "uid-p-0", "2026-02-01")
    assert wanted.key == Key(Role.PREFILL, "10.0.0.1:8000")
    assert not wanted.protocol_known
    assert "secret" not in repr(wanted)


def test_ipv6() -> None:
    (wanted,) = read(pod(ip="2001:DB8::0:1")).workers
    assert str(wanted.spec.url) == "http://[2001:db8::1]:8000"
    assert wanted.key.authority == "[2001:db8::1]:8000"


def test_several_ports_are_several_workers() -> None:
    reading = annotated(ports="8000, 8001,8000", bootstrap="8998,8999", engine="a,b", connector="mooncake")
    assert [(w.spec.url.port, w.spec.bootstrap_port, w.spec.kv.engine_id) for w in reading.workers] == [
        (8000, 8998, "a"),
        (8001, 8999, "b"),
    ]
    assert {w.spec.kv.connector for w in reading.workers} == {"MooncakeConnector"}
    assert not reading.warnings


def test_one_bootstrap_port_for_all() -> None:
    assert [w.spec.bootstrap_port for w in annotated(ports="1,2,3", bootstrap="9").workers] == [9, 9, 9]


def test_decode_workers_have_no_bootstrap_port() -> None:
    (wanted,) = annotated(DECODE, bootstrap="nonsense").workers
    assert wanted.spec.bootstrap_port is None


@pytest.mark.parametrize(
    ("annotations", "warning"),
    [
        ({"bootstrap": "x"}, "sglang.ai/bootstrap-port: 'x' is not a port between 1 and 65535; ignored"),
        ({"bootstrap": "0"}, "sglang.ai/bootstrap-port: '0' is not a port between 1 and 65535; ignored"),
        ({"bootstrap": "1,2"}, "sglang.ai/bootstrap-port: 2 ports for 1 workers; ignored"),
        ({"bootstrap": ""}, "sglang.ai/bootstrap-port: '' is not a port between 1 and 65535; ignored"),
    ],
)
def test_a_bootstrap_port_that_is_none_is_left_out(annotations: dict[str, str], warning: str) -> None:
    reading = annotated(**annotations)
    assert reading.warnings == (warning,)
    assert [wanted.spec.bootstrap_port for wanted in reading.workers] == [None]


@pytest.mark.parametrize(
    ("annotations", "problem"),
    [
        ({"ports": "80,x"}, "smg.ai/worker-ports: 'x' is not a port between 1 and 65535"),
        ({"ports": "0"}, "smg.ai/worker-ports: '0' is not a port between 1 and 65535"),
        ({"ports": " , "}, "smg.ai/worker-ports: expected ports, with commas between them"),
        ({"ports": "70000"}, "smg.ai/worker-ports: '70000' is not a port between 1 and 65535"),
        (
            {"ports": "1,2", "engine": "a"},
            "smg.ai/kv-engine-id: expected one for each of 2 workers, with commas between them",
        ),
        ({"connector": "MoRIIOConnector"}, "MoRIIOConnector: its handoff is not supported"),
        ({"connector": ""}, "kv_connector: String should have at least 1 character"),
    ],
)
def test_what_cannot_be_served(annotations: dict[str, str], problem: str) -> None:
    reading = annotated(**annotations)
    assert reading.problem.startswith(problem)
    assert reading.workers == ()


def test_annotations_can_be_called_otherwise() -> None:
    rules = PodRules(SELECTORS, port=1, annotations=Annotations("a/b", "a/p", "a/c", "a/e"))
    said = {"a/b": "8", "a/p": "9", "a/c": "nixl", "a/e": "id", "smg.ai/worker-ports": "5"}
    (wanted,) = read(pod(annotations=said), rules).workers
    spec = wanted.spec
    assert (spec.bootstrap_port, spec.url.port, spec.kv.connector, spec.kv.engine_id) == (8, 9, "NixlConnector", "id")


@pytest.mark.parametrize(
    ("source", "model"),
    [("namespace", "inference"), ("label:app", "x"), ("annotation:m.example/name", "m"), ("label:none", "")],
)
def test_the_model_of_a_pod(source: str, model: str) -> None:
    rules = PodRules(SELECTORS, model_id=ModelIdSource.parse(source))
    reading = read(pod(annotations={"m.example/name": "m"}), rules)
    (wanted,) = reading.workers
    assert wanted.spec.model_ids == ((model,) if model else ())
    assert wanted.spec.engine_models_too is bool(model)
    assert bool(reading.warnings) is not bool(model)
    assert str(rules.model_id) == source


# --- the table ---


def relist(table: PodTable, pods: Iterable[Pod]) -> None:
    table.replace(table.read(pods))


def names(table: PodTable) -> list[str]:
    return sorted(wanted.name.removeprefix("inference/") for wanted in table.wanted().values())


def test_a_list_is_all_there_is() -> None:
    table = PodTable(RULES)
    relist(table, [pod("a"), pod("b", ip="10.0.0.2"), pod("c", {"app": "y"}, "10.0.0.3")])
    assert names(table) == ["a", "b"]
    before = table.wanted()[Key(Role.PREFILL, "10.0.0.2:8000")]
    relist(table, [pod("b", ip="10.0.0.2"), pod("d", DECODE, "10.0.0.4")])
    assert names(table) == ["b", "d"]
    assert table.wanted()[before.key] is before, "what has not changed is not read again"
    assert table.counts() == {("prefill", "ready"): 1, ("decode", "ready"): 1}


def test_events() -> None:
    table = PodTable(RULES)
    first = pod("a", version="10")
    table.put(first)
    table.put(first)
    assert names(table) == ["a"]
    table.put(pod("a", version="12", terminating=True))
    assert names(table) == []
    table.put(first)  # late: it was so before
    assert names(table) == []
    table.put(pod("a", uid="new", version="11"))  # another pod: its versions are its own
    assert names(table) == ["a"]
    table.drop(first)
    assert names(table) == ["a"], "the former one has gone, not this one"
    table.drop(pod("a", uid="new", version="13"))
    assert names(table) == []
    table.drop(pod("never"))


def test_a_pod_that_is_labelled_otherwise_goes_or_changes_its_role() -> None:
    table = PodTable(RULES)
    table.put(pod("a"))
    table.put(pod("a", DECODE, version="8"))
    assert list(table.wanted()) == [Key(Role.DECODE, "10.0.0.1:8000")]
    table.put(pod("a", {"app": "other"}, version="9"))
    assert (names(table), len(table)) == ([], 0)


def test_what_is_wrong_is_told_once() -> None:
    table = PodTable(RULES)
    wrong = {"smg.ai/worker-ports": "x"}
    table.put(pod("a", annotations=wrong))
    ((about, why),) = table.news()
    assert (about.name, why) == ("inference/a", "smg.ai/worker-ports: 'x' is not a port between 1 and 65535")
    table.put(pod("a", annotations=wrong, version="8"))
    assert list(table.news()) == []
    assert table.counts() == {("prefill", "refused"): 1}
    table.put(pod("a", annotations={"smg.ai/worker-ports": "y"}, version="9"))
    assert len(list(table.news())) == 1


def test_an_address_belongs_to_the_younger_pod() -> None:
    old, new = pod("old", created="2026-01-01T00:00:00Z"), pod("new", created="2026-01-02T00:00:00Z")
    table = PodTable(RULES)
    for order in ([old, new], [new, old]):
        relist(table, order)
        assert names(table) == ["new"]
    relist(table, [old, pod("new", created="2026-01-02T00:00:00Z", ready=False, version="8")])
    assert names(table) == ["old"], "while the younger one is not ready"


# --- steps ---

_URLS = [f"http://10.0.0.{index}:80" for index in range(4)] + ["grpc://10.0.0.1:80"]
_WANTED = st.builds(
    lambda url, role, owner, port, ready: Wanted(
        registration({"url": url, "worker_type": role, "bootstrap_port": port}), url, owner, ready=ready
    ),
    st.sampled_from(_URLS),
    st.sampled_from(["prefill", "encode"]),
    st.sampled_from("abc"),
    st.sampled_from([1, 2]),
    st.booleans(),
)
_FLEET = st.lists(_WANTED, max_size=8).map(by_key)


def take(known: dict[Key, Wanted], wanted: dict[Key, Wanted]) -> list[tuple[Step, Key]]:
    """Do what is to be done, as the registrar does; what was done."""
    done = list(steps(known, wanted))
    for step, key in done:
        if step is Step.REMOVE:
            del known[key]
        else:
            assert (key in known) is (step is not Step.ADD)
            known[key] = wanted[key]
    return done


@given(st.lists(_FLEET, max_size=5))
def test_steps_lead_to_what_is_wanted(fleets: list[dict[Key, Wanted]]) -> None:
    known: dict[Key, Wanted] = {}
    for wanted in fleets:
        before = dict(known)
        done = take(known, wanted)
        assert len({key for _, key in done}) == len(done), "one step for each"
        for key, is_wanted in wanted.items():
            if is_wanted.ready:
                assert known[key].spec == is_wanted.spec
                assert known[key].owner == is_wanted.owner
            elif key in known:  # kept: the same pod, as it is registered now
                assert (known[key].owner, before[key].owner) == (is_wanted.owner, is_wanted.owner)
        assert known.keys() <= wanted.keys()
        assert not list(steps(known, wanted)), "nothing is left to do"
        kinds = [step for step, _ in done]
        assert Step.REMOVE not in kinds[kinds.index(Step.ADD) :] if Step.ADD in kinds else True


def wanted(url: str = _URLS[0], owner: str = "a", port: int = 1, *, ready: bool = True) -> dict[Key, Wanted]:
    spec = registration({"url": url, "worker_type": "prefill", "bootstrap_port": port})
    return by_key([Wanted(spec, "p", owner, ready=ready)])


@pytest.mark.parametrize(
    ("before", "after", "step"),
    [
        (wanted(), wanted(), None),
        (wanted(), wanted(ready=False), None),
        (wanted(), wanted(port=2), Step.CHANGE),
        (wanted(), wanted(port=2, ready=False), Step.CHANGE),
        (wanted(), wanted(owner="b"), Step.REPLACE),
        (wanted(), wanted(owner="b", ready=False), Step.REMOVE),
        (wanted(_URLS[1]), wanted(_URLS[4]), Step.REPLACE),
        (wanted(), {}, Step.REMOVE),
        ({}, wanted(), Step.ADD),
        ({}, wanted(ready=False), None),
    ],
)
def test_each_step(before: dict[Key, Wanted], after: dict[Key, Wanted], step: Step | None) -> None:
    assert [found for found, _ in steps(before, after)] == ([] if step is None else [step])


# --- any order of events ---


@st.composite
def _histories(draw: st.DrawFn) -> list[tuple[str, Pod]]:
    """What happens to a few pods, in order."""
    history, version = [], 10
    for _ in range(draw(st.integers(0, 12))):
        version += 1
        name = draw(st.sampled_from("ab"))
        each = pod(
            name,
            draw(st.sampled_from([PREFILL, DECODE, {"app": "y"}])),
            draw(st.sampled_from(["10.0.0.1", "10.0.0.2", None])),
            uid=name + draw(st.sampled_from("12")),
            ready=draw(st.booleans()),
            terminating=draw(st.booleans()),
            version=str(version),
        )
        history.append((draw(st.sampled_from(["put", "put", "drop"])), each))
    return history


@given(_histories())
def test_events_and_a_list_come_to_the_same(history: list[tuple[str, Pod]]) -> None:
    """Whoever watched all the time knows what somebody knows who lists at the end, whatever came twice."""
    watched, there = PodTable(RULES), {}
    for kind, each in history:
        if kind == "drop" and each.name in there and there[each.name].metadata.uid != each.metadata.uid:
            continue  # the API ends a pod before it makes another one of its name
        for _ in range(2):
            watched.put(each) if kind == "put" else watched.drop(each)
        if kind == "put":
            there[each.name] = each
        else:
            there.pop(each.name, None)
    listed = PodTable(RULES)
    relist(listed, there.values())
    assert watched.wanted() == listed.wanted()
    assert watched.counts() == listed.counts()
