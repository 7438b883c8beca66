"""``pd-extproc envoy-config``: print the Envoy configuration that ``launch`` would use with the same options.

Or what an Envoy of somebody else's needs in the place of it: ``--snippet``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from extproc import flags
from extproc.dataplane.bootstrap import bootstrap_yaml
from extproc.dataplane.config import DEBIAN_CA_FILE, STANDALONE, DataplaneConfig
from extproc.dataplane.snippets import SNIPPETS, Place, SnippetConfig
from extproc.flags import read_settings
from extproc.transport.address import TcpAddress, parse_address
from extproc.values import EGRESS_ENVOY, Destination
from extproc.workers.endpoints import Endpoint
from extproc.workers.resolver import literal

if TYPE_CHECKING:
    import argparse

    from extproc.settings import Settings
    from extproc.workers.spec import WorkerSpec

__all__ = ["add_arguments", "control_target", "dataplane_config", "egress_target", "run"]

_WILDCARDS = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}  # noqa: S104 - replaced, not bound
_PLACE: Final = Place()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add every setting to ``parser``, and what is asked of this command only."""
    flags.add_arguments(parser)
    group = parser.add_argument_group("For an Envoy of a mesh (docs/deploy/meshes.md)")
    group.add_argument("--snippet", choices=SNIPPETS, metavar="NAME", help=f"print this instead: {', '.join(SNIPPETS)}")
    for flag, default, text in (
        ("namespace", _PLACE.namespace, "of the objects"),
        ("gateway", _PLACE.gateway, "the Gateway that they are for"),
        ("service", _PLACE.service, "Service of the sidecar"),
        ("workers", _PLACE.workers, "Service or InferencePool of the workers, and their label pd-pool"),
    ):
        group.add_argument(f"--snippet-{flag}", metavar="NAME", default=default, help=f"{text} [default: {default}]")
    group.add_argument(
        "--snippet-worker-port",
        metavar="PORT",
        type=int,
        default=_PLACE.worker_port,
        help=f"port of all workers [default: {_PLACE.worker_port}]",
    )


def dataplane_config(settings: Settings) -> DataplaneConfig:
    """The part of the settings that Envoy must know."""
    return DataplaneConfig(
        extproc=_reachable(settings.extproc_address),
        ads=_reachable(settings.ads_address),
        control=_reachable(settings.control_address),
        egress=_listening(settings.egress_address) if settings.egress == EGRESS_ENVOY else None,
        client_host=settings.host,
        client_port=settings.port,
        admin_port=settings.envoy_admin_port,
        status_host=settings.prometheus_host,
        status_port=settings.envoy_status_port,
        request_timeout=settings.request_timeout_secs,
        max_payload_bytes=settings.max_payload_size,
        concurrency=settings.envoy_concurrency,
        ca_file=DEBIAN_CA_FILE if settings.worker_ca_file is None else str(settings.worker_ca_file),
        late_answers=settings.retry_released,
        destination_header=settings.destination is not Destination.METADATA,
        access_log=settings.access_log,
    )


def egress_target(settings: Settings) -> str | TcpAddress:
    """Where the service connects to Envoy's egress listener: the path of a socket file, or a TCP address."""
    address = parse_address(_reachable(settings.egress_address))
    return address if isinstance(address, TcpAddress) else address.path


def control_target(settings: Settings) -> str:
    """Where a client on this machine finds the control API: ``unix:/path`` or ``host:port``."""
    return _reachable(settings.control_address)


def run(namespace: argparse.Namespace) -> int:
    """Print the configuration. Raises SettingsError."""
    settings = read_settings(namespace)
    if namespace.snippet is None:
        print(bootstrap_yaml(dataplane_config(settings)), end="")
    else:
        print(SNIPPETS[namespace.snippet](snippet_config(settings, _place(namespace))), end="")
    return 0


def snippet_config(settings: Settings, place: Place = _PLACE) -> SnippetConfig:
    """What the settings say to an Envoy that is not ours. Sockets that only ours could reach are none of it."""
    dataplane = replace(dataplane_config(settings), egress=None)  # for which those Envoys have no listener
    if "extproc_address" not in settings.model_fields_set:
        dataplane = replace(dataplane, extproc=STANDALONE.extproc, ads=STANDALONE.ads, control=STANDALONE.control)
    prefill, decode = ([_endpoint(worker) for worker in workers] for workers in (settings.prefill, settings.decode))
    return SnippetConfig(dataplane, place, prefill, decode)


def _place(namespace: argparse.Namespace) -> Place:
    return Place(
        namespace=namespace.snippet_namespace,
        gateway=namespace.snippet_gateway,
        service=namespace.snippet_service,
        workers=namespace.snippet_workers,
        worker_port=namespace.snippet_worker_port,
    )


def _endpoint(worker: WorkerSpec) -> Endpoint:
    """A worker that is to stand in a file: Envoy looks its name up."""
    url = worker.url
    return Endpoint(url.host, url.port, url.host, tls=url.tls, grpc=url.is_grpc)


def _listening(address: str) -> str:
    """Where Envoy listens for a service that connects to ``address``: on all its addresses, where that is a name."""
    parsed = parse_address(address)
    if isinstance(parsed, TcpAddress) and literal(parsed.host) is None:
        return f"0.0.0.0:{parsed.port}"
    return address


def _reachable(address: str) -> str:
    """Where who is on the same host connects for a service that listens on ``address``."""
    host, colon, port = address.rpartition(":")
    return f"{_WILDCARDS.get(host, host)}{colon}{port}"
