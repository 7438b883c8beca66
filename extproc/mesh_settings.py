"""The settings of who does what between the service and an Envoy, ours or another's; :mod:`extproc.settings` has the
others."""

from __future__ import annotations

from typing import Annotated

from extproc.discovery_settings import DiscoverySettings
from extproc.options import Group, Option
from extproc.values import Count, Destination, EgressText, LegsMode


class MeshSettings(DiscoverySettings):
    """A part of :class:`extproc.settings.Settings`."""

    # fmt: off
    mode: Annotated[LegsMode, Option(
        Group.WORKERS, "gateway; select-only: llm-d sidecars send the legs", "NAME"
    )] = LegsMode.GATEWAY
    egress: Annotated[EgressText, Option(
        Group.ENVOY, "our legs go by envoy, direct (to workers) or http://HOST:PORT", "WAY")] = "envoy"
    destination: Annotated[Destination, Option(
        Group.ENVOY, "Envoy is told the worker by metadata, header or both", "FORM")] = Destination.METADATA
    destination_hosts: Annotated[Count, Option(
        Group.ENVOY, "workers that it may be told of, to try in order", "COUNT")] = 4
    # fmt: on
