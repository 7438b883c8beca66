"""What an engine is that takes token ids and answers with token ids, over gRPC."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from extproc.apis.table import Api
from extproc.generation.asked import Asked, Generation
from extproc.generation.events import Event
from extproc.generation.sampling import Sampling
from extproc.workers.worker import Role


class Room(NamedTuple):
    """Where two legs meet that run at once: a room of the prefill worker's bootstrap server."""

    host: str
    port: int
    number: int


class Params(NamedTuple):
    """``kv_transfer_params``, as raw JSON."""

    json: bytes


class Remote(NamedTuple):
    """What vLLM's Mooncake had before its parameters were JSON: the prefill worker's bootstrap server."""

    host: str
    port: int


class Alternatives(NamedTuple):
    """Alternatives to a token; None where no log probabilities are asked for.

    Attributes:
        output: to each token of the answer.
        prompt: to each of the prompt.
    """

    output: int | None
    prompt: int | None


Meeting = Room | Params | Remote


class Engine(Protocol):
    """One engine.

    Attributes:
        runtime: its name, as registrations have it.
        service: its gRPC service.
        generate_path: what HTTP/2 calls ``Generate``.
    """

    runtime: str
    service: str
    generate_path: bytes

    def defaults(self, api: Api, labels: Mapping[str, str]) -> Mapping[str, Any]:
        """What the engine's own server takes for sampling values that the client does not say.

        Args:
            labels: of the worker that decodes, where it has told its model's defaults.
        """

    def check(self, asked: Asked, sampling: Sampling) -> None:
        """Refuse, by its name, what this engine cannot be told, or would refuse: raises GatewayError (400).

        Args:
            sampling: of a sequence of it, defaults filled in.
        """

    def alternatives(self, asked: Asked, labels: Mapping[str, str]) -> Alternatives:
        """How many alternatives to a token the engine must be asked for, to tell those that its own server would tell.

        Args:
            labels: of the worker that decodes.
        """

    def request(
        self, generation: Generation, meeting: Meeting | None, role: Role, name: str, rank: int | None = None
    ) -> bytes:
        """The ``GenerateRequest`` of a leg, serialised.

        Args:
            role: of the leg: PREFILL makes no more of it than the KV cache needs, and is never a stream; DECODE leaves
                the prompt's log probabilities to the prefill; REGULAR is a request that one worker answers alone.
            name: by which the engine knows the request and can be asked to end it.
            rank: which of the worker's data parallel ranks is to serve it.
        """

    def event(self, message: bytes) -> Event:
        """What a ``GenerateResponse`` says; raises GatewayError where it is none."""

    def abort(self, names: Sequence[str]) -> Sequence[tuple[bytes, bytes]]:
        """Path and ``AbortRequest``, serialised, of the calls that end the requests of these names."""
