"""The life of a *direct* exchange as a table: what may happen when, and what is done about it.

In a direct exchange the prefill leg goes out through the egress listener while Envoy itself runs the decode leg; the
decode's answer never passes through here. ``TABLE`` holds every legal (state, event) pair; anything else is a defect
and raises :class:`IllegalTransitionError`. The machine has no sockets and no clock; what it wants done it says through
:class:`Outside`.

::

    READY ──accepted in turn──► PREFILLING ──prefill done──► DECODING
                                  │   ▲   └──prefill failed──► ENDED
                                  └───┴ failed, once more: PAUSED
    READY ──accepted──► PARALLEL ──prefill done──► DECODING ──decode head──► ANSWERING ──closed──► OVER
                          │   └──decode head──► ANSWERING_PARALLEL ──prefill done──► ANSWERING
                          ├──decode head, early──► HELD ──prefill done──► ANSWERING
                          │                          └──held long enough──► ANSWERING_PARALLEL
                          └──prefill failed, expired──► ENDED ──closed──► OVER
    ANSWERING, ANSWERING_PARALLEL ──prefill failed, expired──► CUT ──closed──► OVER
    PARALLEL ──decode refused, early──► REFUSED ──prefill failed──► ENDED    REFUSED ──decode refused──► ANSWERING
    PARALLEL ──prefill replaced──► REPLACING ──decode head, headless──► OVER    HELD, REFUSED ──prefill replaced──► OVER
    PARALLEL, REFUSED, DECODING ──decode replaced──► OVER    (all these hand the request on)
"""

from __future__ import annotations

from enum import IntEnum, auto
from typing import Final, Protocol


class State(IntEnum):
    """Where an exchange is. "Out" means: sent, and its answer is not complete."""

    READY = 0  # the client's request is complete and placed
    PREFILLING = auto()  # the prefill leg is out; the decode leg waits for its answer
    PAUSED = auto()  # a prefill failed; another attempt is due
    PARALLEL = auto()  # both legs are out; the decode has not answered
    REPLACING = auto()  # the prefill failed, another attempt is due; the decode leg is out, and of no use any more
    DECODING = auto()  # the decode leg is out, alone: the prefill is done, or there is none
    HELD = auto()  # an early decode head waits a moment for the prefill's fate
    REFUSED = auto()  # a decode's error waits a moment for the prefill's fate, which may be its cause
    ANSWERING_PARALLEL = auto()  # the decode's answer flows to the client; the prefill is still out
    ANSWERING = auto()  # the decode's answer flows to the client
    LINGERING = auto()  # the decode's answer ended; the prefill gets a moment to end by itself
    ENDED = auto()  # we answered the client ourselves; waiting for Envoy to close
    CUT = auto()  # Envoy was told to cut the decode's answer; waiting for it to close
    OVER = auto()  # nothing is held any more


class Event(IntEnum):
    """What may happen to an exchange."""

    ACCEPTED = 0  # placed on a pair, both legs prepared
    ACCEPTED_IN_TURN = auto()  # placed on a pair whose decode leg is made of the prefill's answer
    ACCEPTED_ALONE = auto()  # placed on one worker; nothing is handed off
    PREFILL_DONE = auto()  # the prefill answered 2xx, completely
    PREFILL_FAILED = auto()  # the prefill answered otherwise, or not completely, and that is the request's end
    PREFILL_REPLACED = auto()  # it failed, but the request is to be tried elsewhere
    PREFILL_WAIVED = auto()  # it failed, but the decode will do without
    DECODE_HEAD = auto()  # the decode answered; its head goes to the client
    DECODE_HEAD_EARLY = auto()  # the decode answered 2xx before it can have the KV cache
    DECODE_REFUSED = auto()  # the decode answered with an error status, which is the client's
    DECODE_REFUSED_EARLY = auto()  # it did while the prefill is out, in a way that a failed prefill would explain
    DECODE_REPLACED = auto()  # it did, or its connection broke, but the request is to be tried elsewhere
    HEADLESS = auto()  # no head of the decode's answer came in the moment that was granted to it
    HELD_ENOUGH = auto()  # the moment granted to an early head passed
    EXPIRED = auto()  # the request's time is over: its deadline passed, or the gateway stops
    LINGERED = auto()  # the moment granted to the prefill passed
    CLOSED = auto()  # Envoy ended the stream: the answer is out, or the client has left


