"""The client's one answer, growing as the legs' answers arrive.

The exchange feeds in what the legs send and sends on what comes back, until the answer is complete::

    answer = joined_answer(request)
    answer.prefill_done(sample, body)      # where answer.needs_prefill
    answer.decode_data(sample, chunk)      # any number of times
    answer.decode_done(sample)

Streamed and whole answers have the same interface. All methods may raise GatewayError ``decode_bad_reply``; then, and
for any other failure, ``fail`` gives what a client that already hears a stream is told.
"""

from __future__ import annotations

from typing import Final, Protocol

from extproc.apis.request import InferenceRequest
from extproc.apis.table import GENERATE
from extproc.errors import GatewayError
from extproc.merge.prompt_logprobs import CompletionLogprobs, GenerateLogprobs, PromptLogprobs
from extproc.merge.raw_json import RawObject, bad_reply, encode, is_null, raw, raw_list, raw_object
from extproc.merge.samples import merged_choices, merged_items, merged_once, renumber
from extproc.merge.sse import DONE, Event, EventSplitter

_END: Final = Event(DONE).framed()


class JoinedAnswer(Protocol):
    """One answer made of the answers of ``request.samples`` pairs of legs.

    Attributes:
        content_type: of the answer.
        needs_prefill: whether the bodies of the prefill legs' answers are needed.
        complete: nothing more will come; legs that are still out are to be cancelled.
    """

    content_type: bytes
    needs_prefill: bool
    complete: bool

    def prefill_done(self, sample: int, body: bytes) -> bytes:
        """The sample's prefill leg answered 2xx with ``body``. Returns what can be sent to the client now."""

    def decode_data(self, sample: int, chunk: bytes) -> bytes:
        """A piece of the sample's decode answer arrived. Returns what can be sent to the client now."""

    def decode_done(self, sample: int) -> bytes:
        """The sample's decode answer is whole. Returns what can be sent to the client now."""

    def fail(self, error: GatewayError) -> bytes:
        """The answer cannot be completed. Returns the last bytes to send; the answer is complete then."""


def joined_answer(request: InferenceRequest) -> JoinedAnswer:
    """The answer to a request of several samples or with prompt logprobs."""
    return JoinedStream(request) if request.stream else JoinedBody(request)


def _prompt_logprobs(request: InferenceRequest, prefill: bytes) -> PromptLogprobs:
    if request.api is GENERATE:
        return GenerateLogprobs(prefill, request.prompts)
    return CompletionLogprobs(prefill)


class JoinedBody:
    """A whole (not streamed) answer: everything comes back from the call that completes it."""

    content_type = b"application/json"

    def __init__(self, request: InferenceRequest) -> None:
        self._request = request
        self.needs_prefill = request.prompt_logprobs
        self.complete = False
        self._prefills: dict[int, bytes] = {}
        self._decodes = [bytearray() for _ in range(request.samples)]
        self._pending = set(range(request.samples))

    def prefill_done(self, sample: int, body: bytes) -> bytes:
        """See :class:`JoinedAnswer`."""
        if self.needs_prefill:
            self._prefills[sample] = body
        return self._merged()

    def decode_data(self, sample: int, chunk: bytes) -> bytes:
        """See :class:`JoinedAnswer`."""
        self._decodes[sample] += chunk
        return b""

    def decode_done(self, sample: int) -> bytes:
        """See :class:`JoinedAnswer`."""
        self._pending.discard(sample)
        return self._merged()

    def fail(self, error: GatewayError) -> bytes:
        """See :class:`JoinedAnswer`."""
        self.complete = True
        return error.body

    def _merged(self) -> bytes:
        request = self._request
        prefills_missing = self.needs_prefill and len(self._prefills) < request.samples
        if self.complete or self._pending or prefills_missing:
            return b""
        self.complete = True
        bodies = [bytes(decode) for decode in self._decodes]
        if self.needs_prefill:
            known = [_prompt_logprobs(request, self._prefills[sample]) for sample in range(request.samples)]
            bodies = [logprobs.complete_body(body) for logprobs, body in zip(known, bodies, strict=True)]
        if request.samples == 1:
            return bodies[0]
        if request.api is GENERATE:
            return merged_items(bodies, request.prompts)
        return merged_choices(bodies, request.prompts or 1)


