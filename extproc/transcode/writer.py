"""What the answers of all APIs have in common."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Protocol

import orjson

from extproc.apis.table import CHAT, COMPLETIONS
from extproc.generation.asked import Asked
from extproc.generation.events import PromptLogprobs
from extproc.generation.sampling import Sampling
from extproc.text.tokenizer import Prepared, Tokenizer
from extproc.transcode.output import Output, Rows
from extproc.transcode.usage import Tally
from extproc.transcode.vocabulary import Halves

DONE: Final = b"data: [DONE]\n\n"
NULL: Final = b"null"
VLLM: Final = "vllm"
_HALVES: Final = {
    (VLLM, CHAT): Halves.JOINED,
    (VLLM, COMPLETIONS): Halves.JOINED,
    ("sglang", COMPLETIONS): Halves.BYTES,
}


@dataclass(frozen=True, slots=True)
class Context:
    """What an answer is an answer to.

    Attributes:
        sampling: of this sequence.
        runtime: the engine's name.
        id: of the answer.
        model: as the answer names it.
        created: when, in seconds since the epoch.
        index: of the choice.
    """

    asked: Asked
    sampling: Sampling
    prepared: Prepared
    tokenizer: Tokenizer
    runtime: str
    id: str
    model: str
    created: int
    index: int

    @property
    def halves(self) -> Halves:
        """What becomes of a token that is part of a character: as with the engine's own server."""
        return _HALVES.get((self.runtime, self.asked.api), Halves.REPLACED)


class Writer(Protocol):
    """An API's answer to one sequence."""

    @property
    def rows(self) -> Rows | None:
        """What takes the output's log probabilities; None where none are asked for."""

    def prompt(self, logprobs: PromptLogprobs) -> None:
        """The prompt's log probabilities: told once, before anything is asked of this, where they are asked for."""

    def chunk(self, output: Output, tally: Tally) -> bytes:
        """The events that say what is new of ``output``; b"" where that is nothing."""

    def last(self, output: Output, tally: Tally) -> bytes:
        """The events that end a stream, behind that of the finish."""

    def body(self, output: Output, tally: Tally) -> bytes:
        """The whole answer, not streamed."""


def string(text: str) -> bytes:
    """``text`` in JSON."""
    return orjson.dumps(text)


def integers(ids: Iterable[int]) -> bytes:
    """A list of integers in JSON."""
    return b"[%b]" % b",".join([b"%d" % one for one in ids])


def ending(context: Context, output: Output) -> bytes:
    """A choice's members that say why it ended.

    ``stop_reason`` is vLLM's: null for an EOS. Behind an engine whose own server calls it ``matched_stop``, and names
    an EOS there, the choice has that, too.
    """
    matched = output.matched
    reason = b'"finish_reason":%b,"stop_reason":' % orjson.dumps(output.finish)
    if context.runtime == VLLM:
        return reason + orjson.dumps(matched)
    is_eos = isinstance(matched, int) and matched not in context.sampling.stop_token_ids
    return b'%b%b,"matched_stop":%b' % (
        reason,
        NULL if is_eos else orjson.dumps(matched),
        orjson.dumps(output.end if matched is None else matched),
    )
