"""What vLLM knows of a prompt's log probabilities: who is asked for them, and how they come into the answer.

The prefill leg computes them. A decode leg that were asked for them, too, would leave the KV cache where it is and
compute the whole prompt again (seen on vLLM 0.32), so it is asked without. Of chat's ``echo`` the decode computes them
nevertheless; its answer is complete then, and nothing is done about it.

Where an aggregated server puts them, streamed answers having none but the echo's:

============================  ==================================================================================
chat, /inference/v1/generate  ``prompt_logprobs`` of the answer
completions                   ``prompt_logprobs`` of each choice
completions' ``echo`` with    before those of the output, in the lists of the choice's ``logprobs``, as the prompt's
``logprobs``                  text is before the output's in ``text``; streamed: in the choice's first chunk
============================  ==================================================================================

Source: vllm 0.32 entrypoints/openai/{chat_completion,completion}/serving.py, scale_out/token_in_token_out/serving.py.
"""

from __future__ import annotations

from typing import Final

import msgspec

from extproc.apis.json_object import NO_EDITS, Edits, JsonObject
from extproc.apis.request import InferenceRequest
from extproc.apis.table import CHAT, COMPLETIONS, INFERENCE_GENERATE
from extproc.errors import GatewayError
from extproc.merge.raw_json import (
    NULL,
    RawList,
    RawObject,
    bad_reply,
    integer,
    integers,
    is_null,
    raw,
    raw_list,
    raw_object,
    strings,
)

_KEY: Final = "prompt_logprobs"
_SAMPLING: Final = "sampling_params"
_IN_SAMPLING: Final = (_KEY, "prompt_logprob_token_ids", "prompt_logprob_start")
_OF_ANSWER: Final = (_KEY, "prompt_token_id_logprobs")
_TRANSFERS: Final = ("kv_transfer_params", "ec_transfer_params")
# What an echo's prompt part is made by, so that it stays in the prefill leg.
_OF_ECHO: Final = ("echo", "logprobs", _KEY, "return_token_ids", "return_tokens_as_token_ids")


def wants_prompt_logprobs(request: InferenceRequest) -> bool:
    """Whether the answer to a request for one sample is to hold log probabilities of the prompt's tokens.

    Raises:
        GatewayError: ``invalid_type`` when they are asked for in a stream: the engine refuses that, but the prefill
            leg would not be streamed, and the decode leg would not ask.
    """
    body = request.body
    if request.api is INFERENCE_GENERATE:
        params = body.object_of(_SAMPLING)
        wanted = params is not None and any(params.get(key) is not None for key in _IN_SAMPLING[:2])
        return wanted and not request.stream
    if request.api not in (CHAT, COMPLETIONS):
        return False
    number = body.get(_KEY) if _KEY in body else None
    if not isinstance(number, int | float) or number is False:
        return _echoes_logprobs(request)
    if request.stream and (number > 0 or number == -1):
        raise GatewayError("invalid_type", f"`{_KEY}` are not available when `stream=True`.", param=_KEY)
    return not request.stream or _echoes_logprobs(request)


def _echoes_logprobs(request: InferenceRequest) -> bool:
    body = request.body
    return (
        request.api is COMPLETIONS
        and "echo" in body
        and body.get("echo") is True
        and isinstance(body.get("logprobs"), int)
    )


def prefill_edits(request: InferenceRequest) -> Edits:
    """In what the prefill leg differs from the client's request, if the answer holds prompt log probabilities.

    An echo of no tokens is the prompt alone, text and log probabilities, with nothing to be cut off; the engine
    computes a token all the same, and hands over. It refuses ``logprob_token_ids`` with it, whose effect on the
    prompt's part is that all of its candidates are listed.
    """
    body = request.body
    if not _echoes_logprobs(request):
        return NO_EDITS
    put = {key: value for key in _OF_ECHO if (value := body.raw_value(key)) is not None} | {"max_tokens": b"0"}
    if body.get("logprob_token_ids") and body.get(_KEY) is not None:
        put["logprobs"] = put[_KEY]
    return Edits(put, ("logprob_token_ids",))


def decode_edits(request: InferenceRequest) -> Edits:
    """In what the decode leg differs from the client's request, if the answer holds prompt log probabilities."""
    body = request.body
    if request.api is INFERENCE_GENERATE:
        params = JsonObject(body.raw_value(_SAMPLING) or b"{}")
        return Edits({_SAMPLING: params.edited({}, _IN_SAMPLING)})
    if not _echoes_logprobs(request):
        return Edits(drop=(_KEY,))
    # The first chunk of an echo has the prompt's token ids, wanted or not.
    return Edits({"return_token_ids": b"true"} if request.stream else {}, ("echo", _KEY))


