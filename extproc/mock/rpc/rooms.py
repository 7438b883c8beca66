"""What SGLang's and TokenSpeed's servers have in common: legs that meet in rooms, chunks that count all so far."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from extproc.mock.engine import CrashError, RequestError
from extproc.mock.generation import Limits, Prompt
from extproc.mock.rpc import api
from extproc.mock.rpc.model import CONTEXT, MARGIN
from extproc.mock.sglang.engine import Batch, Engine, LogprobOptions, Mode, Room, Sequence

_HOTTEST = 2.0
_COLDEST = 1e-5


class RoomsApi(api.Api[Sequence]):
    """The answer to one ``Generate``. Subclasses know the engine's messages.

    ``sampling_params`` are taken as they come by these servers; the mock refuses what their schedulers would not
    survive, or would silently take for something else.
    """

    messages: ClassVar[Any]

    def __init__(self, engine: Engine, request: Any) -> None:
        self._engine = engine
        self._request = request
        self._options = self._logprobs() if request.return_logprob else None

    @property
    def stream(self) -> bool:
        """Whether a stream is asked for."""
        return bool(self._request.stream)

    def batch(self) -> Batch:
        """The sequences asked for."""
        request = self._request
        if not request.HasField("tokenized"):
            raise RequestError(self._untokenized)
        ids = list(request.tokenized.input_ids)
        self._check_prompt(ids)
        limits = self._limits()
        room = self._room()
        in_pairs = self._engine.mode is not Mode.REGULAR
        if in_pairs:
            self._check_free(room)
        samples = request.sampling_params.n or 1
        if in_pairs and samples > 1:
            raise RequestError("mock: several samples in one room never answer; each takes a room of its own")
        prompt = Prompt(ids=tuple(ids))
        sequences = [
            Sequence(
                prompt=prompt,
                limits=replace(limits, seed=limits.seed + index),
                rid=self._rid(index, samples),
                index=index,
                room=room,
                logprobs=self._options,
            )
            for index in range(samples)
        ]
        return Batch(sequences, samples, samples == 1)

    # --- of the engine ---

    _untokenized: ClassVar[str]

    def _logprobs(self) -> LogprobOptions:
        raise NotImplementedError

    def _room(self) -> Room:
        """Where the legs meet; raises RequestError, or CrashError where the engine does not survive it."""
        raise NotImplementedError

    def _rid(self, index: int, samples: int) -> str:
        raise NotImplementedError

    def _check_prompt(self, ids: list[int]) -> None:
        """Raise RequestError, or CrashError where the engine does not survive a prompt."""
        longest = CONTEXT - MARGIN
        if len(ids) > longest:
            raise RequestError(
                f"Input length ({len(ids)} tokens) exceeds the maximum allowed length ({longest} tokens). Use a "
                "shorter input or enable --allow-auto-truncate."
            )

    # --- common ---

    def _check_free(self, room: Room) -> None:
        """Two live legs in one room of one worker get each other's KV cache, and nothing says so."""
        for other in self._engine.live.values():
            theirs = other.room
            if (room.number, room.host, room.port) == (theirs.number, theirs.host, theirs.port):
                raise RequestError(f"mock: room {room.number} is in use, by {other.rid}")

    def _limits(self) -> Limits:
        sampling = self._request.sampling_params
        temperature = self._temperature()
        if not 0 <= temperature <= _HOTTEST:
            raise RequestError(f"mock: a temperature of {temperature:g}")
        most = sampling.max_new_tokens if sampling.HasField("max_new_tokens") else None
        if most is not None and sampling.min_new_tokens > most:
            raise RequestError(f"mock: min_new_tokens of {sampling.min_new_tokens} above max_new_tokens of {most}")
        if api.unknown([int(token) for token in sampling.logit_bias]) is not None:
            raise CrashError  # an index error in the scheduler (seen on 0.5.23)
        return Limits(
            most,
            tuple(sampling.stop),
            frozenset(sampling.stop_token_ids),
            sampling.ignore_eos,
            sampling.no_stop_trim,
            0 if temperature < _COLDEST else self._seed(),
            sampling.min_new_tokens,
        )

    def _temperature(self) -> float:
        return float(self._request.sampling_params.temperature)

    def _seed(self) -> int:
        return 0

    def _counts(self, sequence: Sequence) -> dict[str, Any]:
        return {"prompt_tokens": sequence.prompt.length, "completion_tokens": sequence.written}