class Outside(Protocol):
    """What the machine can have done."""

    def send_both(self) -> None:
        """Send the prefill leg and release the decode leg."""

    def send_prefill(self) -> None:
        """Send the prefill leg; the decode leg waits for its answer."""

    def release(self) -> None:
        """Release the held request to the worker that will answer it."""

    def pause(self) -> None:
        """Wait a moment, then place the request anew and raise ACCEPTED..., or PREFILL_FAILED where nobody is left."""

    def await_head(self) -> None:
        """Wait a moment for the head of the decode's answer, then raise HEADLESS."""

    def relay(self) -> None:
        """Hand the request on to a course with legs of its own: a released one cannot be addressed to another."""

    def give_back(self) -> None:
        """Give everything back, but for the request itself."""

    def hold_refusal(self) -> None:
        """Keep a decode's error back for a moment, then raise DECODE_REFUSED or DECODE_REPLACED."""

    def pass_head(self) -> None:
        """Let the decode's head through to the client."""

    def hold_head(self) -> None:
        """Keep the decode's head back for a moment, then raise HELD_ENOUGH.

        Most prefills that fail do so within milliseconds; a client can then still be told with a status.
        """

    def answer_error(self) -> None:
        """Tell the client what went wrong; where its answer has begun, cut it."""

    def drop_prefill(self) -> None:
        """Cancel the prefill leg and end its work on the worker."""

    def drop_decode(self) -> None:
        """End the decode leg's work on the worker; its connection is Envoy's to close."""

    def settle(self) -> None:
        """Leave nothing of the KV cache's transfer, whether or not the ended decode leg had begun it.

        Comes after drop_prefill, since it depends on whether the prefill is let finish.
        """

    def linger(self) -> None:
        """Give the decode's load back and grant the prefill leg a moment, then raise LINGERED."""

    def finish(self) -> None:
        """Give everything back and write the log line."""


class IllegalTransitionError(RuntimeError):
    """An event that cannot happen in the state it happened in."""

    def __init__(self, state: State, event: Event) -> None:
        super().__init__(f"{event.name} cannot happen in {state.name}")


Rule = tuple[State, tuple[str, ...]]