class VllmPrefill:
    """What a prefill leg's answer adds to the decode leg's answer of the same, single prompt.

    These are the log probabilities, and what the prefill found in its cache: for a decode leg, the cache it was handed
    may count as found.

    Args:
        request: the client's request.
        prefill: the prefill leg's whole answer, not streamed.

    Raises:
        GatewayError: ``decode_bad_reply`` when the answer is not what the API promises.
    """

    def __init__(self, request: InferenceRequest, prefill: bytes) -> None:
        answer = raw_object(prefill, "the prefill's answer")
        self._of_answer = {key: answer[key] for key in _OF_ANSWER if not is_null(answer.get(key))}
        usage = {} if is_null(answer.get("usage")) else raw_object(answer["usage"], "`usage`")
        self._details = usage.get("prompt_tokens_details", NULL)
        self._of_choice = NULL
        self._echo: _Echo | None = None
        if request.api is COMPLETIONS:
            choice = _only_choice(answer)
            self._of_choice = choice.get(_KEY, NULL)
            if _echoes_logprobs(request):
                shows_ids = bool("return_token_ids" in request.body and request.body.get("return_token_ids"))
                prompt_tokens = integer(usage.get("prompt_tokens"), "`usage.prompt_tokens`")
                self._echo = _Echo(choice, prompt_tokens, shows_ids=shows_ids)

    def complete_body(self, decode: bytes) -> bytes:
        """The decode leg's answer with what the prefill knows."""
        answer = self.completed(raw_object(decode, "the answer"))
        answer.update(self._of_answer)
        for key in _TRANSFERS:
            if key in answer:
                answer[key] = NULL
        if not is_null(self._of_choice):
            choice = _only_choice(answer)
            choice[_KEY] = self._of_choice
            answer["choices"] = raw([choice])
        return bytes(raw(answer))

    def completed(self, chunk: RawObject) -> RawObject:
        """The same of a streamed chunk, where there is less to add."""
        if not is_null(chunk.get("usage")) and not is_null(self._details):
            chunk["usage"] = raw(self._counted(raw_object(chunk["usage"], "`usage`")))
        if self._echo is not None and not is_null(chunk.get("choices")):
            choices = [raw_object(choice, "a choice") for choice in raw_list(chunk["choices"], "`choices`")]
            chunk["choices"] = raw([self._echo.before(choice) for choice in choices])
        return chunk

    def _counted(self, usage: RawObject) -> RawObject:
        key = "prompt_tokens_details"
        if not is_null(usage.get(key)):
            own, known = (raw_object(details, f"`usage.{key}`") for details in (usage[key], self._details))
            usage[key] = raw({kind: known.get(kind, count) for kind, count in own.items()})
        return usage


class _Echo:
    """The prompt's part of a choice of ``echo`` with ``logprobs``.

    Args:
        choice: the prefill's; what it holds beyond ``prompt_tokens`` was generated, and is left out.
        shows_ids: whether the client is to see the ids of the tokens.
    """

    def __init__(self, choice: RawObject, prompt_tokens: int, *, shows_ids: bool) -> None:
        logprobs = raw_object(choice.get("logprobs", NULL), "`logprobs`")
        tokens = strings(logprobs.get("tokens"), "`logprobs.tokens`")
        offsets = integers(logprobs.get("text_offset"), "`logprobs.text_offset`")
        if not len(offsets) == len(tokens) >= prompt_tokens > 0:
            raise bad_reply(f"log probabilities of {prompt_tokens} tokens were expected of the prefill")
        self._lists = {
            key: raw_list(value, f"`logprobs.{key}`")[:prompt_tokens]
            for key, value in logprobs.items()
            if not is_null(value)
        }
        text = _string(choice.get("text"))
        if generated := "".join(tokens[prompt_tokens:]):  # of a leg that was asked for a token
            text = bytes(raw(strings(msgspec.Raw(b"[%b]" % text), "`text`")[0].removesuffix(generated)))
        self._text = text[:-1]  # its last quote is the output's
        self._end = offsets[prompt_tokens - 1] + len(tokens[prompt_tokens - 1])
        self._shows_ids = shows_ids
        self._told = False

    def before(self, choice: RawObject) -> RawObject:
        """The decode's choice behind the prompt's part; of a stream's chunks the first one, the others stay behind."""
        logprobs = {} if is_null(choice.get("logprobs")) else raw_object(choice["logprobs"], "`logprobs`")
        if not is_null(logprobs.get("text_offset")):
            own = integers(logprobs["text_offset"], "`logprobs.text_offset`")
            logprobs["text_offset"] = raw([offset + self._end for offset in own])
        if not self._told:
            self._told = True
            logprobs |= {key: raw([*known, *_own(logprobs, key)]) for key, known in self._lists.items()}
            choice["text"] = msgspec.Raw(self._text + _string(choice.get("text"))[1:])
        choice["logprobs"] = raw(logprobs)
        if not self._shows_ids and "token_ids" in choice:
            choice["token_ids"] = NULL
        return choice


def _own(logprobs: RawObject, key: str) -> RawList:
    return [] if is_null(logprobs.get(key)) else raw_list(logprobs[key], f"`logprobs.{key}`")


def _only_choice(answer: RawObject) -> RawObject:
    choices = raw_list(answer.get("choices"), "`choices`")
    if len(choices) != 1:
        raise bad_reply(f"one choice was expected, not {len(choices)}")
    return raw_object(choices[0], "a choice")


def _string(value: msgspec.Raw | None) -> bytes:
    """A JSON string, as it stands there: two of them make one without being decoded."""
    text = bytes(NULL if value is None else value)
    if text[:1] != b'"':
        raise bad_reply("a choice's `text` is not a string")
    return text
