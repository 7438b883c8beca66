"""What all tests need: patience on busy machines, Ctrl-C, and an end in order when they are told to end."""

from __future__ import annotations

import signal
from types import FrameType

from hypothesis import HealthCheck, settings

# Machines that run the tests may be busy, or stop for seconds: that says nothing of the code or of what is generated.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

# A shell that starts something in the background has it ignore SIGINT, and whatever it starts in turn.
signal.signal(signal.SIGINT, signal.default_int_handler)

# So does nohup with SIGHUP. What tests start is to heed it: a handler of ours is not passed on, unlike its absence.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda _number, _frame: None)


def _end_in_order(_number: int, _frame: FrameType | None) -> None:
    """As Ctrl-C does it: fixtures put back what they have changed. Said twice (timeout and make do), it counts once."""
    signal.signal(signal.SIGTERM, lambda _number, _frame: None)
    raise KeyboardInterrupt


signal.signal(signal.SIGTERM, _end_in_order)
