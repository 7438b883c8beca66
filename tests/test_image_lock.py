"""The lock files of the image: every requirement of pyproject.toml is met, exactly and by hash."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
ASKED = {
    "requirements.lock": PROJECT["project"]["dependencies"],
    "envoy.lock": PROJECT["project"]["optional-dependencies"]["envoy"],
    "build.lock": PROJECT["build-system"]["requires"],
}


def locked(name: str) -> list[tuple[Requirement, list[str]]]:
    """The requirements of a lock file, and the hashes of each."""
    text = (ROOT / "image" / name).read_text()
    entries = re.findall(r"^([a-z0-9].*?) \\\n((?:    --hash=.*\n?)+)", text, re.MULTILINE)
    lines = [line for line in text.splitlines() if not line.startswith(("#", "    --hash="))]
    assert len(entries) == len(lines), "something in it is no requirement with hashes"
    return [(Requirement(line), re.findall(r"sha256:([0-9a-f]{64})", hashes)) for line, hashes in entries]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize("name", ASKED)
def test_every_requirement_is_met(name: str) -> None:
    """Run scripts/lock-requirements.sh when this fails."""
    versions: dict[str, list[str]] = {}
    for requirement, _ in locked(name):
        (pin,) = requirement.specifier
        assert pin.operator == "=="
        versions.setdefault(normal(requirement.name), []).append(pin.version)
    for text in ASKED[name]:
        asked = Requirement(text)
        found = versions.get(normal(asked.name))
        assert found, f"{asked} is not in image/{name}: run scripts/lock-requirements.sh"
        assert all(asked.specifier.contains(version) for version in found), f"{asked}: {found}"


@pytest.mark.parametrize("name", ASKED)
def test_every_file_has_a_hash(name: str) -> None:
    assert all(hashes for _, hashes in locked(name))


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13", "3.14"])
def test_one_version_of_each_for_any_python(python: str) -> None:
    environment = {**default_environment(), "python_version": python, "python_full_version": f"{python}.0"}
    environment |= {"sys_platform": "linux", "implementation_name": "cpython"}
    names = [
        normal(requirement.name)
        for requirement, _ in locked("requirements.lock")
        if requirement.marker is None or requirement.marker.evaluate({k: str(v) for k, v in environment.items()})
    ]
    assert len(names) == len(set(names))
