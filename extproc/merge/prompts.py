"""The answers to the prompts of a list put together as the one answer of a vLLM server that was given the list.

Usage is summed, all of it: an aggregated server sums the tokens, too, but of what it found in its cache it tells only
one prompt's. What belongs to a single sequence (``metrics``) it leaves out, and there is nothing to transfer any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from extproc.merge.raw_json import NULL, RawObject, bad_reply, integer, is_null, raw, raw_object

_OF_ONE: Final = ("metrics", "kv_transfer_params", "ec_transfer_params")
_BRACE: Final = ord("{")


def merged_once(answers: Sequence[RawObject]) -> RawObject:
    """What an answer, or a chunk of no choices, has once: the first prompt's members, with usage summed.

    Raises:
        GatewayError: ``decode_bad_reply`` when some have usage and some have not.
    """
    merged = dict(answers[0])
    usages = [answer["usage"] for answer in answers if not is_null(answer.get("usage"))]
    if len(usages) == len(answers):
        merged["usage"] = raw(_summed([raw_object(usage, "`usage`") for usage in usages]))
    elif usages:
        raise bad_reply(f"only {len(usages)} of {len(answers)} answers have `usage`")
    for key in _OF_ONE:
        if not is_null(merged.get(key)):
            merged[key] = NULL
    return merged


def name_of_all(name: msgspec.Raw, part: int) -> msgspec.Raw:
    """The id of the whole answer, made of the id of one prompt's: further parts are asked for as ``<id>-<index>``."""
    suffix = b'-%d"' % part
    text = bytes(name)
    return msgspec.Raw(text.removesuffix(suffix) + b'"') if part and text.endswith(suffix) else name


def _summed(parts: Sequence[RawObject]) -> RawObject:
    """Numbers added up, by key, and objects of them."""
    merged = {}
    for key in dict.fromkeys(key for part in parts for key in part):
        values = [part[key] for part in parts if not is_null(part.get(key))]
        if not values:
            merged[key] = NULL
        elif memoryview(values[0])[0] == _BRACE:
            merged[key] = raw(_summed([raw_object(value, f"`{key}`") for value in values]))
        else:
            merged[key] = msgspec.Raw(b"%d" % sum(integer(value, f"`{key}`") for value in values))
    return merged
