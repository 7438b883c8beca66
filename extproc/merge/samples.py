"""The answers of single-sample requests put together as the one answer of a server that was asked for ``n``.

Order is prompt-major: choice (or item) ``prompt * n + sample``. The first sample's answer gives everything that an
answer has once: id, created, model, prompt tokens, cached tokens, weight versions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from extproc.merge.raw_json import RawObject, bad_reply, encode, integer, is_null, raw, raw_list, raw_object

_SUMMED: Final = ("completion_tokens", "reasoning_tokens")


Once = Callable[[Sequence[RawObject]], RawObject]


def merged_choices(answers: Sequence[bytes], prompts: int, once: Once | None = None) -> bytes:
    """One chat or text completion of several.

    Args:
        answers: the samples' answers, sample 0 first.
        prompts: how many prompts each answer has a choice for.
        once: merges what an answer has once; :func:`merged_once` where it is not given.

    Raises:
        GatewayError: ``decode_bad_reply`` when an answer is not a completion of so many prompts.
    """
    whole = [raw_object(answer, "the answer") for answer in answers]
    choices: list[RawObject] = [{}] * (prompts * len(whole))
    for sample, answer in enumerate(whole):
        own = [raw_object(choice, "a choice") for choice in raw_list(answer.get("choices"), "`choices`")]
        if sorted(integer(choice.get("index"), "a choice's `index`") for choice in own) != list(range(prompts)):
            raise bad_reply(f"{prompts} choices were expected, with indexes from 0, not {len(own)}")
        for choice in own:
            choices[renumber(choice, sample, len(whole))] = choice
    merged = (once or merged_once)(whole)
    merged["choices"] = raw(choices)
    return encode(merged)


def merged_items(answers: Sequence[bytes], prompts: int | None) -> bytes:
    """One list of ``/generate`` items of several answers; ``prompts`` is None for requests of a single prompt.

    Raises:
        GatewayError: ``decode_bad_reply`` when an answer has another number of items.
    """
    if prompts is None:
        return b"[%b]" % b",".join(encode(raw_object(answer, "the answer")) for answer in answers)
    lists = [raw_list(answer, "the answer") for answer in answers]
    if any(len(items) != prompts for items in lists):
        raise bad_reply(f"lists of {prompts} items were expected")
    return encode([items[prompt] for prompt in range(prompts) for items in lists])


def renumber(choice: RawObject, sample: int, samples: int) -> int:
    """Give a sample's choice or item the index it has in the one answer; the new index is returned."""
    own = 0 if is_null(choice.get("index")) else integer(choice["index"], "`index`")
    index = own * samples + sample
    choice["index"] = msgspec.Raw(b"%d" % index)
    return index


def merged_once(answers: Sequence[RawObject]) -> RawObject:
    """What an answer, or a chunk of no choices, has once: the first one's members, with usage and sglext merged."""
    merged = dict(answers[0])
    for key, merge in (("usage", _merged_usage), ("sglext", _merged_sglext)):
        parts = [answer[key] for answer in answers if not is_null(answer.get(key))]
        if len(parts) == len(answers):
            merged[key] = raw(merge([raw_object(part, f"`{key}`") for part in parts]))
        elif parts:
            raise bad_reply(f"only {len(parts)} of {len(answers)} samples have `{key}`")
    return merged


def _merged_usage(parts: Sequence[RawObject]) -> RawObject:
    """The prompt's tokens were read once, whatever the number of samples; what was generated is summed."""
    merged = dict(parts[0])
    for key in _SUMMED:
        if not is_null(merged.get(key)):
            merged[key] = _sum(parts, key)
    if not is_null(merged.get("total_tokens")):
        total = sum(integer(merged.get(key), f"`usage.{key}`") for key in ("prompt_tokens", "completion_tokens"))
        merged["total_tokens"] = msgspec.Raw(b"%d" % total)
    key = "completion_tokens_details"
    objects = [raw_object(part[key], f"`usage.{key}`") for part in parts if not is_null(part.get(key))]
    if objects:
        kinds = dict.fromkeys(kind for one in objects for kind in one)
        merged[key] = raw({kind: _sum(objects, kind) for kind in kinds})
    return merged


def _sum(parts: Sequence[RawObject], key: str) -> msgspec.Raw:
    total = sum(integer(part[key], f"`{key}`") for part in parts if not is_null(part.get(key)))
    return msgspec.Raw(b"%d" % total)


def _merged_sglext(parts: Sequence[RawObject]) -> RawObject:
    """SGLang's extension: output ids and speculation statistics are listed per sample, the rest is per prompt."""
    merged = dict(parts[0])
    if not is_null(merged.get("output_ids")):
        merged["output_ids"] = raw([ids for part in parts for ids in raw_list(part.get("output_ids"), "`output_ids`")])
    speculation = [part["spec_tokens_details"] for part in parts if not is_null(part.get("spec_tokens_details"))]
    if speculation:
        merged["spec_tokens_details"] = raw(speculation)
    return merged
