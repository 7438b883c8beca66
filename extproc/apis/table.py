"""The inference endpoints as a table: where each API keeps its prompt, its samples and its identifiers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Final
from urllib.parse import unquote


class Flow(Enum):
    """How a request of an API is served by a prefill/decode fleet."""

    KEEPER = "keeper"  # the decode worker that keeps what is asked for answers alone

    PAIR = "pair"  # a prefill leg and a decode leg with a handoff between them
    PREFILL_ONLY = "prefill_only"  # one prefill worker answers alone; nothing is handed off


@dataclass(frozen=True, slots=True)
class Api:
    """One public endpoint.

    Attributes:
        name: short name for logs and metrics.
        path: the client's path.
        worker_path: the path on the worker.
        id_prefix: how request ids made for this API begin (the peer's prefixes).
        prompt_keys: where the prompt may be; one of them must be present (all of them for ``needs_all``).
        ids_keys: the prompt keys whose value may be a list of token ids, or a list of such lists.
        batch_keys: the prompt keys whose value may be a list of prompts.
        object_keys: what else must be present, as objects.
        samples_key: the key with the number of samples per prompt, or None.
        samples_in: the key of the object that holds ``samples_key``, or None for the top level.
        rid_key: the key by which the engine lets us name the request, to abort it by; None where it has none.
        rid_prefix: how the engine's own names for requests of this API begin.
        early_head: whether the engine sends the head of a streamed answer before it has a first token.

    What the last three say of SGLang was seen on 0.5.23 (docs/sglang-facts.md). ``/inference/v1/generate``,
    ``/tokenize`` and ``/detokenize`` are as in vLLM 0.32:
    entrypoints/scale_out/token_in_token_out/protocol.py, entrypoints/serve/tokenize/protocol.py.
    """

    name: str
    path: str
    worker_path: str
    id_prefix: str
    prompt_keys: tuple[str, ...]
    flow: Flow = Flow.PAIR
    ids_keys: tuple[str, ...] = ()
    batch_keys: tuple[str, ...] = ()
    object_keys: tuple[str, ...] = ()
    samples_key: str | None = None
    samples_in: str | None = None
    needs_all: bool = False
    rid_key: str | None = None
    rid_prefix: str = ""
    early_head: bool = False


CHAT: Final = Api(
    "chat",
    "/v1/chat/completions",
    "/v1/chat/completions",
    "chatcmpl-",
    ("messages",),
    samples_key="n",
    rid_key="rid",
)
COMPLETIONS: Final = Api(
    "completions",
    "/v1/completions",
    "/v1/completions",
    "cmpl-",
    ("prompt",),
    ids_keys=("prompt",),
    batch_keys=("prompt",),
    samples_key="n",
    rid_key="rid",
)
GENERATE: Final = Api(
    "generate",
    "/generate",
    "/generate",
    "gnt-",
    ("text", "input_ids", "input_embeds"),
    ids_keys=("input_ids",),
    batch_keys=("text", "input_ids", "input_embeds"),
    samples_key="n",
    samples_in="sampling_params",
    rid_key="rid",
    early_head=True,
)
MESSAGES: Final = Api("messages", "/v1/messages", "/v1/messages", "msg_", ("messages",), early_head=True)
RESPONSES: Final = Api(
    "responses",
    "/v1/responses",
    "/v1/responses",
    "resp-",
    ("input",),
    rid_key="request_id",
    rid_prefix="resp_",
    early_head=True,
)
COUNT_TOKENS: Final = Api(
    "count_tokens",
    "/v1/messages/count_tokens",
    "/v1/messages/count_tokens",
    "req-",
    ("messages",),
    flow=Flow.PREFILL_ONLY,
)
RERANK: Final = Api(
    "rerank", "/v1/rerank", "/v1/rerank", "req-", ("query", "documents"), flow=Flow.PREFILL_ONLY, needs_all=True
)
RERANK_SHORT: Final = Api(
    "rerank", "/rerank", "/v1/rerank", "req-", ("query", "documents"), flow=Flow.PREFILL_ONLY, needs_all=True
)
INFERENCE_GENERATE: Final = Api(
    "inference_generate",
    "/inference/v1/generate",
    "/inference/v1/generate",
    "gnt-",
    ("token_ids",),
    ids_keys=("token_ids",),
    object_keys=("sampling_params",),
    samples_key="n",
    samples_in="sampling_params",
    rid_key="request_id",
)
TOKENIZE: Final = Api("tokenize", "/tokenize", "/tokenize", "req-", ("prompt", "messages"), flow=Flow.PREFILL_ONLY)
DETOKENIZE: Final = Api("detokenize", "/detokenize", "/detokenize", "req-", ("tokens",), flow=Flow.PREFILL_ONLY)
# The peer's and SGLang's names of the same; what vLLM has is for both engines.
TOKENIZE_LONG: Final = replace(TOKENIZE, path="/v1/tokenize")
DETOKENIZE_LONG: Final = replace(DETOKENIZE, path="/v1/detokenize")

_ALL: Final = (
    CHAT,
    COMPLETIONS,
    GENERATE,
    MESSAGES,
    RESPONSES,
    INFERENCE_GENERATE,
    COUNT_TOKENS,
    TOKENIZE,
    DETOKENIZE,
    TOKENIZE_LONG,
    DETOKENIZE_LONG,
    RERANK,
    RERANK_SHORT,
)
# Everything below this path; the rest of it names the response, and what is wanted of it.
STORED_RESPONSES: Final = Api(
    "stored_responses", "/v1/responses/", "/v1/responses/", "req-", ("input",), flow=Flow.KEEPER
)

APIS: Final[dict[str, Api]] = {api.path: api for api in _ALL}


_OF_STORED: Final = ("", "cancel", "input_items")


def api_of(path: str) -> Api | None:
    """The endpoint at a client's path, whatever its query; None when there is none."""
    api = APIS.get(path) or APIS.get(path.partition("?")[0])
    if api is None and path.startswith(STORED_RESPONSES.path):
        return STORED_RESPONSES
    return api


def stored_name(path: str) -> str | None:
    """The name of the stored response that a path below STORED_RESPONSES asks about; None for no path of the API."""
    name, _, rest = path.partition("?")[0].removeprefix(STORED_RESPONSES.path).partition("/")
    return unquote(name) if rest in _OF_STORED else None
