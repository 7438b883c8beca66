"""One answer of the answers to single sequences, which the gateway has made of token streams itself.

A sequence is one sample of one prompt; they are in the order of their indices, all samples of a prompt before the next
prompt's. Each one's answer is complete with the index 0. What is asked of HTTP workers is split otherwise: parts.py.
An error behind the head is an event, and the end: only a whole answer has ``[DONE]``.
"""

from __future__ import annotations

from collections.abc import Sequence

from extproc.apis.request import InferenceRequest
from extproc.apis.table import GENERATE
from extproc.errors import GatewayError
from extproc.merge import prompts, samples
from extproc.merge.answer import JoinedAnswer, JoinedBody, JoinedStream
from extproc.merge.as_is import AsIs
from extproc.merge.parts import Joint, Split
from extproc.merge.raw_json import RawObject
from extproc.merge.sse import Event

_STREAM = b"text/event-stream; charset=utf-8"
_WHOLE = b"application/json"


def sequences_answer(request: InferenceRequest, count: int, samples_each: int, *, batched: bool) -> JoinedAnswer:
    """The answer to ``request`` of ``count`` sequences.

    Args:
        samples_each: of a prompt.
        batched: the answer is a list even if there is one sequence (``/generate``).
    """
    if count == 1 and not (batched and request.api is GENERATE):
        return OneSequence(request)
    joint = Joint("", Split.SAMPLES, count)
    if request.stream:
        return _Streams(request, joint, samples_each)
    return _Bodies(request, joint, samples_each)


class OneSequence(AsIs):
    """The answer to one sequence, as it is."""

    def __init__(self, request: InferenceRequest) -> None:
        super().__init__(request)
        self.content_type = _STREAM if request.stream else _WHOLE

    def fail(self, error: GatewayError) -> bytes:
        """See JoinedAnswer."""
        self.complete = True
        return Event(error.body).framed() if self._streams else b""


class _Bodies(JoinedBody):
    """A whole answer."""

    def __init__(self, request: InferenceRequest, joint: Joint, samples_each: int) -> None:
        super().__init__(request, joint)
        self._samples = samples_each

    def _joined(self, bodies: Sequence[bytes]) -> bytes:
        if self._request.api is GENERATE:
            return samples.merged_items(bodies, None)
        return samples.merged_choices(bodies, 1, self._once)

    def _once(self, answers: Sequence[RawObject]) -> RawObject:
        return _merged_once(answers, self._samples)


class _Streams(JoinedStream):
    """A streamed answer."""

    end_of_failed = b""

    def __init__(self, request: InferenceRequest, joint: Joint, samples_each: int) -> None:
        super().__init__(request, joint)
        self._samples = samples_each

    def _once_of(self, chunks: Sequence[RawObject]) -> RawObject:
        return _merged_once(chunks, self._samples)


def _merged_once(answers: Sequence[RawObject], each: int) -> RawObject:
    """What an answer has once: a prompt's tokens count once for its samples, those of the prompts are summed."""
    of_prompts = [samples.merged_once(answers[at : at + each]) for at in range(0, len(answers), each)]
    return of_prompts[0] if len(of_prompts) == 1 else prompts.merged_once(of_prompts)
