"""One sequence: the bytes of a gRPC reply in, the bytes of the client's answer out.

::

    transcoder = Transcoder(asked, prepared, tokenizer, engine, id=..., model=..., created=...)
    transcoder.prefilled(complete)   # once, whenever the prefill has answered; None where there is none
    transcoder.feed(data)            # any number of times
    transcoder.end(status, message)  # the trailers

Of a stream, all that one call makes certain is one chunk, whatever number of messages came together. Before the first
byte of an answer an error is raised, to be answered with its status; after it, it is an event of the stream, which then
ends without ``[DONE]``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from extproc.apis.table import CHAT, COMPLETIONS, GENERATE
from extproc.engines.engine import Engine
from extproc.engines.status import http_of
from extproc.errors import GatewayError
from extproc.generation.asked import Asked
from extproc.generation.events import Complete, Event, PromptLogprobs, Tokens
from extproc.generation.sampling import Sampling
from extproc.text.tokenizer import Prepared, Tokenizer
from extproc.transcode.chat import Chat
from extproc.transcode.completions import Completions
from extproc.transcode.frames import Frames, bad_reply
from extproc.transcode.generate import Generate
from extproc.transcode.output import Output
from extproc.transcode.usage import Tally
from extproc.transcode.vocabulary import Halves
from extproc.transcode.writer import Context, Writer

_OK: Final = 0
_SERVER_ERROR: Final = 500
_FEW: Final = 100  # tokens of a prompt: their log probabilities are made JSON at once


class Transcoder:
    """Makes one sequence's answer.

    Args:
        asked: what the client asked for.
        prepared: the prompt of this sequence.
        tokenizer: the model's.
        engine: of the decode worker.
        id: of the answer.
        model: as the answer names it.
        created: when the request came, in seconds since the epoch.
        index: of the choice.
        sampling: of this sequence, where it is not ``asked.sampling``.
        now: seconds since the epoch, for the times that ``/generate`` tells; without it, it tells none.
        vocabulary: how many tokens the model has, as the decode worker says; 0: it does not.

    Attributes:
        content_type: of the answer.
        stopped: a stop string was found here. The answer is complete without what the engine still makes of the
            sequence, so that its work can be aborted.
        complete: all of the answer was given out, or it failed: whatever comes is passed over.
        failed: why the answer ended without being whole.
    """

    def __init__(
        self,
        asked: Asked,
        prepared: Prepared,
        tokenizer: Tokenizer,
        engine: Engine,
        *,
        id: str,  # noqa: A002 - what it is called in the answer
        model: str,
        created: int,
        index: int = 0,
        sampling: Sampling | None = None,
        now: Callable[[], float] | None = None,
        vocabulary: int = 0,
    ) -> None:
        sampling = sampling or asked.sampling
        context = Context(asked, sampling, prepared, tokenizer, engine.runtime, id, model, created, index)
        self.content_type = b"text/event-stream; charset=utf-8" if asked.stream else b"application/json"
        self.stopped = False
        self.complete = False
        self.failed: GatewayError | None = None
        self._asked = asked
        self._prompt_tokens = len(prepared.ids)
        self._event_of = engine.event
        self._frames = Frames()
        self._writer = _writer(context, now)
        self._output = Output(
            sampling,
            tokenizer,
            prepared.ids,
            self._writer.rows,
            vocabulary,
            keeps_half=context.halves is not Halves.JOINED,
        )
        self._tally = Tally(self._prompt_tokens)
        self._waits = _needs_prompt_logprobs(asked)
        self._own_prompt: PromptLogprobs | None = None  # what the decode says of it
        self._alone = False  # there is no prefill: the decode's word counts
        self._heard = False  # a message
        self._spoke = False
        self._ended = False  # by trailers that say that all is well

    @property
    def waits(self) -> bool:
        """Whether nothing can be given out before the prefill has answered: the answer begins with what it knows."""
        return self._waits

    def prefilled(self, complete: Complete | None) -> Callable[[], None] | None:
        """The prefill's last word; None if the decode worker does without a prefill.

        What this makes certain is given out by the next call; where the decode's reply has ended, by ``feed(b"")``.

        Returns:
            What is to be done first where that is much, some 10 µs for each token of the prompt, in any thread; then
            :meth:`prompt_made`. Until then the transcoder :attr:`waits`.

        Raises:
            GatewayError: ``decode_bad_reply`` where it does not tell what was asked for.
        """
        if complete is None:
            self._alone = True
            self._look_for_prompt()
            return None
        self._tally.prefilled(complete.usage)
        if not self._waits or self.complete:
            return None
        logprobs = self._checked(complete.prompt_logprobs)
        if len(logprobs.ids) > _FEW:
            return partial(self._writer.prompt, logprobs)
        self._writer.prompt(logprobs)
        self._waits = False
        return None

    def prompt_made(self) -> None:
        """What :meth:`prefilled` has left to do is done."""
        self._waits = False

    def feed(self, data: bytes) -> bytes:
        """A piece of the reply. Returns what can be sent to the client now.

        Raises:
            GatewayError: nothing was sent yet, and the reply is no answer: ``decode_bad_reply``, ``decode_failed``.
        """
        if self.complete:
            return b""
        try:
            for message in () if self.stopped else self._frames.feed(data):
                self._take(self._event_of(message))
                if self.stopped:
                    break
        except GatewayError as error:
            return self.fail(error)
        return self._given()

    def end(self, status: int, message: str = "", *, constraint: bool = False) -> bytes:
        """The reply's trailers. Returns the rest of the answer.

        Args:
            status: ``grpc-status``.
            message: ``grpc-message``, decoded.
            constraint: the trailers say that the answer could not be made to fit the request's own constraint.

        Raises:
            GatewayError: as :meth:`feed`, also for the status.
        """
        if self.complete:
            return b""
        if status != _OK:
            return self.fail(_refused(status, message, constraint=constraint))
        if self._frames.unfinished:
            return self.fail(bad_reply("it ends within a message"))
        if self._output.finish is None:
            return self.fail(bad_reply("it ends before the sequence does"))
        self._ended = True
        return self._given()

    def fail(self, error: GatewayError) -> bytes:
        """The answer cannot be completed. Returns the last bytes to send; raises ``error`` if none were sent yet."""
        if self.complete:
            return b""
        self.complete, self.failed = True, error
        if not self._spoke:
            raise error
        return b"%bdata: %b\n\n" % (self._chunk(), error.body)

    def _take(self, event: Event) -> None:
        self._heard = True
        output = self._output
        if output.finish is not None:
            raise bad_reply("it goes on behind the end of the sequence")
        if isinstance(event, Tokens):
            output.add(event.ids, event.logprobs)
        else:
            output.complete(event)
        self._tally.decoded(event.usage)
        self.stopped = output.stopped
        if self._waits:
            self._own_prompt = event.prompt_logprobs or self._own_prompt
            self._look_for_prompt()

    def _look_for_prompt(self) -> None:
        """Where there is no prefill, the decode tells of the prompt, at its end at last."""
        if self._alone and self._waits and (self._own_prompt is not None or self._output.finish is not None):
            self._writer.prompt(self._checked(self._own_prompt))
            self._waits = False

    def _checked(self, logprobs: PromptLogprobs | None) -> PromptLogprobs:
        """What is told of the prompt. Raises GatewayError where that is not what was asked for."""
        logprobs = logprobs or PromptLogprobs((), ())
        told, expected = len(logprobs.ids), self._prompt_tokens - (self._asked.logprob_start or 0)
        # How SGLang counts from the last tokens on is its own business.
        if told != expected and (self._asked.api is not GENERATE or (expected > 0 and not told)):
            raise bad_reply(f"log probabilities of {expected} tokens of the prompt were asked for, {told} are told")
        return logprobs

    def _given(self) -> bytes:
        """All that is certain, and the end if it has come."""
        if self._waits or not self._heard:
            return b""
        ends = self._ended or self.stopped
        if not self._asked.stream:
            self.complete = ends
            return self._writer.body(self._output, self._tally) if ends else b""
        given = self._chunk()
        if ends:
            self.complete = True
            given += self._writer.last(self._output, self._tally)
        return given

    def _chunk(self) -> bytes:
        given = b"" if self._waits else self._writer.chunk(self._output, self._tally)
        if given:
            self._spoke = True
        return given


def _writer(context: Context, now: Callable[[], float] | None) -> Writer:
    api = context.asked.api
    if api is CHAT:
        return Chat(context)
    if api is COMPLETIONS:
        return Completions(context)
    assert api is GENERATE, "no other API is served by gRPC workers"
    return Generate(context, now)


def _refused(status: int, message: str, *, constraint: bool) -> GatewayError:
    http = http_of(status, constraint=constraint)
    code = "decode_rejected" if http < _SERVER_ERROR else "decode_failed"
    said = f"the decode worker ended the call with gRPC status {status}"
    return GatewayError(code, f"{said}: {message}" if message else said, status=http, answered=http)


def _needs_prompt_logprobs(asked: Asked) -> bool:
    """Whether the answer holds log probabilities of the prompt: vLLM's streams only have an echo's."""
    if asked.prompt_logprobs is None:
        return False
    return not asked.stream or asked.api is GENERATE or (asked.echo and asked.top_logprobs is not None)
