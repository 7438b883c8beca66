"""What all handoffs between vLLM servers have in common.

The prefill leg is the client's request as one of a single token, the decode leg the client's request plus
``kv_transfer_params`` that say where the prompt's KV cache is. One handoff serves one sequence: with several (lists of
prompts, ``n``) a real decode gives all of them the first one's cache and answers nonsense, so lists are split before
they come here, and requests for several samples are left to the decode alone, which computes their prompt once.

Source: vllm 0.32 entrypoints/openai/*/protocol.py, entrypoints/anthropic/protocol.py; docs/vllm-facts.md.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

from extproc.apis.json_object import Edits, JsonObject, LegEdits
from extproc.apis.request import CONTROL_FIELDS, InferenceRequest
from extproc.apis.table import CHAT, COMPLETIONS, INFERENCE_GENERATE, MESSAGES, RESPONSES
from extproc.errors import GatewayError
from extproc.handoff.endings import broke_off
from extproc.handoff.handoff import Alone, Kv, Plan
from extproc.handoff.one_token import one_token
from extproc.workers.worker import Role, Worker

_PARAMS: Final = "kv_transfer_params"
# Where each API keeps the most tokens it may generate; the first one present counts.
_CAPS: Final = {
    CHAT: ("max_completion_tokens", "max_tokens"),
    COMPLETIONS: ("max_tokens",),
    MESSAGES: ("max_tokens",),
}
_MINUS_ONE: Final = re.compile(r"-(?:0[0_]*)?1(?:\.0+)?")  # what pydantic takes for it in a string
SCORING: Final = (0, 1)
_NOTHING: Final[frozenset[str]] = frozenset()
_BRACKET: Final = ord("[")
# What a decode must be told: without all of it, it dies or waits for ever (seen with both connectors).
FETCHED: Final = ("remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port")  # NIXL
PUSHED: Final = ("transfer_id", "remote_engine_id", "remote_bootstrap_addr")  # Mooncake
HOLD_SECONDS: Final = 20.0  # Envoy wants to be answered within 30
# Refused for its token count where the engine is about to take it, which has the prefill's blocks freed (in 70 ms);
# what the request's own class refuses has not.
_FORGET_PATH: Final = b"/v1/completions"
_FORGET: Final = b'{"prompt":"x","max_tokens":-1,"kv_transfer_params":%b}'
_MAYBE_BROKEN: Final = (b'"abort"', b'"error"', b'"failed"', b'"cancelled"')


def alone(request: InferenceRequest) -> Alone | None:
    """Who answers ``request`` alone, whatever the connector; None for a request that two legs serve."""
    body = request.body
    if request.api is RESPONSES and body.get("previous_response_id") is not None:
        why = "the response it goes on from is known to one decode worker only"
        return Alone(Role.DECODE, Kv.RECOMPUTED, why)
    if is_scoring(request):
        return Alone(Role.PREFILL, Kv.NONE)
    if _truncates(request):
        why = "a prompt cut to fit is cut at another place in a leg of one token"
        return Alone(Role.DECODE, Kv.RECOMPUTED, why)
    if several_sequences(request):
        why = "one handoff cannot serve several sequences: the decode computes the prompt once for all of them"
        return Alone(Role.DECODE, Kv.RECOMPUTED, why)
    return None


def is_scoring(request: InferenceRequest) -> bool:
    """Whether the answer ends with the prefill: at most one token is asked for."""
    body, keys = request.body, _CAPS.get(request.api, ())
    if request.api is INFERENCE_GENERATE:
        params = body.object_of("sampling_params")
        caps = [] if params is None else [params.get("max_tokens")]
    else:
        caps = [body.get(key) for key in keys]
    cap = next((cap for cap in caps if cap is not None), None)
    return type(cap) is int and cap in SCORING


def _truncates(request: InferenceRequest) -> bool:
    """Whether the engine is to cut the prompt by what the output leaves of the context, which differs by leg."""
    body = request.body
    if request.api is RESPONSES:
        return "truncation" in body and body.get("truncation") != "disabled"
    if request.api not in (CHAT, COMPLETIONS) or "truncate_prompt_tokens" not in body:
        return False
    most = body.get("truncate_prompt_tokens")
    return bool(_MINUS_ONE.fullmatch(most.strip()) if isinstance(most, str) else most == -1)


def several_sequences(request: InferenceRequest) -> bool:
    """Whether one prompt is to be continued more than once, in the answer or on the way to it."""
    if request.samples > 1:
        return True
    body = request.body
    if request.api not in (CHAT, COMPLETIONS):
        return False
    best_of = body.get("best_of") if "best_of" in body else None
    return (type(best_of) is int and best_of > 1) or bool("use_beam_search" in body and body.get("use_beam_search"))


def prefill_body(request: InferenceRequest, edits: LegEdits, params: bytes, *, trust_client: bool) -> bytes:
    """The prefill leg; ``params`` is the raw value of its ``kv_transfer_params``, empty for none."""
    leg = one_token(request, edits.prefill, keep_prompt_logprobs=edits.prompt_logprobs)
    return _edited(request, leg, params, trust_client=trust_client)


def decode_body(request: InferenceRequest, edits: Edits, params: bytes, *, trust_client: bool) -> bytes:
    """The decode leg; ``params`` as in :func:`prefill_body`."""
    return _edited(request, edits, params, trust_client=trust_client)


def _edited(request: InferenceRequest, edits: Edits, params: bytes, *, trust_client: bool) -> bytes:
    body = request.body
    drop: Collection[str] = _dropped(body, trust_client=trust_client)
    if edits.drop:
        drop = {*drop, *edits.drop}
    return body.edited(edits.put, drop, b'"kv_transfer_params":' + params if params else b"")


def _dropped(body: JsonObject, *, trust_client: bool) -> frozenset[str]:
    """What no leg may have of the client's: a decode can die of parameters that are not whole."""
    if CONTROL_FIELDS.isdisjoint(body.keys()):
        return _NOTHING
    return frozenset({_PARAMS}) if trust_client else CONTROL_FIELDS


