"""The documents say what the code does."""

import argparse
import json
import logging
import re
import shlex
from dataclasses import astuple
from pathlib import Path

import pytest

from extproc.apis.request import CONTROL_FIELDS, MAX_PROMPTS, MAX_SAMPLES, InferenceRequest
from extproc.apis.table import APIS, Flow
from extproc.control.discovery_metrics import DiscoveryMetrics
from extproc.control.kv_event_metrics import KvEventMetrics
from extproc.control.load_report import load_report
from extproc.control.metrics import Metrics
from extproc.control.worker_metrics import WorkerMetrics
from extproc.control.worker_spec import parse_worker_spec
from extproc.dataplane.config import DataplaneConfig
from extproc.dataplane.paths import DECODE_PATHS, INFERENCE_PATHS, PREFILL_PATHS
from extproc.discovery.file import POLL_SECONDS
from extproc.discovery.kubernetes import WatchPace
from extproc.discovery.pod_workers import Annotations
from extproc.discovery.state import DiscoveryState
from extproc.discovery_settings import DiscoverySettings
from extproc.errors import CATALOGUE, GatewayError
from extproc.exchange.attempts import is_transient
from extproc.exchange.clock import (
    ABORT_SECONDS,
    ENDED_HEAD_SECONDS,
    HEAD_SECONDS,
    LEFTOVER_SECONDS,
    LINGER_SECONDS,
    PREFILL_WORD_SECONDS,
    REST_SECONDS,
    SECOND_CALL_SECONDS,
    SETTLE_SECONDS,
    TAKEN_SECONDS,
    UNPIN_SECONDS,
)
from extproc.exchange.record import NO_PARAMS, WAIVED, Record
from extproc.flags import add_arguments, read_settings, split_prefill
from extproc.handoff import sglang, vllm
from extproc.handoff.mooncake import MooncakeHandoff
from extproc.handoff.nixl import NixlHandoff
from extproc.handoff.one_token import one_token
from extproc.handoff.sglang import SglangHandoff
from extproc.handoff.table import Handoffs
from extproc.observe import RequestLog, RequestMetrics
from extproc.peer_options import ALIASES
from extproc.policies.event_prefixes import EventPrefixes
from extproc.policies.least import MOST_COMPARED
from extproc.policies.names import PolicyName
from extproc.policies.partners import CANDIDATES, NEAR_FACTOR
from extproc.policies.sticky import MOST_KEYS, MOST_UNDER_WAY
from extproc.settings import Settings
from extproc.text import library
from extproc.text.bundle import LARGEST_ARCHIVE, LARGEST_CONTENT, MOST_FILES
from extproc.text.service import INLINE_CHARACTERS, RETRY_AFTER
from extproc.text.threads import MOST_WAITING
from extproc.text_settings import TextSettings
from extproc.upstream import host
from extproc.workers import index, kv_event_stream, load_poll, publication
from extproc.workers.health_state import Pace
from extproc.workers.kv_config import KvConfig, kv_config
from extproc.workers.kv_event_feed import KvEventFeed
from extproc.workers.kv_event_source import Common
from extproc.workers.load import EngineLoad, RankLoad
from extproc.workers.pairing import PairingMode
from extproc.workers.pairing_key import Pairing
from extproc.workers.ranks import MOST_RANKS, form
from extproc.workers.registry import Registry
from extproc.workers.topology import NOWHERE, place_of
from extproc.workers.worker import MOONCAKE, NIXL, KvEngine, Role, Worker, WorkerUrl

