"""What admission is told of the settings."""

from __future__ import annotations

from typing import Final

from extproc.admission.gate import GateSettings
from extproc.admission.legs import LegSettings
from extproc.admission.priority import CLASSES, Priority, Tenants
from extproc.settings import PriorityName, Settings, usable_cores

_PER_CORE: Final = 1024
_AT_LEAST: Final = 4096
_QUEUE: Final = LegSettings()


def gate_settings(settings: Settings) -> GateSettings:
    """For the gate. ``--max-concurrent-requests`` is also what may come at once after a pause, where it was given."""
    given = settings.max_concurrent_requests
    limit = max(_AT_LEAST, _PER_CORE * usable_cores()) if given < 0 else given
    return GateSettings(
        limit=limit,
        queue_size=settings.queue_size,
        queue_timeout=settings.queue_timeout_secs,
        rate=float(settings.rate_limit_tokens_per_second or 0),
        burst=max(0, given),
        classes=CLASSES if settings.priority_scheduler_enabled else None,
    )


def leg_settings(settings: Settings) -> LegSettings:
    """For those that wait for workers."""
    size, timeout = settings.prefill_queue_size, settings.prefill_queue_timeout_secs
    return LegSettings(
        prefill_limit=max(0, settings.prefill_max_inflight_requests_per_worker),
        prefill_queue_size=_QUEUE.prefill_queue_size if size is None else size,
        prefill_queue_timeout=_QUEUE.prefill_queue_timeout if timeout is None else timeout,
        decode_wait=settings.pd_admission_wait_secs,
    )


def tenants(settings: Settings) -> Tenants:
    """Who may ask for which class."""
    highest = {tenant: _priority(name) for tenant, name in settings.tenant_max_priority}
    return Tenants(highest, _priority(settings.default_max_priority))


def _priority(name: PriorityName) -> Priority:
    return Priority[name.name]
