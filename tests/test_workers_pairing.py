"""Which workers may hand a KV cache over to each other."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.workers.kv_config import KvConfig, kv_config
from extproc.workers.pairing import (
    PairingMode,
    hand_over_alike,
    may_pair,
    mismatch,
    of_one_model,
    pairing_key,
    same_server,
    why_none,
)
from extproc.workers.pairing_key import ANY, Pairing
from extproc.workers.worker import MOONCAKE, NIXL, Role, Worker, WorkerUrl

OFF, LENIENT, STRICT = PairingMode.OFF, PairingMode.LENIENT, PairingMode.STRICT
LAYOUT = {"kv_cache_dtype": "auto", "page_size": "64", "attention_backend": "fa3", "model_dtype": "bfloat16"}
SGLANG = {**LAYOUT, "disaggregation_transfer_backend": "mooncake"}
VLLM = {**LAYOUT, "version": "0.32.0", "model_path": "/models/tiny"}


def worker(role: Role, runtime: str, connector: str = "", /, **labels: str) -> Worker:
    return Worker(
        role.value, WorkerUrl("http", role.value, 1), role, runtime=runtime, kv_connector=connector, labels=labels
    )


def differ(runtime: str, connector: str, prefill: dict[str, str], decode: dict[str, str], mode: PairingMode) -> Any:
    """In what two workers with these labels do not fit."""
    one, other = worker(Role.PREFILL, runtime, connector, **prefill), worker(Role.DECODE, runtime, connector, **decode)
    return mismatch(one.pairing, other.pairing, mode)


@pytest.mark.parametrize(
    ("prefill", "decode", "problem"),
    [
        (("sglang", ""), ("sglang", ""), ""),
        (("vllm", NIXL), ("vllm", NIXL), ""),
        (("vllm", NIXL), ("vllm", MOONCAKE), "transport"),
        (("vllm", ""), ("vllm", MOONCAKE), ""),
        (("vllm", NIXL), ("vllm", ""), ""),
        (("vllm", ""), ("sglang", ""), "runtime"),
        (("vllm", NIXL), ("sglang", ""), "runtime"),
    ],
)
def test_what_is_known_on_both_sides_must_agree(prefill: Any, decode: Any, problem: str) -> None:
    one, other = worker(Role.PREFILL, *prefill), worker(Role.DECODE, *decode)
    assert mismatch(one.pairing, other.pairing, LENIENT) == ((problem,) if problem else ())
    assert mismatch(one.pairing, other.pairing, OFF) == ()


def test_a_tensor_parallel_size_is_no_part_of_it_but_by_the_operators_word() -> None:
    one, other = SGLANG | {"tp_size": "4"}, SGLANG | {"tp_size": "8"}
    for mode in PairingMode:
        assert differ("sglang", "", one, other, mode) == ()
    apart = {"pairing_protocol": "tp4"}, {"pairing_protocol": "tp8"}
    assert differ("sglang", "", one | apart[0], other | apart[1], LENIENT) == ("pairing_protocol",)


@pytest.mark.parametrize(
    ("runtime", "connector", "labels"), [("sglang", "", SGLANG), ("vllm", NIXL, VLLM), ("vllm", MOONCAKE, LAYOUT)]
)
@pytest.mark.parametrize("part", ["kv_cache_dtype", "page_size", "attention_backend", "model_dtype"])
def test_every_part_of_the_layout_counts(runtime: str, connector: str, labels: dict[str, str], part: str) -> None:
    for mode in PairingMode:
        assert differ(runtime, connector, labels, labels, mode) == ()
        other = labels | {part: "else"}
        assert differ(runtime, connector, labels, other, mode) == (() if mode is OFF else (part,))
        unknown = {name: value for name, value in labels.items() if name != part}
        for one, another in ((labels, unknown), (unknown, labels), (unknown, unknown)):
            assert differ(runtime, connector, one, another, mode) == ((part,) if mode is STRICT else ())


def test_strict_wants_the_transport_to_be_known() -> None:
    assert differ("vllm", "", LAYOUT, LAYOUT, STRICT) == ("transport",)
    assert differ("sglang", "", LAYOUT, LAYOUT, STRICT) == ("transport",)


def test_all_that_differs_is_named_but_behind_another_runtime_nothing() -> None:
    assert differ("sglang", "", SGLANG, SGLANG | {"page_size": "1", "kv_cache_dtype": "fp8_e5m2"}, LENIENT) == (
        "kv_cache_dtype",
        "page_size",
    )
    one, other = worker(Role.PREFILL, "sglang", **SGLANG), worker(Role.DECODE, "vllm", NIXL, page_size="1")
    assert mismatch(one.pairing, other.pairing, LENIENT) == ("runtime",)


def test_a_block_is_a_page() -> None:
    assert differ("vllm", NIXL, {"block_size": "16"}, {"block_size": "32"}, LENIENT) == ("page_size",)
    assert differ("vllm", NIXL, {"block_size": "16"}, {"page_size": "16"}, LENIENT) == ()


@pytest.mark.parametrize(
    ("part", "one", "other", "lenient", "strict"),
    [
        ("model_dtype", "torch.bfloat16", "bfloat16", True, True),
        ("model_dtype", "half", "float16", True, True),
        ("model_dtype", "auto", "bfloat16", True, False),
        ("model_dtype", "auto", "auto", True, True),
        ("attention_backend", "FLASH_ATTN", "flash_attn", True, True),
        ("attention_backend", "auto", "fa3", True, False),
        # SGLang's decode compares the words, and so does the hash of vLLM's NIXL connector.
        ("kv_cache_dtype", "auto", "auto", True, True),
        ("kv_cache_dtype", "auto", "bfloat16", False, False),
        ("kv_cache_dtype", "fp8", "fp8_e4m3", False, False),
    ],
)
def test_words_that_mean_the_same_or_may(part: str, one: str, other: str, lenient: bool, strict: bool) -> None:  # noqa: FBT001
    for left, right in ((one, other), (other, one)):
        for mode, expected in ((LENIENT, lenient), (STRICT, strict)):
            problem = differ("sglang", "", SGLANG | {part: left}, SGLANG | {part: right}, mode)
            assert problem == (() if expected else (part,))


@pytest.mark.parametrize("nothing", ["", " ", "?"])
def test_a_label_takes_back_what_a_server_says(nothing: str) -> None:
    blank = worker(Role.DECODE, "sglang", **SGLANG | {"attention_backend": nothing})
    assert mismatch(worker(Role.PREFILL, "sglang", **SGLANG).pairing, blank.pairing, LENIENT) == ()
    assert blank.pairing.key == "sglang/mooncake/dtype=auto,page=64,model=bfloat16"


@pytest.mark.parametrize(
    ("own", "its", "expected"),
    [("a", "a", True), ("a", "b", False), ("a", "", False), ("", "b", False)],
)
@pytest.mark.parametrize("mode", [LENIENT, STRICT])
def test_the_operators_word_counts_where_both_have_one(own: str, its: str, expected: bool, mode: PairingMode) -> None:  # noqa: FBT001
    labels = [{"pairing_protocol": said} if said else {} for said in (own, its)]
    prefill = worker(Role.PREFILL, "vllm", NIXL, **labels[0])
    decode = worker(Role.DECODE, "sglang", **labels[1])
    named = ("pairing_protocol",) if own and its else ("runtime",)
    assert mismatch(prefill.pairing, decode.pairing, mode) == (() if expected else named)
    assert mismatch(prefill.pairing, decode.pairing, OFF) == ()


# -- what NIXL's handshake compares ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("part", "other"), [("version", "0.31.0"), ("model_path", "/models/other")])
def test_nixls_handshake_wants_the_same_engine_and_model(part: str, other: str) -> None:
    assert differ("vllm", NIXL, VLLM, VLLM | {part: other}, LENIENT) == (part,)
    assert differ("vllm", MOONCAKE, VLLM, VLLM | {part: other}, STRICT) == ()
    assert differ("vllm", "", VLLM, VLLM | {part: other}, LENIENT) == ()
    assert differ("sglang", "", VLLM, VLLM | {part: other}, LENIENT) == ()
    unknown = {name: value for name, value in VLLM.items() if name != part}
    assert differ("vllm", NIXL, VLLM, unknown, LENIENT) == ()
    assert differ("vllm", NIXL, VLLM, unknown, STRICT) == (part,)


@pytest.mark.parametrize(
    ("one", "other", "fits"),
    [
        ("0.12.0", "0.11.2", True),  # of which neither looks
        ("0.12.0", "0.13.0", False),
        ("0.32.0", "0.32.1.dev7+gabc", False),
        ("0.32.0", "dev", False),
        ("0.32.0", f"0.{'9' * 5000}", False),
        ("1.0.0", "0.12.0", False),
    ],
)
def test_engines_before_the_handshake_may_be_of_two_versions(one: str, other: str, fits: bool) -> None:  # noqa: FBT001
    for left, right in ((one, other), (other, one)):
        found = differ("vllm", NIXL, VLLM | {"version": left}, VLLM | {"version": right}, LENIENT)
        assert found == (() if fits else ("version",))
    assert differ("vllm", NIXL, VLLM | {"version": one}, VLLM | {"version": other}, STRICT) == ("version",)


def test_a_decode_that_does_not_look_takes_any() -> None:
    lax = {"enforce_handshake_compat": "false"}
    assert differ("vllm", NIXL, VLLM, VLLM | {"version": "0.1"} | lax, STRICT) == ()
    assert differ("vllm", NIXL, VLLM | lax, VLLM | {"version": "0.31.0"}, LENIENT) == ("version",)  # it is D that looks
    config = {"kv_connector": NIXL, "kv_connector_extra_config": {"enforce_handshake_compat": False}}
    said = kv_config(Role.DECODE, KvConfig(), config)
    assert not said.enforces_handshake
    decode = Worker(
        "d",
        WorkerUrl("http", "w", 1),
        Role.DECODE,
        runtime="vllm",
        kv_connector=said.connector,
        enforces_handshake=said.enforces_handshake,
        labels=VLLM | {"version": "0.31.0"},
    )
    assert mismatch(worker(Role.PREFILL, "vllm", NIXL, **VLLM).pairing, decode.pairing, LENIENT) == ()
    assert decode.pairing.version == ANY


def test_of_a_multi_connectors_children_the_one_that_moves_the_cache_says_whether_it_looks() -> None:
    lax = {"kv_connector": NIXL, "kv_connector_extra_config": {"enforce_handshake_compat": False}}
    store = {"kv_connector": "OffloadingConnector"}
    multi = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [store, lax]}}
    assert not kv_config(Role.DECODE, KvConfig(), multi).enforces_handshake
    assert kv_config(Role.DECODE, KvConfig(), {"kv_connector": NIXL}).enforces_handshake
    assert not KvConfig().or_else(KvConfig(NIXL, enforces_handshake=False)).enforces_handshake


# -- what is shown -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shown", "fields", "labels"),
    [
        ("sglang/?/?", ("sglang",), {}),
        ("vllm/nixl/?", ("vllm", NIXL), {}),
        ("vllm/nixl/?", ("vllm", NIXL), {"version": "0.32.0", "model_path": "m"}),
        ("vllm/mooncake/?", ("vllm", MOONCAKE), {}),
        ("vllm/moriio/?", ("vllm", "MoRIIOConnector"), {}),
        ("vllm/lmcacheconnectorv1/?", ("vllm", "LMCacheConnectorV1"), {}),
        # The peer's, of workers that tell: over gRPC.
        (
            "vllm/nixl/dtype=auto,page=16,model=torch.bfloat16",
            ("vllm", NIXL),
            {"kv_cache_dtype": "auto", "block_size": "16", "model_dtype": "torch.bfloat16"},
        ),
        (
            "sglang/mooncake/dtype=auto,page=64,attn=fa3",
            ("sglang",),
            SGLANG | {"attention_backend": "FA3", "model_dtype": ""},
        ),
        ("my own", ("vllm", NIXL), {"pairing_protocol": "my own"}),
    ],
)
def test_the_key_is_the_peers(shown: str, fields: tuple[str, ...], labels: dict[str, str]) -> None:
    assert pairing_key(worker(Role.PREFILL, *fields, **labels)) == shown


def reason(prefills: list[Worker], decodes: list[Worker], mode: PairingMode = LENIENT) -> str:
    return why_none(of_one_model(prefills, decodes), mode)


def test_why_none_names_both_sides_as_the_peer_does() -> None:
    assert reason([worker(Role.PREFILL, "vllm", NIXL)], [worker(Role.DECODE, "sglang")]) == (
        "No prefill/decode pair shares a KV transfer protocol "
        '(mismatch on ["runtime"]; prefill: ["vllm/nixl/?"], decode: ["sglang/?/?"])'
    )
    prefills = [worker(Role.PREFILL, "vllm", NIXL), worker(Role.PREFILL, "vllm", NIXL)]
    assert reason(prefills, [worker(Role.DECODE, "sglang"), worker(Role.DECODE, "vllm", MOONCAKE)]) == (
        "No prefill/decode pair shares a KV transfer protocol "
        '(mismatch on ["runtime", "transport"]; prefill: ["vllm/nixl/?"], decode: ["sglang/?/?", "vllm/mooncake/?"])'
    )
    assert reason(prefills, [worker(Role.DECODE, "sglang"), worker(Role.DECODE, "vllm", NIXL)]) == ""
    assert reason([], []) == ""


def test_what_strict_misses_is_named() -> None:
    """Both keys are alike then, and say nothing of what is wrong."""
    one, other = worker(Role.PREFILL, "vllm", "", **LAYOUT), worker(Role.DECODE, "vllm", NIXL, page_size="64")
    assert reason([one], [other]) == ""
    assert reason([one], [other], STRICT) == (
        "No prefill/decode pair shares a KV transfer protocol "
        '(mismatch on ["transport", "kv_cache_dtype", "attention_backend", "model_dtype"]; '
        'prefill: ["vllm/?/dtype=auto,page=64,attn=fa3,model=bfloat16"], decode: ["vllm/nixl/page=64"]; '
        'not known of prefill, and strict wants it said, as by labels: ["transport"]; '
        "not known of decode, and strict wants it said, as by labels: "
        '["kv_cache_dtype", "attention_backend", "model_dtype"])'
    )


@pytest.mark.parametrize("mode", [LENIENT, STRICT])
def test_a_word_of_the_operators_on_one_side_only_is_said_not_to_count(mode: PairingMode) -> None:
    labels = SGLANG | {"pairing_protocol": "mine"}
    one, other = worker(Role.PREFILL, "sglang", **labels), worker(Role.DECODE, "sglang", **SGLANG | {"page_size": "1"})
    layout = "attn=fa3,model=bfloat16"
    assert reason([one], [other], mode) == (
        'No prefill/decode pair shares a KV transfer protocol (mismatch on ["page_size"]; '
        f'prefill: ["sglang/mooncake/dtype=auto,page=64,{layout}"], '
        f'decode: ["sglang/mooncake/dtype=auto,page=1,{layout}"]; '
        'pairing_protocol ["mine"] of prefill is not compared: decode has none)'
    )
    yours = worker(Role.DECODE, "sglang", **SGLANG, pairing_protocol="yours")
    assert reason([one], [yours], mode).endswith(
        '(mismatch on ["pairing_protocol"]; prefill: ["mine"], decode: ["yours"])'
    )


def at(role: Role, url: str, endpoint: str | None = None) -> Worker:
    made = Worker(role.value, WorkerUrl.parse(url), role)
    made.endpoint = endpoint
    return made


@pytest.mark.parametrize(
    ("prefill", "decode", "is_one"),
    [
        (("http://w:1", None), ("http://w:1", None), True),
        (("http://w:1", "10.0.0.1:1"), ("http://w:2", "10.0.0.1:2"), False),
        (("http://w:1", None), ("http://v:1", None), False),
        (("http://localhost:1", "127.0.0.1:1"), ("http://127.0.0.1:1", "127.0.0.1:1"), True),
        (("http://[::1]:1", "[::1]:1"), ("http://w:1", "[::1]:1"), True),
        # A proxy in front of both may tell them apart by name.
        (("http://prefill:80", "10.0.0.1:80"), ("http://decode:80", "10.0.0.1:80"), False),
    ],
)
def test_a_server_in_both_roles_has_nothing_to_hand_over(prefill: Any, decode: Any, *, is_one: bool) -> None:
    one, other = at(Role.PREFILL, *prefill), at(Role.DECODE, *decode)
    assert same_server(one, other) is is_one
    said = "No prefill/decode pair: the only one that fits is the same server" if is_one else ""
    for mode in (LENIENT, OFF):
        assert may_pair(one, other, mode) is not is_one
        assert reason([one], [other], mode)[: len(said) or None] == said


def test_what_keys_do_not_show_is_named_besides() -> None:
    old = worker(Role.PREFILL, "vllm", NIXL, **VLLM | {"version": "0.31.0"})
    assert reason([old], [worker(Role.DECODE, "vllm", NIXL, **VLLM)]).endswith(
        'page=64,attn=fa3,model=bfloat16"]; version: ["0.31.0"] and ["0.32.0"])'
    )
    blank = worker(Role.PREFILL, "vllm", NIXL, **LAYOUT, version="0.32.0")
    assert '; model_path: ["?"] and ["/models/tiny"]' in reason(
        [blank], [worker(Role.DECODE, "vllm", NIXL, **VLLM)], STRICT
    )


def test_of_many_keys_a_few_are_shown() -> None:
    prefills = [worker(Role.PREFILL, "vllm", f"Connector{number}") for number in range(30)]
    message = reason(prefills, [worker(Role.DECODE, "sglang")])
    assert '"vllm/connector7/?", and 22 more]' in message
    assert "connector8" not in message


PAIRINGS = st.builds(
    Pairing,
    st.sampled_from(["sglang", "vllm"]),
    st.sampled_from(["nixl", "mooncake", "?"]),
    *[st.sampled_from(["", "auto", "a", "b"])] * 4,
    *[st.sampled_from(["", "*", "0.32.0", "0.31.0"])] * 2,
    st.sampled_from(["", "x", "y"]),
    st.sampled_from(["http", "grpc"]),
)


@given(PAIRINGS, PAIRINGS)
def test_modes_are_ordered_and_sides_alike(one: Pairing, other: Pairing) -> None:
    """Who may be paired strictly may be leniently; and it is all the same which of the two is the prefill worker."""
    differ = one.connection_mode != other.connection_mode
    assert mismatch(one, other, OFF) == (("connection_mode",) if differ else ())
    assert set(mismatch(one, other, LENIENT)) <= set(mismatch(one, other, STRICT))
    for mode in PairingMode:
        assert mismatch(one, other, mode) == mismatch(other, one, mode)
        assert mismatch(one, one, LENIENT) == ()


@pytest.mark.parametrize("mode", PairingMode)
@pytest.mark.parametrize("word", [{}, {"pairing_protocol": "x"}])
def test_http_and_grpc_never_fit(mode: PairingMode, word: dict[str, str]) -> None:
    over_http, over_grpc = (
        Worker("w", WorkerUrl(scheme, "w", 1), Role.PREFILL, runtime="vllm", kv_connector=NIXL, labels=VLLM | word)
        for scheme in ("http", "grpcs")
    )
    assert mismatch(over_http.pairing, over_grpc.pairing, mode) == ("connection_mode",)
    assert mismatch(over_grpc.pairing, over_http.pairing, mode) == ("connection_mode",)
    assert mismatch(over_grpc.pairing, over_grpc.pairing, mode) == ()
    assert not hand_over_alike(over_http, over_grpc)
    said = why_none([(over_http, over_grpc)], mode)
    assert 'mismatch on ["connection_mode"]; ' in said
    assert said.endswith('; connection_mode: ["http"] and ["grpc"])')