ROOT = Path(__file__).parent.parent
BEHAVIOUR = (ROOT / "docs/behaviour.md").read_text()
POLICIES = (ROOT / "docs/policies.md").read_text()
README = (ROOT / "README.md").read_text()
VLLM = (ROOT / "docs/vllm.md").read_text()
SGLANG = (ROOT / "docs/sglang.md").read_text()
ARCHITECTURE = (ROOT / "docs/architecture.md").read_text()
TEXT = (ROOT / "docs/text.md").read_text()
DISCOVERY = (ROOT / "docs/discovery.md").read_text()
GUIDES = {"README.md": README, "text.md": TEXT, "vllm.md": VLLM, "sglang.md": SGLANG, "discovery.md": DISCOVERY}
# Options named that are not ours: the engines', the peer's, and those of other programs of ours.
OTHERS_OPTIONS = {
    "--disaggregation-decode-enable-radix-cache",
    "--enable-deterministic-inference",
    *("--kv-transfer-config", "--enable-scale-out", "--enable-prompt-tokens-details", "--data-parallel-external-lb"),
    *(
        "--data-parallel-size",
        "--data-parallel-hybrid-lb",
        "--dp-size",
        "--enable-dp-attention",
        "--enable-return-routed-experts",
        "--grpc",
        "--load-balance-method",
        "--max-logprobs",
    ),
    *("--disaggregation-mode", "--disaggregation-bootstrap-port", "--disaggregation-transfer-backend"),
    *("--prefill-attention-backend", "--decode-attention-backend", "--disable-log-stats"),
    *("--profiler-config", "--grpc", "--smg-grpc-mode", "--dry-run", "--engine", "--role", "--kv-connector"),
    *("--enable-metrics", "--kv-events-config", "--served-model-name"),
    *("--build-arg", "--upgrade", "--ready", "--concurrency"),
}


def section(name, text=BEHAVIOUR):
    """What stands below a heading."""
    return text.split(f"## {name}\n")[1].split("\n## ")[0]


