"""Into how many pairs of legs a request is split, what each pair is asked for, and what its prefill must tell.

An SGLang pair never answers a request for several samples, so each sample is a part of its own; lists of prompts stay
whole. With vLLM one handoff serves one sequence: of a list, each prompt is a part. Requests for several samples are not
split there, as the decode worker serves them alone and computes their prompt once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache

from extproc.apis.json_object import Edits, LegEdits
from extproc.apis.request import InferenceRequest
from extproc.errors import GatewayError
from extproc.merge.routed_experts import wants_routed_experts
from extproc.merge.split import sample_edits
from extproc.merge.vllm_prompt import decode_edits, prefill_edits, wants_prompt_logprobs


class Split(Enum):
    """What a part of a request is."""

    NONE = "none"  # the whole of it
    SAMPLES = "samples"  # one of the ``n`` samples, of every prompt
    PROMPTS = "prompts"  # one prompt of a list


@dataclass(frozen=True, slots=True)
class Joint:
    """How the answer to a request is put together.

    Attributes:
        runtime: the engine's name, as in ``Worker.runtime``.
        split: what the parts are.
        parts: how many pairs of legs there are, at least 1.
        prompt_logprobs: the prefill legs compute the prompt's log probabilities, so their answers are needed.
        routed_experts: they tell the experts of the prompt's tokens, so the same.
        prompts: the raw items of the list of prompts, for ``Split.PROMPTS``.
    """

    runtime: str
    split: Split = Split.NONE
    parts: int = 1
    prompt_logprobs: bool = False
    prompts: tuple[bytes, ...] = ()
    routed_experts: bool = False

    @property
    def needs_prefill(self) -> bool:
        """The bodies of the prefill legs' answers are needed for the client's."""
        return self.prompt_logprobs or self.routed_experts

    def without_prefills(self) -> Joint:
        """The same where the decode workers do without prefill legs: they compute all that is asked for themselves."""
        return replace(self, prompt_logprobs=False, routed_experts=False)


@lru_cache(64)
def _whole(runtime: str) -> Joint:
    return Joint(runtime)


def joint_of(request: InferenceRequest, runtime: str) -> Joint:
    """What ``request`` needs of workers of ``runtime`` that serve it in pairs.

    Raises:
        GatewayError: ``invalid_type`` for what the engine refuses, but would not refuse of the legs it is split into.
    """
    if runtime != "vllm":
        experts = wants_routed_experts(request)
        if request.samples == 1 and not request.prompt_logprobs and not experts:
            return _whole(runtime)  # most requests
        split = Split.SAMPLES if request.samples > 1 else Split.NONE
        return Joint(runtime, split, request.samples, request.prompt_logprobs, routed_experts=experts)
    if request.samples > 1:
        return Joint(runtime)
    wanted = wants_prompt_logprobs(request)
    if request.prompts is None or request.prompts == 1:
        return Joint(runtime, prompt_logprobs=wanted)  # a list of one is one sequence; the engine takes it as it is
    prompts = tuple(request.body.items_of(request.api.batch_keys[0]))
    return Joint(runtime, Split.PROMPTS, len(prompts), wanted, prompts)


def check_parts(request: InferenceRequest, joint: Joint, limit: int) -> None:
    """See that the bodies of all legs together are no larger than ``limit`` bytes: a few prompts can make many.

    Raises:
        GatewayError: ``payload_too_large``.
    """
    shared = len(request.body.raw) - sum(len(prompt) for prompt in joint.prompts)
    size = 2 * (joint.parts * shared + sum(len(prompt) for prompt in joint.prompts))
    if size > limit:
        raise GatewayError("payload_too_large", f"the bodies of {2 * joint.parts} legs take more than {limit} bytes")


def leg_edits(request: InferenceRequest, joint: Joint, part: int) -> LegEdits:
    """In what the legs of one part differ from the client's request.

    Seeds and request ids of a list of prompts stay the client's: a vLLM server gives each prompt the same seed, and
    names it after the request and its index (the copies of a request id get a random end).

    Args:
        request: the client's request.
        joint: of the request.
        part: 0 <= part < ``joint.parts``.
    """
    if joint.runtime != "vllm":
        edits = Edits(sample_edits(request, part))
        return LegEdits(edits, edits, joint.prompt_logprobs)
    own = {request.api.batch_keys[0]: joint.prompts[part]} if joint.split is Split.PROMPTS else {}
    if request.samples > 1 or not joint.prompt_logprobs:
        return LegEdits(Edits(own), Edits(own))
    prefill, decode = prefill_edits(request), decode_edits(request)
    return LegEdits(
        Edits({**own, **prefill.put}, prefill.drop), Edits({**own, **decode.put}, decode.drop), prompt_logprobs=True
    )
