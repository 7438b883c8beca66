"""An inference request, read just far enough to route and split it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import orjson

from extproc.apis.json_object import MOST_ITEMS, JsonObject
from extproc.apis.table import COMPLETIONS, GENERATE, RESPONSES, STORED_RESPONSES, Api
from extproc.errors import GatewayError

# A client must not choose where its KV cache goes or comes from: these are ours to set (SGLang io_struct.py,
# vLLM kv_transfer_params). Without this, a request could make a worker connect to any host the client names.
CONTROL_FIELDS: Final = frozenset(
    {
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "bootstrap_pair_key",
        "routed_dp_rank",
        "data_parallel_rank",
        "disagg_prefill_dp_rank",
        "decode_tp_size",
        "ec_transfer_params",
        "encoder_urls",
        "http_worker_ipc",
        "kv_transfer_params",
        "need_wait_for_mm_inputs",
        "num_items_assigned",
    }
)
# What decides routing, splitting or the handoff; a second occurrence would let us and the engine read different values.
_DECISIVE: Final = CONTROL_FIELDS | {
    "model",
    "stream",
    "stream_options",
    "n",
    "rid",
    "messages",
    "prompt",
    "text",
    "input_ids",
    "input_embeds",
    "input",
    "token_ids",
    "sampling_params",
    "vllm_xargs",
    "return_logprob",
    "echo",
    "logprobs",
    "seed",
}
# Objects whose members vLLM gives to its scheduler as they are: there the same fields can hide, and kill the engine.
_XARGS: Final = "vllm_xargs"
_SAMPLING: Final = "sampling_params"
_EXTRA: Final = "extra_args"  # of these
_TRANSFERS: Final = ("kv_transfer_params", "ec_transfer_params")
MAX_PROMPTS: Final = MOST_ITEMS  # vLLM's limit (VLLM_MAX_COMPLETION_PROMPTS); each may be a pair of legs
MAX_SAMPLES: Final = 128  # OpenAI's own limit; each sample is a pair of legs here
_QUOTE, _BRACKET, _BRACE = b'"[{'
_LISTS: Final = {"messages": "a list of messages", "token_ids": "a list of token ids", "tokens": "a list of token ids"}
# How a list begins tells what it is a list of. Looking no further matters: a prompt may be a million token ids.
_TEXT: Final = re.compile(rb'"')
_TOKEN_IDS: Final = re.compile(rb'\[[ \t\n\r]*[^ \t\n\r"\[{]')
_IDS: Final = re.compile(rb"\[[ \t\n\r\[]*\d")
_SOME_IDS: Final = 512  # bytes of a list of token ids, to see how long they are
# Chat templates put these before the messages; the last two are vLLM's and SGLang's for caches that are not shared.
_CONTEXT: Final = ("tools", "system", "instructions", "cache_salt", "lora_path")
_BYTES_PER_TOKEN: Final = 4  # of text, markup and JSON around it; a common rule of thumb for English
_OPENING: Final = re.compile(rb'\[[ \t\n\r]*(?:\]|"|\[[ \t\n\r]*\[?)?')

NO_FIELDS: Final[Mapping[str, bytes]] = MappingProxyType({})


class InferenceRequest(NamedTuple):
    """What a request asks for. (A named tuple is made in a third of a frozen dataclass's time.)

    Attributes:
        api: its endpoint.
        body: its body.
        model: the model it names; None when it names none.
        stream: whether the answer is to be streamed.
        samples: completions per prompt, at least 1.
        prompts: how many prompts a body with a list of prompts holds; None for a single prompt.
        prompt_logprobs: whether log probabilities of prompt tokens are asked for, which only the prefill leg has.
        fields: the headers that came with it, by lower-case name.
        notes: what placement has worked out of it, see policies.policy.RequestView.
        within: the endpoints among which its workers must be, see there.
    """

    api: Api
    body: JsonObject
    model: str | None
    stream: bool
    samples: int
    prompts: int | None
    prompt_logprobs: bool
    fields: Mapping[str, bytes]
    notes: dict[object, object]
    within: frozenset[str] | None = None

    @classmethod
    def read(
        cls, api: Api, raw: bytes, fields: Mapping[str, bytes] = NO_FIELDS, within: frozenset[str] | None = None
    ) -> InferenceRequest:
        """Read ``raw`` as a request of ``api``, which came with the headers ``fields``, for workers ``within`` a set.

        Raises:
            GatewayError: with a 4xx fault; ``param`` names the field.
        """
        body = JsonObject(raw)
        if (twice := body.duplicated()) and (decisive := twice & _DECISIVE):
            key = min(decisive)
            raise GatewayError("duplicate_parameter", f"`{key}` occurs more than once in the body", param=key)
        _require_prompt(api, body)
        sampling = _sampling(body)
        _refuse_hidden_transfers(body, sampling)
        if api is RESPONSES:
            _check_response(body)
        return cls(
            api,
            body,
            model=_typed(body, "model", str),
            stream=_typed(body, "stream", bool) or False,
            samples=_samples(api, body, sampling),
            prompts=_prompts(api, body),
            prompt_logprobs=_wants_prompt_logprobs(api, body),
            fields=fields,
            notes={},
            within=within,
        )

    def renamed(self, model: str) -> InferenceRequest:
        """The same request, which names a model, for ``model``."""
        return self._replace(body=JsonObject(self.body.edited({"model": orjson.dumps(model)})), model=model)

    def prompt_tokens(self) -> int:
        """About how many tokens its prompts have, all together: enough to tell a long request from a short one.

        Token ids are counted by how many there are at the beginning; else it is the body's bytes over four. Images and
        the like in the body count by their bytes, too. (Measured: 0.2 µs for a chat, 1 µs for token ids.)
        """
        body = self.body
        for key in self.api.ids_keys:
            head = body.beginning(key, _SOME_IDS)
            if _IDS.match(head):
                commas, size = head.count(b","), body.size_of(key)
                return commas + 1 if size <= _SOME_IDS else max(1, commas * size // _SOME_IDS)
        return len(body.raw) // _BYTES_PER_TOKEN

    def prompt_bytes(self, most: int | None = None) -> bytes:
        """Its prompt as it stands in the body: a JSON string, list of messages or list of token ids.

        ``most``: only so many bytes of its beginning.
        """
        body = self.body
        for key in self.api.prompt_keys:
            found = body.raw_value(key) if most is None else body.beginning(key, most)
            if found and found[0] != 0x6E:  # null
                return found
        return b""

    def own_id(self) -> str:
        """The id that the body gives it (SGLang's ``rid``); empty when there is none, or one for each prompt."""
        found = self.body.get("rid") if self.body.first_byte("rid") == _QUOTE else ""
        return found if isinstance(found, str) else ""

    def prompt_context(self) -> bytes:
        """What else the model reads before its prompt, or keeps prefix caches apart, as it stands in the body.

        (Measured: 0.2 µs where there is nothing of it.)
        """
        body = self.body
        if body.keys().isdisjoint(_CONTEXT):
            return b""
        return b"".join([found for key in _CONTEXT if (found := body.raw_value(key)) is not None])


def _sampling(body: JsonObject) -> list[JsonObject]:
    """The objects of ``sampling_params``, of which SGLang takes a list, too."""
    first = body.first_byte(_SAMPLING)
    if first == _BRACKET:
        return [JsonObject(item) for item in body.items_of(_SAMPLING) if item[0] == _BRACE]
    params = body.object_of(_SAMPLING) if first == _BRACE else None
    return [] if params is None else [params]


def _refuse_hidden_transfers(body: JsonObject, sampling: Sequence[JsonObject]) -> None:
    if not sampling and _XARGS not in body:
        return  # most requests
    passed = [(_XARGS, body.object_of(_XARGS))]
    passed += [(f"{_SAMPLING}.{_EXTRA}", params.object_of(_EXTRA)) for params in sampling]
    for name, held in passed:
        for transfer in _TRANSFERS:
            if held is not None and transfer in held:
                param = f"{name}.{transfer}"
                raise GatewayError("invalid_type", f"`{param}` is not a client's to set", param=param)


def _check_response(body: JsonObject) -> None:
    if body.get("background"):
        raise GatewayError("invalid_type", "`background` cannot be served by a pair of legs", param="background")
    if body.first_byte("request_id") not in (0, _QUOTE):  # null neither; it would be replaced by a name of ours
        raise GatewayError("invalid_type", "`request_id` must be a string", param="request_id")


def _typed(body: JsonObject, key: str, kind: type) -> Any:
    """The value of ``key`` as ``kind``; None when absent or null."""
    if key not in body:
        return None
    value = body.get(key)
    if value is None or isinstance(value, kind):
        return value
    expected = "a string" if kind is str else "true or false"
    raise GatewayError("invalid_type", f"`{key}` must be {expected}", param=key)


def _require_prompt(api: Api, body: JsonObject) -> None:
    for key in api.object_keys:
        if body.first_byte(key) in (0, 0x6E):
            raise GatewayError("missing_required_parameter", f"missing field `{key}`", param=key)
        if body.first_byte(key) != _BRACE:
            raise GatewayError("invalid_type", f"`{key}` must be an object", param=key)
    if len(api.prompt_keys) == 1 and body.first_byte(api.prompt_keys[0]) == _BRACKET:
        return  # most requests
    found = [key for key in api.prompt_keys if body.first_byte(key) not in (0, 0x6E)]  # absent, or null
    if not found or (api.needs_all and len(found) < len(api.prompt_keys)):
        missing = next(key for key in api.prompt_keys if key not in found)
        names = "`, `".join(api.prompt_keys)
        wanted = f"one of `{names}`" if len(api.prompt_keys) > 1 and not api.needs_all else f"`{missing}`"
        raise GatewayError("missing_required_parameter", f"missing field {wanted}", param=missing)
    key = found[0]
    first = body.first_byte(key)
    if key in _LISTS and first != _BRACKET:
        raise GatewayError("invalid_type", f"`{key}` must be {_LISTS[key]}", param=key)
    if first not in (_QUOTE, _BRACKET):
        raise GatewayError("invalid_type", f"`{key}` must be a string or a list", param=key)
    if len(found) > 1 and not api.needs_all:
        raise GatewayError("invalid_type", f"only one of `{'`, `'.join(found)}` may be given", param=found[1])


def _samples(api: Api, body: JsonObject, sampling: Sequence[JsonObject]) -> int:
    if api.samples_key is None:
        return 1
    name = api.samples_key
    if api.samples_in is None:
        value = body.get(name)
    else:
        values = [params.get(name) for params in sampling]
        name = f"{api.samples_in}.{name}"
        if len({repr(value or 1) for value in values}) > 1:
            raise GatewayError("invalid_type", f"`{name}` must be the same for all prompts", param=name)
        value = values[0] if values else None
    if value is None:
        return 1
    if type(value) is not int or not 1 <= value <= MAX_SAMPLES:
        raise GatewayError("invalid_type", f"`{name}` must be a whole number from 1 to {MAX_SAMPLES}", param=name)
    return value


def _prompts(api: Api, body: JsonObject) -> int | None:
    """Count the prompts of a list; None for one prompt, which may itself be a list of token ids (or of vectors)."""
    for key in api.batch_keys:
        if body.first_byte(key) != _BRACKET:
            continue
        opening = body.match(key, _OPENING)
        if opening.endswith(b"]"):
            raise GatewayError("invalid_type", f"`{key}` must not be an empty list", param=key)
        depth = opening.count(b"[")
        deep_enough = depth > 2 if key == "input_embeds" else depth > 1 or opening.endswith(b'"')
        if not deep_enough:
            return None
        items = body.items_of(key)
        if api is COMPLETIONS and not (_all(_TEXT, items) or _all(_TOKEN_IDS, items)):
            raise GatewayError("invalid_type", f"`{key}` must hold texts only, or lists of token ids only", param=key)
        return len(items)
    return None


def _all(pattern: re.Pattern[bytes], items: Sequence[bytes]) -> bool:
    return all(pattern.match(item) for item in items)


def _wants_prompt_logprobs(api: Api, body: JsonObject) -> bool:
    """Whether the answer holds log probabilities that only the prefill leg knows (docs/sglang-facts.md)."""
    if api is GENERATE:
        if not _any(body.get("return_logprob")):
            return False
        starts = body.get("logprob_start_len")
        from_prompt = any(start not in (None, -1) for start in (starts if isinstance(starts, list) else [starts]))
        return from_prompt or _any(body.get("token_ids_logprob"))
    if api is COMPLETIONS:
        return bool(body.get("echo")) and bool(body.get("logprobs"))
    return False


def _any(value: Any) -> bool:
    return any(value) if isinstance(value, list) else bool(value)


# Not read from a body: what such a request asks for is in its path, and it goes to its worker as it is.
NO_BODY: Final = JsonObject(b"{}")
ABOUT_STORED: Final = InferenceRequest(STORED_RESPONSES, NO_BODY, None, False, 1, None, False, NO_FIELDS, {})  # noqa: FBT003