def cells(text):
    """The cells of a table's rows, its head among them."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def rows(name):
    """The cells of the table below a heading of behaviour.md."""
    return cells(section(name))[2:]


def test_every_error_is_in_the_table_as_the_catalogue_has_it():
    table = {row[0].strip("`"): row[1:] for row in rows("Errors")}
    assert len(table) == len(rows("Errors"))
    assert table == {
        fault.code: [str(fault.status), fault.type, "yes" if fault.retryable else "no", fault.when]
        for fault in CATALOGUE.values()
    }


def test_times_and_limits_are_the_codes():
    timeouts = "\n".join(" ".join(row) for row in rows("Timeouts"))
    config = DataplaneConfig(extproc="unix:/a", ads="unix:/b", control="unix:/c", egress="unix:/d")
    assert f"(SGLang) {sglang.HOLD_SECONDS * 1000:g} ms" in timeouts
    assert f"(vLLM, Mooncake) {vllm.HOLD_SECONDS:g} s" in timeouts
    assert f"that nobody wants any more (Mooncake) {LEFTOVER_SECONDS:g} s" in timeouts
    assert f"{LINGER_SECONDS * 1000:g} ms" in timeouts
    assert f"before another answer is begun {HEAD_SECONDS * 1000:g} ms; {ENDED_HEAD_SECONDS:g} s" in timeouts
    assert f"wants any more (handoffs in sequence) {REST_SECONDS:g} s" in timeouts
    assert f"let finish, at most {REST_SECONDS:g} s, and what it names" in section("Who ends what")
    assert f"abort request to a worker, and the like {ABORT_SECONDS:g} s" in timeouts
    assert f"connecting to a worker {config.connect_timeout:g} s" in timeouts
    assert f"pool {config.upstream_idle_timeout:g} s" in timeouts
    assert (config.connect_timeout, config.upstream_idle_timeout) == (host.CONNECT_SECONDS, host.IDLE_SECONDS)
    assert f"`--egress http://HOST:PORT` {host.CONNECT_SECONDS:g} s" in timeouts
    limits = "\n".join(" ".join(row) for row in rows("Limits"))
    assert f"`--egress direct`) {host.MOST_CONNECTIONS}, of which {host.MOST_IDLE} may be idle" in limits
    assert f"call of a late answer {SECOND_CALL_SECONDS:g} s" in timeouts
    assert f"when the decode of its answer is done {PREFILL_WORD_SECONDS:g} s" in timeouts
    assert f"decode whose prefill failed {UNPIN_SECONDS:g} s" in timeouts
    assert f"after its 400 and {SETTLE_SECONDS:g} s, release" in section("Who ends what")
    assert f"whose leg was ended after {TAKEN_SECONDS:g} s or more" in section("Who ends what")
    assert f"let finish, at most {LEFTOVER_SECONDS:g} s" in section("Who ends what")
    assert f"let finish ({LEFTOVER_SECONDS:g} s)" in VLLM
    assert f"holds it for {sglang.HOLD_SECONDS * 1000:g} ms" in SGLANG
    assert f"is held until P is done, at most {vllm.HOLD_SECONDS:g} s" in VLLM.replace("\n", " ")
    assert config.idle_timeout - config.request_timeout == 5
    assert f"engine is {load_poll.LIMIT:g} s;" in timeouts
    assert f"counts for {load_poll.STALE} intervals" in timeouts
    further = f"more than {publication.FREE} endpoints {publication.SPACING * 1000:g} ms for each further"
    assert further in timeouts
    assert f"(1,000: {publication.spacing(1000):.2f} s)" in timeouts
    assert f"also every {Pace().restart:g} s" in timeouts
    assert f"a fleet of more than {load_poll.MOST_PER_SECOND * load_poll.INTERVAL:g} more slowly" in timeouts
    assert f"asked every {load_poll.SILENT} intervals" in section("Load")
    assert f"data-parallel ranks it has (`--dp-aware`) {Pace().ranks:g} s" in timeouts
    assert f"{kv_event_stream.REPLAY_SECONDS:g} s without a message" in timeouts
    assert f"asked again after {kv_event_stream.AGAIN_SECONDS:g} s" in timeouts
    limits = "\n".join(" ".join(row) for row in rows("Limits"))
    assert f"message of KV events {kv_event_stream.LARGEST >> 20} MiB" in limits
    assert f"`--kv-event-max-blocks`, {Settings.model_fields['kv_event_max_blocks'].default}" in limits
    assert f"about load {load_poll.MOST_PER_SECOND} a second, {load_poll.CONCURRENCY} at once" in limits
    assert f"an answer to one {load_poll.LARGEST >> 20} MiB" in limits
    assert f"(`n`) {MAX_SAMPLES} " in limits
    assert f"it is remembered who may be paired {index._SUBSETS} " in limits
    assert f"for one request {CANDIDATES} " in limits
    assert f"prompts of one request {MAX_PROMPTS} " in limits
    assert f"ranks of a server (`--dp-aware`) {MOST_RANKS} " in limits


def test_defaults_named_are_the_settings():
    fields = Settings.model_fields
    for flag, value in re.findall(r"`--([a-z-]+)`,? \(?(\d+)(?: s| MiB)?\)?", BEHAVIOUR):
        default = fields[flag.replace("-", "_")].default
        assert default in (int(value), int(value) << 20), flag


def test_what_is_said_of_text_is_the_codes():
    pauses = "after {:g}, {:g} and then every\n{:g} s".format(*library.RETRY_SECONDS)
    assert f"at most every {library.LOOK_AGAIN_SECONDS:g} s" in TEXT
    assert pauses in TEXT
    assert library.KEPT_SECONDS == 5 * 60  # Five minutes after
    assert f"Up to {INLINE_CHARACTERS:,} characters" in TEXT
    assert f"{MOST_WAITING} may wait" in TEXT
    assert f"at most {LARGEST_ARCHIVE >> 20} MiB, {LARGEST_CONTENT >> 20} MiB unpacked" in TEXT
    limits = {row[0]: row[1] for row in rows("Limits")}
    sizes = f"{LARGEST_ARCHIVE >> 20} MiB, {LARGEST_CONTENT >> 20} MiB unpacked, {MOST_FILES} files"
    assert limits["a tokenizer that a worker sends"] == sizes
    assert limits["long prompts to gRPC workers that wait to be tokenised"] == str(MOST_WAITING)
    assert f"{RETRY_AFTER} s on `tokenizer_not_found`" in BEHAVIOUR
    assert {f"--{name.replace('_', '-')}" for name in TextSettings.__annotations__} <= set(
        re.findall(r"--[a-z0-9-]+", TEXT)
    )


def test_every_path_is_in_the_table_and_in_envoys_routes():
    documented = {path for row in rows("Paths") for path in re.findall(r"`([^`]+)`", row[0])}
    assert set(APIS) <= documented
    assert set(APIS) == set(INFERENCE_PATHS)
    assert {path for path, api in APIS.items() if api.flow is Flow.PAIR} == set(DECODE_PATHS)
    assert {path for path, api in APIS.items() if api.flow is Flow.PREFILL_ONLY} == set(PREFILL_PATHS)


def test_every_part_of_a_pairing_is_in_the_table():
    parts, modes = section("Pairing").split("| `--pd-pairing-mode` |")
    table = {row[0].strip("`"): row[1:] for row in cells(parts)[2:]}
    fields = {"protocol": "pairing_protocol"}
    assert set(table) == {fields.get(name, name) for name in Pairing._fields}
    for part, (labels, _, shown) in table.items():
        if part in ("runtime", "transport"):
            continue
        for label in re.findall(r"`([^`]+)`", labels):
            found = Pairing.of("vllm", "nixl", {label: "x"}, handshake=True)
            assert getattr(found, part.removeprefix("pairing_")) == "x"
            assert found.key == {"not": "vllm/nixl/?", "alone, instead of all": "x"}.get(
                shown, f"vllm/nixl/{shown[1:-1]}x"
            )
    assert {row[0].split("`")[1] for row in cells(modes)[1:]} == {mode.value for mode in PairingMode}


def test_every_policy_is_in_the_table():
    table = [row[0].strip("`") for row in cells(section("Which policy", POLICIES))[2:]]
    assert sorted(table) == sorted(policy.value for policy in PolicyName)
    measured = {row[0] for row in cells(section("What a placement costs", POLICIES))[2:]}
    assert measured == {*table, "least_load, sticky"}


def test_what_is_said_of_policies_is_so():
    fields = Settings.model_fields
    for flag, value in re.findall(r"`--([a-z-]+)` \(([\d.]+)(?: s)?\)", POLICIES):
        assert fields[flag.replace("-", "_")].default == float(value), flag
    assert "100,000 for each role" in POLICIES.replace("\n", " ")
    assert MOST_KEYS == 100_000
    assert f"Of more than {MOST_COMPARED} candidates {MOST_COMPARED} are compared" in POLICIES
    limits = "\n".join(" ".join(row) for row in rows("Limits"))
    assert f"(`--routing-key-override`) {MOST_UNDER_WAY} " in limits
    for alias, name in ALIASES.items():
        if alias == "sticky-sessions":
            assert f"`--{name}` (`--{alias}`)" in POLICIES


def test_what_is_said_of_places_is_so():
    text = section("Pairing").replace("\n", " ")
    for labels in re.findall(r"`(zone|rack|host|[a-z.]*kubernetes.io/[a-z]+)`", text):
        assert place_of({labels: "x"}) is not NOWHERE
    times = f"more than {NEAR_FACTOR} times the requests of this gateway under way"
    assert f"{times} that the farther one has, and {NEAR_FACTOR} more" in text


def test_every_request_metric_is_in_the_table():
    metrics = Metrics()
    RequestMetrics(metrics)
    documented = {name for row in rows("Metrics") for name in re.findall(r"`([a-z_]+)`", row[0])}
    assert set(re.findall(r"# TYPE (\S+)", metrics.render().decode())) <= documented


def test_every_worker_metric_is_in_the_table():
    metrics, registry = Metrics(), Registry(lambda _: None)
    WorkerMetrics(registry, metrics)
    prefixes = EventPrefixes(1)
    KvEventMetrics(registry, KvEventFeed(registry, prefixes, Common()), prefixes, metrics)
    DiscoveryMetrics(DiscoveryState("file"), metrics)
    documented = {name for row in rows("Metrics") for name in re.findall(r"`([a-z_]+)`", row[0])}
    assert set(re.findall(r"# TYPE (\S+)", metrics.render().decode())) <= documented


def test_what_is_said_of_discovery_is_so():
    metrics = Metrics()
    DiscoveryMetrics(DiscoveryState("file"), metrics)
    seen = {row[0].strip("`") for row in cells(section("What can be seen", DISCOVERY)) if row[0].startswith("`pd_")}
    assert seen == set(re.findall(r"# TYPE (\S+)", metrics.render().decode()))
    options, annotations, *_ = (
        cells(part) for part in section("Kubernetes", DISCOVERY).split("\n\n") if part[0] == "|"
    )
    told = {flag: row[1] for row in options[2:] for flag in re.findall(r"`(--[a-z-]+)`", row[0])}
    fields = DiscoverySettings.__annotations__.keys() - {"discovery_file", "discovery_provider"}
    assert told.keys() == {f"--{name.replace('_', '-')}" for name in fields}
    for flag, default in told.items():
        value = Settings.model_fields[flag.removeprefix("--").replace("-", "_")].default
        words = {None: ("none", "all", "as workers say"), False: ("off",)}
        assert default.strip("`") in words.get(value, (f"{value:g}" if isinstance(value, float | int) else value,)), (
            flag
        )
    assert [row[0].strip("`") for row in annotations[2:]] == list(astuple(Annotations()))
    said = "\n".join(" ".join(row) for row in rows("Timeouts"))
    pace = WatchPace()
    assert f"(30 s) and {pace.grace:g} s more for a watch" in said
    assert f"asked again, {pace.first:g} s to {pace.longest:g} s later" in said
    assert f"looked at every {POLL_SECONDS:g} s" in said
    assert {
        reason for row in cells(DISCOVERY.split("| reason |")[1]) for reason in re.findall(r"`([a-z]+)`", row[0])
    } == {
        *("unauthorized", "forbidden", "refused", "connection", "tls", "timeout", "cut", "ended", "invalid", "config"),
        "unreadable",
    }


def test_every_field_of_the_log_line_is_in_the_table(caplog):
    record = Record(1.0)
    for name in Record.__slots__:
        setattr(record, name, {int: 7, float: 7.0, bytes: b"7", str: "7", bool: True}[type(getattr(record, name))])
    with caplog.at_level(logging.INFO, "extproc.request"):
        RequestLog().finished(record)
    own = vars(logging.makeLogRecord({})).keys()
    fields = (
        {name for name, value in vars(caplog.records[0]).items() if value is not None} - own - {"message", "asctime"}
    )
    assert {name for row in rows("Log line") for name in re.findall(r"`([a-z_]+)`", row[0])} == fields


def test_every_control_field_is_named():
    named = set(
        re.findall(r"`([a-z_*]+)`", section("Bodies").split("Control fields of a client")[1].split("Inside")[0])
    )
    assert {field for field in CONTROL_FIELDS if not field.startswith("bootstrap_")} | {"bootstrap_*"} == named


def test_every_handoff_is_named():
    names = {handoff.name for handoff in Handoffs()}
    assert names == set(re.findall(r"^\| `([a-z]+)` \|", section("The handoffs", ARCHITECTURE), re.MULTILINE))
    assert names <= set(re.findall(r"^\| `([a-z]+)` \|", section("Bodies"), re.MULTILINE))


@pytest.mark.parametrize("status", [400, 408, 409, 429, 500, 502, 503, 529])
def test_which_statuses_lead_to_another_attempt(status):
    code = "prefill_rejected" if status < 500 else "prefill_failed"
    assert is_transient(GatewayError(code, "", status=status)) == (status in (408, 429) or status >= 500)
    assert "answers 408, 429 or 5xx" in section("Another attempt")


@pytest.mark.parametrize(
    "code", ["prefill_unreachable", "decode_connection_lost", "prefill_timeout", "egress_unavailable"]
)
def test_what_leads_to_another_attempt_besides(code):
    assert is_transient(GatewayError(code, ""))


@pytest.mark.parametrize("code", ["kv_missing", "decode_bad_reply", "request_timeout"])
def test_what_does_not(code):
    assert not is_transient(GatewayError(code, ""))


ONE_TOKEN = {
    "chat": ("/v1/chat/completions", {"messages": []}),
    "completions": ("/v1/completions", {"prompt": "x"}),
    "responses": ("/v1/responses", {"input": "x"}),
    "messages": ("/v1/messages", {"messages": []}),
}


@pytest.mark.parametrize("name", ONE_TOKEN)
def test_what_is_set_in_a_leg_of_one_token(name):
    path, body = ONE_TOKEN[name]
    raw = json.dumps({**body, "stream": True, "n": 1, "max_completion_tokens": 9}).encode()
    edits = one_token(InferenceRequest.read(APIS[path], raw), keep_prompt_logprobs=False)
    table = {row[0]: row[1] for row in cells(section("Bodies"))}
    told = table[name].replace("the same", table["chat"].split("1, ", 1)[1])
    for key, value in edits.put.items():
        if (name, key) not in [("messages", "n"), ("responses", "n")]:  # these APIs have none
            assert re.search(rf"`{key}`[^|]* {value.decode()}\b", told), key


def legs_params(handoff):
    """The names of the members of each leg's ``kv_transfer_params`` that are made here."""
    request = InferenceRequest.read(APIS["/v1/completions"], b'{"prompt": "x"}')
    prefill = Worker("p", WorkerUrl("http", "p", 1), Role.PREFILL, runtime="vllm", kv_engines=(KvEngine(0, "e"),))
    plan = handoff.plan(request, prefill)
    return [set(json.loads(body)["kv_transfer_params"]) for body in (plan.prefill, plan.decode) if body]


