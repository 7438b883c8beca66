"""vLLM's own request classes take every golden prefill leg, and sample one token by it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import servers

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(not servers.installed("vllm"), reason="not installed: make integration-engines"),
]
HERE = Path(__file__).parent
GOLDEN = [
    one
    for one in json.loads((HERE.parents[1] / "tests/data/one_token_bodies.json").read_text())
    if one["path"] != "/generate"  # SGLang's
]


@pytest.fixture(scope="module")
def understood() -> dict[str, Any]:
    """What the engine makes of each leg."""
    command = [servers.python("vllm"), HERE / "vllm_classes.py"]
    run = subprocess.run(
        command,
        input=json.dumps(GOLDEN),
        capture_output=True,
        text=True,
        check=False,
        env={**servers.ENVIRONMENT, "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"},
    )
    assert run.returncode == 0, run.stderr
    return dict(zip(map(name, GOLDEN), json.loads(run.stdout.splitlines()[-1]), strict=True))


def name(golden: Any) -> str:
    return f"{golden['api']}: {golden['name']}"


@pytest.mark.parametrize("golden", GOLDEN, ids=map(name, GOLDEN))
def test_the_engine_samples_one_token(golden: Any, understood: dict[str, Any]) -> None:
    found = understood[name(golden)]
    assert "error" not in found, found
    ends = {"stop": [], "stop_token_ids": [], "ignore_eos": golden["api"] != "messages"}  # Messages cannot ignore it
    assert found == {"max_tokens": 1, "min_tokens": 0, "n": 1, "stream": False, **ends}
