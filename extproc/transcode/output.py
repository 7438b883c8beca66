"""What a sequence has become so far: tokens in, the text that is certain out, up to what ends it.

A token that may be the end (an EOS, one of ``stop_token_ids``) is held back with all that is known of it until the next
message: its text is no part of the answer if it was the end, and its log probabilities belong with the last chunk. All
engines name it among the tokens, but TokenSpeed, which leaves it out and counts it.

Stop strings are found here, whether the engine was told them or not: the token that completes one is the last that
counts. They are looked for in the text of the tokens after the first ``min_tokens``, as vLLM does.

Source: vllm 0.32 v1/engine/detokenizer.py (``update``); sglang 0.5.23 managers/detokenizer_manager.py
(``trim_matched_stop``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, Protocol

from extproc.errors import GatewayError
from extproc.generation.events import Complete, Logprobs, Top
from extproc.generation.sampling import Sampling
from extproc.text.stops import StopFinder
from extproc.text.tokenizer import Tokenizer
from extproc.transcode.frames import bad_reply

_NO_TOP: Final[Top] = ((), ())
_FAILED: Final = {"abort", "error"}


class Row(NamedTuple):
    """A token's log probability (None: the engine does not tell it) and its alternatives."""

    id: int
    value: float | None
    top: Top


class Rows(Protocol):
    """Where log probabilities go, in the API's form."""

    def add(self, row: Row, piece: str) -> None:
        """One more token; ``piece`` is what the text has grown by with it, held back or not."""


