"""The settings as command line options: one per field of the model, so that ``--help`` cannot say anything else."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

from extproc.options import Group, Option
from extproc.peer_options import ALIASES, NOT_AVAILABLE_YET, not_available
from extproc.settings import Settings
from extproc.sources import SettingsError, flag_of, load_settings

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

# With these, every option of the longest name and text still fits on one line; a test holds it so.
_WIDTH = 128
_HELP_COLUMN = 48

_EPILOG = """\
other ways to set an option:
  PD_EXTPROC_PORT=30000   environment: the option's name in capitals behind PD_EXTPROC_; switches take true or false
  port: 30000             YAML file of --config (or PD_EXTPROC_CONFIG): the option's name with underscores
  Flags win over the environment, the environment over the file. A list is replaced as a whole, never added to.
  PD_EXTPROC_PREFILL="http://a:8000 8998;http://b:8000 none"      PD_EXTPROC_DECODE="http://c:8001;http://d:8001"
  prefill: ["http://a:8000 8998", {url: "http://b:8000", kv_connector: NixlConnector, labels: {zone: a}}]
  A mapping takes the fields of POST /workers: kv_transfer_config for a MultiConnector, labels, api_key, models ...
  As a flag or in the environment it is JSON: --decode '{"url": "http://c:8001", "kv_connector": "NixlConnector"}'

Options of smg launch that are not listed here are recognised, and refused as not available yet.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--config`` and every setting to ``parser``."""
    parser.formatter_class = _OneLineFormatter
    parser.usage = "%(prog)s --pd-disaggregation --prefill URL [PORT|none] ... --decode URL ... [OPTION ...]"
    parser.epilog = _EPILOG
    parser.add_argument(
        "--config", metavar="FILE", default=argparse.SUPPRESS, help="YAML file with any of the options below"
    )
    groups = {group: parser.add_argument_group(group.value) for group in Group}
    for name, field in Settings.model_fields.items():
        option = next(item for item in field.metadata if isinstance(item, Option))
        _add_setting(groups[option.group], name, field, option)
    for alias, name in ALIASES.items():
        dest = name.replace("-", "_")
        hidden: dict[str, Any] = {"dest": dest, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
        if Settings.model_fields[dest].annotation is bool:
            parser.add_argument(f"--{alias}", _opposite(f"--{alias}"), action=_Switch, **hidden)
        else:
            parser.add_argument(f"--{alias}", **hidden)
    for name in sorted(NOT_AVAILABLE_YET):
        parser.add_argument(f"--{name}", action=_NotAvailable, help=argparse.SUPPRESS)


def read_settings(namespace: argparse.Namespace) -> Settings:
    """The settings that parsed arguments, the environment and the YAML file add up to; raises SettingsError."""
    flags = {name: value for name, value in vars(namespace).items() if name in Settings.model_fields}
    refused = [not_available(flag.removeprefix("--"), flag) for flag in getattr(namespace, _NotAvailable.collected, ())]
    try:
        settings = load_settings(flags, os.environ, getattr(namespace, "config", None))
    except SettingsError as error:
        raise SettingsError([*refused, *error.problems]) from None
    if refused:
        raise SettingsError(refused)
    return settings


def split_prefill(argv: Sequence[str]) -> list[str]:
    """``--prefill=URL`` as two arguments: argparse would not take the port that may follow."""
    arguments: list[str] = []
    for argument in argv:
        arguments += argument.split("=", 1) if argument.startswith("--prefill=") else [argument]
    return arguments


def _add_setting(group: argparse._ArgumentGroup, name: str, field: FieldInfo, option: Option) -> None:
    text = f"{option.help} [default: {_shown_default(field, option)}]"
    common: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": text, "metavar": option.metavar}
    if field.annotation is bool:
        group.add_argument(flag_of(name), _opposite(flag_of(name)), action=_Switch, **common)
    elif name == "prefill":
        group.add_argument(flag_of(name), action=_Prefill, nargs="+", **common)
    elif name in ("decode", "prefill_kv_engine_id", "model_alias", "control_plane_api_keys", "tenant_max_priority"):
        group.add_argument(flag_of(name), action="append", **common)
    elif name in ("request_id_headers", "routing_key_headers") or name.endswith("selector"):
        group.add_argument(flag_of(name), nargs="+", **common)
    else:
        group.add_argument(flag_of(name), **common)


def _shown_default(field: FieldInfo, option: Option) -> str:
    default = field.default
    if option.default is not None:
        return option.default
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, Enum):
        return str(default.value)
    return " ".join(default) if isinstance(default, tuple) else str(default)


def _opposite(flag: str) -> str:
    return f"--{flag.removeprefix('--no-')}" if flag.startswith("--no-") else f"--no-{flag.removeprefix('--')}"


class _Switch(argparse.Action):
    """``--x`` and ``--no-x``, the former first in ``option_strings``."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **options)

    def __call__(
        self,
        parser: argparse.ArgumentParser,  # noqa: ARG002 - argparse's signature
        namespace: argparse.Namespace,
        values: object,  # noqa: ARG002 - argparse's signature
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, option_string == self.option_strings[0])


class _Prefill(argparse.Action):
    """``--prefill URL [PORT|none]``, repeatable; the port is checked with the rest of the settings."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,  # noqa: ARG002 - argparse's signature
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,  # noqa: ARG002 - argparse's signature
    ) -> None:
        setattr(namespace, self.dest, [*getattr(namespace, self.dest, ()), " ".join(values or ())])


class _NotAvailable(argparse.Action):
    """An option that is recognised with whatever values follow it, to be refused by name."""

    collected = "not_available"

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:  # noqa: ARG002 - one list for all
        super().__init__(option_strings, self.collected, nargs="*", default=(), **options)

    def __call__(
        self,
        parser: argparse.ArgumentParser,  # noqa: ARG002 - argparse's signature
        namespace: argparse.Namespace,
        values: object,  # noqa: ARG002 - argparse's signature
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, (*getattr(namespace, self.dest), option_string))


class _OneLineFormatter(argparse.RawDescriptionHelpFormatter):
    """One line an option, whatever the terminal's width: the text can be searched and cut by line."""

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, **(options | {"max_help_position": _HELP_COLUMN, "width": _WIDTH}))

    def _format_action(self, action: argparse.Action) -> str:
        """Of an option whose name is longer than the column, the text would begin a line of its own."""
        text = super()._format_action(action)
        name, _, help_text = text.partition("\n")
        alone = name.strip() == self._format_action_invocation(action)
        return f"{name}  {help_text.strip()}\n" if alone and help_text else text

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if isinstance(action, _Switch):
            flag = action.option_strings[0]
            return flag if flag.startswith("--no-") else f"--[no-]{flag.removeprefix('--')}"
        if isinstance(action, _Prefill):
            return "--prefill URL [PORT|none]"
        return super()._format_action_invocation(action)
