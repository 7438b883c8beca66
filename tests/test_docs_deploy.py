"""The guides to deployment: each command is run here, or said to need a cluster."""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from extproc import envoy_config
from extproc.cli import main
from extproc.dataplane.snippets import SNIPPETS
from extproc.flags import read_settings, split_prefill
from extproc.settings import Settings

ROOT = Path(__file__).parent.parent
# What other parts of the project test; see the modules of the same name.
OURS = [path for path in (ROOT / "docs/deploy").glob("*.md") if path.name != "docker.md"]
MESHES = (ROOT / "docs/deploy/meshes.md").read_text()


def blocks(text: str, kind: str) -> list[str]:
    return re.findall(rf"^```{re.escape(kind)}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def commands(text: str, kind: str = "console") -> list[str]:
    found = [re.findall(r"^\$ ((?:\\\n|.)*)", block, re.MULTILINE) for block in blocks(text, kind)]
    return [command.replace("\\\n", " ") for block in found for command in block]


RUN = [command for path in OURS for command in commands(path.read_text())]


@pytest.mark.parametrize("command", RUN)
def test_commands_do_what_they_say(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    program, *arguments = shlex.split(command)
    if program == "kubectl":
        if shutil.which(program) is None:
            pytest.skip("no kubectl")
        assert arguments[0] == "kustomize"  # needs no cluster
        printed = subprocess.run([program, *arguments], cwd=ROOT, check=True, capture_output=True, text=True)
        assert "kind: Deployment" in printed.stdout
        return
    assert program == "pd-extproc"
    if ">" in arguments:
        arguments = arguments[: arguments.index(">")]
    assert main(arguments) == 0
    assert capsys.readouterr().out


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.name)
def test_no_command_is_hidden(path: Path) -> None:
    text = path.read_text()
    known = {"console", "console needs-a-cluster", "yaml"}
    kinds = re.findall(r"^```(.*)\n(?:.*\n)*?^```$", text, re.MULTILINE)
    assert set(kinds) <= known


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.name)
def test_what_is_linked_and_named_is_there(path: Path) -> None:
    text = path.read_text()
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        assert (path.parent / link).exists(), link
    for named in re.findall(r"`((?:deploy|envoy|integration|tests)/[\w./-]+)`", text):
        assert (ROOT / named).exists(), named


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.name)
def test_options_named_are_there(path: Path) -> None:
    parser = argparse.ArgumentParser()
    envoy_config.add_arguments(parser)
    known = {option for action in parser._actions for option in action.option_strings}
    others = {"--concurrency", "--from-literal", "--config"}
    assert set(re.findall(r"`(--[a-z][a-z-]*[a-z])\b(?!-)", path.read_text())) <= known | others


def test_the_options_for_each_snippet_are_settings() -> None:
    rows = re.findall(r"^\| ((?:`[a-z-]+`(?:, )?)+) \| `(--no-envoy [^`]*)`", MESHES, re.MULTILINE)
    named = {name: options for names, options in rows for name in re.findall(r"`([a-z-]+)`", names)}
    assert set(named) == set(SNIPPETS)
    for name, options in named.items():
        parser = argparse.ArgumentParser()
        envoy_config.add_arguments(parser)
        settings = read_settings(parser.parse_args(split_prefill(options.split())))
        assert isinstance(settings, Settings)
        head = (ROOT / f"envoy/snippets/{name}.yaml").read_text().partition("\n\n")[0].replace("\n#", " ")
        said = set(re.findall(r"--[a-z-]+", head))
        assert set(re.findall(r"--[a-z-]+", options)) <= said


def test_each_snippet_has_a_column() -> None:
    (header,) = re.findall(r"^\| \| (.*) \|$", MESHES, re.MULTILINE)
    assert re.findall(r"`([a-z-]+)`", header) == list(SNIPPETS)
