"""``Generate`` of vLLM's gRPC server (smg-grpc-servicer 0.14.1, ``vllm/servicer.py``; seen with 0.32 on a CPU).

Chunks are deltas and count only their own tokens; the end of a stream repeats the last one. What ends a text is among
its ids: the end of text with no ``matched_stop``, a stop token or the token that completes a stop string with it.
"""

from __future__ import annotations

import json
from typing import Any, Final

from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from extproc.mock.engine import RequestError
from extproc.mock.generation import Limits, Prompt
from extproc.mock.rpc import api
from extproc.mock.rpc.model import END
from extproc.mock.vllm import checks
from extproc.mock.vllm.engine import Batch, Engine, Sequence, new_id

_LARGEST_PORT: Final = 65535


class VllmApi(api.Api[Sequence]):
    """The answer to one ``Generate``."""

    ends_when_aborted = True

    def __init__(self, engine: Engine, request: pb.GenerateRequest, record: Any) -> None:
        self._engine = engine
        self._request = request
        self._record = record
        self._params: dict[str, Any] | None = None
        sampling = request.sampling_params
        self._top = sampling.logprobs if sampling.HasField("logprobs") else None
        self._prompt_top = sampling.prompt_logprobs if sampling.HasField("prompt_logprobs") else None

    @property
    def stream(self) -> bool:
        """Whether a stream is asked for."""
        return bool(self._request.stream)

    def batch(self) -> Batch:
        """The sequences asked for, refused in the engine's order and words."""
        request, sampling = self._request, self._request.sampling_params
        self._params = _params(request)
        ids = list(request.tokenized.input_ids)
        if request.WhichOneof("input") == "text":
            raise RequestError("mock: a prompt as text is not taken, its tokens are")
        limit = self._engine.options.max_model_len
        if not ids:
            raise RequestError("The decoder prompt cannot be empty")
        if len(ids) > limit:
            raise RequestError(
                f"The decoder prompt (length {len(ids)}) is longer than the maximum model length of {limit}. Make sure "
                "that `max_model_len` is no smaller than the number of text tokens."
            )
        if (wrong := api.unknown(ids)) is not None:
            raise RequestError(f"Token id {wrong} is out of vocabulary")
        samples = sampling.n or 1
        temperature = sampling.temperature if sampling.HasField("temperature") else 1.0
        most = sampling.max_tokens if sampling.HasField("max_tokens") else None
        checks.sampling(n=samples, temperature=temperature, max_tokens=most, min_tokens=sampling.min_tokens)
        checks.logprobs(self._top, self._prompt_top)
        if len(ids) == limit:
            raise RequestError(
                f"The decoder prompt (length {len(ids)}) plus the number of requested output tokens (at least 1) is "
                f"longer than the maximum model length of {limit}. Make sure that `max_model_len` is no smaller than "
                "the number of text tokens (prompt + requested output tokens)."
            )
        return Batch([self._sequence(ids, temperature, most, index) for index in range(samples)], samples, samples == 1)

    def chunk(self, sequence: Sequence, told: int) -> pb.GenerateResponse:
        """See Api."""
        ids = sequence.text.ids[told : sequence.written]
        message = pb.GenerateStreamChunk(
            token_ids=ids,
            prompt_tokens=sequence.prompt.length,
            completion_tokens=len(ids),
            cached_tokens=sequence.cached,
            index=sequence.index,
        )
        self._add_logprobs(message, sequence, ids, first=told == 0)
        return pb.GenerateResponse(chunk=message)

    def complete(self, sequence: Sequence, told: int) -> pb.GenerateResponse:
        """See Api."""
        ids = sequence.text.ids[told : sequence.written]
        matched = {} if (sequence.finish or {}).get("matched") == END else api.matched_stop(sequence)
        message = pb.GenerateComplete(
            output_ids=ids,
            finish_reason=api.finish_reason(sequence),
            prompt_tokens=sequence.prompt.length,
            completion_tokens=len(ids),
            cached_tokens=sequence.cached,
            index=sequence.index,
            **matched,
        )
        if returned := sequence.returned:
            message.kv_transfer_params_json = json.dumps(returned)
            if returned.get("remote_host"):
                message.kv_transfer_params.remote_host = returned["remote_host"]
                message.kv_transfer_params.remote_port = returned["remote_port"]
        self._add_logprobs(message, sequence, ids, first=told == 0)
        return pb.GenerateResponse(complete=message)

    def goes_on(self, sequence: Sequence) -> bool:
        """See Api. A transfer of KV cache, once begun, is finished."""
        return sequence.loading

    def failed(self, sequence: Sequence) -> None:  # noqa: ARG002 - Api's signature
        """See Api. The engine's own failures end with a message whose ``finish_reason`` is ``error``."""
        return

    def rejected(self) -> None:
        """The prefill need not keep its blocks (``_notify_kv_transfer_rejected``)."""
        self._engine.reject(self._params)

    def _sequence(self, ids: list[int], temperature: float, most: int | None, index: int) -> Sequence:
        request, sampling = self._request, self._request.sampling_params
        seed = sampling.seed if sampling.HasField("seed") else 0
        limits = Limits(
            most,
            tuple(sampling.stop),
            frozenset(sampling.stop_token_ids),
            sampling.ignore_eos,
            sampling.include_stop_str_in_output,
            0 if temperature == 0 else seed + index,
            sampling.min_tokens,
        )
        return Sequence(
            prompt=Prompt(ids=tuple(ids)),
            limits=limits,
            rid=f"{request.request_id}-{new_id(8)}",
            external=request.request_id,
            index=index,
            ids_in=ids,
            min_tokens=sampling.min_tokens,
            handoff=self._params,
            wanted_rank=request.data_parallel_rank if request.HasField("data_parallel_rank") else None,
            reads_cache=self._prompt_top is None,
            record=self._record,
        )

    def _add_logprobs(self, message: Any, sequence: Sequence, ids: list[int], *, first: bool) -> None:
        if self._top is not None and ids:
            message.output_logprobs.CopyFrom(
                pb.OutputLogProbs(
                    token_logprobs=api.values(ids),
                    token_ids=ids,
                    top_logprobs=api.rows(pb.TopLogProbs, ids, self._top) if self._top else (),
                )
            )
        if self._prompt_top is not None and first:
            message.input_logprobs.CopyFrom(_of_prompt(sequence.ids_in, self._prompt_top))


