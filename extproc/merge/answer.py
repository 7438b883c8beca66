"""The client's one answer, growing as the legs' answers arrive.

The exchange feeds in what the legs send and sends on what comes back, until the answer is complete::

    answer = joined_answer(request, joint)
    answer.prefill_done(part, body)        # must be told where answer.needs_prefill, and may be told always
    answer.decode_data(part, chunk)        # any number of times
    answer.decode_done(part)

Streamed and whole answers have the same interface. All methods may raise GatewayError ``decode_bad_reply``; then, and
for any other failure, ``fail`` gives what a client that already hears a stream is told.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from extproc.apis.request import InferenceRequest
from extproc.apis.table import GENERATE
from extproc.errors import GatewayError
from extproc.merge import prompts, samples
from extproc.merge.as_is import AsIs
from extproc.merge.parts import Joint, Split, joint_of
from extproc.merge.prompt_logprobs import CompletionLogprobs, GenerateLogprobs
from extproc.merge.raw_json import RawObject, bad_reply, encode, is_null, raw, raw_list, raw_object
from extproc.merge.routed_experts import RoutedExperts
from extproc.merge.samples import merged_choices, merged_items, renumber
from extproc.merge.sse import DONE, Event, EventSplitter
from extproc.merge.vllm_prompt import VllmPrefill

_END: Final = Event(DONE).framed()


class JoinedAnswer(Protocol):
    """One answer made of the answers of ``joint.parts`` pairs of legs.

    Attributes:
        content_type: of the answer.
        needs_prefill: whether the bodies of the prefill legs' answers are needed.
        complete: nothing more will come; legs that are still out are to be cancelled.
    """

    content_type: bytes
    needs_prefill: bool
    complete: bool

    def prefill_done(self, part: int, body: bytes) -> bytes:
        """The part's prefill leg answered 2xx with ``body``. Returns what can be sent to the client now."""

    def decode_data(self, part: int, chunk: bytes) -> bytes:
        """A piece of the part's decode answer arrived. Returns what can be sent to the client now."""

    def decode_done(self, part: int) -> bytes:
        """The part's decode answer is whole. Returns what can be sent to the client now."""

    def fail(self, error: GatewayError) -> bytes:
        """The answer cannot be completed. Returns the last bytes to send; the answer is complete then."""


class _PrefillAnswer(Protocol):
    """What a prefill's answer adds to its decode's: to a whole answer, or to the chunks of a streamed one."""

    def complete_body(self, decode: bytes) -> bytes:
        """The whole answer with it."""

    def completed(self, chunk: RawObject) -> RawObject:
        """A chunk with it."""


def joined_answer(request: InferenceRequest, joint: Joint | None = None) -> JoinedAnswer:
    """The answer to ``request``, put together as ``joint`` says; where it is not given, as SGLang needs it."""
    joint = joint or joint_of(request, "sglang")
    if joint.split is Split.NONE and not joint.needs_prefill:
        return AsIs(request)
    return JoinedStream(request, joint) if request.stream else JoinedBody(request, joint)


def _prefill_answer(request: InferenceRequest, joint: Joint, body: bytes) -> _PrefillAnswer:
    if joint.runtime == "vllm":
        return VllmPrefill(request, body)
    if not joint.routed_experts:
        return _logprobs(request, body)
    return RoutedExperts(body, _logprobs(request, body) if joint.prompt_logprobs else None)


def _logprobs(request: InferenceRequest, body: bytes) -> _PrefillAnswer:
    return GenerateLogprobs(body, request.prompts) if request.api is GENERATE else CompletionLogprobs(body)


def _is_wanted(joint: Joint, body: bytes) -> bool:
    """Whether a prefill's answer has something to add; a vLLM server's, where it is there, always has its counts."""
    return joint.needs_prefill or (joint.runtime == "vllm" and bool(body))


class JoinedBody:
    """A whole (not streamed) answer: everything comes back from the call that completes it."""

    content_type = b"application/json"

    def __init__(self, request: InferenceRequest, joint: Joint) -> None:
        self._request = request
        self._joint = joint
        self.needs_prefill = joint.needs_prefill
        self.complete = False
        self._prefills: dict[int, bytes] = {}
        self._decodes = [bytearray() for _ in range(joint.parts)]
        self._pending = set(range(joint.parts))

    def prefill_done(self, part: int, body: bytes) -> bytes:
        """See :class:`JoinedAnswer`."""
        if _is_wanted(self._joint, body):
            self._prefills[part] = body
        return self._merged()

    def decode_data(self, part: int, chunk: bytes) -> bytes:
        """See :class:`JoinedAnswer`."""
        self._decodes[part] += chunk
        return b""

    def decode_done(self, part: int) -> bytes:
        """See :class:`JoinedAnswer`."""
        self._pending.discard(part)
        return self._merged()

    def fail(self, error: GatewayError) -> bytes:
        """See :class:`JoinedAnswer`."""
        self.complete = True
        return error.body

    def _merged(self) -> bytes:
        joint = self._joint
        prefills_missing = self.needs_prefill and len(self._prefills) < joint.parts
        if self.complete or self._pending or prefills_missing:
            return b""
        self.complete = True
        return self._joined([self._completed(part, bytes(decode)) for part, decode in enumerate(self._decodes)])

    def _joined(self, bodies: Sequence[bytes]) -> bytes:
        request, joint = self._request, self._joint
        if joint.parts == 1:
            return bodies[0]
        if joint.split is Split.PROMPTS:
            return merged_choices(bodies, 1, prompts.merged_once)
        if request.api is GENERATE:
            return merged_items(bodies, request.prompts)
        return merged_choices(bodies, request.prompts or 1)

    def _completed(self, part: int, decode: bytes) -> bytes:
        prefill = self._prefills.get(part)
        if prefill is None:
            return decode
        return _prefill_answer(self._request, self._joint, prefill).complete_body(decode)


