"""``pd-extproc envoy-config``: print the Envoy configuration that ``launch`` would use with the same options."""

from __future__ import annotations

from typing import TYPE_CHECKING

from extproc.dataplane.bootstrap import bootstrap_yaml
from extproc.dataplane.config import DEBIAN_CA_FILE, DataplaneConfig
from extproc.flags import add_arguments, read_settings
from extproc.values import EGRESS_ENVOY, Destination

if TYPE_CHECKING:
    import argparse

    from extproc.settings import Settings

__all__ = ["add_arguments", "dataplane_config", "run"]

_WILDCARDS = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}  # noqa: S104 - replaced, not bound


def dataplane_config(settings: Settings) -> DataplaneConfig:
    """The part of the settings that Envoy must know."""
    return DataplaneConfig(
        extproc=_reachable(settings.extproc_address),
        ads=_reachable(settings.ads_address),
        control=_reachable(settings.control_address),
        egress=settings.egress_address if settings.egress == EGRESS_ENVOY else None,
        client_host=settings.host,
        client_port=settings.port,
        admin_port=settings.envoy_admin_port,
        request_timeout=settings.request_timeout_secs,
        max_payload_bytes=settings.max_payload_size,
        concurrency=settings.envoy_concurrency,
        ca_file=DEBIAN_CA_FILE if settings.worker_ca_file is None else str(settings.worker_ca_file),
        late_answers=settings.retry_released,
        destination_header=settings.destination is not Destination.METADATA,
        access_log=settings.access_log,
    )


def run(namespace: argparse.Namespace) -> int:
    """Print the configuration. Raises SettingsError."""
    print(bootstrap_yaml(dataplane_config(read_settings(namespace))), end="")
    return 0


def _reachable(address: str) -> str:
    """Where Envoy on the same host connects for a service that listens on ``address``."""
    host, colon, port = address.rpartition(":")
    return f"{_WILDCARDS.get(host, host)}{colon}{port}"
