"""From request fields to sequences, with the engine's rules for lists (``GenerateReqInput`` in its ``io_struct``)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from extproc.mock.engine import InternalError, RequestError
from extproc.mock.generation import CONTEXT, Limits, Prompt
from extproc.mock.sglang.engine import Batch, LogprobOptions, Ranks, Room, Sequence, new_rid


@dataclass(frozen=True, slots=True)
class Spread:
    """The fields that may be one value or a list of them, as they came."""

    rid: list[str] | str | None
    host: Any
    port: Any
    room: Any
    ranks: Ranks


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sampling parameters of one prompt; ``limits.seed`` counts only above temperature 0."""

    limits: Limits
    n: int = 1
    temperature: float = 1.0

    def sample(self, number: int) -> Limits:
        """The limits of the prompt's sample ``number``."""
        seed = 0 if self.temperature == 0 else self.limits.seed + number
        return self.limits if seed == self.limits.seed else replace(self.limits, seed=seed)


def one(prompt: Prompt, sampling: Sampling, spread: Spread, logprobs: LogprobOptions | None) -> Batch:
    """One prompt that is not in a list; raises RequestError, InternalError."""
    if sampling.n > 1:
        return several([prompt], lambda _: sampling, spread, lambda _: logprobs)
    _check(prompt, sampling)
    if isinstance(spread.rid, list):
        raise InternalError("unhashable type: 'list'")
    room = Room(spread.room, spread.host, spread.port, spread.ranks)
    limits, rid = sampling.sample(0), spread.rid or new_rid()
    return Batch([Sequence(prompt=prompt, limits=limits, rid=rid, room=room, logprobs=logprobs)])


def several(
    prompts: list[Prompt],
    sampling: Callable[[int], Sampling],
    spread: Spread,
    logprobs: Callable[[int], LogprobOptions | None],
) -> Batch:
    """A list of prompts, or several samples of one; raises RequestError, InternalError."""
    samples = sampling(0).n if prompts else 1
    rids = _rids(spread.rid, len(prompts), samples)
    sequences = []
    for index, rid in enumerate(rids):
        number, sample = divmod(index, samples)
        _check(prompts[number], sampling(number))
        host, port = _item(spread.host, number), _item(spread.port, number)
        room = Room(_room(spread.room, number), host, port, spread.ranks)
        limits = sampling(number).sample(sample)
        sequences.append(
            Sequence(prompt=prompts[number], limits=limits, rid=rid, room=room, logprobs=logprobs(number), index=index)
        )
    return Batch(sequences, samples, single=False)


def _check(prompt: Prompt, sampling: Sampling) -> None:
    if prompt.length >= CONTEXT:
        raise RequestError(
            f"The input ({prompt.length} tokens) is longer than the model's context length ({CONTEXT} tokens)."
        )
    limit = sampling.limits.max_new_tokens
    if limit is not None and limit < 0:
        raise RequestError(f"max_new_tokens must be at least 0, got {limit}.")
    if sampling.temperature < 0:
        raise RequestError(f"temperature must be a non-negative finite number, got {float(sampling.temperature)}.")


def _item(value: Any, number: int) -> Any:
    if not isinstance(value, list):
        return value
    try:
        return value[number]
    except IndexError:
        raise InternalError("list index out of range") from None


def _room(value: Any, number: int) -> Any:
    """From one room the engine derives those of a batch."""
    return value + number if isinstance(value, int) else _item(value, number)


def _rids(rid: list[str] | str | None, prompts: int, samples: int) -> list[str]:
    if isinstance(rid, list):
        if len(rid) != prompts:
            raise RequestError("The specified rids length mismatch with the batch_size for batch processing.")
        if len(set(rid)) != len(rid):
            duplicates = [entry for entry in dict.fromkeys(rid) if rid.count(entry) > 1]
            raise RequestError(f"Duplicate request IDs detected within the request: {duplicates}")
    if rid is None or samples > 1:  # samples get ids of their own
        return [new_rid() for _ in range(prompts * samples)]
    return [f"{rid}_{index}" for index in range(prompts)] if isinstance(rid, str) else rid