def _of_prompt(ids: list[int], top: int) -> pb.InputLogProbs:
    """The first token has no value."""
    later = ids[1:]
    found = [pb.InputTokenLogProb(), *(pb.InputTokenLogProb(value=value) for value in api.values(later))]
    tops = [pb.TopLogProbs(), *api.rows(pb.TopLogProbs, later, top)] if top else ()
    return pb.InputLogProbs(token_logprobs=found, token_ids=ids, top_logprobs=tops)


def _params(request: pb.GenerateRequest) -> dict[str, Any] | None:
    """``kv_transfer_params`` (``vllm/kv_transfer.py``, ``params_from_request``)."""
    if request.HasField("kv_transfer_params_json"):
        try:
            params = json.loads(request.kv_transfer_params_json)
        except json.JSONDecodeError as error:
            raise RequestError(f"Invalid kv_transfer_params_json: {error}") from None
        if not isinstance(params, dict):
            raise RequestError("kv_transfer_params_json must be a JSON object")
        return params
    if request.HasField("kv_transfer_params"):
        host, port = request.kv_transfer_params.remote_host, request.kv_transfer_params.remote_port
        if not host or not 1 <= port <= _LARGEST_PORT:
            raise RequestError(
                "Invalid kv_transfer_params: remote_host must be set and remote_port must be in [1, 65535]."
            )
        return {"remote_host": host, "remote_port": port}
    return None
