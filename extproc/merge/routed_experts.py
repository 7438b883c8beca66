"""Which experts a prompt's tokens were routed to (SGLang's ``return_routed_experts``), put into the decode's answer.

A decode leg is handed the KV cache of the prompt and never runs its tokens: what it tells of them is whatever its
buffers hold. The prefill leg has run them. Both tell the same rows from the same position on (``[start, length - 1)``,
32-bit integers by token, layer and place, in base64), so the prefill's rows stand for as many of the decode's first.

Where they are: ``meta_info`` of ``/generate``, and of a chat's choices with ``return_meta_info``; else ``sglext`` of a
completion or chat, streamed in a chunk of no choices. Source: SGLang 0.5.23 ``state_capturer/routed_experts.py``,
``batch_result_processor.py``, ``disaggregation/prefill.py``, ``entrypoints/openai``. vLLM 0.32 does not start with
``--enable-return-routed-experts`` and a connector that hands over by request.
"""

from __future__ import annotations

import binascii
from collections.abc import Iterator
from typing import Final, Protocol

import msgspec

from extproc.apis.request import InferenceRequest
from extproc.apis.table import CHAT, COMPLETIONS, GENERATE
from extproc.merge.raw_json import RawObject, bad_reply, integer, is_null, raw, raw_list, raw_object

ASKED_BY: Final = "return_routed_experts"
_KEY: Final = "routed_experts"
_META: Final = "meta_info"
_EXTENSION: Final = "sglext"
_TEXT: Final = msgspec.json.Decoder(str)


class _Inner(Protocol):
    """What else the prefill's answer adds."""

    def complete_body(self, decode: bytes) -> bytes:
        """The whole answer with it."""

    def completed(self, chunk: RawObject) -> RawObject:
        """A chunk with it."""


def wants_routed_experts(request: InferenceRequest) -> bool:
    """Whether the answer is to hold them; of a list of prompts, of any."""
    if ASKED_BY not in request.body or request.api not in (CHAT, COMPLETIONS, GENERATE):
        return False
    asked = request.body.get(ASKED_BY)
    return any(asked) if isinstance(asked, list) else bool(asked)


class RoutedExperts:
    """What a prefill leg's answer adds of them to the decode leg's.

    Args:
        prefill: the prefill leg's whole answer, not streamed.
        inner: what else it adds; None where that is nothing.

    Raises:
        GatewayError: ``decode_bad_reply`` when the answer is not what the API promises.
    """

    def __init__(self, prefill: bytes, inner: _Inner | None) -> None:
        self._inner = inner
        self._known: dict[tuple[str, int], bytes] = {}
        for at, item in enumerate(_items(prefill, "the prefill's answer")):
            for place, holder, _ in _holders(item, at):
                if not is_null(holder.get(_KEY)):
                    self._known[place] = _rows(holder)

    def complete_body(self, decode: bytes) -> bytes:
        """The decode leg's answer with the prompt's rows."""
        whole = decode if self._inner is None else self._inner.complete_body(decode)
        items = [self._spliced(item, at) for at, item in enumerate(_items(whole, "the answer"))]
        return bytes(raw(items if _is_list(whole) else items[0]))

    def completed(self, chunk: RawObject) -> RawObject:
        """The same of a streamed chunk."""
        return self._spliced(chunk if self._inner is None else self._inner.completed(chunk))

    def _spliced(self, item: RawObject, at: int = 0) -> RawObject:
        for place, holder, put in _holders(item, at):
            known = self._known.get(place)
            if known is not None and not is_null(holder.get(_KEY)):
                own = _rows(holder)
                rows = known[: len(own)] + own[len(known) :]
                holder[_KEY] = raw(binascii.b2a_base64(rows, newline=False).decode())
                put(holder)
        return item


class _Put(Protocol):
    def __call__(self, holder: RawObject) -> None: ...


def _holders(item: RawObject, at: int) -> Iterator[tuple[tuple[str, int], RawObject, _Put]]:
    """The objects of an answer, item or chunk that may hold them: where each is, and what puts it back there.

    ``at``: the item's place in its list; a chunk says it itself.
    """
    index = at if is_null(item.get("index")) else integer(item["index"], "`index`")
    for name in (_META, _EXTENSION):
        if not is_null(item.get(name)):
            yield (name, index), raw_object(item[name], f"`{name}`"), _member(item, name)
    if is_null(item.get("choices")):
        return
    choices = [raw_object(choice, "a choice") for choice in raw_list(item["choices"], "`choices`")]
    for choice in choices:
        if not is_null(choice.get(_META)):
            index = integer(choice.get("index"), "a choice's `index`")
            yield (f"choice {_META}", index), raw_object(choice[_META], f"`{_META}`"), _of_choice(item, choices, choice)


def _member(item: RawObject, name: str) -> _Put:
    def put(holder: RawObject) -> None:
        item[name] = raw(holder)

    return put


def _of_choice(item: RawObject, choices: list[RawObject], choice: RawObject) -> _Put:
    def put(holder: RawObject) -> None:
        choice[_META] = raw(holder)
        item["choices"] = raw(choices)

    return put


def _is_list(answer: bytes) -> bool:
    return answer.lstrip()[:1] == b"["


def _items(answer: bytes, what: str) -> list[RawObject]:
    """The items of a list, or the one answer."""
    return [raw_object(item, what) for item in (raw_list(answer, what) if _is_list(answer) else [answer])]


def _rows(holder: RawObject) -> bytes:
    try:
        return binascii.a2b_base64(_TEXT.decode(memoryview(holder[_KEY])))
    except (msgspec.DecodeError, ValueError) as error:
        raise bad_reply(f"`{_KEY}` is not base64 ({error})") from None
