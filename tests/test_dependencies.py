"""Dependencies point down: a package imports only what stands below it."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "extproc"
# Each package and what it may import of the others; docs/architecture.md draws the same.
BELOW = {
    "transport": {"errors"},
    "apis": {"errors"},
    "workers": {"errors"},
    "policies": {"errors", "workers"},
    "admission": {"errors", "workers"},
    "generation": {"errors", "apis"},
    "engines": {"errors", "apis", "generation", "workers"},
    "handoff": {"errors", "apis", "engines", "generation", "workers"},
    "merge": {"errors", "apis"},
    "text": {"errors", "apis", "generation", "workers"},
    "transcode": {"errors", "apis", "engines", "generation", "text"},
    "exchange": {
        "errors",
        "names",
        "admission",
        "apis",
        "engines",
        "generation",
        "handoff",
        "merge",
        "policies",
        "text",
        "transcode",
        "workers",
        "transport",
    },
    "upstream": {"errors", "names", "workers", "transport"},
    "dataplane": {"errors", "names", "workers", "transport"},
    "discovery": {"errors", "workers"},
    "control": {"errors", "names", "discovery", "text", "workers", "transport"},
    "mock": {"logs"},
}


def imported(path):
    """The modules that a file imports at run time or for its types."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


@pytest.mark.parametrize("package", BELOW)
def test_a_package_imports_only_what_is_below_it(package):
    for path in (ROOT / package).rglob("*.py"):
        for module in imported(path):
            top, *rest = module.split(".")
            if top == "extproc" and rest and rest[0] != package:
                assert rest[0] in BELOW[package], f"{path.relative_to(ROOT)} imports {module}"


@pytest.mark.parametrize(
    "package", ["admission", "exchange", "handoff", "merge", "transcode", "apis", "engines", "generation", "policies"]
)
def test_the_pure_parts_do_no_io(package):
    for path in (ROOT / package).rglob("*.py"):
        assert not {"asyncio", "socket", "aiohttp", "time"} & set(imported(path)), path.name