class Output:
    """One sequence.

    Args:
        sampling: as the client wants it.
        tokenizer: the model's.
        prompt_ids: the prompt.
        rows: takes the log probabilities; None where none are asked for.
        vocabulary: how many tokens the model has, where that is known: often more than the tokenizer, and these have no
            text.
        keeps_half: a character that stays half at the end is U+FFFD, else nothing, as vLLM has it.

    Attributes:
        count: how many tokens there are, as usage counts them.
        finish: why it ended: "stop" or "length"; None before.
        matched: the stop string that was found, or else what the engine says that ended it; vLLM does not name an EOS.
        end: the token that ended it and has no text, EOS or not; None where there was none, or it was left out.
        stopped: a stop string was found here: whatever the engine still says of the sequence does not count.
        unwritten: where no tokens are asked for, the alternatives to the one that the engine has made all the same.
    """

    __slots__ = (
        "_detokenizer", "_empty", "_ends", "_fresh", "_held", "_ids", "_keeps_half", "_limit", "_min_tokens", "_parts",
        "_plain", "_rows", "_stops", "_trims", "count", "end", "finish", "matched", "stopped", "unwritten",
    )  # fmt: skip

    def __init__(
        self,
        sampling: Sampling,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        rows: Rows | None = None,
        vocabulary: int = 0,
        *,
        keeps_half: bool = True,
    ) -> None:
        self._keeps_half = keeps_half
        self._detokenizer = tokenizer.detokenizer(
            prompt_ids,
            skip_special=sampling.skip_special_tokens,
            spaces_between=sampling.spaces_between_special_tokens,
        )
        self._stops = StopFinder(sampling.stop, include=sampling.include_stop) if sampling.stop else None
        self._trims = not sampling.include_stop
        self._ends = _ends(sampling, tokenizer)
        self._limit = max(tokenizer.vocab_size, vocabulary)
        self._min_tokens = sampling.min_tokens
        self._empty = sampling.max_tokens == 0  # an engine that hands a cache over makes a token nevertheless
        self._rows = rows
        self._plain = self._stops is None and rows is None
        self._fresh: list[int] = []  # whose text was not asked for yet: many are decoded at once
        self._parts: list[str] = []  # certain text that was not taken yet
        self._ids: list[int] = []  # not taken yet
        self._held: Row | None = None
        self.count = 0
        self.finish: str | None = None
        self.matched: int | str | None = None
        self.end: int | None = None
        self.stopped = False
        self.unwritten: Top | None = None

    @property
    def grown(self) -> bool:
        """Whether there are tokens that were not taken yet; their text may be uncertain still."""
        return bool(self._ids)

    def add(self, ids: Sequence[int], logprobs: Logprobs | None) -> None:
        """Some more tokens.

        Raises:
            GatewayError: ``decode_bad_reply`` for a token that the vocabulary has not.
        """
        if self._held is not None:
            self._release()
        if self._empty:
            self.unwritten = logprobs.tops[0] if logprobs is not None and logprobs.tops else None
            return
        if not ids or self.stopped:
            return
        for one in ids:
            if not 0 <= one < self._limit:
                raise bad_reply(f"the vocabulary of {self._limit} tokens has no token {one}")
        if self._plain:
            if ids[-1] in self._ends:
                self._held = Row(ids[-1], None, _NO_TOP)
                ids = ids[:-1]
            self._fresh += ids
            self._ids += ids
            self.count += len(ids)
            return
        rows = list(_aligned(ids, logprobs))
        if ids[-1] in self._ends:
            self._held = rows.pop()
        for row in rows:
            if self.finish is None:
                self._add(row)
        if self.finish is not None:  # by a stop string
            self._held = None

    def complete(self, last: Complete) -> None:
        """The engine's end of it.

        Raises:
            GatewayError: ``decode_failed`` where that is no end of an answer.
        """
        if self.stopped:
            return
        if last.finish in _FAILED:
            raise GatewayError("decode_failed", f"the decode worker ended the sequence: {last.finish}")
        if not self.count and self._held is None:  # of a stream, this repeats the last tokens
            self._first_and_last(last)
        if self._held is not None:
            if last.finish == "stop" and not isinstance(last.matched, str):
                self._end(self._held)
            else:
                self._release()
        self._flush()
        if self.finish is not None:  # by a stop string
            return
        self.finish = last.finish
        if not self._empty:
            self.count = max(self.count, last.usage.completion)  # TokenSpeed's counts the end that it leaves out
        if last.finish == "stop":
            self.matched = last.matched

    def text(self) -> str:
        """The text that is certain and was not taken before."""
        if self._fresh:
            self._parts.append(self._detokenizer.add(self._fresh))
            self._fresh = []
        parts = self._parts
        if not parts:
            return ""
        self._parts = []
        return parts[0] if len(parts) == 1 else "".join(parts)

    def ids(self) -> list[int]:
        """The tokens that were not taken before, what ended the sequence included."""
        ids, self._ids = self._ids, []
        return ids

    def _first_and_last(self, last: Complete) -> None:
        ids = last.ids
        if self._trims and ids and last.finish == "stop" and last.matched == ids[-1]:
            self._ends |= {ids[-1]}  # an end that only the engine knows of
        self.add(ids, last.logprobs)

    def _add(self, row: Row) -> None:
        self.count += 1
        self._ids.append(row.id)
        piece = self._detokenizer.add((row.id,))
        if self._rows is not None:
            self._rows.add(row, piece)
        if piece:
            self._pass(piece)

    def _pass(self, piece: str) -> None:
        stops = self._stops
        if stops is None or self.count <= self._min_tokens:
            self._parts.append(piece)
            return
        if certain := stops.add(piece):
            self._parts.append(certain)
        if stops.matched is not None:
            self.stopped = True
            self.finish, self.matched = "stop", stops.matched

    def _end(self, row: Row) -> None:
        """The held token was the end: it counts, but has no text."""
        self._held = None
        self.count += 1
        self._ids.append(row.id)
        self.end = row.id
        if self._rows is not None:
            self._rows.add(row, "")

    def _release(self) -> None:
        """The held token was not the end."""
        row, self._held = self._held, None
        assert row is not None, "the caller looked"
        if self._plain:
            self._fresh.append(row.id)
            self._ids.append(row.id)
            self.count += 1
        else:
            self._add(row)

    def _flush(self) -> None:
        """No more text comes: give out what was held back."""
        if self._fresh:
            self._parts.append(self._detokenizer.add(self._fresh))
            self._fresh = []
        if self._keeps_half and (rest := self._detokenizer.end()):
            self._pass(rest)
        if self._stops is not None and (rest := self._stops.end()):
            self._parts.append(rest)


def _ends(sampling: Sampling, tokenizer: Tokenizer) -> frozenset[int]:
    """The tokens whose text is no part of the answer when they end it."""
    if sampling.include_stop:
        return frozenset()
    own = frozenset() if sampling.ignore_eos else tokenizer.eos_ids
    return own.union(sampling.stop_token_ids) if sampling.stop_token_ids else own


def _aligned(ids: Sequence[int], logprobs: Logprobs | None) -> Iterable[Row]:
    """A row per token. Engines leave out the rows of tokens whose log probability they do not know."""
    if logprobs is None:
        return [Row(one, None, _NO_TOP) for one in ids]
    known = zip(logprobs.ids, logprobs.values, logprobs.tops or (_NO_TOP,) * len(logprobs.ids), strict=False)
    if len(logprobs.ids) == len(ids):
        return [Row(*row) for row in known]
    rows = []
    row = next(known, None)
    for one in ids:
        if row is not None and row[0] == one:
            rows.append(Row(*row))
            row = next(known, None)
        else:
            rows.append(Row(one, None, _NO_TOP))
    return rows