class _PartStream:
    """One part's decode stream."""

    def __init__(self) -> None:
        self.splitter = EventSplitter()
        self.held: list[Event] = []  # until the prefill's answer is there
        self.prefill: _PrefillAnswer | None = None
        self.ended = False


class JoinedStream:
    """A streamed answer: every event is passed on at once, but for what the answer has only once.

    Chunks of no choices (usage, extensions) are held until all parts ended, then sent merged, then ``[DONE]``. With
    prompt logprobs a part's events wait for its prefill's answer, without which the first one cannot be complete.
    """

    content_type = b"text/event-stream; charset=utf-8"
    end_of_failed = _END  # behind an error

    def __init__(self, request: InferenceRequest, joint: Joint) -> None:
        self._request = request
        self._joint = joint
        self.needs_prefill = joint.needs_prefill
        self.complete = False
        self._parts = [_PartStream() for _ in range(joint.parts)]
        self._identity: RawObject = {}  # of the first chunk: one answer has one
        self._once: dict[tuple[bytes, ...], dict[int, RawObject]] = {}  # chunks of no choices, by kind and part

    def prefill_done(self, part: int, body: bytes) -> bytes:
        """See :class:`JoinedAnswer`."""
        if self.complete or not _is_wanted(self._joint, body):
            return b""
        stream = self._parts[part]
        stream.prefill = _prefill_answer(self._request, self._joint, body)
        held, stream.held = stream.held, []
        return self._passed(part, held)

    def decode_data(self, part: int, chunk: bytes) -> bytes:
        """See :class:`JoinedAnswer`."""
        return self._passed(part, self._parts[part].splitter.feed(chunk))

    def decode_done(self, part: int) -> bytes:
        """See :class:`JoinedAnswer`."""
        stream = self._parts[part]
        out = self._passed(part, stream.splitter.finish())
        if not (self.complete or stream.ended or any(event.data == DONE for event in stream.held)):
            raise bad_reply("a stream ended without [DONE]")
        return out

    def fail(self, error: GatewayError) -> bytes:
        """See :class:`JoinedAnswer`. The engines' streams tell an error as an event, too, and then end as always."""
        if self.complete:
            return b""
        self.complete = True
        return Event(error.body).framed() + self.end_of_failed

    def _passed(self, part: int, events: list[Event]) -> bytes:
        stream = self._parts[part]
        if self.needs_prefill and stream.prefill is None:
            stream.held += events
            return b""
        out = b""
        for event in events:
            if not self.complete:
                out += self._event(part, event)
        return out

    def _event(self, part: int, event: Event) -> bytes:
        if event.data is None:
            return event.framed()
        if event.data == DONE:
            return self._ended(part)
        chunk = raw_object(event.data, "an event")
        if not is_null(chunk.get("error")):
            self.complete = True
            return event.framed() + self.end_of_failed
        prefill = self._parts[part].prefill
        if prefill is not None:
            chunk = prefill.completed(chunk)
        if len(self._parts) > 1:
            return self._unified(part, chunk, event.other)
        return Event(encode(chunk), event.other).framed()

    def _unified(self, part: int, chunk: RawObject, other: bytes) -> bytes:
        if self._request.api is GENERATE:
            renumber(chunk, part, len(self._parts))
            return Event(encode(chunk), other).framed()
        if not self._identity:
            self._identity = {key: chunk[key] for key in ("id", "created") if key in chunk}
            if self._joint.split is Split.PROMPTS and "id" in chunk:
                self._identity["id"] = prompts.name_of_all(chunk["id"], part)
        chunk.update(self._identity)
        choices = [raw_object(choice, "a choice") for choice in raw_list(chunk.get("choices"), "`choices`")]
        if not choices:
            self._once.setdefault((other, *(key.encode() for key in chunk)), {})[part] = chunk
            return b""
        for choice in choices:
            renumber(choice, part, len(self._parts))
        chunk["choices"] = raw(choices)
        return Event(encode(chunk), other).framed()

    def _ended(self, part: int) -> bytes:
        self._parts[part].ended = True
        if not all(stream.ended for stream in self._parts):
            return b""
        once = b"".join(
            Event(encode(self._merged(chunks)), other).framed() for (other, *_), chunks in self._once.items()
        )
        self.complete = True
        return once + _END

    def _merged(self, chunks: dict[int, RawObject]) -> RawObject:
        if len(chunks) != len(self._parts):
            raise bad_reply(f"{len(self._parts)} chunks without choices were expected, not {len(chunks)}")
        return self._once_of([chunks[part] for part in range(len(chunks))])

    def _once_of(self, chunks: Sequence[RawObject]) -> RawObject:
        once = prompts.merged_once if self._joint.split is Split.PROMPTS else samples.merged_once
        return once(chunks)
