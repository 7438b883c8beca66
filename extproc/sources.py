"""Where settings come from: flags, then ``PD_EXTPROC_*`` variables, then the YAML file, then defaults.

An option is taken whole from the first source that has it. Every complaint names the source and the key in it.
"""

from __future__ import annotations

import difflib
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import ValidationError

from extproc.peer_options import ALIASES, NOT_AVAILABLE_YET, not_available
from extproc.settings import Settings

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

VARIABLE_PREFIX = "PD_EXTPROC_"
CONFIG_VARIABLE = f"{VARIABLE_PREFIX}CONFIG"

_NOT_YET = frozenset(name.replace("-", "_") for name in NOT_AVAILABLE_YET)
_OTHER_NAMES = {name.replace("-", "_"): field.replace("-", "_") for name, field in ALIASES.items()}
_SHOWN_LENGTH = 80
_SECRET = frozenset({"api_key", "control_plane_api_keys"})


class SettingsError(Exception):
    """Settings that cannot be used; each problem is one line that names its source and key."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


@dataclass(frozen=True, slots=True)
class _Value:
    """What a source says of one field, and the name under which it says so."""

    raw: object
    shown_name: str


def flag_of(field: str) -> str:
    """The command line's name of a field."""
    return f"--{field.replace('_', '-')}"


def variable_of(field: str) -> str:
    """The environment's name of a field."""
    return f"{VARIABLE_PREFIX}{field.upper()}"


def load_settings(flags: Mapping[str, object], environ: Mapping[str, str], config: str | None = None) -> Settings:
    """Merge the sources and validate the result.

    ``flags`` has the given options only, by field name. ``config`` is the YAML file's path; without it,
    ``PD_EXTPROC_CONFIG`` is. Raises SettingsError with everything that is wrong.
    """
    config = environ.get(CONFIG_VARIABLE) if config is None else config
    problems: list[str] = []
    values: dict[str, _Value] = {}
    if config is not None:
        values |= _from_yaml(Path(config), problems)
    values |= _from_environment(environ, problems)
    values |= {field: _Value(raw, flag_of(field)) for field, raw in flags.items()}
    try:
        settings = Settings.model_validate({field: value.raw for field, value in values.items()})
    except ValidationError as error:
        problems += [_complaint(detail, values) for detail in error.errors() if _is_a_cause(detail)]
    if problems:
        raise SettingsError(problems)
    return settings


def _from_environment(environ: Mapping[str, str], problems: list[str]) -> dict[str, _Value]:
    values: dict[str, _Value] = {}
    for variable, text in environ.items():
        if not variable.startswith(VARIABLE_PREFIX) or variable == CONFIG_VARIABLE:
            continue
        field = variable.removeprefix(VARIABLE_PREFIX).lower()
        field = _OTHER_NAMES.get(field, field)
        if field in values:
            problems.append(f"{variable}: given twice, as {values[field].shown_name}")
        elif field in Settings.model_fields and variable.isupper():
            values[field] = _Value(text, variable)
        elif field in _NOT_YET:
            problems.append(not_available(field.replace("_", "-"), variable))
        else:
            known = [CONFIG_VARIABLE, *map(variable_of, Settings.model_fields)]
            problems.append(f"environment: unknown variable {variable}{_nearest(variable, known)}")
    return values


def _from_yaml(path: Path, problems: list[str]) -> dict[str, _Value]:
    values: dict[str, _Value] = {}
    for key, raw in _read_yaml(path).items():
        field = str(key).replace("-", "_")
        field = _OTHER_NAMES.get(field, field)
        shown_name = f"{path}: {key}"
        if field in values:
            problems.append(f"{shown_name}: given twice")
        elif field in Settings.model_fields:
            values[field] = _Value(raw, shown_name)
        elif field in _NOT_YET:
            problems.append(not_available(field.replace("_", "-"), shown_name))
        else:
            problems.append(f"{path}: unknown key {key}{_nearest(field, Settings.model_fields)}")
    return values


def _read_yaml(path: Path) -> dict[Any, object]:
    try:
        document = yaml.load(path.read_bytes(), _UniqueKeyLoader)  # noqa: S506 - a SafeLoader
    except OSError as error:
        raise SettingsError([f"{path}: {error.strerror}"]) from None
    except yaml.YAMLError as error:
        raise SettingsError([f"{path}: not valid YAML: {' '.join(str(error).split())}"]) from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise SettingsError([f"{path}: must be a mapping of option names to values"])
    return document


class _UniqueKeyLoader(yaml.SafeLoader):
    """PyYAML keeps the last of several equal keys; a settings file that has them is a mistake."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:  # noqa: FBT001, FBT002 - PyYAML's signature
        """The mapping; raises ConstructorError when a key occurs twice."""
        seen: set[object] = set()
        for key_node, _ in node.value:
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key_node.value!r} occurs twice", key_node.start_mark
                )
            seen.add(key_node.value if isinstance(key_node.value, Hashable) else id(key_node))
        return super().construct_mapping(node, deep)


def _nearest(name: str, known: Iterable[str]) -> str:
    matches = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {matches[0]}?" if matches else ""


def _is_a_cause(detail: ErrorDetails) -> bool:
    """Not the mere consequence of another error: a default that could not be computed."""
    return detail["type"] != "default_factory_not_called"


def _complaint(detail: ErrorDetails, values: Mapping[str, _Value]) -> str:
    cause = detail.get("ctx", {}).get("error")
    message = str(cause) if isinstance(cause, ValueError) else detail["msg"]
    if not detail["loc"]:  # a rule between fields; its message names them
        return message
    field = str(detail["loc"][0])
    value = values.get(field)
    shown_name = f"{flag_of(field)} (its default)" if value is None else value.shown_name
    given = repr(detail["input"])
    if field in _SECRET or not isinstance(detail["input"], str | int | float) or given in message:
        return f"{shown_name}: {message}"
    return f"{shown_name}: {message} (got {given if len(given) <= _SHOWN_LENGTH else f'{given[:_SHOWN_LENGTH]}...'})"
