"""What a worker says of itself, and whether that fits its registration."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from fleet import spec

from extproc.workers.client import Answer, NoAnswerError
from extproc.workers.identify import unidentified
from extproc.workers.metadata import Metadata, MismatchError, check_kind, read_metadata
from extproc.workers.pairing_key import Pairing
from extproc.workers.worker import Role

MODELS = {"object": "list", "data": [{"id": "tiny", "object": "model", "owned_by": "sglang", "max_model_len": 2048}]}
# As the peer's reference capture 00 has them.
SERVER_INFO = {
    "model_path": "MODEL_DIR",
    "tokenizer_path": "MODEL_DIR",
    "served_model_name": "tiny",
    "tp_size": 1,
    "dp_size": 1,
    "pp_size": 1,
    "disaggregation_mode": "prefill",
    "disaggregation_bootstrap_port": 8998,
    "max_total_tokens": 8192,
    "max_running_requests": 16,
    "version": "0.5.23",
    "load_balance_method": "auto",
    "is_embedding": False,
    "api_key": "s3cret",
    "internal_states": [{"load": 0}],
}
MODEL_INFO = {
    "model_path": "MODEL_DIR",
    "tokenizer_path": "MODEL_DIR",
    "is_generation": True,
    "preferred_sampling_params": None,
    "weight_version": "default",
    "has_image_understanding": False,
    "has_audio_understanding": False,
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
}


class Site:
    """A worker's answers by path; what is not there is 404."""

    def __init__(self, pages: dict[str, Any]) -> None:
        self.pages = pages
        self.asked: list[str] = []

    async def __call__(self, path: str) -> Answer:
        self.asked.append(path)
        page = self.pages.get(path, Answer(404, "", b""))
        if isinstance(page, Exception):
            raise page
        return page if isinstance(page, Answer) else Answer(200, "application/json", orjson.dumps(page))


def sglang(**changes: Any) -> Site:
    return Site({"/v1/models": MODELS, "/server_info": SERVER_INFO | changes, "/model_info": MODEL_INFO})


async def test_an_sglang_worker_is_described_as_the_peer_does() -> None:
    found = await read_metadata(sglang())
    assert found.labels == {
        "served_model_name": "tiny",
        "version": "0.5.23",
        "max_running_requests": "16",
        "dp_size": "1",
        "model_type": "llama",
        "has_image_understanding": "false",
        "tp_size": "1",
        "is_embedding": "false",
        "has_audio_understanding": "false",
        "max_total_tokens": "8192",
        "pp_size": "1",
        "load_balance_method": "auto",
        "max_model_len": "2048",
        "architectures": '["LlamaForCausalLM"]',
        "model_path": "MODEL_DIR",
        "is_generation": "true",
        "disaggregation_mode": "prefill",
        "tokenizer_path": "MODEL_DIR",
    }
    assert found.cards == (
        {
            "id": "tiny",
            "model_type": ["chat", "completions", "responses", "tools"],
            "hf_model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "context_length": 2048,
            "tokenizer_path": "MODEL_DIR",
        },
    )
    assert (found.model_ids, found.runtime) == (("tiny",), "sglang")
    assert (found.disaggregation_mode, found.bootstrap_port) == ("prefill", 8998)
    assert found.listed == tuple(MODELS["data"])


# What 0.5.23 said of itself on a CPU, as far as it is about the KV cache.
LAYOUT = {
    "kv_cache_dtype": "auto",
    "page_size": 1,
    "attention_backend": "torch_native",
    "prefill_attention_backend": None,
    "decode_attention_backend": None,
    "dtype": "float32",
    "disaggregation_transfer_backend": "mooncake",
}


async def test_sglang_tells_how_its_cache_is_laid_out_and_moved() -> None:
    labels = (await read_metadata(sglang(**LAYOUT))).labels
    assert Pairing.of("sglang", "mooncake", labels, handshake=False).key == (
        "sglang/mooncake/dtype=auto,page=1,attn=torch_native,model=float32"
    )
    assert labels["disaggregation_transfer_backend"] == "mooncake"
    assert "prefill_attention_backend" not in labels


@pytest.mark.parametrize("split", ["prefill_attention_backend", "decode_attention_backend"])
async def test_kernels_of_ones_own_for_a_role_are_not_compared(split: str) -> None:
    labels = (await read_metadata(sglang(**LAYOUT | {split: "fa3"}))).labels
    assert "attention_backend" not in labels
    assert labels["page_size"] == "1"


async def test_older_versions_have_other_paths() -> None:
    site = Site({"/v1/models": MODELS, "/get_server_info": SERVER_INFO, "/get_model_info": MODEL_INFO})
    assert await read_metadata(site) == await read_metadata(sglang())
    assert site.asked == ["/v1/models", "/server_info", "/get_server_info", "/model_info", "/get_model_info"]


