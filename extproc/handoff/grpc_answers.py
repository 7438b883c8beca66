"""What a prefill's answer over gRPC says: that of a leg that is never a stream, so one message and the call's end."""

from __future__ import annotations

import random
from typing import Final

from extproc.engines.engine import Engine
from extproc.engines.frames import messages
from extproc.errors import GatewayError
from extproc.generation.asked import Generation
from extproc.generation.events import Complete

_BROKEN: Final = ("abort", "error")
# SGLang (0.5.23) takes a request whose name begins so for a probe: it is thrown away while there are others, and cannot
# be ended. A client may well call its request that.
_OF_PROBES: Final = "HEALTH_CHECK"


def leg_name(generation: Generation) -> str:
    """A name for both legs of an attempt: no other request's name begins with it, or ever was the same."""
    name = generation.name
    return f"{'_' if name.startswith(_OF_PROBES) else ''}{name}-{random.getrandbits(64):016x}"


def ended(engine: Engine, answer: bytes) -> Complete | None:
    """The end of the sequence, as ``answer`` tells it; None where it does not, or cannot be read."""
    try:
        events = [engine.event(message) for message in messages(answer)]
    except GatewayError:
        return None
    last = events[-1] if events else None
    return last if isinstance(last, Complete) else None


def broke_off(engine: Engine, answer: bytes) -> bool:
    """Whether an answer whose call ended well says nothing of the end that can be read, or that it was not one."""
    last = ended(engine, answer)
    return last is None or last.finish in _BROKEN