def test_what_the_legs_are_told():
    rows_of = {row[0]: row[1:3] for row in cells(section("What each leg gets", VLLM))}
    asked, told = legs_params(MooncakeHandoff())
    assert [set(re.findall(r"`(\w+)`", cell)) for cell in rows_of["`mooncake`"]] == [asked, told]
    (asked,) = legs_params(NixlHandoff())
    named = set(re.findall(r"`(\w+)`", rows_of["`nixl`"][0]))
    assert named < asked
    assert len(asked - named) == 4  # "four nulls"
    assert f"(`{'`, `'.join(vllm.FETCHED)}`)" in VLLM.replace("\n", " ")


def test_what_the_legs_are_told_of_ranks():
    table = {row[0]: row[1:] for row in cells(section("Data-parallel ranks"))}

    def told(version):
        labels = {"version": version}
        prefill = [Worker("p", WorkerUrl("http", "p", 1), Role.PREFILL, labels=labels) for _ in range(2)]
        decode = [Worker("d", WorkerUrl("http", "d", 1), Role.DECODE, labels=labels) for _ in range(2)]
        form(prefill)
        form(decode)
        request = InferenceRequest.read(APIS["/v1/completions"], b'{"prompt": "x"}')
        plan = SglangHandoff().plan(request, prefill[1], decode=decode[0])
        of_ranks = [
            {name: value for name, value in json.loads(body).items() if name.endswith("dp_rank") or "parallel" in name}
            for body in (plan.prefill, plan.decode)
        ]
        return [", ".join(f"`{name}` {'dp'[value]}" for name, value in fields.items()) for fields in of_ranks]

    assert table["SGLang from 0.5.10, or of a version that cannot be read"] == told("0.5.10") == told("")
    before = told("0.5.9")
    assert table["SGLang before"][0] == before[0]
    assert (table["SGLang before"][1].split(":")[0], before[1]) == ("nothing", "")


