"""What ``/v1/chat/completions`` and ``/v1/completions`` have in common."""

from __future__ import annotations

from typing import Any

from extproc.mock.api import Reply, event
from extproc.mock.generation import Prompt
from extproc.mock.vllm import bodies, checks
from extproc.mock.vllm.api import Api, Context, refusal
from extproc.mock.vllm.engine import Batch, Sequence


class OpenAiApi(Api):
    """Either of the two."""

    def __init__(self, context: Context, body: bodies.Sampled) -> None:
        super().__init__(context, body)
        options = body.stream_options
        self.include_usage = bool(options and options.include_usage)
        self.continuous_usage = bool(self.include_usage and options and options.continuous_usage_stats)
        self.told: dict[int, int] = {}
        self._sampled = body

    @property
    def stream(self) -> bool:
        """Whether a stream is asked for."""
        return bool(self._sampled.stream)

    def objection(self) -> Reply | None:
        """What the request's class refuses."""
        problem = checks.before(self._sampled)
        return None if problem is None else refusal(problem)

    @property
    def temperature(self) -> float:
        """The temperature asked for."""
        return 1.0 if self._sampled.temperature is None else self._sampled.temperature

    def spread(self, prompts: list[Prompt], ids: list[str], max_tokens: int | None) -> Batch:
        """The sequences of ``n`` samples of each prompt; ``ids`` are those of the prompts. Raises RefusedError."""
        body = self._sampled
        beams = body.use_beam_search
        n = 1 if body.n is None else body.n
        checks.sampling(
            n=n, temperature=self.temperature, max_tokens=max_tokens, min_tokens=body.min_tokens, greedy_n=beams
        )
        if beams:
            self.handoff = None  # the beams are requests of the engine's own
        sequences: list[Sequence] = []
        for number, prompt in enumerate(prompts):
            for sample in range(n):
                limits = checks.limits(body, max_tokens, self.temperature, sample)
                child = sample if n > 1 else None
                sequence = self.sequence(prompt, limits, ids[number], len(sequences), child=child)
                sequence.min_tokens = body.min_tokens
                sequences.append(sequence)
        return Batch(sequences, n, single=len(sequences) == 1)

    def counts(self, batch: Batch) -> tuple[int, int]:
        """Prompt and written tokens of a batch; a prompt counts once, whatever its samples."""
        prompt = sum(sequence.prompt.length for sequence in batch.sequences[:: batch.samples])
        return prompt, sum(sequence.written for sequence in batch.sequences)

    def details(self, sequence: Sequence, **more: Any) -> dict[str, Any] | None:
        """``prompt_tokens_details``."""
        if not self.options.prompt_tokens_details or self._sampled.use_beam_search:
            return None
        return {"cached_tokens": sequence.cached, **more}

    @staticmethod
    def event(chunk: dict[str, Any], usage: dict[str, Any] | None, **more: Any) -> bytes:
        """A chunk as an event, ``usage`` and ``more`` last."""
        if usage is not None:
            chunk["usage"] = usage
        return event({**chunk, **more})