async def test_newer_versions_say_the_mode_in_model_info_too() -> None:
    site = Site({"/v1/models": MODELS, "/model_info": MODEL_INFO | {"disaggregation_mode": "decode"}})
    assert (await read_metadata(site)).disaggregation_mode == "decode"


async def test_several_models_keep_their_order() -> None:
    site = Site({"/v1/models": {"data": [{"id": "base"}, {"id": "lora", "parent": "base"}, {"id": "base"}]}})
    assert (await read_metadata(site)).model_ids == ("base", "lora")


async def test_the_served_name_stands_in_for_a_missing_listing() -> None:
    site = Site({"/server_info": SERVER_INFO})
    assert (await read_metadata(site)).model_ids == ("tiny",)


async def test_a_worker_that_says_nothing_is_unknown() -> None:
    assert await read_metadata(Site({})) == Metadata()


# As the peer's reference capture 30v_nixl_registration_by_post has them.
VLLM_MODELS = {"data": [{"id": "tiny", "owned_by": "vllm", "root": "MODEL_DIR", "parent": None, "max_model_len": 2048}]}


async def test_a_vllm_worker_is_described_as_the_peer_does() -> None:
    site = Site({"/v1/models": VLLM_MODELS, "/version": {"version": "0.32.0"}})
    found = await read_metadata(site)
    assert found == Metadata(
        model_ids=("tiny",),
        cards=({"id": "tiny", "model_type": ["chat", "completions", "responses", "tools"], "context_length": 2048},),
        labels={
            "served_model_name": "tiny",
            "model_path": "MODEL_DIR",
            "max_model_len": "2048",
            "version": "0.32.0",
        },
        runtime="vllm",
        listed=tuple(VLLM_MODELS["data"]),
    )
    assert site.asked == ["/v1/models", "/version", "/metrics"]


# A line of 0.32's, shortened, and what is around it.
METRICS = b"""\
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{_block_size_resolved="True",block_size="32",cache_dtype="auto",engine="%b",mamba_block_size=""} 1
vllm:num_requests_running{engine="0",model_name="tiny"} 0.0
"""


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        (METRICS % b"0", {"block_size": "32", "kv_cache_dtype": "auto"}),
        (METRICS % b"0" + METRICS % b"1", {"block_size": "32", "kv_cache_dtype": "auto"}),
        (METRICS % b"0" + (METRICS % b"1").replace(b'"32"', b'"64"'), {"kv_cache_dtype": "auto"}),
        ((METRICS % b"0").replace(b'"32"', b'"None"').replace(b'"auto"', b'""'), {}),
        (b"vllm:num_requests_running 0.0\n", {}),
        (b"\xff\x00 nonsense", {}),
        (Answer(404, "", METRICS % b"0"), {}),
        (NoAnswerError("GET /metrics: nothing came"), {}),
    ],
)
async def test_vllms_metrics_tell_how_its_cache_is_laid_out(metrics: Any, expected: dict[str, str]) -> None:
    """And where they do not, the worker is described all the same."""
    page = Answer(200, "text/plain", metrics) if isinstance(metrics, bytes) else metrics
    site = Site({"/v1/models": VLLM_MODELS, "/version": {"version": "0.32.0"}, "/metrics": page})
    found = await read_metadata(site)
    assert found.layout == expected
    assert found.labels["version"] == "0.32.0"


async def test_a_vllm_worker_is_never_asked_sglangs_questions() -> None:
    for runtime in (None, "vllm"):
        site = Site({"/v1/models": VLLM_MODELS})
        assert (await read_metadata(site, runtime)).runtime == "vllm"
        assert site.asked == ["/v1/models", "/version", "/metrics"]


@pytest.mark.parametrize(
    ("owner", "registered", "title"),
    [("vllm", "sglang", "vLLM"), ("sglang", "vllm", "SGLang"), ("vllm", "tokenspeed", "vLLM")],
)
async def test_a_worker_that_says_it_is_another_engine_is_kept_out(owner: str, registered: str, title: str) -> None:
    """What it would be sent it would not understand, and not say so: no cache would be handed over."""
    site = Site({"/v1/models": {"data": [{"id": "lora"}, {"id": "tiny", "owned_by": owner}]}})
    said = f"registered as {registered}, but the server is {title}: register it with runtime_type {owner}, or without"
    with pytest.raises(MismatchError, match=said):
        await read_metadata(site, registered)


@pytest.mark.parametrize("owner", ["nvidia", "somebody", None, 7])
async def test_one_that_does_not_say_so_is_believed_to_be_what_it_is_registered_as(owner: object) -> None:
    site = Site({"/v1/models": {"data": [{"id": "tiny", "owned_by": owner}]}})
    for registered in ("vllm", "sglang"):
        assert (await read_metadata(site, registered)).runtime == registered


