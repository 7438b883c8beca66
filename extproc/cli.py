"""``pd-extproc``: names the commands, and loads only the one that is asked for.

Exit codes: 0 done, 1 failed, 2 wrong usage or settings, 130 interrupted, 141 nobody reads what is printed.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from extproc import __version__

_UNREAD = 141  # as shells call the end by SIGPIPE
_DESCRIPTION = "A prefill/decode gateway for LLM inference: Envoy in front, a Python ext_proc service beside it."


class CommandModule(Protocol):
    """What a command's module offers."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's own options."""

    def run(self, namespace: argparse.Namespace) -> int:
        """Do it; returns the exit code."""


@dataclass(frozen=True, slots=True)
class _Command:
    module: str
    summary: str
    has_settings: bool = True

    def load(self) -> CommandModule:
        """Import the module: pydantic, Envoy's types and the servers take longer than ``--help`` may."""
        return cast("CommandModule", importlib.import_module(self.module))


COMMANDS = {
    "launch": _Command("extproc.launch", "start the gateway: Envoy and the service beside it"),
    "demo": _Command("extproc.demo.cli", "start everything, with mock workers or real vLLM, and show a few requests"),
    "mock": _Command("extproc.mock.cli", "start one mock worker"),
    "health": _Command("extproc.health", "ask whether a gateway or a worker is well", has_settings=False),
    "envoy-config": _Command("extproc.envoy_config", "print the Envoy configuration that launch would use"),
}


class _Formatter(argparse.HelpFormatter):
    """Wide enough for one line a command."""

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, **(options | {"max_help_position": 24, "width": 100}))
        self._action_max_length = 18  # argparse leaves out the indentation of commands when it computes this


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (the process's own by default); returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="pd-extproc", description=_DESCRIPTION, allow_abbrev=False, formatter_class=_Formatter
    )
    parser.add_argument("--version", action="version", version=f"pd-extproc {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, title="commands (COMMAND --help tells more)")
    subparsers = {
        name: commands.add_parser(name, help=command.summary, description=command.summary, allow_abbrev=False)
        for name, command in COMMANDS.items()
    }
    name = arguments[0] if arguments else ""
    if name not in COMMANDS:
        parser.parse_args(arguments)  # --help, --version or an error: all of them exit
        return 2
    return _run(name, subparsers[name], arguments[1:])


def _run(name: str, parser: argparse.ArgumentParser, arguments: Sequence[str]) -> int:
    module = COMMANDS[name].load()
    module.add_arguments(parser)
    if not COMMANDS[name].has_settings:
        return module.run(parser.parse_args(arguments))

    from extproc.flags import split_prefill  # noqa: PLC0415 - pydantic again
    from extproc.sources import SettingsError  # noqa: PLC0415 - pydantic again

    namespace = parser.parse_args(split_prefill(arguments))
    try:
        code = module.run(namespace)
        sys.stdout.flush()
    except BrokenPipeError:  # "| head" has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or it is tried once more at the end
        return _UNREAD
    except SettingsError as error:
        for problem in error.problems:
            print(f"{parser.prog}: error: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return code
