"""vLLM over gRPC: ``vllm.grpc.engine.VllmEngine``.

What its server (smg-grpc-servicer 0.14.1, ``vllm/servicer.py``) makes of a request: token ids are taken as they are;
``stop`` has it detokenise and match, so that it ends by itself; a value of 0 of ``top_p`` and ``repetition_penalty``
is none. Chunks are deltas and count only themselves; the end of a stream repeats the last one. Of several constraints
it has a field for each kind. Seeds have 32 bits there: others are folded into these, so that the same seed still makes
the same answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson
from google.protobuf.message import DecodeError
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from extproc.apis.table import COMPLETIONS, GENERATE, Api
from extproc.engines.engine import Alternatives, Meeting, Params, Remote
from extproc.engines.limits import check_stops, defaults_in, is_cold, refuse_value
from extproc.engines.prompt import with_prompt
from extproc.engines.rows import bad_reply, logprobs_of, prompt_logprobs_of
from extproc.generation.asked import Asked, Generation
from extproc.generation.events import Complete, Event, Tokens, Usage
from extproc.generation.sampling import Constraint, Sampling, Shape
from extproc.workers.worker import Role

MOST_LOGPROBS: Final = 20  # --max-logprobs, unless set otherwise; the label max_logprobs says what is
MOST_STOPS: Final = 4  # VLLM_MAX_STOP_STRINGS, unless set otherwise
_HOTTEST: Final = 2.0
_LARGEST_BIAS: Final = 100.0  # its server cuts off what is beyond
_SEED: Final = 2**31
_TOKENIZED, _INPUT_IDS = 2, 2  # fields of GenerateRequest and TokenizedInput
_FIELDS: Final = {
    Shape.JSON_SCHEMA: "json_schema",
    Shape.REGEX: "regex",
    Shape.GRAMMAR: "grammar",
    Shape.STRUCTURAL_TAG: "structural_tag",
}
_read: Final = pb.GenerateResponse.FromString


class VllmEngine:
    """See the module, and Engine."""

    runtime = "vllm"
    service = "vllm.grpc.engine.VllmEngine"
    generate_path = b"/vllm.grpc.engine.VllmEngine/Generate"
    abort_path = b"/vllm.grpc.engine.VllmEngine/Abort"

    def defaults(self, api: Api, labels: Mapping[str, str]) -> Mapping[str, Any]:  # noqa: ARG002 - Engine's signature
        """See Engine. Its server has the same for all APIs: those of the model's generation config."""
        return defaults_in(labels.get("default_sampling_params_json", ""))

    def check(self, asked: Asked, sampling: Sampling) -> None:
        """See Engine."""
        if sampling.temperature is not None and sampling.temperature > _HOTTEST:
            refuse_value(asked.api, "temperature", f"must be in [0, {_HOTTEST:g}]")
        if asked.samples > 1 and is_cold(sampling):
            refuse_value(asked.api, "n", "must be 1 when the temperature is 0")
        check_stops(asked.api, sampling, MOST_STOPS)

    def alternatives(self, asked: Asked, labels: Mapping[str, str]) -> Alternatives:
        """See Engine.

        Its gRPC server tells as many as it is asked for, with the token itself in front. Its own server does so of
        chat; of completions, and of any prompt, it tells one more where the token is none of the likeliest. So one more
        is asked for, as long as the engine gives so many.
        """
        most = labels.get("max_logprobs", "")
        limit = int(most) if most.isdecimal() else MOST_LOGPROBS
        if asked.api is GENERATE:
            return Alternatives(asked.top_logprobs, asked.prompt_logprobs)
        output = _one_more(asked.top_logprobs, limit) if asked.api is COMPLETIONS else asked.top_logprobs
        return Alternatives(output, _one_more(asked.prompt_logprobs, limit))

    def request(
        self, generation: Generation, meeting: Meeting | None, role: Role, name: str, rank: int | None = None
    ) -> bytes:
        """See Engine. A prefill leg is one of a single token, which nothing ends before (``handoff/one_token.py``)."""
        prefills = role is Role.PREFILL
        message = pb.GenerateRequest(
            request_id=name,
            sampling_params=_prefill_params(generation) if prefills else _params(generation, role),
            stream=generation.stream and not prefills,
            data_parallel_rank=rank,
        )
        if isinstance(meeting, Params):
            message.kv_transfer_params_json = meeting.json.decode()
        elif isinstance(meeting, Remote):
            message.kv_transfer_params.remote_host = meeting.host
            message.kv_transfer_params.remote_port = meeting.port
        return with_prompt(message, generation, _TOKENIZED, _INPUT_IDS)

    def event(self, message: bytes) -> Event:
        """See Engine. (Measured: 1.6 µs for a token.)"""
        try:
            said = _read(message)
        except DecodeError:
            raise bad_reply(message) from None
        if said.HasField("chunk"):
            chunk = said.chunk
            return Tokens(
                chunk.token_ids,
                logprobs_of(chunk.output_logprobs) if chunk.HasField("output_logprobs") else None,
                Usage(chunk.prompt_tokens, chunk.completion_tokens, chunk.cached_tokens),
                prompt_logprobs_of(chunk.input_logprobs) if chunk.HasField("input_logprobs") else None,
            )
        if not said.HasField("complete"):
            raise bad_reply(message)
        return _complete(said.complete)

    def abort(self, names: Sequence[str]) -> Sequence[tuple[bytes, bytes]]:
        """See Engine."""
        return [(self.abort_path, pb.AbortRequest(request_ids=names).SerializeToString())] if names else []