def test_what_is_said_of_a_cache_that_was_not_handed_over():
    for note in (NO_PARAMS, WAIVED):
        assert note in VLLM
    request = InferenceRequest.read(APIS["/v1/completions"], b'{"prompt": "x"}')
    alone = MooncakeHandoff().alone(request, Worker("p", WorkerUrl("http", "p", 1), Role.PREFILL, runtime="vllm"))
    assert alone.why in VLLM
    cores = (KvEngine(0, "e_dp0"), KvEngine(1, "e_dp1"))
    several = Worker("p", WorkerUrl("http", "p", 1), Role.PREFILL, runtime="vllm", kv_engines=cores)
    assert MooncakeHandoff().alone(request, several).why in VLLM


def source(name):
    return (ROOT / "extproc" / name).read_text()


@pytest.mark.parametrize(
    ("reason", "module"),
    [
        ("no kv_connector registered", "workers/connectors.py"),
        ("engine cores, and no --dp-aware: the decode recomputes each prompt", "workers/bootstrap.py"),
        ("no engine id: the decode recomputes each prompt", "workers/bootstrap.py"),
        ("its handoff is not supported", "workers/connectors.py"),
        ("whatever the prefill returns is relayed", "workers/connectors.py"),
        ("knows no engine yet", "workers/bootstrap.py"),
        ("does not answer", "workers/bootstrap.py"),
        ("registered with engine id", "workers/bootstrap.py"),
        (
            "a Mooncake prefill restarted under the same engine id; its decode workers are told",
            "workers/mooncake_refresh.py",
        ),
        ("handoffs from it hang", "workers/mooncake_refresh.py"),
    ],
)
def test_reasons_are_worded_as_in_the_code(reason, module):
    assert reason in VLLM
    assert reason in source(module)


