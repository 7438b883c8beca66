"""SGLang behind the mock's HTTP front: the hand-off between the two legs, and what its scheduler does not survive."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from extproc.mock import engine
from extproc.mock.engine import CrashError, Pace, RequestError
from extproc.mock.generation import Text, word
from extproc.mock.sglang.rendezvous import (
    ABORTED,
    DEFAULT_PORT,
    OTHER_SIDE,
    Bootstrap,
    Prefills,
    TransferError,
    UnreachableError,
)

if TYPE_CHECKING:
    from asyncio import Future

LARGEST_ROOM = 2**63 - 1
FAKE_HOST = "2.2.2.2"  # the engine's own health checks and warm-up use it: no transfer takes place


class Mode(Enum):
    """The values are the engine's ``disaggregation_mode``."""

    PREFILL = "prefill"
    DECODE = "decode"
    REGULAR = "null"


@dataclass(frozen=True, slots=True)
class Ranks:
    """What a body says of data-parallel ranks, by the names of its fields."""

    routed: int | None = None
    former: int | None = None  # ``data_parallel_rank``, which engines before 0.5.10 have alone
    prefill: int | None = None


@dataclass(frozen=True, slots=True)
class Room:
    """Where the two legs of a sequence meet, as in the body, types unchecked; ``port`` None: the engine's default."""

    number: object = None
    host: object = None
    port: object = None
    ranks: Ranks = Ranks()


@dataclass(frozen=True, slots=True)
class LogprobOptions:
    """What a request wants to know besides the text. ``start``: first prompt position of interest, -1: none."""

    start: int = -1
    top: int = 0
    token_ids: tuple[int, ...] | None = None
    with_text: bool = False


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence(engine.Sequence):
    """One text being written."""

    room: Room = Room()
    logprobs: LogprobOptions | None = None
    waiting: bool = False  # for the other leg: a prefill's before it runs, a decode's with its place in the cache


Batch = engine.Batch[Sequence]


@dataclass(frozen=True, slots=True)
class Patience:
    """How long the engine waits, in seconds, before it gives up."""

    death: float = 2.5  # a decode, until it takes a silent prefill for dead
    connect: float = 15.0  # a decode, for a bootstrap port where nobody listens
    wait: float = 300.0  # a leg, for the other one


@dataclass(frozen=True, slots=True)
class Layout:
    """How the KV cache is laid out and moved, by the engine's names; as ``/server_info`` says on a CPU (0.5.23)."""

    kv_cache_dtype: str = "auto"
    page_size: int = 1
    attention_backend: str = "torch_native"
    prefill_attention_backend: str | None = None
    decode_attention_backend: str | None = None
    dtype: str = "float32"
    disaggregation_transfer_backend: str = "mooncake"

    @property
    def compared(self) -> str:
        """What a decode wants to be the same in its prefill, in words without blanks."""
        return f"{self.page_size} {self.kv_cache_dtype}"