def _complete(said: pb.GenerateComplete) -> Complete:
    matched = said.WhichOneof("matched_stop")
    return Complete(
        said.output_ids,
        said.finish_reason,
        None if matched is None else getattr(said, matched),
        logprobs_of(said.output_logprobs) if said.HasField("output_logprobs") else None,
        Usage(said.prompt_tokens, said.completion_tokens, said.cached_tokens),
        prompt_logprobs_of(said.input_logprobs) if said.HasField("input_logprobs") else None,
        said.kv_transfer_params_json.encode(),
    )


def _scalars(sampling: Sampling) -> dict[str, Any]:
    top_k = sampling.top_k
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": top_k if top_k is not None and top_k > 0 else None,
        "min_p": sampling.min_p,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "n": 1,
        "skip_special_tokens": sampling.skip_special_tokens,
        "spaces_between_special_tokens": sampling.spaces_between_special_tokens,
    }


def _prefill_params(generation: Generation) -> pb.SamplingParams:
    scalars = _scalars(generation.sampling)
    return pb.SamplingParams(**scalars, max_tokens=1, ignore_eos=True, prompt_logprobs=generation.prompt_logprobs)


def _params(generation: Generation, role: Role) -> pb.SamplingParams:
    sampling = generation.sampling
    params = pb.SamplingParams(
        **_scalars(sampling),
        max_tokens=None if sampling.max_tokens is None else max(1, sampling.max_tokens),  # 1 for an echo alone
        min_tokens=sampling.min_tokens,
        stop=sampling.stop,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        include_stop_str_in_output=sampling.include_stop,
        logprobs=generation.top_logprobs,
        prompt_logprobs=None if role is Role.DECODE else generation.prompt_logprobs,
        seed=None if sampling.seed is None else _seed(sampling.seed),
        logit_bias={token: min(_LARGEST_BIAS, max(-_LARGEST_BIAS, bias)) for token, bias in sampling.logit_bias},
    )
    if sampling.constraint is not None:
        _constrain(params, sampling.constraint)
    return params


def _one_more(alternatives: int | None, limit: int) -> int | None:
    """None at all are told without the token."""
    return alternatives + 1 if alternatives and alternatives < limit else alternatives


def _seed(seed: int) -> int:
    return seed if -_SEED <= seed < _SEED else seed % _SEED


def _constrain(params: pb.SamplingParams, constraint: Constraint) -> None:
    if constraint.shape is Shape.JSON_OBJECT:
        params.json_object = True
    elif constraint.shape is Shape.CHOICE:
        params.choice.choices.extend(orjson.loads(constraint.text))
    else:
        setattr(params, _FIELDS[constraint.shape], constraint.text)