def test_the_defaults_of_retries():
    table = {row[0]: row[1] for row in cells(section("Failures and retries", VLLM))}
    fields = Settings.model_fields
    assert table["`--retry-max-retries N`"].startswith(f"{fields['retry_max_retries'].default} attempts")
    assert table["`--on-prefill-failure`"] == f"`{fields['on_prefill_failure'].default.value}`"
    assert table["`--kv-missing`"] == f"`{fields['kv_missing'].default.value}`"
    assert table["`--mooncake-dispatch`"] == f"`{fields['mooncake_dispatch'].default.value}`"
    (pauses,) = [row for row in table if "--retry-initial-backoff-ms" in row]
    names = [flag.replace("-", "_") for flag in re.findall(r"`--([a-z-]+)`", pauses)]
    assert table[pauses] == ", ".join(f"{fields[name].default:g}" for name in names)


@pytest.mark.parametrize("document", [*ROOT.glob("docs/**/*.md"), ROOT / "README.md"], ids=lambda path: path.name)
def test_options_named_are_there(document):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    known = {string for action in parser._actions for string in action.option_strings} | OTHERS_OPTIONS
    text = re.sub(r"<!-- bench: begin.*bench: end -->", "", document.read_text(), flags=re.DOTALL)
    if "facts" not in document.name:  # of the engines
        assert set(re.findall(r"`(--[a-z][a-z-]*[a-z])\b(?!-)", text)) <= known


