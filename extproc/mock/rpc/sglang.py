"""``Generate`` of SGLang's gRPC server (smg-grpc-servicer 0.14.1, ``sglang/servicer.py``; seen with 0.5.23 on a CPU).

Chunks are deltas with counts of all so far; the end of a stream repeats the last one. What ends a text is among its
ids, with ``matched_stop``. ``Abort`` is answered with success whatever it names, and of a request that it ends the
stream goes silent: nothing more comes, no end and no status either. The server reads neither a rank nor a seed.
"""

from __future__ import annotations

from typing import Any, ClassVar

from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb

from extproc.mock.engine import CrashError
from extproc.mock.rpc import api
from extproc.mock.rpc.rooms import RoomsApi
from extproc.mock.sglang.engine import LogprobOptions, Mode, Room, Sequence


class SglangApi(RoomsApi):
    """The answer to one ``Generate``."""

    ends_when_aborted = False
    messages: ClassVar[Any] = pb
    _untokenized = "Tokenized input must be provided"

    def chunk(self, sequence: Sequence, told: int) -> pb.GenerateResponse:
        """See Api."""
        ids = sequence.text.ids[told : sequence.written]
        message = pb.GenerateStreamChunk(token_ids=ids, index=sequence.index, **self._counts(sequence))
        self._add_logprobs(message, sequence, ids, first=told == 0)
        return pb.GenerateResponse(request_id=self._request.request_id, chunk=message)

    def complete(self, sequence: Sequence, told: int) -> pb.GenerateResponse:
        """See Api. Of several samples that are no stream it does not say which is which."""
        ids = sequence.text.ids[told : sequence.written]
        message = pb.GenerateComplete(
            output_ids=ids,
            finish_reason=api.finish_reason(sequence),
            index=sequence.index if self.stream else 0,
            **self._counts(sequence),
            **api.matched_stop(sequence),
        )
        self._add_logprobs(message, sequence, ids, first=told == 0)
        return pb.GenerateResponse(request_id=self._request.request_id, complete=message)

    def _logprobs(self) -> LogprobOptions:
        request = self._request
        return LogprobOptions(
            request.logprob_start_len, request.top_logprobs_num, tuple(request.token_ids_logprob) or None
        )

    def _room(self) -> Room:
        request = self._request
        if self._engine.mode is Mode.REGULAR:
            return Room()
        if not request.HasField("disaggregated_params"):
            raise CrashError  # where it would say so, the scheduler trips over what only its HTTP server sets
        place = request.disaggregated_params
        return Room(place.bootstrap_room, place.bootstrap_host or None, place.bootstrap_port or None)

    def _rid(self, index: int, samples: int) -> str:
        name: str = self._request.request_id
        return name if samples == 1 else f"{name}-{index}"

    def _check_prompt(self, ids: list[int]) -> None:
        super()._check_prompt(ids)
        if not ids or api.unknown(ids) is not None:
            raise CrashError

    def _add_logprobs(self, message: Any, sequence: Sequence, ids: list[int], *, first: bool) -> None:
        """A decode knows nothing of the prompt; its rows for the first token are the prefill's."""
        options = self._options
        if options is None:
            return
        top, chosen = options.top, options.token_ids or ()
        message.output_logprobs.CopyFrom(
            pb.OutputLogProbs(
                token_logprobs=api.values(ids),
                token_ids=ids,
                top_logprobs=api.rows(pb.TopLogProbs, ids, top) if top > 0 else (),
                token_ids_logprobs=[
                    pb.TopLogProbs(values=api.values(list(chosen)), token_ids=chosen) for _ in ids if chosen
                ],
            )
        )
        if first and options.start >= 0 and self._engine.mode is not Mode.DECODE:
            message.input_logprobs.CopyFrom(_of_prompt(sequence, options))


def _of_prompt(sequence: Sequence, options: LogprobOptions) -> pb.InputLogProbs:
    """From ``logprob_start_len`` on; the first of the prompt has no value."""
    ids = [token for token, _ in sequence.prompt.tokens()][options.start :]
    said = api.values(ids)
    found = [pb.InputTokenLogProb(value=value) for value in said[1:]]
    tops = [pb.TopLogProbs(), *api.rows(pb.TopLogProbs, ids[1:], options.top)] if options.top > 0 else ()
    return pb.InputLogProbs(token_logprobs=[pb.InputTokenLogProb(), *found], token_ids=ids, top_logprobs=tops)