class _SampleStream:
    """One sample's decode stream."""

    def __init__(self) -> None:
        self.splitter = EventSplitter()
        self.held: list[Event] = []  # until the prefill's answer is there
        self.logprobs: PromptLogprobs | None = None
        self.ended = False


class JoinedStream:
    """A streamed answer: every event is passed on at once, but for what the answer has only once.

    Chunks of no choices (usage, extensions) are held until all samples ended, then sent merged, then ``[DONE]``. With
    prompt logprobs a sample's events wait for its prefill's answer, without which the first one cannot be complete.
    """

    content_type = b"text/event-stream; charset=utf-8"

    def __init__(self, request: InferenceRequest) -> None:
        self._request = request
        self.needs_prefill = request.prompt_logprobs
        self.complete = False
        self._samples = [_SampleStream() for _ in range(request.samples)]
        self._identity: RawObject = {}  # of the first chunk: one answer has one
        self._once: dict[tuple[bytes, ...], dict[int, RawObject]] = {}  # chunks of no choices, by kind and sample

    def prefill_done(self, sample: int, body: bytes) -> bytes:
        """See :class:`JoinedAnswer`."""
        if self.complete or not self.needs_prefill:
            return b""
        stream = self._samples[sample]
        stream.logprobs = _prompt_logprobs(self._request, body)
        held, stream.held = stream.held, []
        return self._passed(sample, held)

    def decode_data(self, sample: int, chunk: bytes) -> bytes:
        """See :class:`JoinedAnswer`."""
        return self._passed(sample, self._samples[sample].splitter.feed(chunk))

    def decode_done(self, sample: int) -> bytes:
        """See :class:`JoinedAnswer`."""
        stream = self._samples[sample]
        out = self._passed(sample, stream.splitter.finish())
        if not (self.complete or stream.ended or any(event.data == DONE for event in stream.held)):
            raise bad_reply("a stream ended without [DONE]")
        return out

    def fail(self, error: GatewayError) -> bytes:
        """See :class:`JoinedAnswer`. SGLang's streams tell an error as an event, too, and then end as always."""
        if self.complete:
            return b""
        self.complete = True
        return Event(error.body).framed() + _END

    def _passed(self, sample: int, events: list[Event]) -> bytes:
        stream = self._samples[sample]
        if self.needs_prefill and stream.logprobs is None:
            stream.held += events
            return b""
        out = b""
        for event in events:
            if not self.complete:
                out += self._event(sample, event)
        return out

    def _event(self, sample: int, event: Event) -> bytes:
        if event.data is None:
            return event.framed()
        if event.data == DONE:
            return self._ended(sample)
        chunk = raw_object(event.data, "an event")
        if not is_null(chunk.get("error")):
            self.complete = True
            return event.framed() + _END
        logprobs = self._samples[sample].logprobs
        if logprobs is not None:
            chunk = logprobs.completed(chunk)
        if len(self._samples) > 1:
            return self._unified(sample, chunk, event.other)
        return Event(encode(chunk), event.other).framed()

    def _unified(self, sample: int, chunk: RawObject, other: bytes) -> bytes:
        samples = len(self._samples)
        if self._request.api is GENERATE:
            renumber(chunk, sample, samples)
            return Event(encode(chunk), other).framed()
        if not self._identity:
            self._identity = {key: chunk[key] for key in ("id", "created") if key in chunk}
        chunk.update(self._identity)
        choices = [raw_object(choice, "a choice") for choice in raw_list(chunk.get("choices"), "`choices`")]
        if not choices:
            self._once.setdefault((other, *(key.encode() for key in chunk)), {})[sample] = chunk
            return b""
        for choice in choices:
            renumber(choice, sample, samples)
        chunk["choices"] = raw(choices)
        return Event(encode(chunk), other).framed()

    def _ended(self, sample: int) -> bytes:
        self._samples[sample].ended = True
        if not all(stream.ended for stream in self._samples):
            return b""
        once = b"".join(
            Event(encode(self._merged(chunks)), other).framed() for (other, *_), chunks in self._once.items()
        )
        self.complete = True
        return once + _END

    def _merged(self, chunks: dict[int, RawObject]) -> RawObject:
        if len(chunks) != len(self._samples):
            raise bad_reply(f"{len(self._samples)} chunks without choices were expected, not {len(chunks)}")
        return merged_once([chunks[sample] for sample in range(len(chunks))])
