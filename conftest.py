"""What all tests need: patience on busy machines, and Ctrl-C."""

from __future__ import annotations

import signal

from hypothesis import HealthCheck, settings

# Machines that run the tests may be busy, or stop for seconds: that says nothing of the code or of what is generated.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

# A shell that starts something in the background has it ignore SIGINT, and whatever it starts in turn.
signal.signal(signal.SIGINT, signal.default_int_handler)
