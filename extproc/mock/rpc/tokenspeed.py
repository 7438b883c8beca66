"""``Generate`` of TokenSpeed's gRPC server, by its code (smg-grpc-servicer 0.14.1, ``tokenspeed/servicer.py``).

Chunks are deltas with counts of all so far; one without tokens is left out, unless it is the first. A stop token is cut
off the ids unless ``no_stop_trim``, and is in ``matched_stop``. The end of a stream repeats the last delta. Of the
prompt there are no log probabilities. ``Abort`` ends the call with a status.
"""

from __future__ import annotations

from typing import Any, ClassVar

from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as pb

from extproc.mock.engine import RequestError
from extproc.mock.rpc import api
from extproc.mock.rpc.rooms import RoomsApi
from extproc.mock.sglang.engine import LogprobOptions, Mode, Ranks, Room, Sequence

_UNSAID = 500  # of an abort without a status


class TokenspeedApi(RoomsApi):
    """The answer to one ``Generate``."""

    ends_when_aborted = True
    messages: ClassVar[Any] = pb
    _untokenized = "GenerateRequest.tokenized is required"

    def chunk(self, sequence: Sequence, told: int) -> pb.GenerateResponse | None:
        """See Api."""
        ids = self._kept(sequence, told)
        if not ids and told:
            return None
        message = pb.GenerateStreamChunk(token_ids=ids, index=sequence.index, **self._counts(sequence))
        self._add_logprobs(message, ids)
        return pb.GenerateResponse(request_id=self._request.request_id, chunk=message)

    def complete(self, sequence: Sequence, told: int) -> pb.GenerateResponse:
        """See Api."""
        ids = self._kept(sequence, told)
        message = pb.GenerateComplete(
            output_ids=ids,
            finish_reason=api.finish_reason(sequence),
            index=sequence.index,
            **self._counts(sequence),
            **api.matched_stop(sequence),
        )
        self._add_logprobs(message, ids)
        return pb.GenerateResponse(request_id=self._request.request_id, complete=message)

    def failed(self, sequence: Sequence) -> tuple[Any, str] | None:
        """See Api. An abort ends the call in whatever state."""
        finish = sequence.finish or {}
        if finish.get("type") != "abort":
            return None
        return api.code_of(sequence.failure or _UNSAID), sequence.message or "aborted"

    def _logprobs(self) -> LogprobOptions:
        return LogprobOptions(top=self._request.top_logprobs_num)

    def _room(self) -> Room:
        request = self._request
        pinned = Ranks(routed=request.data_parallel_rank if request.HasField("data_parallel_rank") else None)
        if self._engine.mode is Mode.REGULAR:
            return Room(ranks=pinned)
        if not request.HasField("kv_bootstrap_info"):
            raise RequestError("mock: a leg without kv_bootstrap_info")
        place = request.kv_bootstrap_info
        return Room(place.bootstrap_room, place.bootstrap_host or None, place.bootstrap_port or None, pinned)

    def _rid(self, index: int, samples: int) -> str:
        name: str = self._request.request_id
        return name if samples == 1 else f"{name}-n{index}"

    def _temperature(self) -> float:
        return super()._temperature() if self._request.sampling_params.HasField("temperature") else 1.0

    def _seed(self) -> int:
        sampling = self._request.sampling_params
        return sampling.sampling_seed if sampling.HasField("sampling_seed") else 0

    def _check_prompt(self, ids: list[int]) -> None:
        super()._check_prompt(ids)
        if not ids:
            raise RequestError("GenerateRequest.tokenized.input_ids is empty")
        if (wrong := api.unknown(ids)) is not None:
            raise RequestError(f"mock: token id {wrong} is out of the vocabulary")

    def _kept(self, sequence: Sequence, told: int) -> list[int]:
        ids = sequence.text.ids[told : sequence.written]
        matched = (sequence.finish or {}).get("matched")
        trims = isinstance(matched, int) and not self._request.sampling_params.no_stop_trim
        return ids[:-1] if trims and ids and ids[-1] == matched else ids

    def _add_logprobs(self, message: Any, ids: list[int]) -> None:
        """There is a row for every token, empty where none was asked for."""
        if self._options is not None and ids:
            message.output_logprobs.CopyFrom(
                pb.OutputLogProbs(
                    token_logprobs=api.values(ids),
                    token_ids=ids,
                    top_logprobs=api.rows(pb.TopLogProbs, ids, self._options.top),
                )
            )
