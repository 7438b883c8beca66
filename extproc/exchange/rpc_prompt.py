"""What a prefill leg tells of its prompt, on its way into the answer: of a long prompt it is much work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from extproc.engines.table import engine_of
from extproc.errors import GatewayError
from extproc.exchange.rpc import Texts
from extproc.handoff.grpc_answers import ended
from extproc.transcode.transcoder import Transcoder
from extproc.workers.worker import Worker

_AS_CHARACTERS: Final = 32  # that take as long to be made tokens as one token's log probabilities to be made JSON


def told(transcoder: Transcoder, worker: Worker, answer: bytes) -> Callable[[], None] | None:
    """Tell ``transcoder`` what the prefill leg's ``answer`` says; see Transcoder.prefilled. Raises as that does."""
    complete = ended(engine_of(worker.runtime), answer)
    return None if complete is None else transcoder.prefilled(complete)


class Making:
    """The JSON of a long prompt's log probabilities on its way, in a thread, while the decode leg goes on.

    Args:
        texts: has the threads.
        transcoder: whose.
        work: see Transcoder.prefilled.
        tokens: of the prompt.
        then: is called when it is done, with what has gone wrong, if something has.
    """

    __slots__ = ("_cancel", "under_way")

    def __init__(
        self,
        texts: Texts,
        transcoder: Transcoder,
        work: Callable[[], None],
        tokens: int,
        then: Callable[[GatewayError | None], None],
    ) -> None:
        self.under_way = True

        def done(outcome: GatewayError | None) -> None:
            self.under_way = False
            if outcome is None:
                transcoder.prompt_made()
            then(outcome)

        self._cancel = texts.run(work, tokens * _AS_CHARACTERS, done)

    def drop(self) -> None:
        """Nobody wants it any more."""
        if self.under_way:
            self.under_way = False
            self._cancel()