class Engine(engine.Engine[Sequence]):
    """One engine process, of ``dp_size`` data-parallel ranks.

    Args:
        one_field: it is older than 0.5.10.
        dp_attention: ``--enable-dp-attention``. Without it every rank takes itself for rank 0 when it looks at a room.
    """

    def __init__(
        self,
        mode: Mode,
        patience: Patience,
        layout: Layout,
        dp_size: int = 1,
        *,
        one_field: bool = False,
        dp_attention: bool = False,
    ) -> None:
        super().__init__()
        self.mode = mode
        self.dp_size = dp_size
        self._one_field = one_field
        self._dp_attention = dp_attention
        self._turn = 0  # of the rank that gets the next request for none
        self.bootstrap = Bootstrap(layout.compared, dp_size)
        self.prefills = Prefills(layout.compared, patience.death, patience.connect)
        self._patience = patience

    @property
    def running(self) -> list[int]:
        """How many requests each rank has."""
        ranks = [sequence.rank for sequence in self.live.values()]
        return [ranks.count(rank) for rank in range(self.dp_size)]

    def admit(self, batch: Batch) -> None:
        """Take a batch in; raises RequestError where the engine refuses, CrashError where it dies."""
        seen: set[str] = set()
        for sequence in batch.sequences:
            sequence.rank = self._dispatch(sequence.room)
            if sequence.rid in self.live or sequence.rid in seen:
                raise RequestError(f"Duplicate request ID detected: {sequence.rid}")
            seen.add(sequence.rid)
            if self.mode is not Mode.REGULAR:
                self._survive(sequence.room)
        super().admit(batch)

    def abort(self, rid: str, *, everything: bool) -> None:
        """End live requests as ``/abort_request`` does.

        ``rid`` must be that of a live sequence; then every other whose id begins so ends with it. The id of a batch is
        not that of any of its sequences (``rid_0``, ``rid_1``).
        """
        if not everything and rid not in self.live:
            return
        for sequence in list(self.live.values()):
            stopper = sequence.stopper
            if (everything or sequence.rid.startswith(rid)) and stopper is not None and not stopper.done():
                stopper.set_result(None)

    def on(self, rank: int) -> list[Sequence]:
        """The sequences of a rank."""
        return [sequence for sequence in self.live.values() if sequence.rank == rank]

    def waiting(self, rank: int) -> int:
        """How many sequences of a rank wait for their other leg."""
        return sum(sequence.waiting for sequence in self.on(rank))

    def used_tokens(self, rank: int) -> int:
        """What a rank's KV cache holds: a decode has taken its place there before anything comes, a prefill has not."""
        holders = (s for s in self.on(rank) if not s.waiting or self.mode is Mode.DECODE)
        return sum(sequence.prompt.length + sequence.written for sequence in holders)

    def _dispatch(self, room: Room) -> int:
        """The rank that gets a request: as asked, a prefill's else by its room, a decode's in turn."""
        told, ranks = room.ranks, self.dp_size
        rank = told.former if self._one_field or told.routed is None else told.routed
        if rank is not None and not 0 <= rank < ranks:
            if self._one_field:  # an IndexError in the process that dispatches
                raise CrashError
            raise RequestError(f"routed_dp_rank={rank} out of range [0, {ranks})")
        if rank is not None:
            return rank
        if self.mode is Mode.PREFILL and isinstance(room.number, int):
            return room.number % ranks
        self._turn = (self._turn + 1) % ranks
        return self._turn

    def _source(self, room: Room) -> int | None:
        """The prefill's rank, as a leg was told it: until 0.5.10 by the field that also chooses the leg's own."""
        return room.ranks.former if self._one_field else room.ranks.prefill

    # --- one sequence ---

    async def _begin(self, sequence: Sequence, pace: Pace) -> bool:
        """Everything before the first token; False: there will be none."""
        text = self.write(sequence.prompt, sequence.limits, pace.tokens)
        # a prefill leg writes the first token, whatever the limits say
        sequence.text = Text([text.first], [word(text.first)]) if self.mode is Mode.PREFILL else text
        if self.mode is Mode.REGULAR:
            if pace.first_token:
                await sequence.sleep(pace.first_token)
        else:
            await self._hand_off(sequence, pace)
        return sequence.finish is None

    def _end(self, sequence: Sequence) -> None:
        if sequence.stopped:
            sequence.finish = _aborted("Aborted", None)
        elif self.mode is Mode.PREFILL:
            sequence.finish = {"type": "length", "length": 0}
        else:
            sequence.finish = sequence.text.finish

    # --- the hand-off ---

    def _survive(self, room: Room) -> None:
        """Raise CrashError for what the engine's scheduler does not survive (seen on 0.5.23)."""
        number = room.number
        if number is None or room.host == FAKE_HOST:
            return
        if not isinstance(number, int):
            raise CrashError
        if self.mode is Mode.DECODE:
            if not isinstance(room.host, str):
                raise CrashError
            # room 0 means "nothing here yet" to the decode: its KV cache arrives unnoticed, and a second leg finds it
            if number == 0 and any(sequence.room.number == 0 for sequence in self.live.values()):
                raise CrashError

    async def _hand_off(self, sequence: Sequence, pace: Pace) -> None:
        number, host, port = sequence.room.number, sequence.room.host, sequence.room.port
        if not isinstance(number, int):
            sequence.finish = _aborted(
                f"Invalid request: Disaggregated request received without bootstrap room id. req.rid={sequence.rid!r}",
                400,
            )
            return
        if host == FAKE_HOST:
            return
        try:
            if self.mode is Mode.PREFILL:
                await self._send_kv(sequence, number, pace)
            else:
                address = (str(host), port if isinstance(port, int) else DEFAULT_PORT)
                await self._receive_kv(sequence, address, number)
        except TransferError as error:
            self._fail(sequence, number, error)

    def _fail(self, sequence: Sequence, number: int, error: TransferError) -> None:
        if self.mode is Mode.PREFILL:
            leg, name = "Prefill bootstrap", "req"
        else:
            leg = "Decode handshake" if isinstance(error, UnreachableError) else "Decode transfer"
            name = "decode_req.req"
        sequence.finish = _aborted(
            f"{leg} failed for request rank=0 {name}.rid={sequence.rid!r} {name}.bootstrap_room={number} "
            f"with exception KVTransferError(bootstrap_room={number}): {error}",
            500,
        )

    async def _send_kv(self, sequence: Sequence, number: int, pace: Pace) -> None:
        rank = sequence.rank
        unsaid = not self._one_field and self._source(sequence.room) is None
        own = rank if self._dp_attention else 0
        if unsaid and own != number % self.dp_size:
            raise TransferError(
                f"follow_bootstrap_room conflict: dispatched to dp_rank {own} but bootstrap_room {number} implies "
                f"dp_rank {number % self.dp_size}. Set SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK=1 to allow "
                "mixed routing."
            )
        met = self.bootstrap.enter(number, rank, sequence.prompt.digest)
        try:
            await self._unless_stopped(sequence, met)
            if number > LARGEST_ROOM:
                raise CrashError
            if pace.first_token:
                await sequence.sleep(pace.first_token)
                if sequence.stopped:
                    raise TransferError(ABORTED)
                if self.bootstrap.abandoned(number, rank):
                    raise TransferError(OTHER_SIDE)
            self.bootstrap.transferred(number, rank)
        finally:
            self.bootstrap.leave(number, rank, met)

    async def _receive_kv(self, sequence: Sequence, address: tuple[str, int], number: int) -> None:
        peer = await self.prefills.peer(address)
        here = peer.want(number, self._source(sequence.room), sequence.prompt.digest)
        try:
            await self._unless_stopped(sequence, here)
        except BaseException:
            peer.drop(number, here)
            raise
        if number == 0 and sequence.stopper is not None:
            await sequence.stopper
            raise TransferError(ABORTED)
        if number < 0:
            sequence.finish = _aborted("Metadata corruption detected - bootstrap_room mismatch", 500)

    async def _unless_stopped(self, sequence: Sequence, future: Future[None]) -> None:
        """Await ``future``, but no longer than the sequence lives or the engine's patience lasts."""
        stopper = sequence.stopper
        if stopper is None or future.done():
            await future
            return
        sequence.waiting = True

        # the plain path: stopper and timer speak through the future, which is cheaper than asyncio.wait and a timeout
        def give_up(reason: str) -> None:
            if not future.done():
                future.set_exception(TransferError(reason))

        stopper.add_done_callback(lambda _: give_up(ABORTED))
        patience = self._patience.wait
        reason = f"Request {sequence.rid} timed out after {patience:.1f}s in KVPoll.Bootstrapping"
        timer = future.get_loop().call_later(patience, give_up, reason)
        try:
            await future
        finally:
            sequence.waiting = False
            timer.cancel()


def _aborted(message: str, status: int | None) -> dict[str, object]:
    return {"type": "abort", "message": message, "status_code": status, "err_type": None}


def new_rid() -> str:
    """A request id as the engine makes them."""
    return f"{random.getrandbits(128):032x}"
