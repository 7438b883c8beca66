"""What a handoff between gRPC servers is: :class:`~extproc.handoff.handoff.Handoff` of one sequence of token ids.

The legs of a plan, and the orders besides, are gRPC bodies: one message each, with its prefix. Both legs' path is the
engine's ``Generate``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from extproc.apis.json_object import Edits, LegEdits
from extproc.apis.request import InferenceRequest
from extproc.engines.engine import Engine
from extproc.generation.asked import Generation
from extproc.handoff.grpc_answers import leg_name
from extproc.handoff.handoff import Alone, Handed, Handoff, Plan
from extproc.workers.worker import Role, Worker


class RpcHandoff(Protocol):
    """One KV-transfer protocol of one engine; what is not said here is as in Handoff."""

    @property
    def name(self) -> str:
        """See Handoff."""

    @property
    def engine(self) -> Engine:
        """Whose messages the legs are."""

    @property
    def in_turn(self) -> bool:
        """See Handoff."""

    @property
    def waivable(self) -> bool:
        """See Handoff."""

    @property
    def lets_finish(self) -> bool:
        """See Handoff."""

    @property
    def pushes(self) -> bool:
        """See Handoff."""

    @property
    def blame(self) -> float:
        """See Handoff."""

    @property
    def receiving(self) -> float:
        """How many seconds a decode leg that has shown no token must be left running, though nobody wants its answer.

        It may be receiving the KV cache, which its engine does not survive to be interrupted in. 0: it does.
        """

    @property
    def live(self) -> int:
        """How many rooms are taken."""

    def alone(self, generation: Generation, prefill: Worker) -> Alone | None:
        """Who answers ``generation`` alone; None for what two legs serve."""

    def single(self, generation: Generation, worker: Worker) -> Plan:
        """A request that ``worker`` answers alone: its one leg stands where a decode's would."""

    def plan(self, generation: Generation, prefill: Worker, decode: Worker | None) -> Plan:
        """Prepare both legs; ``decode`` is None for any worker that stands for no rank."""

    def handed(self, generation: Generation, plan: Plan, answer: bytes) -> Handed:
        """The decode leg, now that the prefill has answered with the body ``answer``; empty: it must do without."""

    def hold(self, generation: Generation) -> float:
        """How many seconds the head of the decode's answer may be kept back."""

    def release(self, plan: Plan) -> None:
        """Both legs of ``plan`` are over."""

    def aborts(self, plan: Plan) -> Sequence[tuple[bytes, bytes]]:
        """Path and body of the calls that end the plan's legs on a worker."""

    def forgets(self, params: bytes) -> Sequence[tuple[bytes, bytes]]:
        """Path and body of the calls by which a decode worker has the prefill free a KV cache it holds."""

    def unpins(self, plan: Plan) -> Sequence[tuple[bytes, bytes]]:
        """Path and body of the calls that give a prefill worker something to send for the plan."""

    def failed(self, answer: bytes) -> bool:
        """Whether a prefill's answer that ended well says that it failed all the same."""


class Sequences:
    """A Handoff (see there) for the sequences of one request; which of them, :meth:`part` says.

    The exchange hands over what it knows of an HTTP request; what matters here is known beforehand.

    Args:
        handoff: how the pair hands over.
        generations: the sequences, at least one. What is asked of the whole is answered for the first.
    """

    __slots__ = (
        "_generations",
        "_handoff",
        "blame",
        "in_turn",
        "lets_finish",
        "name",
        "path",
        "pushes",
        "receiving",
        "waivable",
    )

    prefixes_ids = False  # a leg's message names it
    tells_tokens = False  # the decode leg has them
    early_heads = False  # the engines' Python servers send it with the first token (measured), whatever may be before

    def __init__(self, handoff: RpcHandoff, generations: Sequence[Generation]) -> None:
        self._handoff = handoff
        self._generations = generations
        self.name = handoff.name
        self.in_turn = handoff.in_turn
        self.waivable = handoff.waivable
        self.lets_finish = handoff.lets_finish
        self.pushes = handoff.pushes
        self.blame = handoff.blame
        self.receiving = handoff.receiving
        self.path = handoff.engine.generate_path

    def part(self, index: int) -> Sequences:
        """The same for one sequence: 0 <= ``index`` < the number of them."""
        if len(self._generations) == 1:
            return self
        return Sequences(self._handoff, self._generations[index : index + 1])

    @property
    def live(self) -> int:
        """See Handoff."""
        return self._handoff.live

    def alone(self, request: InferenceRequest, prefill: Worker) -> Alone | None:  # noqa: ARG002 - Handoff's signature
        """See Handoff. A prefill worker answers alone only where it does so for all of them."""
        found = [self._handoff.alone(generation, prefill) for generation in self._generations]
        return next((alone for alone in found if alone is None or alone.role is not Role.PREFILL), found[0])

    def single(self, worker: Worker) -> Plan:
        """See RpcHandoff."""
        return self._handoff.single(self._generations[0], worker)

    def unaided(self, decode: Worker) -> Plan:
        """A plan for ``decode`` to do without a prefill: :meth:`handed` makes its leg, of an empty answer."""
        return Plan(b"", b"", names=(leg_name(self._generations[0]),), rank=decode.dp_rank)

    def plan(
        self,
        request: InferenceRequest,  # noqa: ARG002 - Handoff's signature
        prefill: Worker,
        edits: LegEdits | None = None,  # noqa: ARG002 - Handoff's signature
        *,
        trust_client: bool = False,  # noqa: ARG002 - Handoff's signature
        decode: Worker | None = None,
    ) -> Plan:
        """See Handoff."""
        return self._handoff.plan(self._generations[0], prefill, decode)

    def handed(
        self,
        request: InferenceRequest,  # noqa: ARG002 - Handoff's signature
        plan: Plan,
        edits: Edits | None,  # noqa: ARG002 - Handoff's signature
        answer: bytes,
        *,
        trust_client: bool = False,  # noqa: ARG002 - Handoff's signature
    ) -> Handed:
        """See Handoff."""
        return self._handoff.handed(self._generations[0], plan, answer)

    def hold(self, request: InferenceRequest) -> float:  # noqa: ARG002 - Handoff's signature
        """See Handoff."""
        return self._handoff.hold(self._generations[0])

    def named_by_client(self, request: InferenceRequest) -> bool:  # noqa: ARG002 - Handoff's signature
        """See Handoff. A leg's name is new in every attempt."""
        return False

    def release(self, plan: Plan) -> None:
        """See Handoff."""
        self._handoff.release(plan)

    def aborts(self, plan: Plan) -> Sequence[tuple[bytes, bytes]]:
        """See Handoff."""
        return self._handoff.aborts(plan)

    def forgets(self, params: bytes) -> Sequence[tuple[bytes, bytes]]:
        """See Handoff."""
        return self._handoff.forgets(params)

    def unpins(self, plan: Plan) -> Sequence[tuple[bytes, bytes]]:
        """See Handoff."""
        return self._handoff.unpins(plan)

    def failed(self, answer: bytes) -> bool:
        """See Handoff."""
        return self._handoff.failed(answer)


if TYPE_CHECKING:
    _: type[Handoff] = Sequences