_S, _E = State, Event
RULES: Final[dict[tuple[State, Event], Rule]] = {
    (_S.READY, _E.ACCEPTED): (_S.PARALLEL, ("send_both",)),
    (_S.READY, _E.ACCEPTED_IN_TURN): (_S.PREFILLING, ("send_prefill",)),
    (_S.READY, _E.ACCEPTED_ALONE): (_S.DECODING, ("release",)),
    (_S.READY, _E.EXPIRED): (_S.ENDED, ("answer_error",)),
    (_S.READY, _E.CLOSED): (_S.OVER, ("finish",)),
    (_S.PREFILLING, _E.PREFILL_DONE): (_S.DECODING, ("release",)),
    (_S.PREFILLING, _E.PREFILL_FAILED): (_S.ENDED, ("answer_error",)),
    (_S.PREFILLING, _E.PREFILL_REPLACED): (_S.PAUSED, ("pause",)),
    (_S.PREFILLING, _E.PREFILL_WAIVED): (_S.DECODING, ("release",)),
    (_S.PREFILLING, _E.EXPIRED): (_S.ENDED, ("drop_prefill", "answer_error")),
    (_S.PREFILLING, _E.CLOSED): (_S.OVER, ("drop_prefill", "finish")),
    (_S.PAUSED, _E.ACCEPTED): (_S.PARALLEL, ("send_both",)),
    (_S.PAUSED, _E.ACCEPTED_IN_TURN): (_S.PREFILLING, ("send_prefill",)),
    (_S.PAUSED, _E.ACCEPTED_ALONE): (_S.DECODING, ("release",)),
    (_S.PAUSED, _E.PREFILL_FAILED): (_S.ENDED, ("answer_error",)),
    (_S.PAUSED, _E.EXPIRED): (_S.ENDED, ("answer_error",)),
    (_S.PAUSED, _E.CLOSED): (_S.OVER, ("finish",)),
    (_S.PARALLEL, _E.PREFILL_DONE): (_S.DECODING, ()),
    (_S.PARALLEL, _E.PREFILL_FAILED): (_S.ENDED, ("drop_decode", "answer_error")),
    (_S.PARALLEL, _E.PREFILL_REPLACED): (_S.REPLACING, ("drop_decode", "await_head")),
    # Envoy is given another answer most safely where it asks about a worker's. One that we begin by ourselves may cross
    # a worker's head, and is then lost: so that is done only when none has come for a moment.
    (_S.REPLACING, _E.HEADLESS): (_S.OVER, ("relay", "give_back")),
    (_S.REPLACING, _E.DECODE_HEAD): (_S.OVER, ("relay", "give_back")),
    (_S.REPLACING, _E.DECODE_HEAD_EARLY): (_S.OVER, ("relay", "give_back")),
    (_S.REPLACING, _E.DECODE_REFUSED): (_S.OVER, ("relay", "give_back")),
    (_S.REPLACING, _E.EXPIRED): (_S.ENDED, ("answer_error",)),
    (_S.REPLACING, _E.CLOSED): (_S.OVER, ("finish",)),
    (_S.PARALLEL, _E.DECODE_REPLACED): (_S.OVER, ("relay", "drop_prefill", "give_back")),
    (_S.PARALLEL, _E.DECODE_HEAD): (_S.ANSWERING_PARALLEL, ("pass_head",)),
    (_S.PARALLEL, _E.DECODE_HEAD_EARLY): (_S.HELD, ("hold_head",)),
    (_S.PARALLEL, _E.DECODE_REFUSED): (_S.ANSWERING, ("drop_prefill", "pass_head")),
    # What fails a pair's transfer fails both its legs, in either order: it is told as the prefill's failure.
    (_S.PARALLEL, _E.DECODE_REFUSED_EARLY): (_S.REFUSED, ("hold_refusal",)),
    (_S.REFUSED, _E.PREFILL_DONE): (_S.REFUSED, ()),
    (_S.REFUSED, _E.PREFILL_FAILED): (_S.ENDED, ("answer_error",)),
    (_S.REFUSED, _E.PREFILL_REPLACED): (_S.OVER, ("relay", "give_back")),
    (_S.REFUSED, _E.DECODE_REFUSED): (_S.ANSWERING, ("drop_prefill", "pass_head")),
    (_S.REFUSED, _E.DECODE_REPLACED): (_S.OVER, ("relay", "drop_prefill", "give_back")),
    (_S.REFUSED, _E.EXPIRED): (_S.ENDED, ("drop_prefill", "answer_error")),
    (_S.REFUSED, _E.CLOSED): (_S.OVER, ("drop_prefill", "finish")),
    (_S.PARALLEL, _E.EXPIRED): (_S.ENDED, ("drop_prefill", "drop_decode", "settle", "answer_error")),
    (_S.PARALLEL, _E.CLOSED): (_S.OVER, ("drop_prefill", "drop_decode", "settle", "finish")),
    (_S.DECODING, _E.DECODE_HEAD): (_S.ANSWERING, ("pass_head",)),
    (_S.DECODING, _E.DECODE_HEAD_EARLY): (_S.ANSWERING, ("pass_head",)),
    (_S.DECODING, _E.DECODE_REFUSED): (_S.ANSWERING, ("pass_head",)),
    # Only where the prefill is found gone before its cache was fetched, for which the decode would wait for ever.
    (_S.DECODING, _E.PREFILL_REPLACED): (_S.REPLACING, ("drop_decode", "await_head")),
    (_S.DECODING, _E.PREFILL_FAILED): (_S.ENDED, ("drop_decode", "answer_error")),
    (_S.DECODING, _E.DECODE_REPLACED): (_S.OVER, ("relay", "give_back")),
    (_S.DECODING, _E.EXPIRED): (_S.ENDED, ("drop_decode", "settle", "answer_error")),
    (_S.DECODING, _E.CLOSED): (_S.OVER, ("drop_decode", "settle", "finish")),
    (_S.HELD, _E.HELD_ENOUGH): (_S.ANSWERING_PARALLEL, ("pass_head",)),
    (_S.HELD, _E.PREFILL_DONE): (_S.ANSWERING, ("pass_head",)),
    (_S.HELD, _E.PREFILL_FAILED): (_S.ENDED, ("drop_decode", "answer_error")),
    (_S.HELD, _E.PREFILL_REPLACED): (_S.OVER, ("relay", "drop_decode", "give_back")),
    (_S.HELD, _E.EXPIRED): (_S.ENDED, ("drop_prefill", "drop_decode", "answer_error")),
    (_S.HELD, _E.CLOSED): (_S.OVER, ("drop_prefill", "drop_decode", "finish")),
    (_S.ANSWERING_PARALLEL, _E.PREFILL_DONE): (_S.ANSWERING, ()),
    # A decode that is ended while it answers closes its answer in good order (SGLang: finish reason "abort"): it may be
    # told only when the client can no longer get to see that.
    (_S.ANSWERING_PARALLEL, _E.PREFILL_FAILED): (_S.CUT, ("answer_error",)),
    (_S.ANSWERING_PARALLEL, _E.EXPIRED): (_S.CUT, ("drop_prefill", "answer_error")),
    # The stream's end alone does not tell a finished answer from a client that left: a prefill that is about to answer
    # is let do so, or each short generation would cost the worker a broken connection.
    (_S.ANSWERING_PARALLEL, _E.CLOSED): (_S.LINGERING, ("linger",)),
    (_S.ANSWERING, _E.EXPIRED): (_S.CUT, ("answer_error",)),
    # As in DECODING, of a stream whose head came before.
    (_S.ANSWERING, _E.PREFILL_FAILED): (_S.CUT, ("answer_error",)),
    (_S.ANSWERING, _E.CLOSED): (_S.OVER, ("finish",)),
    (_S.LINGERING, _E.PREFILL_DONE): (_S.OVER, ("finish",)),
    (_S.LINGERING, _E.PREFILL_FAILED): (_S.OVER, ("finish",)),
    (_S.LINGERING, _E.EXPIRED): (_S.OVER, ("drop_prefill", "finish")),
    (_S.LINGERING, _E.LINGERED): (_S.OVER, ("drop_prefill", "drop_decode", "finish")),
    # The decode's head may cross our own answer on the way.
    (_S.ENDED, _E.DECODE_HEAD): (_S.ENDED, ()),
    (_S.ENDED, _E.DECODE_HEAD_EARLY): (_S.ENDED, ()),
    (_S.ENDED, _E.DECODE_REFUSED): (_S.ENDED, ()),
    (_S.ENDED, _E.EXPIRED): (_S.ENDED, ()),
    (_S.ENDED, _E.CLOSED): (_S.OVER, ("finish",)),
    (_S.CUT, _E.EXPIRED): (_S.CUT, ()),
    (_S.CUT, _E.CLOSED): (_S.OVER, ("drop_decode", "finish")),
}
# The same, indexed by two small integers: a tuple look-up costs a third of a dict look-up by a pair of enums.
_ROWS: Final = tuple(tuple(RULES.get((state, event)) for event in Event) for state in State)


def rule_of(state: State, event: Event) -> Rule:
    """Where ``event`` leads from ``state``, and what is to be done, in order, by the names of Outside's methods.

    Raises:
        IllegalTransitionError: the table has no such pair.
    """
    rule = _ROWS[state][event]
    if rule is None:
        raise IllegalTransitionError(state, event)
    return rule
