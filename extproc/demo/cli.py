"""``pd-extproc demo``: which workers to show, and for how long."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final

import uvloop

from extproc.demo import stage
from extproc.demo.engines import RecipeMissingError, vllm_recipe
from extproc.demo.mock_engines import SglangShow, VllmShow
from extproc.demo.real import RealShow
from extproc.mock.vllm.worker import MOONCAKE, NIXL

_CONNECTORS: Final = {"nixl": NIXL, "mooncake": MOONCAKE}
_ENGINES_DIR: Final = "~/.cache/pd-extproc/engines"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--engine",
        choices=["sglang", "vllm", "vllm-cpu"],
        default="sglang",
        help="sglang, vllm: mock workers; vllm-cpu: real vLLM on this CPU, installed if need be (default: sglang)",
    )
    parser.add_argument(
        "--kv-connector", choices=list(_CONNECTORS), help="vllm: how KV caches are passed on (default: nixl)"
    )
    parser.add_argument(
        "--engines-dir",
        metavar="DIR",
        help=f"vllm-cpu: where vLLM is, or is installed: about 3 GB (default: {_ENGINES_DIR})",
    )
    parser.add_argument("--once", action="store_true", help="end after the show; exit code 0 when all went well")
    parser.add_argument("--port", type=int, default=30000, help="port for clients; 0: any free one (default: 30000)")


def run(namespace: argparse.Namespace) -> int:
    """Show; returns 0 when everything was as it should be, 1 when not, 130 when interrupted before the end."""
    try:
        show = _show(namespace)
    except _UsageError as error:
        print(f"pd-extproc demo: error: {error}", file=sys.stderr)
        return 2
    return uvloop.run(stage.give(show, namespace.port, once=namespace.once))


class _UsageError(Exception):
    """The options do not go together, or what they ask for cannot be had here."""


def _show(namespace: argparse.Namespace) -> stage.Show:
    engine = namespace.engine
    if not 0 <= namespace.port <= 65535:
        raise _UsageError(f"--port {namespace.port}: Port must be between 1 and 65535")
    if namespace.kv_connector and engine != "vllm":
        raise _UsageError("--kv-connector is for --engine vllm")
    if namespace.engines_dir and engine != "vllm-cpu":
        raise _UsageError("--engines-dir is for --engine vllm-cpu")
    if engine == "sglang":
        return SglangShow()
    if engine == "vllm":
        return VllmShow(_CONNECTORS[namespace.kv_connector or "nixl"])
    try:
        return RealShow(vllm_recipe(), Path(namespace.engines_dir or _ENGINES_DIR).expanduser().absolute())
    except RecipeMissingError as error:
        raise _UsageError(error) from None
