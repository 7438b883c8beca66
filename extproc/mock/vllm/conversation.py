"""From a conversation to a prompt: by the chat template, or by the token ids that a prefill has told.

Chat, messages and responses take such ids in ``kv_transfer_params.prompt_token_ids`` and then neither apply the
template nor tokenise; completions and generate ignore the key (0.32, ``renderers/online_renderer.py``, and seen).
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from extproc.mock.generation import VOCABULARY, Prompt
from extproc.mock.vllm import checks
from extproc.mock.vllm.api import Api, RefusedError

if TYPE_CHECKING:
    from extproc.mock.recorder import Record

_KEY = "prompt_token_ids"
_PARAM = f"kv_transfer_params.{_KEY}"
_MALFORMED = f"`kv_transfer_params['{_KEY}']` must be a non-empty list of non-negative integers."
_TEXTS = frozenset({"text", "input_text", "output_text", "refusal", "thinking", "tool_reference"})
_RANK, _NO_RANK = "x-data-parallel-rank", "1000000"
_PROBE = re.compile(rb'"prompt_token_ids"\s*:\s*\[\s*\]')


def is_probe(record: Record) -> bool:
    """Whether a request only asks what the worker is.

    It asks if it knows the key: an empty list is refused by one that does; or how many ranks it has, by one that no
    worker has.
    """
    return _PROBE.search(record.body) is not None or record.header(_RANK) == _NO_RANK


def prompt_of(api: Api, own: Prompt, contents: Collection[Any], *, echo: bool = False) -> Prompt:
    """The prompt of a conversation; ``own`` is what the template makes of it, ``contents`` are its messages'.

    Takes the ids out of ``api.handoff``, as there. Raises RefusedError.
    """
    ids = _told(api, contents, echo=echo)
    if ids is None:
        if not contents:
            raise RefusedError("Cannot apply chat template to an empty conversation. Provide at least one message.")
        checks.length(own, api.options)
        return own
    api.context.record.ids_reused = True
    # the mock's tokens cannot be read back: where they are those of the conversation, its text is what they stand for
    return own if ids == [token for token, _ in own.tokens()] else Prompt(ids=tuple(ids))


def _told(api: Api, contents: Collection[Any], *, echo: bool) -> list[int] | None:
    """The ids that stand for the conversation; None: there are none, or it must be rendered whatever they are."""
    if not api.options.knows_token_ids or not api.handoff:
        return None
    api.handoff = dict(api.handoff)
    ids = api.handoff.pop(_KEY, None)
    if ids is None or echo or any(_has_media(content) for content in contents):
        return None
    if not isinstance(ids, list) or not ids or any(type(token) is not int or token < 0 for token in ids):
        raise RefusedError(_MALFORMED, _PARAM)
    if max(ids) >= VOCABULARY:
        raise RefusedError(f"Token id {max(ids)} is out of vocabulary", _PARAM)
    return ids


def _has_media(content: Any) -> bool:
    parts = content if isinstance(content, list) else []
    return any(isinstance(part, dict) and part.get("type", "text") not in _TEXTS for part in parts)
