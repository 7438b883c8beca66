"""``pd-extproc launch``: start the gateway and serve until told to stop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from extproc import logs
from extproc.flags import add_arguments, read_settings
from extproc.sources import SettingsError

if TYPE_CHECKING:
    import argparse

__all__ = ["add_arguments", "run"]


def run(namespace: argparse.Namespace) -> int:
    """Serve; the exit code is the service's. Raises SettingsError."""
    settings = read_settings(namespace)
    if not settings.pd_disaggregation:
        raise SettingsError(["only prefill/decode mode is available yet: add --pd-disaggregation"])
    logs.configure(settings.log_level, as_json=settings.log_json)

    from extproc.service import run as serve  # noqa: PLC0415 - after the settings: a wrong flag is answered at once

    return serve(settings)