async def test_a_server_that_owns_no_model_may_still_tell_its_version() -> None:
    assert (await read_metadata(Site({"/version": {"version": "0.32.0"}}))).runtime == "vllm"
    site = Site({"/version": {"release": 7}, "/server_info": SERVER_INFO})
    assert (await read_metadata(site)).runtime == "sglang"


@pytest.mark.parametrize("path", ["/v1/models", "/server_info", "/model_info"])
@pytest.mark.parametrize(
    ("page", "message", "busy"),
    [
        (Answer(500, "", b"oops"), "HTTP 500", False),
        (Answer(503, "", b"oops"), "HTTP 503", True),
        (Answer(401, "", b""), "HTTP 401", False),
        (Answer(200, "text/html", b"<html>"), "not JSON", False),
        (Answer(200, "application/json", b"[1]"), "not a JSON object", False),
        (NoAnswerError("GET it: connection refused"), "connection refused", True),
    ],
)
async def test_an_answer_that_fails_is_said_and_no_guess(path: str, page: object, message: str, *, busy: bool) -> None:
    site = sglang()
    site.pages[path] = page
    found = await read_metadata(site)
    assert len(found.failed) == 1
    assert message in found.failed[0]
    assert found.busy is busy
    assert found.locked is (path == "/v1/models" and message == "HTTP 401")
    assert (site.asked[-1] == path) is (path == "/model_info" or isinstance(page, NoAnswerError)), "each takes its time"


async def test_what_does_not_fail_is_found_all_the_same() -> None:
    found = await read_metadata(sglang(), "sglang")
    site = sglang()
    site.pages["/model_info"] = Answer(500, "", b"")
    partly = await read_metadata(site)
    assert (partly.model_ids, partly.bootstrap_port) == (found.model_ids, found.bootstrap_port)
    assert "model_type" not in partly.labels


# What older engines say: SGLang 0.4 has the two paths with get_, and tells less there; before it had no list of models
# (0.1) it told the path; vLLM 0.2 has no /version.
@pytest.mark.parametrize(
    ("pages", "models", "runtime"),
    [
        ({"/v1/models": MODELS, "/get_model_info": {"model_path": "M"}, "/get_server_info": {}}, ("tiny",), "sglang"),
        ({"/v1/models": MODELS}, ("tiny",), "sglang"),
        ({"/get_model_info": {"model_path": "M"}}, ("M",), "sglang"),
        ({"/v1/models": VLLM_MODELS}, ("tiny",), "vllm"),
        ({"/v1/models": VLLM_MODELS, "/version": {"version": "0.6.0"}}, ("tiny",), "vllm"),
    ],
)
async def test_older_engines_are_identified(pages: dict[str, Any], models: tuple[str, ...], runtime: str) -> None:
    found = await read_metadata(Site(pages))
    assert (found.model_ids, found.runtime, found.failed) == (models, runtime, ())
    assert unidentified(spec(Role.PREFILL, "http://w:1"), found) == ""


@pytest.mark.parametrize("junk", [None, 7, "x", [], [7], [{}], [{"id": 7}], [{"id": ""}], {"id": "m"}])
async def test_a_senseless_listing_lists_nothing(junk: object) -> None:
    assert (await read_metadata(Site({"/v1/models": {"data": junk}}))).model_ids == ()


@pytest.mark.parametrize("port", [None, 0, 65536, "8998", 1.5, True])
async def test_a_senseless_bootstrap_port_is_none(port: object) -> None:
    assert (await read_metadata(sglang(disaggregation_bootstrap_port=port))).bootstrap_port is None


@pytest.mark.parametrize(
    ("role", "mode", "problem"),
    [
        (Role.PREFILL, "prefill", None),
        (Role.DECODE, "decode", None),
        (Role.PREFILL, None, None),
        (Role.REGULAR, "null", None),
        (Role.PREFILL, "decode", "registered as prefill, but the server's disaggregation_mode is decode"),
        (Role.DECODE, "prefill", "registered as decode, but the server's disaggregation_mode is prefill"),
        (Role.REGULAR, "decode", "registered as regular, but the server's disaggregation_mode is decode"),
        (Role.PREFILL, "null", "registered as prefill, but the server is not disaggregated"),
        (Role.DECODE, "null", "registered as decode, but the server is not disaggregated"),
    ],
)
def test_the_role_must_be_the_servers(role: Role, mode: str | None, problem: str | None) -> None:
    found = Metadata(runtime="sglang", disaggregation_mode=mode)
    if problem is None:
        check_kind(role, "", found)
    else:
        with pytest.raises(MismatchError, match=problem):
            check_kind(role, "", found)


def test_a_connector_needs_a_vllm_server() -> None:
    check_kind(Role.PREFILL, "NixlConnector", Metadata(runtime="vllm"))
    check_kind(Role.PREFILL, "NixlConnector", Metadata())
    with pytest.raises(MismatchError, match="registered with kv_connector NixlConnector, but the server is SGLang"):
        check_kind(Role.PREFILL, "NixlConnector", Metadata(runtime="sglang"))
