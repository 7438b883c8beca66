"""SGLang over HTTP: both legs at once, meeting in a room of the prefill worker's bootstrap server.

What: prefill and decode get the same body plus ``bootstrap_host``, ``bootstrap_port``, ``bootstrap_room``; the decode
registers with the prefill's bootstrap server under the room and pulls nothing until the prefill pushed its KV cache.
When to use: workers started with ``--disaggregation-mode``, whatever their transfer backend.
Fields: host = host of the prefill worker's URL; port = its ``--disaggregation-bootstrap-port``, or null for the
engine's default; room = 1 … 2^63-1, one per prompt. ``rid`` is ours unless the client gave one.
Data parallelism: a leg names its own rank in ``routed_dp_rank``, and both name the prefill's in
``disagg_prefill_dp_rank``: with it a decode need not ask, and a prefill need not tell its bootstrap server, nor does it
compare the rank with the room. Before 0.5.10 a prefill leg has ``data_parallel_rank`` and a decode leg nothing. Either
way the room is congruent to the prefill's rank modulo their number: that decides where nothing is said, or heard
(``/v1/messages`` and ``/v1/responses`` of 0.5.10).
Failure: a lone leg waits for the engine's own timeout (300 s by default), so the other one must be ended: by ``POST
/abort_request {"rid"}`` (5-10 ms; the closed connection alone is noticed after up to 4 s). The items of a batch are
named ``rid_0``, ``rid_1``, ...; aborting one ends the whole answer.
Source: sglang srt/managers/io_struct.py, srt/entrypoints/openai/protocol.py (PDRoutingFields), 0.5.23; a room of 2^63
or more ends the prefill process there. For ranks also srt/managers/data_parallel_controller.py and srt/disaggregation/
(decode.py, ``_resolve_prefill_dp_rank``; common/conn.py, ``CommonKVSender``), of 0.5.9 and 0.5.10 too.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import orjson

from extproc.apis.json_object import Edits, LegEdits
from extproc.apis.request import CONTROL_FIELDS, InferenceRequest
from extproc.handoff.endings import broke_off
from extproc.handoff.handoff import Alone, Handed, Plan
from extproc.workers.ranks import has_two_fields
from extproc.workers.worker import Worker

MAX_ABORTS: Final = 64  # of one batch; the others' legs end with their connection
# Measured: a prefill answers between 5 ms before and 40 ms after the decode's first token; one that refuses a request
# does so within 3 ms.
HOLD_SECONDS: Final = 0.03
_ABORT_PATH: Final = b"/abort_request"
_MEETING_PLACE: Final = frozenset({"bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key"})
_RANKS: Final = frozenset({"routed_dp_rank", "data_parallel_rank", "disagg_prefill_dp_rank"})
_ROOM_BITS: Final = 63
LARGEST_ROOM: Final = 2**_ROOM_BITS - 1
_NOTHING: Final[frozenset[str]] = frozenset()
_WHOLE: Final = LegEdits()


class Rooms:
    """Mints rooms and remembers the live ones, so that no two requests ever meet in the same room.

    Args:
        bits: that a room may have.
    """

    def __init__(self, bits: int = _ROOM_BITS) -> None:
        self._bits = bits
        self._live: set[int] = set()

    def __len__(self) -> int:
        return len(self._live)

    def mint(self, count: int, rank: int = 0, ranks: int = 1) -> tuple[int, ...]:
        """``count`` rooms that are not live, now live, each congruent to ``rank`` modulo ``ranks``."""
        rooms: list[int] = []
        largest = (1 << self._bits) - 1
        while len(rooms) < count:
            room = random.getrandbits(self._bits)
            if ranks > 1:
                room += rank - room % ranks
            if (
                0 < room <= largest and room not in self._live
            ):  # in room 0 the real decode never answers, and the next one dies
                self._live.add(room)
                rooms.append(room)
        return tuple(rooms)

    def release(self, rooms: tuple[int, ...]) -> None:
        """The rooms' legs are over."""
        self._live.difference_update(rooms)


class SglangHandoff:
    """See the module, and Handoff."""

    name = "sglang"
    in_turn = False
    lets_finish = False
    blame = HOLD_SECONDS  # a transfer that fails fails both legs (srt/disaggregation/{prefill,decode}.py, 0.5.23)
    pushes = False  # it does, but its decode notices within seconds
    prefixes_ids = False
    waivable = False
    tells_tokens = False
    early_heads = True

    def __init__(self) -> None:
        self._rooms = Rooms()

    @property
    def live(self) -> int:
        """See Handoff."""
        return len(self._rooms)

    def alone(self, request: InferenceRequest, prefill: Worker) -> Alone | None:  # noqa: ARG002 - Handoff's signature
        """See Handoff. A worker that was started for one role serves nothing without the other."""
        return None

    def plan(
        self,
        request: InferenceRequest,
        prefill: Worker,
        edits: LegEdits = _WHOLE,
        *,
        trust_client: bool = False,
        decode: Worker | None = None,
    ) -> Plan:
        """See Handoff. The client's bytes reach both legs as they are, but for what the module says."""
        rooms = self._rooms.mint(request.prompts or 1, prefill.dp_rank or 0, prefill.dp_size)
        try:
            return _plan(request, prefill, decode, rooms, edits.decode, trust_client=trust_client)
        except BaseException:
            self._rooms.release(rooms)
            raise

    def handed(
        self, request: InferenceRequest, plan: Plan, edits: Edits, answer: bytes, *, trust_client: bool
    ) -> Handed:
        """See Handoff. The legs do not run in turn."""
        raise NotImplementedError

    def hold(self, request: InferenceRequest) -> float:
        """See Handoff. Most prefills that fail do so within milliseconds; one that does well may answer last."""
        return HOLD_SECONDS if request.stream and request.api.early_head else 0.0

    def named_by_client(self, request: InferenceRequest) -> bool:
        """See Handoff. "Duplicate request ID detected", it says otherwise."""
        return request.api.rid_key is not None and request.api.rid_key in request.body

    def release(self, plan: Plan) -> None:
        """See Handoff."""
        self._rooms.release(plan.rooms)

    def aborts(self, plan: Plan) -> Sequence[tuple[bytes, bytes]]:
        """See Handoff."""
        return [(_ABORT_PATH, orjson.dumps({"rid": name})) for name in plan.names]

    def forgets(self, params: bytes) -> Sequence[tuple[bytes, bytes]]:  # noqa: ARG002 - Handoff's signature
        """See Handoff. What a decode does not fetch, the abort frees."""
        return ()

    def unpins(self, plan: Plan) -> Sequence[tuple[bytes, bytes]]:  # noqa: ARG002 - Handoff's signature
        """See Handoff. The abort is enough."""
        return ()

    def failed(self, answer: bytes) -> bool:
        """See Handoff."""
        return broke_off(answer)


