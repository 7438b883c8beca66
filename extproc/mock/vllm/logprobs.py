"""Logprobs in the shapes of the endpoints."""

from __future__ import annotations

from typing import Any

from extproc.mock.generation import alternatives, logprob, word
from extproc.mock.vllm.engine import Sequence

_CHOSEN_RANK = 57  # a prompt's tokens are seldom the likeliest


def of_prompt(sequence: Sequence, top: int) -> list[dict[str, Any] | None]:
    """``prompt_logprobs``: for each position its token and the ``top`` likeliest; the first position has none."""
    rows: list[dict[str, Any] | None] = [None]
    for token, text in sequence.prompt.tokens()[1:]:
        row = {str(token): _entry(logprob(token), _CHOSEN_RANK, text)}
        for rank, (value, other) in enumerate(_others(token, top), 1):
            row[str(other)] = _entry(value, rank, word(other))
        rows.append(row)
    return rows


def chat(sequence: Sequence, told: int, top: int) -> dict[str, Any]:
    """``logprobs`` of a chat choice for the tokens from ``told`` on."""
    return {
        "content": [
            {
                **_token(logprob(token), token),
                "top_logprobs": [_token(value, other) for value, other in alternatives(token, top)],
            }
            for token in sequence.text.ids[told : sequence.written]
        ]
    }


def generate(sequence: Sequence, told: int, top: int) -> dict[str, Any]:
    """``logprobs`` of a choice of ``/inference/v1/generate`` for the tokens from ``told`` on."""
    content = []
    for token in sequence.text.ids[told : sequence.written]:
        likeliest = [
            {"token_id": other, "logprob": value, "rank": rank}
            for rank, (value, other) in enumerate(alternatives(token, max(top, 1)), 1)
        ]
        content.append({**likeliest[0], "top_logprobs": likeliest})
    return {"content": content}


class CompletionLogprobs:
    """``logprobs`` of one completion choice, which come in pieces in a stream: offsets go on where they ended."""

    def __init__(self, top: int) -> None:
        self._top = top
        self._offset = 0

    def piece(self, sequence: Sequence, told: int, *, prompt: bool, text: bool = True) -> dict[str, Any]:
        """For the tokens from ``told`` on, if ``text``, after those of the prompt, if ``prompt``."""
        entries: list[tuple[str, float | None, dict[str, float] | None]] = []
        if prompt:
            for place, (token, piece) in enumerate(sequence.prompt.tokens()):
                value = None if place == 0 else logprob(token)
                row = {word(other): number for number, other in _others(token, self._top)}
                entries.append((piece, value, None if value is None else {piece: value, **row}))
        for token in sequence.text.ids[told : sequence.written] if text else []:
            row = {word(other): number for number, other in alternatives(token, max(self._top, 1))}
            entries.append((word(token), logprob(token), row))
        offsets = []
        for piece, _, _ in entries:
            offsets.append(self._offset)
            self._offset += len(piece)
        return {
            "text_offset": offsets,
            "token_logprobs": [value for _, value, _ in entries],
            "tokens": [piece for piece, _, _ in entries],
            "top_logprobs": [row for _, _, row in entries],
        }


def _others(token: int, count: int) -> list[tuple[float, int]]:
    return [(value + 1, other) for value, other in alternatives(token, count + 1)[1:]]


def _entry(value: float, rank: int, text: str) -> dict[str, Any]:
    return {"logprob": value, "rank": rank, "decoded_token": text}


def _token(value: float, token: int) -> dict[str, Any]:
    return {"token": word(token), "logprob": value, "bytes": list(word(token).encode())}
