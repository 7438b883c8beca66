"""SGLang over gRPC: ``sglang.grpc.scheduler.SglangScheduler``.

What its server (smg-grpc-servicer 0.14.1, ``sglang/servicer.py``) makes of a request: the scheduler matches ``stop``
itself; scalars have no presence, so each is said, also where it changes nothing; what the tokenizer manager of its HTTP
server checks, nothing checks here, and a wrong value may well end the scheduler: so it is checked by us. There is no
field for a seed (its own server heeds one only under ``--enable-deterministic-inference``); a rank in the request is
not read by the Python server, and the room decides (``handoff/grpc_sglang.py``). Chunks are deltas with counts of all
so far; the end of a stream repeats the last one. An ``Abort`` lets the request's stream hang: end that, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from google.protobuf.message import DecodeError
from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb

from extproc.apis.table import CHAT, GENERATE, Api
from extproc.engines.engine import Alternatives, Meeting, Room
from extproc.engines.limits import (
    ANY_OBJECT,
    check_stops,
    choice_grammar,
    defaults_in,
    is_greedy,
    named,
    refuse_value,
)
from extproc.engines.prompt import with_prompt
from extproc.engines.rows import bad_reply, logprobs_of, prompt_logprobs_of
from extproc.generation import values
from extproc.generation.asked import Asked, Generation
from extproc.generation.events import Complete, Event, Tokens, Usage
from extproc.generation.sampling import Constraint, Sampling, Shape
from extproc.workers.worker import Role

MOST_STOPS: Final = 32
_LARGEST_REPETITION: Final = 2.0
_ALL_TOKENS: Final = -1
_TOKENIZED, _INPUT_IDS = 2, 2  # fields of GenerateRequest and TokenizedInput
CONSTRAINT_FIELDS: Final = {
    Shape.JSON_SCHEMA: "json_schema",
    Shape.JSON_OBJECT: "json_schema",
    Shape.REGEX: "regex",
    Shape.GRAMMAR: "ebnf_grammar",
    Shape.STRUCTURAL_TAG: "structural_tag",
    Shape.CHOICE: "ebnf_grammar",
}
_read: Final = pb.GenerateResponse.FromString


class SglangEngine:
    """See the module, and Engine."""

    runtime = "sglang"
    service = "sglang.grpc.scheduler.SglangScheduler"
    generate_path = b"/sglang.grpc.scheduler.SglangScheduler/Generate"
    abort_path = b"/sglang.grpc.scheduler.SglangScheduler/Abort"

    def defaults(self, api: Api, labels: Mapping[str, str]) -> Mapping[str, Any]:
        """See Engine. The model's for chat, the operator's for ``/generate``, none for completions, as its server."""
        if api is CHAT:
            return defaults_in(labels.get("default_sampling_params_json", ""))
        return defaults_in(labels.get("preferred_sampling_params", "")) if api is GENERATE else {}

    def check(self, asked: Asked, sampling: Sampling) -> None:
        """See Engine."""
        if sampling.repetition_penalty is not None and sampling.repetition_penalty > _LARGEST_REPETITION:
            refuse_value(asked.api, "repetition_penalty", f"must be in (0, {_LARGEST_REPETITION:g}]")
        if sampling.seed is not None and not is_greedy(sampling):
            values.refuse(named(asked.api, "seed"), "SGLang cannot be told of a seed over gRPC")
        check_stops(asked.api, sampling, MOST_STOPS)

    def alternatives(self, asked: Asked, labels: Mapping[str, str]) -> Alternatives:  # noqa: ARG002 - Engine's signature
        """See Engine. The token itself is none of them."""
        return Alternatives(asked.top_logprobs, asked.prompt_logprobs)

    def request(
        self, generation: Generation, meeting: Meeting | None, role: Role, name: str, rank: int | None = None
    ) -> bytes:
        """See Engine. A prefill samples the first token and tells its log probability, so its leg says all of it."""
        from_prompt = generation.prompt_logprobs is not None and role is not Role.DECODE
        wanted = generation.top_logprobs is not None or from_prompt
        message = pb.GenerateRequest(
            request_id=name,
            sampling_params=_params(generation.sampling),
            return_logprob=wanted,
            logprob_start_len=(generation.logprob_start or 0) if from_prompt else -1,
            top_logprobs_num=max(generation.top_logprobs or 0, (generation.prompt_logprobs or 0) if from_prompt else 0),
            data_parallel_rank=rank,
            stream=generation.stream and role is not Role.PREFILL,
        )
        if isinstance(meeting, Room):
            place = message.disaggregated_params
            place.bootstrap_host, place.bootstrap_port, place.bootstrap_room = meeting
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
                Usage(chunk.prompt_tokens, chunk.completion_tokens, chunk.cached_tokens, chunk.reasoning_tokens),
                prompt_logprobs_of(chunk.input_logprobs) if chunk.HasField("input_logprobs") else None,
            )
        if not said.HasField("complete"):
            raise bad_reply(message)
        return _complete(said.complete)

    def abort(self, names: Sequence[str]) -> Sequence[tuple[bytes, bytes]]:
        """See Engine. The scheduler ends each request whose name begins so: none of ours begins with another's."""
        return [
            (self.abort_path, pb.AbortRequest(request_id=name, reason="aborted").SerializeToString()) for name in names
        ]


def _complete(said: pb.GenerateComplete) -> Complete:
    matched = said.WhichOneof("matched_stop")
    return Complete(
        said.output_ids,
        said.finish_reason,
        None if matched is None else getattr(said, matched),
        logprobs_of(said.output_logprobs) if said.HasField("output_logprobs") else None,
        Usage(said.prompt_tokens, said.completion_tokens, said.cached_tokens, said.reasoning_tokens),
        prompt_logprobs_of(said.input_logprobs) if said.HasField("input_logprobs") else None,
    )


def _params(sampling: Sampling) -> pb.SamplingParams:
    params = pb.SamplingParams(
        temperature=_or(sampling.temperature, 1.0),
        top_p=_or(sampling.top_p, 1.0),
        top_k=sampling.top_k or _ALL_TOKENS,
        min_p=_or(sampling.min_p, 0.0),
        frequency_penalty=_or(sampling.frequency_penalty, 0.0),
        presence_penalty=_or(sampling.presence_penalty, 0.0),
        repetition_penalty=_or(sampling.repetition_penalty, 1.0),
        max_new_tokens=sampling.max_tokens,
        stop=sampling.stop,
        stop_token_ids=sampling.stop_token_ids,
        skip_special_tokens=sampling.skip_special_tokens,
        spaces_between_special_tokens=sampling.spaces_between_special_tokens,
        n=1,
        min_new_tokens=sampling.min_tokens,
        ignore_eos=sampling.ignore_eos,
        no_stop_trim=sampling.include_stop,
        logit_bias={str(token): bias for token, bias in sampling.logit_bias},
    )
    if sampling.constraint is not None:
        setattr(params, CONSTRAINT_FIELDS[sampling.constraint.shape], constraint_text(sampling.constraint))
    return params


def constraint_text(constraint: Constraint) -> str:
    """What engines are told that know neither of any object nor of choices."""
    if constraint.shape is Shape.JSON_OBJECT:
        return ANY_OBJECT
    return choice_grammar(constraint.text) if constraint.shape is Shape.CHOICE else constraint.text


def _or(value: float | None, neutral: float) -> float:
    return neutral if value is None else value
