"""From request fields to sequences, with the engine's rules for lists (``GenerateReqInput.normalize_batch_and_arguments``)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from extproc.mock.generation import Limits, Prompt
from extproc.mock.sglang.engine import Batch, EngineError, LogprobOptions, Room, Sequence, new_rid


@dataclass(frozen=True, slots=True)
class Spread:
    """The fields that may be one value or a list of them, as they came."""

    rid: list[str] | str | None
    host: list[Any] | str | None
    port: list[Any] | int | None
    room: list[Any] | int | None


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sampling parameters of one prompt; ``seed`` counts only above temperature 0."""

    limits: Limits
    n: int = 1
    temperature: float = 1.0

    def sample(self, number: int) -> Limits:
        """The limits of the prompt's sample ``number``."""
        limits = self.limits
        seed = 0 if self.temperature == 0 else limits.seed + number
        if seed == limits.seed:
            return limits
        return Limits(
            limits.max_new_tokens, limits.stop, limits.stop_token_ids, limits.ignore_eos, limits.keep_stop, seed
        )


def single(prompt: Prompt, sampling: Sampling, spread: Spread, logprobs: LogprobOptions | None) -> Batch:
    """One prompt that is not in a list, with one sample."""
    rid = spread.rid if isinstance(spread.rid, str) else new_rid() if spread.rid is None else spread.rid[0]
    return Batch([Sequence(prompt, sampling.sample(0), rid, _room(spread.room, spread.host, spread.port), logprobs)])


def several(
    prompts: list[Prompt],
    sampling: Callable[[int], Sampling],
    spread: Spread,
    logprobs: Callable[[int], LogprobOptions | None],
) -> Batch:
    """A list of prompts, or several samples of one: sequences in the order of the answer's indexes."""
    samples = sampling(0).n
    total = len(prompts) * samples
    rids = _rids(spread.rid, len(prompts), total, samples)
    sequences = []
    for index in range(total):
        number, sample = divmod(index, samples)
        try:
            room = _room(
                spread.room[number] if isinstance(spread.room, list) else spread.room and spread.room + number,
                spread.host[number] if isinstance(spread.host, list) else spread.host,
                spread.port[number] if isinstance(spread.port, list) else spread.port,
            )
        except IndexError:
            raise EngineError(500, "list index out of range") from None
        limits = sampling(number).sample(sample)
        sequences.append(Sequence(prompts[number], limits, rids[index], room, logprobs(number), index))
    return Batch(sequences, samples, single=False)


def _room(number: Any, host: Any, port: Any) -> Room:
    return Room(number, host, port)


def _rids(rid: list[str] | str | None, prompts: int, total: int, samples: int) -> list[str]:
    if isinstance(rid, list):
        if len(rid) != prompts:
            raise EngineError(400, "The specified rids length mismatch with the batch_size for batch processing.")
        if len(set(rid)) != len(rid):
            duplicates = [entry for entry in dict.fromkeys(rid) if rid.count(entry) > 1]
            raise EngineError(400, f"Duplicate request IDs detected within the request: {duplicates}")
    if rid is None or samples > 1:  # samples get ids of their own
        return [new_rid() for _ in range(total)]
    if isinstance(rid, str):
        return [f"{rid}_{index}" for index in range(total)]
    return rid
