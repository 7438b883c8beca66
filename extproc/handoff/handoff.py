"""What a handoff is: how the two legs of a request are told to meet, and how they can be ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from extproc.apis.request import InferenceRequest
from extproc.workers.worker import Worker


class Plan(NamedTuple):
    """Two legs that will meet.

    Attributes:
        prefill, decode: their bodies.
        rooms: what they meet in; taken until the plan is released.
        names: by which the engine can be asked to end them; empty where it has no name of ours.
    """

    prefill: bytes
    decode: bytes
    rooms: tuple[int, ...]
    names: Sequence[str]


class Handoff(Protocol):
    """One KV-transfer protocol."""

    name: str

    @property
    def live(self) -> int:
        """How many rooms are taken."""

    def plan(
        self, request: InferenceRequest, prefill: Worker, edits: Mapping[str, bytes], *, trust_client: bool
    ) -> Plan:
        """Prepare both legs of ``request`` with ``prefill`` as the prefill worker.

        Args:
            edits: raw values of top-level fields in which these legs differ from the client's request.
            trust_client: keep the control fields that the client sent, as far as they are not ours to set.
        """

    def release(self, plan: Plan) -> None:
        """Both legs of ``plan`` are over."""

    def aborts(self, plan: Plan) -> Sequence[tuple[bytes, bytes]]:
        """Path and body of the POST requests that end the plan's legs on a worker."""

    def failed(self, answer: bytes) -> bool:
        """Whether a prefill's answer with a 2xx status says that it failed all the same."""
