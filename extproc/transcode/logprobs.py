"""Log probabilities in the form of each API, row by row as tokens come, in JSON.

Of one that the engine does not tell, or that is minus infinity, vLLM's APIs say -9999.0. Where alternatives are listed:

============  ======================================================================================================
chat          as many as were asked for, in the engine's order
completions   the token itself, then the others, so that there are at most as many beside it as were asked for
``/generate``  what the engine says
============  ======================================================================================================

Of a token that is part of a character each engine's own server shows something else (``vocabulary.py``).
Of two alternatives with the same text both keep the later one's value, in the place of the first.

``text_offset`` counts the characters of the text before the token, those that are held back too.

Source: vllm 0.32 entrypoints/openai/chat_completion/serving.py (``_create_chat_logprobs``), completion/serving.py
(``_create_completion_logprobs``), sglang 0.5.23 managers/tokenizer_manager.py (``add_logprob_to_meta_info``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final

import orjson

from extproc.generation.events import PromptLogprobs, Top
from extproc.text.tokenizer import Tokenizer
from extproc.transcode.output import Row
from extproc.transcode.vocabulary import BEFORE, Halves, Shown, Vocabulary

_LEAST: Final = -9999.0
_NONE: Final = b"-9999.0"
_NULL: Final = b"null"


def number(value: float | None) -> bytes:
    """A log probability as vLLM's APIs have it."""
    return orjson.dumps(value) if value is not None and value > _LEAST else _NONE


class Sequel:
    """How tokens are shown that follow each other, and what might have stood in their places.

    Args:
        vocabulary: theirs.
    """

    __slots__ = ("_before", "_vocabulary")

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._before: deque[int] = deque(maxlen=BEFORE)

    def __getitem__(self, token: int) -> Shown:
        """How ``token`` is shown in the next place."""
        shown = self._vocabulary[token]
        return self._vocabulary.behind(list(self._before), token) if shown.partial else shown

    def add(self, token: int) -> None:
        """``token`` is in the next place."""
        self._before.append(token)


class ChatRows:
    """``choices[].logprobs`` of Chat Completions.

    Args:
        most: how many alternatives are listed.
        halves: how parts of characters are shown.
    """

    __slots__ = ("_most", "_rows", "_sequel")

    def __init__(self, tokenizer: Tokenizer, most: int, halves: Halves, *, as_ids: bool = False) -> None:
        self._sequel = Sequel(Vocabulary(tokenizer, halves, as_ids=as_ids))
        self._most = most
        self._rows: list[bytes] = []

    def add(self, row: Row, piece: str) -> None:  # noqa: ARG002 - as other APIs' rows
        """See :class:`extproc.transcode.output.Rows`."""
        sequel = self._sequel
        shown = sequel[row.id]
        tops = []
        for token, value in islice(zip(*row.top, strict=False), self._most):
            other = shown if token == row.id else sequel[token]
            tops.append(b"%b%b%b}" % (other.before, number(value), other.after))
        sequel.add(row.id)
        self._rows.append(
            b'%b%b%b,"top_logprobs":[%b]}' % (shown.before, number(row.value), shown.after, b",".join(tops))
        )

    def take(self) -> bytes:
        """The rows that were not taken before."""
        rows, self._rows = self._rows, []
        return b'{"content":[%b]}' % b",".join(rows)


class _Columns:
    """Rows as Completions have them: a list for each member."""

    __slots__ = ("offsets", "tokens", "tops", "values")

    def __init__(self) -> None:
        self.offsets: list[int] = []
        self.values: list[float | None] = []
        self.tokens: list[bytes] = []
        self.tops: list[bytes] = []

    def append(self, offset: int, token: bytes, value: float | None, tops: bytes) -> None:
        """One more row."""
        self.offsets.append(offset)
        self.values.append(value if value is None or value > _LEAST else _LEAST)
        self.tokens.append(token)
        self.tops.append(tops)


class CompletionRows:
    """``choices[].logprobs`` of Completions.

    Args:
        most: how many alternatives are listed beside the token.
        halves: how parts of characters are shown.
    """

    __slots__ = ("_at", "_most", "_prompt", "_rows", "_sequel", "_start", "_vocabulary")

    def __init__(self, tokenizer: Tokenizer, most: int, halves: Halves, *, as_ids: bool = False) -> None:
        self._vocabulary = Vocabulary(tokenizer, halves, as_ids=as_ids)
        self._sequel = Sequel(self._vocabulary)
        self._most = most
        self._rows = _Columns()
        self._at = 0  # characters of the answer's text so far
        self._prompt = _Columns()
        self._start = 0  # of the answer's text, behind an echo

    def add(self, row: Row, piece: str) -> None:
        """See :class:`extproc.transcode.output.Rows`."""
        sequel = self._sequel
        token = sequel[row.id].text
        self._rows.append(
            self._at, token, _LEAST if row.value is None else row.value, self._tops_of(row, token, sequel)
        )
        sequel.add(row.id)
        self._at += len(piece)

    def echo(self, tokenizer: Tokenizer, text: str, prompt: Iterable[tuple[Row, str]]) -> None:
        """Put the prompt, whose text is ``text``, before all else; what is no part of it (a BOS) has no room there.

        In any thread, while others :meth:`add`: it changes nothing that they do.
        """
        rows, at, sequel = _Columns(), 0, Sequel(self._vocabulary)
        for row, piece in prompt:
            if row.value is None:
                rows.append(at, self._vocabulary[row.id].text, None, _NULL)
            else:
                token = sequel[row.id].text
                rows.append(at, token, row.value, self._tops_of(row, token, sequel))
                sequel.add(row.id)
            at = _behind(tokenizer, row.id, piece, text, at)
        self._prompt, self._start = rows, len(text)

    def take(self) -> bytes:
        """The rows that were not taken before."""
        prompt, rows, start = self._prompt, self._rows, self._start
        self._prompt, self._rows = _Columns(), _Columns()
        return b'{"text_offset":%b,"token_logprobs":%b,"tokens":[%b],"top_logprobs":[%b]}' % (
            orjson.dumps(prompt.offsets + [start + offset for offset in rows.offsets]),
            orjson.dumps(prompt.values + rows.values),
            b",".join(prompt.tokens + rows.tokens),
            b",".join(prompt.tops + rows.tops),
        )

    def _tops_of(self, row: Row, token: bytes, sequel: Sequel) -> bytes:
        """Alternatives by their text."""
        tops = {token: number(row.value)}
        for other, its in _others(row, self._most):
            tops[sequel[other].text] = number(its)
        return b"{%b}" % b",".join([b"%b:%b" % item for item in tops.items()])


