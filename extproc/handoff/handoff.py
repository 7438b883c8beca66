"""What a handoff is: how the two legs of a request are told to meet, and how they can be ended."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, Protocol

from extproc.apis.json_object import Edits, LegEdits
from extproc.apis.request import InferenceRequest
from extproc.workers.worker import Role, Worker


class Kv(Enum):
    """What becomes of the prompt's KV cache; the values are those of ``x-pd-kv``."""

    HANDED = "handed"  # the prefill worker computes it and the decode worker is told where it is
    RECOMPUTED = "recomputed"  # the decode worker computes it, although there might have been a handoff
    UNKNOWN = "unknown"  # the prefill worker computes it; whether the decode finds it is between their connectors
    LOCAL = "local"  # the decode worker computes it, for the operator wants no handoff of such a prompt
    NONE = "none"  # one worker does all there is to do


class Alone(NamedTuple):
    """A request that one worker answers by itself.

    Attributes:
        role: of that worker.
        kv: what that means for the KV cache.
        why: for people; empty where it needs no word.
        unknown: there would be a handoff, were all known of the prefill worker that it needs.
    """

    role: Role
    kv: Kv
    why: str = ""
    unknown: bool = False


class Plan(NamedTuple):
    """Two legs that will meet.

    Attributes:
        prefill: the prefill leg's body.
        decode: the decode leg's body; empty where it is made of the prefill's answer.
        rooms: what they meet in; taken until the plan is released.
        names: by which the engine can be asked to end them; empty where it has no name of ours.
        params: what tells the decode where the KV cache is (raw JSON), where that is known before the prefill answers.
            To have it freed has a price there, whether or not a decode has fetched it: see mooncake.py.
        rank: the decode worker's, where a body that is made later must say it (gRPC).
    """

    prefill: bytes
    decode: bytes
    rooms: tuple[int, ...] = ()
    names: Sequence[str] = ()
    params: bytes = b""
    rank: int | None = None


class Handed(NamedTuple):
    """What a prefill's answer makes of the decode leg.

    Attributes:
        decode: the decode leg's body.
        kv: HANDED, or RECOMPUTED where the answer does not say where the KV cache is.
        params: the raw object that names it; empty where there is none.
    """

    decode: bytes
    kv: Kv
    params: bytes = b""


class Handoff(Protocol):
    """One KV-transfer protocol."""

    @property
    def name(self) -> str:
        """As shown in ``x-pd-handoff``, logs and metrics."""

    @property
    def in_turn(self) -> bool:
        """The decode leg starts only when the prefill leg is done."""

    @property
    def tells_tokens(self) -> bool:
        """The prompt's token ids can be told to the decode worker, if the prefill was asked for them."""

    @property
    def waivable(self) -> bool:
        """A decode worker can do without a prefill."""

    @property
    def prefixes_ids(self) -> bool:
        """The engine names a request after its ``x-request-id``, with a prefix of the API before it."""

    @property
    def live(self) -> int:
        """How many rooms are taken."""

    def alone(self, request: InferenceRequest, prefill: Worker) -> Alone | None:
        """Who answers ``request`` alone; None for a request that two legs serve."""

    def plan(
        self,
        request: InferenceRequest,
        prefill: Worker,
        edits: LegEdits,
        *,
        trust_client: bool,
        decode: Worker | None = None,
    ) -> Plan:
        """Prepare both legs of ``request`` with ``prefill`` as the prefill worker.

        Args:
            edits: in what these legs differ from the client's request.
            trust_client: keep the control fields that the client sent, as far as they are not ours to set.
            decode: the decode worker; None for any that stands for no rank. Envoy may give the leg to another one that
                stands for the same rank.
        """

    def handed(
        self, request: InferenceRequest, plan: Plan, edits: Edits, answer: bytes, *, trust_client: bool
    ) -> Handed:
        """The decode leg, now that the prefill has answered; only of handoffs in turn.

        Args:
            plan: what :meth:`plan` made.
            edits: in what the decode leg differs from the client's request.
            answer: the prefill's whole answer; empty when there was no prefill, and the decode must do without.
            trust_client: as in :meth:`plan`.
        """

    def hold(self, request: InferenceRequest) -> float:
        """How many seconds the head of the decode's answer may be kept back until the prefill's fate is known.

        0 where the decode sends none before it has the KV cache. A client can then still be told with a status, or be
        served by another pair.
        """

    @property
    def blame(self) -> float:
        """How many seconds a decode's 500 may be kept back while its prefill is out, whose failure may be its cause."""

    @property
    def lets_finish(self) -> bool:
        """A prefill leg must be let finish once its decode leg is out, even if nobody wants the answer any more."""

    @property
    def pushes(self) -> bool:
        """The prefill worker sends the cache: a decode whose prefill dies before it has waits for ever."""

    @property
    def early_heads(self) -> bool:
        """A worker sends the head of a streamed answer before it does anything about the request."""

    def named_by_client(self, request: InferenceRequest) -> bool:
        """Whether the client chose a name of which a worker takes no second request while it has a first.

        Nobody knows when the legs of a failed attempt have left their workers, or which those were: such a request,
        once sent, is not tried again.
        """

    def release(self, plan: Plan) -> None:
        """Both legs of ``plan`` are over."""

    def aborts(self, plan: Plan) -> Sequence[tuple[bytes, bytes]]:
        """Path and body of the POST requests that end the plan's legs on a worker."""

    def forgets(self, params: bytes) -> Sequence[tuple[bytes, bytes]]:
        """Path and body of the POST requests by which a decode worker has the prefill free a KV cache it holds.

        Args:
            params: of :class:`Handed` or :class:`Plan`; ``null`` for nothing: the decode worker shows that it lives.
        """

    def unpins(self, plan: Plan) -> Sequence[tuple[bytes, bytes]]:
        """Path and body of the POST requests that give a prefill worker something to send for the plan.

        A decode that waits for a prefill that failed, or that asks once more for what it has had, is answered by that.
        They are sent when the decode leg has ended and the prefill keeps nothing for the plan, which would be lost.
        """

    def failed(self, answer: bytes) -> bool:
        """Whether a prefill's answer with a 2xx status says that it failed all the same."""