def commands(text):
    """The indented shell commands of a document, continuation lines joined."""
    blocks = re.findall(r"^    (\S(?:\\\n|.)*)", text, re.MULTILINE)
    return [re.sub(r"\\\n\s*", "", block).split("  #")[0].rstrip() for block in blocks]


def settings_of(command):
    """The settings of a ``pd-extproc launch`` command."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return read_settings(parser.parse_args(split_prefill(shlex.split(command)[2:])))


LAUNCHES = [command for text in GUIDES.values() for command in commands(text) if "pd-extproc launch" in command]


@pytest.mark.parametrize("command", LAUNCHES)
def test_launch_commands_are_accepted(command):
    assert settings_of(command).pd_disaggregation


def test_the_launch_commands_mean_what_is_said():
    given = [settings_of(command) for command in commands(README) if "pd-extproc launch" in command]
    sglang_workers, empty, *over_grpc = [settings for settings in given if settings.provider is None]
    assert [worker.bootstrap_port for worker in sglang_workers.prefill] == [8998, 8998]
    assert len(sglang_workers.decode) == 2
    assert (empty.prefill, empty.decode) == ((), ())
    assert len(over_grpc) == 2
    assert all(worker.url.is_grpc for each in over_grpc for worker in (*each.prefill, *each.decode))
    _, nixl, mooncake = [settings_of(command) for command in commands(VLLM) if "pd-extproc launch" in command]
    assert (nixl.prefill_kv_connector, nixl.decode_kv_connector) == (NIXL, NIXL)
    assert (mooncake.prefill_kv_connector, mooncake.decode_kv_connector) == (MOONCAKE, MOONCAKE)
    assert mooncake.prefill[0].bootstrap_port == 8998
    assert mooncake.prefill_kv_engine_id == ("prefill-0-1",)


@pytest.mark.parametrize("name", ["README.md", "vllm.md"])
def test_the_file_of_a_guide_is_accepted(name, tmp_path):
    (text,) = re.findall(r"```yaml\n(.*?)```", GUIDES[name], re.DOTALL)
    (tmp_path / "gateway.yaml").write_text(text)
    settings = settings_of(f"pd-extproc launch --config {tmp_path}/gateway.yaml")
    assert settings.pd_disaggregation
    assert len(settings.prefill) == len(settings.decode) == 1


REGISTRATIONS = [
    command
    for text in GUIDES.values()
    for command in commands(text)
    if "curl -X POST" in command and "/workers" in command
]


@pytest.mark.parametrize("command", REGISTRATIONS)
def test_registrations_are_accepted(command):
    words = shlex.split(command)
    spec = parse_worker_spec(words[words.index("-d") + 1].encode())
    assert spec.role in (Role.PREFILL, Role.DECODE)


@pytest.mark.parametrize("command", [command for command in commands(VLLM) if "--kv-transfer-config" in command])
def test_the_engines_configurations_can_be_registered(command):
    words = shlex.split(command)
    config = words[words.index("--kv-transfer-config") + 1]
    role = Role.DECODE if "kv_consumer" in config else Role.PREFILL
    assert kv_config(role, KvConfig(), config).connector in (NIXL, MOONCAKE)


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\bscripts/[a-z.-]+", "".join(GUIDES.values())))))
def test_scripts_are_there(path):
    assert (ROOT / path).exists()


@pytest.mark.parametrize("verb", re.findall(r"make ([a-z-]+)", README))
def test_every_verb_of_the_readme_is_in_the_makefile(verb):
    assert re.search(rf"^{verb}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("document", [*ROOT.glob("docs/**/*.md"), ROOT / "README.md"], ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
        assert (document.parent / target).exists(), target


def test_every_figure_of_get_loads_is_named():
    worker = Worker("w", WorkerUrl("http", "w", 1), Role.DECODE)
    worker.envoy_active = 1
    figures = dict.fromkeys(RankLoad.__dataclass_fields__, 1)
    worker.engine_load = EngineLoad(0, [RankLoad(**figures)])
    (entry,) = load_report([worker])["loads"]
    named = {name for row in cells(section("Load")) for name in re.findall(r"`(\w+)`", row[-1])}
    assert entry.keys() - {"worker", "worker_type", "dp_rank"} <= named