class Returned(NamedTuple):
    """What a prefill's answer says of the KV cache.

    Attributes:
        params: its raw ``kv_transfer_params``; empty where there are none, or none that a decode survives.
        token_ids: the raw list of the prompt's token ids; empty where it was not asked for.
    """

    params: bytes = b""
    token_ids: bytes = b""

    @classmethod
    def of(cls, answer: bytes, *, needed: bool) -> Returned:
        """Read a prefill's answer.

        A decode that is told to fetch a cache, but not all it needs for that, dies or waits for ever. ``needed``:
        without being told that, the decode fetches nothing, so what does not say it is as good as none.
        """
        try:
            said = JsonObject(answer)
            params = said.raw_value(_PARAMS)
            if not params or params == b"null" or not is_whole(params, needed=needed):
                return cls()
        except GatewayError:
            return cls()
        ids = said.raw_value("prompt_token_ids")
        return cls(params, ids if ids and ids[0] == _BRACKET else b"")

    @property
    def told(self) -> bytes:
        """The parameters, and the token ids, so that the decode need not tokenise again (vllm pull request 48145).

        It then also leaves the chat template alone: some 1.3 ms for 1,000 tokens, of which 10 µs are spent here.
        """
        if not self.token_ids:
            return self.params
        return JsonObject(self.params).edited({"prompt_token_ids": self.token_ids})


def is_whole(raw: bytes, *, needed: bool) -> bool:
    """Whether a decode survives these ``kv_transfer_params``, and, if they are ``needed``, gets the cache by them.

    Raises GatewayError for what is no JSON object.
    """
    params = JsonObject(raw)
    if not params.get("do_remote_prefill"):
        return not needed
    return _has(params, FETCHED) or _has(params, PUSHED)


def _has(params: JsonObject, keys: Sequence[str]) -> bool:
    return all(params.first_byte(key) not in (0, 0x6E) for key in keys) and params.get(keys[0]) != []


class VllmHandoff:
    """The part of Handoff that does not depend on the connector."""

    live = 0  # there are no rooms
    lets_finish = False
    blame = 0.0  # a decode that cannot fetch says so for itself
    pushes = False
    prefixes_ids = True
    waivable = True
    tells_tokens = False
    early_heads = True

    def alone(self, request: InferenceRequest, prefill: Worker) -> Alone | None:  # noqa: ARG002 - Handoff's signature
        """See Handoff."""
        return alone(request)

    def hold(self, request: InferenceRequest) -> float:
        """See Handoff. vLLM begins every streamed answer at once (2 to 9 ms), but has nothing to say in it before."""
        return HOLD_SECONDS if request.stream else 0.0

    def named_by_client(self, request: InferenceRequest) -> bool:  # noqa: ARG002 - Handoff's signature
        """See Handoff. Names may be alike."""
        return False

    def release(self, plan: Plan) -> None:
        """See Handoff. There is nothing to give back."""

    def aborts(self, plan: Plan) -> Sequence[tuple[bytes, bytes]]:  # noqa: ARG002 - Handoff's signature
        """See Handoff. A vLLM server ends a request as soon as its connection closes."""
        return ()

    def forgets(self, params: bytes) -> Sequence[tuple[bytes, bytes]]:
        """See Handoff. A decode that rejects a request has the prefill free what the request would have fetched."""
        return [(_FORGET_PATH, _FORGET % params)] if params else []

    def unpins(self, plan: Plan) -> Sequence[tuple[bytes, bytes]]:  # noqa: ARG002 - Handoff's signature
        """See Handoff. No decode waits for a prefill that has not answered."""
        return ()

    def failed(self, answer: bytes) -> bool:
        """See Handoff."""
        return broke_off(answer)