class NativeRows:
    """``output_token_logprobs`` and ``output_top_logprobs`` of ``/generate``: all of them in every chunk.

    Args:
        most: how many alternatives are listed; of none the member is left out.
        texts: show the tokens' texts, too.
    """

    __slots__ = ("_rows", "_texts", "_tops", "_vocabulary", "count", "most")

    def __init__(self, tokenizer: Tokenizer, most: int, *, texts: bool = False) -> None:
        self._vocabulary = Vocabulary(tokenizer)
        self._texts = texts
        self._rows = bytearray()
        self._tops = bytearray()
        self.most = most
        self.count = 0

    def add(self, row: Row, piece: str) -> None:  # noqa: ARG002 - as other APIs' rows
        """See :class:`extproc.transcode.output.Rows`."""
        comma = b"," if self.count else b""
        self._rows += comma + self._entry(row.id, row.value)
        if self.most:
            self._tops += comma + self._alternatives(row.top)
        self.count += 1

    @property
    def rows(self) -> bytes:
        """``*_token_logprobs``."""
        return b"[" + self._rows + b"]"

    def tops(self, unwritten: Top | None = None) -> bytes:
        """``*_top_logprobs``, with those to a token that is none of the answer."""
        return b"[" + (self._tops if unwritten is None else self._alternatives(unwritten)) + b"]"

    def _alternatives(self, top: Top) -> bytes:
        entries = [self._entry(*one) for one in islice(zip(*top, strict=False), self.most)]
        return b"[%b]" % b",".join(entries) if entries else _NULL

    def _entry(self, token: int, value: float | None) -> bytes:
        text = self._vocabulary[token].text if self._texts else _NULL
        return b"[%b,%d,%b]" % (orjson.dumps(value), token, text)


def prompt_rows(tokenizer: Tokenizer, prompt: PromptLogprobs) -> list[tuple[Row, str]]:
    """The rows of a prompt, each with the text that it grows by with the token."""
    detokenizer = tokenizer.detokenizer((), skip_special=False)
    tops = prompt.tops or (((), ()),) * len(prompt.ids)
    rows = zip(prompt.ids, prompt.values, tops, strict=False)
    return [(Row(*row), detokenizer.add((row[0],))) for row in rows]


def prompt_logprobs(vocabulary: Vocabulary, prompt: Iterable[tuple[Row, str]], most: int) -> bytes:
    """``prompt_logprobs`` of vLLM's APIs: the token and the likeliest others by their ids, null for the first token.

    gRPC does not tell ranks. They are what the order of a row tells: that of its last entry is known only if it is not
    the prompt's token.
    """
    sequel = Sequel(vocabulary)
    positions = []
    for row, _ in prompt:
        if row.value is None:
            positions.append(_NULL)
        else:
            positions.append(_position(sequel, row, row.value, most))
            sequel.add(row.id)
    return b"[%b]" % b",".join(positions)


def _behind(tokenizer: Tokenizer, token: int, piece: str, text: str, at: int) -> int:
    """Where a prompt's ``token``, which adds ``piece``, ends in the prompt's text, if it begins ``at``."""
    if text.startswith(piece, at):
        return at + len(piece)
    bare = piece.lstrip(" ")  # SentencePiece puts a space before a text
    if text.startswith(bare, at):
        return at + len(bare)
    return min(at + len(tokenizer.decode((token,))), len(text))  # of a special token that is nothing


def _position(sequel: Sequel, row: Row, own: float, most: int) -> bytes:
    likelier, known = 0, False
    for token, value in zip(*row.top, strict=False):
        likelier += token != row.id and value > own
        known |= token != row.id and value <= own
    entries = [_entry(row.id, own, likelier + 1 if known else None, sequel[row.id].text)]
    for rank, (token, value) in enumerate(_others(row, most), 1):
        entries.append(_entry(token, value, rank + (rank > likelier), sequel[token].text))
    return b"{%b}" % b",".join(entries)


def _entry(token: int, value: float, rank: int | None, text: bytes) -> bytes:
    return b'"%d":{"logprob":%b,"rank":%b,"decoded_token":%b}' % (token, number(value), orjson.dumps(rank), text)


def _others(row: Row, most: int) -> Iterator[tuple[int, float]]:
    """The alternatives beside the token: ``most`` of them, one less where it is itself among the likeliest."""
    others = [(token, value) for token, value in zip(*row.top, strict=False) if token != row.id]
    own = row.value
    likelier = sum(value > own for _, value in others) if own is not None else most
    return islice(others, most - 1 if likelier < most else most)
