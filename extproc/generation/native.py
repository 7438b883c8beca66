"""SGLang's own ``/generate``: one prompt or a list of them, with the sampling parameters of all or of each.

What may be a list per prompt is taken as such where all items are alike; only ``sampling_params`` may differ.
Source: sglang 0.5.23 srt/managers/io_struct.py (GenerateReqInput.normalize_batch_and_arguments).
"""

from __future__ import annotations

from typing import Any, Final

from extproc.apis.request import InferenceRequest
from extproc.errors import GatewayError
from extproc.generation import fields as rules
from extproc.generation import values
from extproc.generation.asked import Asked, Prompt
from extproc.generation.prompts import prompts_of
from extproc.generation.sampling import Sampling
from extproc.generation.sampling_fields import native_sampling
from extproc.generation.values import Fields

DEFAULT_LIMIT: Final = 128  # tokens, by SGLang's rule
_ALIKE: Final = ("return_logprob", "logprob_start_len", "top_logprobs_num")


def native(request: InferenceRequest, fields: Fields) -> Asked:
    """What a body of ``/generate`` asks for. Raises GatewayError."""
    rules.GENERATE.check(fields)
    prompts, batched = _prompts(fields)
    fields = _alike(fields, len(prompts))
    samplings = _samplings(fields, len(prompts))
    wanted = fields.boolean("return_logprob")
    alternatives = fields.count("top_logprobs_num") or 0
    start = fields.integer("logprob_start_len")
    if start is not None and start < -1:
        values.wrong("logprob_start_len", "at least -1")
    from_prompt = wanted and start not in (None, -1)
    return Asked(
        request.api,
        request.model,
        samplings[0],
        prompts=prompts,
        batched=batched,
        samplings=() if all(sampling == samplings[0] for sampling in samplings) else samplings,
        stream=request.stream,
        samples=request.samples,
        top_logprobs=alternatives if wanted else None,
        prompt_logprobs=alternatives if from_prompt else None,
        logprob_start=start if from_prompt else None,
        text_in_logprobs=fields.boolean("return_text_in_logprobs"),
        return_token_ids=fields.boolean("return_prompt_token_ids"),
        rids=fields.texts("rid"),
    )


def _prompts(fields: Fields) -> tuple[tuple[Prompt, ...], bool]:
    name = "text" if "text" in fields else "input_ids"  # one of them: InferenceRequest has seen to that
    prompts, batched = prompts_of(fields.get(name), name)
    if isinstance(prompts[0], str) is not (name == "text"):
        values.wrong(name, "a text or a list of texts" if name == "text" else "token ids, or a list of such lists")
    return prompts, batched


def _alike(fields: Fields, count: int) -> Fields:
    """``fields`` with one value where there is a list of the same for each prompt."""
    members = dict(fields.members)
    for name in _ALIKE:
        value = members.get(name)
        if not isinstance(value, list):
            continue
        if len(value) != count:
            raise GatewayError("invalid_value", f"`{name}` must have one item per prompt", param=name)
        if any(item != value[0] for item in value):
            values.refuse(name, "it must be the same for all prompts over gRPC workers")
        members[name] = value[0]
    return Fields(members)


def _samplings(fields: Fields, count: int) -> tuple[Sampling, ...]:
    given = fields.get("sampling_params")
    if not isinstance(given, list):
        return (_sampling(given),) * count
    if len(given) != count:
        raise GatewayError("invalid_value", "`sampling_params` must have one item per prompt", param="sampling_params")
    return tuple(_sampling(item) for item in given)


def _sampling(given: Any) -> Sampling:
    fields = Fields({} if given is None else values.mapping(given, "sampling_params"), "sampling_params")
    rules.SAMPLING_PARAMS.check(fields)
    limit = fields.count("max_new_tokens")
    return native_sampling(fields, DEFAULT_LIMIT if limit is None else limit)
