"""The prefill leg of handoffs that go one after the other: the client's request as one of a single token, not streamed.

One table, ``_RULES``: per API what of the body is set, what is removed, and what stays although it would be removed
because the prompt's log probabilities come from this leg. All else stays in its bytes, above all what makes the prompt.

What is removed and why: limits that contradict one token (``min_tokens`` above ``max_tokens`` is a 400); several
sequences; stop conditions (engines before 0.32 hand over only what finished by length); what is computed for the
answer, of which nobody reads more than the parameters; grammars, as long as they do not enter the prompt.

``tool_choice`` and ``response_format`` stay (``text`` of Responses, ``output_config`` of Messages too): a renderer may
write them into the prompt (vllm renderers/kimi_k3.py; ``tool_choice`` "none" takes the tools out of it under
``--exclude-tools-when-tool-choice-none``). With the prompt of another leg the KV cache would be of the wrong text. A
forced tool call cut after one token is answered 200 by 0.32; until vLLM pull requests 36841 and 37258 (March 2026) it
was a 400 or 500 (vLLM issue 38911), and no other value is safe with those: "auto" is refused without
``--enable-auto-tool-choice``.

Left to the engine: Messages has no ``ignore_eos``, so that leg may finish by its first token being an end; and a
``thinking.budget_tokens`` above the cap is let pass only by an engine that looks for ``do_remote_decode`` first (0.32
does), an older one answers 400. ``truncate_prompt_tokens`` of -1 (``truncation`` "auto") leaves room for the cap, so
that a prompt longer than the context is cut at another place than in the decode leg: by a token in 0.32.

Source: vllm 0.32 entrypoints/openai/{chat_completion,completion,responses}/protocol.py, anthropic/protocol.py,
scale_out/token_in_token_out/protocol.py, sampling_params.py; for ``/generate`` sglang 0.5.23 io_struct.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from extproc.apis.json_object import NO_EDITS, Edits, JsonObject
from extproc.apis.request import InferenceRequest
from extproc.apis.table import CHAT, COMPLETIONS, GENERATE, INFERENCE_GENERATE, MESSAGES, RESPONSES, Api

_SAMPLING: Final = "sampling_params"
_NOTHING: Final[frozenset[str]] = frozenset()
_BRACE, _BRACKET = b"{["


def _keys(*texts: str) -> frozenset[str]:
    return frozenset(" ".join(texts).split())


@dataclass(frozen=True, slots=True)
class _Rule:
    """What becomes of one object.

    Attributes:
        caps: the keys of the token cap: those present become 1, the first one does if none is.
        put: what is set, present or not, as raw JSON.
        drop: what is removed.
        for_logprobs: what of ``drop`` stays when the prompt's log probabilities are wanted of this leg.
        for_echo: what stays besides when the body also asks for an echo, whose log probabilities the prompt's are.
    """

    caps: tuple[str, ...] = ()
    put: tuple[tuple[str, bytes], ...] = ()
    drop: frozenset[str] = _NOTHING
    for_logprobs: frozenset[str] = _NOTHING
    for_echo: frozenset[str] = _NOTHING


_TO_THE_CAP: Final = (("ignore_eos", b"true"),)
_LENGTH: Final = "min_tokens stop stop_token_ids include_stop_str_in_output best_of use_beam_search stream_options"
_ANSWER: Final = (
    "logprobs top_logprobs prompt_logprobs logprob_token_ids echo return_token_ids return_tokens_as_token_ids"
)
_GRAMMAR: Final = (
    "structured_outputs guided_json guided_regex guided_choice guided_grammar guided_decoding_backend "
    "guided_whitespace_pattern"
)
_OF_PROMPT: Final = "prompt_logprobs prompt_logprob_token_ids prompt_logprob_start flat_logprobs"  # sampling_params'
_SGLANG_LOGPROBS: Final = "return_logprob logprob_start_len top_logprobs_num token_ids_logprob return_text_in_logprobs"

# fmt: off
_RULES: Final[Mapping[Api, _Rule]] = {
    CHAT: _Rule(
        ("max_tokens", "max_completion_tokens"), _TO_THE_CAP, _keys(_LENGTH, _ANSWER, _GRAMMAR, "return_prompt_text"),
        _keys("prompt_logprobs"), _keys("echo logprobs top_logprobs return_tokens_as_token_ids"),
    ),
    COMPLETIONS: _Rule(
        ("max_tokens",), _TO_THE_CAP, _keys(_LENGTH, _ANSWER, _GRAMMAR, "response_format"),
        _keys("prompt_logprobs"), _keys("echo logprobs logprob_token_ids return_tokens_as_token_ids"),
    ),
    RESPONSES: _Rule(
        ("max_output_tokens",), (("store", b"false"), *_TO_THE_CAP),
        _keys(_LENGTH, _ANSWER, _GRAMMAR, "include enable_response_messages"),
    ),
    MESSAGES: _Rule(("max_tokens",), drop=_keys("stop_sequences stream_options")),
    INFERENCE_GENERATE: _Rule(drop=_keys("stream_options return_token_ids")),
    GENERATE: _Rule(
        drop=_keys(_SGLANG_LOGPROBS, "stream_options return_hidden_states"), for_logprobs=_keys(_SGLANG_LOGPROBS),
    ),
}
_SAMPLING_RULE: Final = _Rule(  # sampling_params of all but:
    ("max_tokens",), _TO_THE_CAP,
    _keys(_LENGTH, "logprobs logprob_token_ids trace_decode_token_ids", _OF_PROMPT, _GRAMMAR), _keys(_OF_PROMPT),
)
_GENERATE_SAMPLING_RULE: Final = _Rule(
    ("max_new_tokens",), _TO_THE_CAP,
    _keys("min_new_tokens min_tokens stop stop_token_ids stop_regex json_schema regex ebnf structural_tag"),
)
# fmt: on


def one_token(request: InferenceRequest, edits: Edits = NO_EDITS, *, keep_prompt_logprobs: bool) -> Edits:
    """The edits that make the prefill leg of ``request``, an API of ``Flow.PAIR``.

    Args:
        edits: in what this pair's legs differ from the client's request. What they set stays set, and also where the
            client's member would be removed, but for what a rule sets to another value.
        keep_prompt_logprobs: this leg's answer must hold the log probabilities of the prompt's tokens.
    """
    body = request.body
    put, drop = _applied(_RULES[request.api], body, edits, logprobs=keep_prompt_logprobs)
    if "stream" in put or "stream" in body:
        put["stream"] = b"false"
    sampling = put.get(_SAMPLING) or body.raw_value(_SAMPLING)
    rule = _GENERATE_SAMPLING_RULE if request.api is GENERATE else _SAMPLING_RULE
    if sampling is not None or request.api is GENERATE:
        put[_SAMPLING] = _sampling(rule, sampling or b"{}", logprobs=keep_prompt_logprobs)
    return Edits(put, drop.difference(put))


@lru_cache(1)  # the legs of a list of prompts, up to 1024, have the same
def _sampling(rule: _Rule, raw: bytes, *, logprobs: bool) -> bytes:
    """``sampling_params``, or the list of them that belongs to a list of prompts."""
    if raw[0] != _BRACKET:
        return _sampling_of_one(rule, raw, logprobs=logprobs)
    items = JsonObject(b'{"":%b}' % raw).items_of("")
    return b"[%b]" % b",".join([_sampling_of_one(rule, item, logprobs=logprobs) for item in items])


def _sampling_of_one(rule: _Rule, raw: bytes, *, logprobs: bool) -> bytes:
    if raw == b"null" and rule is _GENERATE_SAMPLING_RULE:
        raw = b"{}"
    if raw[0] != _BRACE:
        return raw  # the engine will say what it thinks of it
    params = JsonObject(raw)
    return params.edited(*_applied(rule, params, NO_EDITS, logprobs=logprobs))


def _applied(rule: _Rule, body: JsonObject, edits: Edits, *, logprobs: bool) -> tuple[dict[str, bytes], frozenset[str]]:
    """What is set and removed of ``body`` by ``edits`` and, over them but for a cap, ``rule``."""
    put = {**edits.put, **dict(rule.put)}
    caps = [key for key in rule.caps if key in body or key in put] or rule.caps[:1]
    put.update({cap: b"1" for cap in caps if cap not in edits.put})  # an echo alone is a leg of no token
    if "n" in body or "n" in put:
        put["n"] = b"1"
    drop = rule.drop.intersection(body.keys())
    if logprobs:
        drop -= rule.for_logprobs
        if "echo" in drop and body.get("echo"):
            drop -= rule.for_echo
    return put, drop.union(edits.drop).difference(put)
