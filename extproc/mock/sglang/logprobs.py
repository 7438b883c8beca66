"""Logprobs as the engine keeps them: triples of value, token id and, if asked for, text.

A decode leg knows nothing of the prompt's tokens: its ``input_*`` lists are empty, and of the first output token, which
the prefill wrote, it lacks the values of ``token_ids_logprob``. Both are in the prefill leg's answer (seen on 0.5.23).
"""

from __future__ import annotations

from typing import Any

from extproc.mock.generation import alternatives, logprob, word
from extproc.mock.sglang.engine import LogprobOptions, Mode, Sequence

Triple = list[Any]
Row = list[Triple] | None


def meta(sequence: Sequence, options: LogprobOptions, mode: Mode) -> dict[str, Any]:
    """The logprob fields of ``meta_info``, in the engine's order."""
    inputs = [] if mode is Mode.DECODE else prompt(sequence, options)
    ids = sequence.ids
    if mode is Mode.DECODE and not sequence.text.ids and sequence.failure is None:
        ids = [sequence.text.first]  # max_new_tokens is 0, but the prefill has written a token
    outputs = [triple(logprob(token), token, options) for token in ids]
    fields: dict[str, Any] = {
        "input_token_logprobs": inputs,
        "output_token_logprobs": outputs,
        "output_token_logprobs_length": len(outputs),
    }
    if options.top > 0:
        fields["input_top_logprobs"] = top(inputs, options, skip=1)
        fields["output_top_logprobs"] = top(outputs, options, skip=0)
    if options.token_ids is not None:
        fields["input_token_ids_logprobs"] = _chosen(inputs, options, skip=1)
        fields["output_token_ids_logprobs"] = _chosen(outputs, options, skip=1 if mode is Mode.DECODE else 0)
    return fields


def prompt(sequence: Sequence, options: LogprobOptions) -> list[Triple]:
    """The prompt's triples from ``options.start`` on; the first has no value."""
    if options.start < 0:
        return []
    return [
        [None if place == 0 else logprob(token), token, text if options.with_text else None]
        for place, (token, text) in enumerate(sequence.prompt.tokens()[options.start :])
    ]


def triple(value: float, token: int, options: LogprobOptions) -> Triple:
    """One value."""
    return [value, token, word(token) if options.with_text else None]


def top(rows: list[Triple], options: LogprobOptions, *, skip: int) -> list[Row]:
    """The likeliest tokens of each position; the first ``skip`` positions have none."""
    return [
        None if place < skip else [triple(value, other, options) for value, other in alternatives(row[1], options.top)]
        for place, row in enumerate(rows)
    ]


def _chosen(rows: list[Triple], options: LogprobOptions, *, skip: int) -> list[Row]:
    return [
        None
        if place < skip
        else [triple(logprob(token, row[1] % 7), token, options) for token in options.token_ids or ()]
        for place, row in enumerate(rows)
    ]
