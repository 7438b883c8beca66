"""One client request as sequences, each ready for an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from extproc.engines.engine import Engine
from extproc.engines.limits import named
from extproc.engines.prompt import packed
from extproc.errors import GatewayError
from extproc.generation.asked import Asked, Generation
from extproc.generation.sampling import Sampling
from extproc.generation.values import LARGEST_ID


def sequences(
    asked: Asked, prompts: Sequence[Sequence[int]], engine: Engine, labels: Mapping[str, str], name: str
) -> tuple[Generation, ...]:
    """The sequences of a request: all samples of the first prompt, then of the next, in the order of their indices.

    Values that the client does not say are the worker's defaults; the samples of a seeded request have its seed, the
    next one, and so on, as vLLM makes them.

    Args:
        prompts: the token ids of each prompt.
        engine: of the workers that serve it.
        labels: of the one that decodes.
        name: of the request, for the engines' logs.

    Raises:
        GatewayError: ``unsupported_parameter`` or ``invalid_value`` for what the engine does not take.
    """
    defaults = engine.defaults(asked.api, labels)
    samplings = [_filled(sampling, defaults) for sampling in asked.samplings or (asked.sampling,)]
    if labels.get("skip_tokenizer_init") == "true":  # such a server takes no stop strings: those are found here alone
        samplings = [replace(sampling, stop=()) for sampling in samplings]
    vocabulary = vocabulary_of(labels) or LARGEST_ID
    for prompt in asked.prompts:
        if not isinstance(prompt, str):
            _check_known(prompt, vocabulary, asked.api.ids_keys[0])
    for sampling in samplings:
        engine.check(asked, sampling)
        _check_known(sampling.stop_token_ids, vocabulary, named(asked.api, "stop_token_ids"))
        _check_known([token for token, _ in sampling.logit_bias], vocabulary, named(asked.api, "logit_bias"))
    alternatives = engine.alternatives(asked, labels)
    found: list[Generation] = []
    for index, ids in enumerate(prompts):
        sampling = samplings[index] if asked.samplings else samplings[0]
        encoded = packed(ids)
        for sample in range(asked.samples):
            own = sampling if sampling.seed is None or not sample else replace(sampling, seed=sampling.seed + sample)
            found.append(
                Generation(
                    ids,
                    own,
                    f"{name}-{len(found)}" if len(prompts) * asked.samples > 1 else name,
                    asked.stream,
                    alternatives.output,
                    alternatives.prompt,
                    asked.logprob_start,
                    encoded,
                )
            )
    return tuple(found)


def vocabulary_of(labels: Mapping[str, str]) -> int | None:
    """How many tokens a worker's model has; None where it does not say."""
    size = labels.get("vocab_size", "")
    return int(size) if size.isdecimal() else None


def _filled(sampling: Sampling, defaults: Mapping[str, Any]) -> Sampling:
    unsaid = {name: value for name, value in defaults.items() if getattr(sampling, name) is None}
    return replace(sampling, **unsaid) if unsaid else sampling


def _check_known(ids: Sequence[int], vocabulary: int, name: str) -> None:
    """Refuse token ids that the model does not know: an engine's scheduler can end of one."""
    if ids and max(ids) >= vocabulary:
        raise GatewayError("invalid_value", f"`{name}` has token ids beyond the vocabulary ({vocabulary})", param=name)
