"""What only the prefill leg knows of a prompt's log probabilities, put into the decode leg's answer.

On a decode worker the ``input_*`` fields of ``/generate`` are there but empty, the logprobs of chosen token ids lack
the first output token, and a completion with ``echo`` and ``logprobs`` has those of the output only.
"""

from __future__ import annotations

from typing import Final

import msgspec

from extproc.merge.raw_json import NULL, RawObject, bad_reply, integer, is_null, raw, raw_list, raw_object

_EMPTY_LIST: Final = msgspec.Raw(b"[]")
_ZERO: Final = msgspec.Raw(b"0")


class GenerateLogprobs:
    """The prompt logprobs of a ``/generate`` request.

    Args:
        prefill: the prefill leg's whole answer, not streamed.
        prompts: how many prompts the request has; None for a single one, whose answer is not a list.

    Raises:
        GatewayError: ``decode_bad_reply`` when the answer is not what the API promises.
    """

    def __init__(self, prefill: bytes, prompts: int | None) -> None:
        items = [msgspec.Raw(prefill)] if prompts is None else raw_list(prefill, "the prefill's answer")
        self._single = prompts is None
        if prompts is not None and len(items) != prompts:
            raise bad_reply(f"a list of {prompts} items was expected of the prefill")
        self._known = [_meta_info(raw_object(item, "the prefill's answer")) for item in items]

    def complete_body(self, decode: bytes) -> bytes:
        """The decode leg's answer with the prompt's logprobs."""
        if self._single:
            return bytes(raw(self.completed(raw_object(decode, "the answer"))))
        items = [raw_object(item, "an item") for item in raw_list(decode, "the answer")]
        return bytes(raw([self._item(item, prompt) for prompt, item in enumerate(items)]))

    def completed(self, chunk: RawObject) -> RawObject:
        """A streamed chunk with the prompt's logprobs; every chunk bears them."""
        prompt = 0 if is_null(chunk.get("index")) else integer(chunk["index"], "`index`")
        return self._item(chunk, prompt)

    def _item(self, item: RawObject, prompt: int) -> RawObject:
        if not 0 <= prompt < len(self._known):
            raise bad_reply(f"there is no prompt {prompt}")
        known = self._known[prompt]
        meta = _meta_info(item)
        for key in meta:
            if key.startswith("input_") and key in known:
                meta[key] = known[key]
        _complete_token_ids(meta, known)
        if "output_token_logprobs" in meta and bytes(meta.get("completion_tokens", NULL)) == b"0":
            # With max_new_tokens 0 the decode reports the token that the prefill sampled; a single server does not.
            meta["output_token_logprobs"] = _EMPTY_LIST
            meta["output_token_logprobs_length"] = _ZERO
        item["meta_info"] = raw(meta)
        return item


class CompletionLogprobs:
    """The prompt logprobs of a ``/v1/completions`` request with ``echo``.

    Args:
        prefill: the prefill leg's whole answer, not streamed.

    Raises:
        GatewayError: ``decode_bad_reply`` when the answer is not what the API promises.
    """

    def __init__(self, prefill: bytes) -> None:
        choices = _choices(raw_object(prefill, "the prefill's answer"))
        self._waiting = {_index(choice): choice.get("logprobs", NULL) for choice in choices}

    def complete_body(self, decode: bytes) -> bytes:
        """The decode leg's answer with the prompt's logprobs."""
        return bytes(raw(self.completed(raw_object(decode, "the answer"))))

    def completed(self, chunk: RawObject) -> RawObject:
        """A chunk (or the whole answer) with the prompt's logprobs, which the first chunk of each choice bears."""
        if not self._waiting or is_null(chunk.get("choices")):
            return chunk
        choices = _choices(chunk)
        for choice in choices:
            known = self._waiting.pop(_index(choice), NULL)
            if not is_null(known):
                choice["logprobs"] = raw(_joined(known, choice.get("logprobs", NULL)))
        chunk["choices"] = raw(choices)
        return chunk


PromptLogprobs = GenerateLogprobs | CompletionLogprobs


def _meta_info(item: RawObject) -> RawObject:
    return raw_object(item.get("meta_info", NULL), "`meta_info`")


def _complete_token_ids(meta: RawObject, known: RawObject) -> None:
    """The logprobs of chosen token ids at the first output position, which the decode leaves null."""
    key = "output_token_ids_logprobs"
    if is_null(meta.get(key)) or is_null(known.get(key)):
        return
    rows, first = raw_list(meta[key], f"`{key}`"), raw_list(known[key], f"`{key}`")
    if rows and first and is_null(rows[0]):
        meta[key] = raw([first[0], *rows[1:]])


def _choices(answer: RawObject) -> list[RawObject]:
    return [raw_object(choice, "a choice") for choice in raw_list(answer.get("choices"), "`choices`")]


def _index(choice: RawObject) -> int:
    return integer(choice.get("index"), "a choice's `index`")


def _joined(prefill: msgspec.Raw, decode: msgspec.Raw) -> RawObject:
    """Each of the parallel lists: the prefill's but for the one token that it generated, then the decode's."""
    known = raw_object(prefill, "`logprobs`")
    own = {} if is_null(decode) else raw_object(decode, "`logprobs`")
    joined = dict(own)
    for key, value in known.items():
        if is_null(value):
            joined[key] = own.get(key, value)
            continue
        output = [] if is_null(own.get(key)) else raw_list(own[key], f"`logprobs.{key}`")
        joined[key] = raw([*raw_list(value, f"`logprobs.{key}`")[:-1], *output])
    return joined