def _plan(
    request: InferenceRequest,
    prefill: Worker,
    decoder: Worker | None,
    rooms: tuple[int, ...],
    edits: Edits,
    *,
    trust_client: bool,
) -> Plan:
    body = request.body
    members = _bootstrap_members(prefill, rooms, request.prompts)
    names: Sequence[str] = ()
    key = request.api.rid_key
    if key is not None and key not in body and key not in edits.put:
        rid = f"{request.api.rid_prefix}{random.getrandbits(128):032x}"
        members += b',"%b":"%b"' % (key.encode(), rid.encode())
        names = _names_of(rid, request.prompts)
    elif key is not None and key in edits.put:  # the client's name with a sample's number, nobody else's either
        rid = orjson.loads(edits.put[key])
        names = _names_of(rid, request.prompts) if isinstance(rid, str) else ()
    drop = _NOTHING if CONTROL_FIELDS.isdisjoint(body.keys()) else CONTROL_FIELDS
    ranks = _ranks(prefill, decoder)
    if trust_client:
        drop &= _MEETING_PLACE | _RANKS if any(ranks) else _MEETING_PLACE
    drop = drop | frozenset(edits.drop) if edits.drop else drop
    decode = body.edited(edits.put, drop, members + ranks[1])
    if not request.stream:
        same = ranks[0] == ranks[1]
        return Plan(decode if same else body.edited(edits.put, drop, members + ranks[0]), decode, rooms, names)
    # The prefill's answer is only waited for, so a stream of it would be work for nothing; and in a stream the engine
    # reports errors as events behind a 200, but as a status when not streaming.
    calm = {**edits.put, "stream": b"false"}
    return Plan(body.edited(calm, drop | {"stream_options"}, members + ranks[0]), decode, rooms, names)


def _ranks(prefill: Worker, decode: Worker | None) -> tuple[bytes, bytes]:
    """What the bodies of the two legs say of ranks; empty of servers as a whole."""
    target = None if decode is None else decode.dp_rank
    if prefill.dp_rank is None and target is None:
        return b"", b""
    former = not has_two_fields(prefill.labels.get("version", ""))
    former_decode = decode is None or not has_two_fields(decode.labels.get("version", ""))
    return _prefill_rank(prefill.dp_rank, former=former), _decode_ranks(prefill.dp_rank, target, former=former_decode)


@lru_cache(4096)
def _prefill_rank(rank: int | None, *, former: bool) -> bytes:
    if rank is None:
        return b""
    if former:
        return b',"data_parallel_rank":%d' % rank
    return b',"routed_dp_rank":%d,"disagg_prefill_dp_rank":%d' % (rank, rank)


@lru_cache(4096)
def _decode_ranks(prefill: int | None, decode: int | None, *, former: bool) -> bytes:
    if former:
        return b""  # there is one field, which would choose both
    own = b"" if decode is None else b',"routed_dp_rank":%d' % decode
    return own if prefill is None else own + b',"disagg_prefill_dp_rank":%d' % prefill


def _names_of(rid: str, prompts: int | None) -> Sequence[str]:
    """The names under which the engine knows the request: one, or one per prompt of a list.

    Aborting any that still runs ends the whole answer; which of them do is not known here.
    """
    return [rid] if prompts is None else [f"{rid}_{index}" for index in range(min(prompts, MAX_ABORTS))]


def _bootstrap_members(prefill: Worker, rooms: tuple[int, ...], prompts: int | None) -> bytes:
    host, port = _address(prefill.bootstrap_host, prefill.bootstrap_port)
    if prompts is None:
        return b'"bootstrap_host":%b,"bootstrap_port":%b,"bootstrap_room":%d' % (host, port, rooms[0])
    hosts, ports = b",".join([host] * prompts), b",".join([port] * prompts)
    listed = b",".join([b"%d" % room for room in rooms])
    return b'"bootstrap_host":[%b],"bootstrap_port":[%b],"bootstrap_room":[%b]' % (hosts, ports, listed)


@lru_cache(4096)
def _address(host: str, port: int | None) -> tuple[bytes, bytes]:
    """Where the prefill's bootstrap server is, as JSON."""
    return orjson.dumps(host), b"null" if port is None else b"%d" % port
