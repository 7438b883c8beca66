"""SGLang over HTTP: both legs at once, meeting in a room of the prefill worker's bootstrap server.

What: prefill and decode get the same body plus ``bootstrap_host``, ``bootstrap_port``, ``bootstrap_room``; the decode
registers with the prefill's bootstrap server under the room and pulls nothing until the prefill pushed its KV cache.
When to use: workers started with ``--disaggregation-mode``, whatever their transfer backend.
Fields: host = host of the prefill worker's URL; port = its ``--disaggregation-bootstrap-port``, or null for the
engine's default; room = 1 … 2^63-1, one per prompt. ``rid`` is ours unless the client gave one.
Failure: a lone leg waits for the engine's own timeout (300 s by default), so the other one must be ended: by ``POST
/abort_request {"rid"}`` (5-10 ms; the closed connection alone is noticed after up to 4 s). The items of a batch are
named ``rid_0``, ``rid_1``, ...; aborting one ends the whole answer.
Source: sglang srt/managers/io_struct.py, srt/entrypoints/openai/protocol.py (PDRoutingFields), 0.5.23; a room of 2^63
or more ends the prefill process there.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Final, NamedTuple

import orjson

from extproc.apis.request import CONTROL_FIELDS, InferenceRequest
from extproc.workers.worker import Worker

NAME: Final = "sglang"
ABORT_PATH: Final = b"/abort_request"
_MAX_ABORTS: Final = 64  # of one batch; the others' legs end with their connection
_ROOM_BITS: Final = 63
_ABORTED: Final = re.compile(rb'"finish_reason"\s*:\s*(?:\{\s*"type"\s*:\s*)?"abort"')
_NOTHING: Final[frozenset[str]] = frozenset()
_NO_EDITS: Final[Mapping[str, bytes]] = {}


class Rooms:
    """Mints rooms and remembers the live ones, so that no two requests ever meet in the same room."""

    def __init__(self) -> None:
        self._live: set[int] = set()

    def __len__(self) -> int:
        return len(self._live)

    def mint(self, count: int) -> tuple[int, ...]:
        """``count`` rooms that are not live, now live."""
        rooms: list[int] = []
        while len(rooms) < count:
            room = random.getrandbits(_ROOM_BITS)
            if room and room not in self._live:  # in room 0 the real decode never answers, and the next one dies
                self._live.add(room)
                rooms.append(room)
        return tuple(rooms)

    def release(self, rooms: tuple[int, ...]) -> None:
        """The rooms' legs are over."""
        self._live.difference_update(rooms)


class Legs(NamedTuple):
    """The two bodies of one handoff."""

    prefill: bytes
    decode: bytes


def plan(
    request: InferenceRequest,
    prefill: Worker,
    rooms: tuple[int, ...],
    rid: str | None,
    *,
    edits: Mapping[str, bytes] = _NO_EDITS,
    trust_client: bool = False,
) -> Legs:
    """The bodies of both legs.

    Args:
        request: the client's request; its bytes reach both legs as they are, but for what is said here.
        prefill: the chosen prefill worker.
        rooms: one live room per prompt.
        rid: the request id that we own; None when the client gave its own or the API has none.
        edits: raw values of top-level fields in which this pair of legs differs from the client's (one of n samples).
        trust_client: keep control fields that the client sent (ours still win).
    """
    body = request.body
    members = _bootstrap_members(prefill, rooms, request.prompts)
    if rid is not None:
        members += b',"%b":"%b"' % (str(request.api.rid_key).encode(), rid.encode())
    drop = _NOTHING if CONTROL_FIELDS.isdisjoint(body.keys()) else CONTROL_FIELDS
    if trust_client:
        drop &= {"bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key"}
    decode = body.edited(edits, drop, members)
    if not request.stream:
        return Legs(decode, decode)
    # The prefill's answer is only waited for, so a stream of it would be work for nothing; and some of the engine's
    # endpoints report an error as an event inside a 200 stream, but as a status when not streaming.
    calm = {**edits, "stream": b"false"}
    return Legs(body.edited(calm, drop | {"stream_options"}, members), decode)


def _bootstrap_members(prefill: Worker, rooms: tuple[int, ...], prompts: int | None) -> bytes:
    host, port = _address(prefill.url.bracketed_host, prefill.bootstrap_port)
    if prompts is None:
        return b'"bootstrap_host":%b,"bootstrap_port":%b,"bootstrap_room":%d' % (host, port, rooms[0])
    hosts, ports = b",".join([host] * prompts), b",".join([port] * prompts)
    listed = b",".join([b"%d" % room for room in rooms])
    return b'"bootstrap_host":[%b],"bootstrap_port":[%b],"bootstrap_room":[%b]' % (hosts, ports, listed)


@lru_cache(4096)
def _address(host: str, port: int | None) -> tuple[bytes, bytes]:
    """Where the prefill's bootstrap server is, as JSON."""
    return orjson.dumps(host), b"null" if port is None else b"%d" % port


def answer_is_aborted(body: bytes) -> bool:
    """Whether a 2xx answer says that the engine gave the request up.

    An engine ends an aborted request with a success status and ``finish_reason`` "abort" (``/generate``: {"type":
    "abort"}). Inside a JSON string the quotes would be escaped, so that text of a model cannot look like this.
    """
    return b'"abort"' in body and _ABORTED.search(body) is not None


def new_rid(prefix: str = "") -> str:
    """A name for a request on its workers, unlike any other's. The client sees it as the answer's id."""
    return f"{prefix}{random.getrandbits(128):032x}"


def abortable_rids(request: InferenceRequest, rid: str) -> list[str]:
    """The names under which the engine knows the request: one, or one per prompt of a list.

    Aborting any that still runs ends the whole answer; which of them do is not known here.
    """
    if request.prompts is None:
        return [rid]
    return [f"{rid}_{index}" for index in range(min(request.prompts, _MAX_ABORTS))]


def abort_body(rid: str) -> bytes:
    """The body of ``POST /abort_request`` that ends the request with this ``rid``."""
    return orjson.dumps({"rid": rid})
