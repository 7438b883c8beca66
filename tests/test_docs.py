"""The documents say what the code does."""

import argparse
import re
import shlex
from pathlib import Path

import pytest

from extproc.apis.request import MAX_SAMPLES
from extproc.apis.table import APIS, Flow
from extproc.control.metrics import Metrics
from extproc.dataplane.config import DataplaneConfig
from extproc.dataplane.paths import DECODE_PATHS, INFERENCE_PATHS, PREFILL_PATHS
from extproc.errors import CATALOGUE
from extproc.exchange.clock import ABORT_SECONDS, LEFTOVER_SECONDS, LINGER_SECONDS
from extproc.flags import add_arguments, read_settings, split_prefill
from extproc.handoff import sglang, vllm
from extproc.observe import RequestMetrics
from extproc.policies.placement import CANDIDATES
from extproc.settings import Settings

ROOT = Path(__file__).parent.parent
BEHAVIOUR = (ROOT / "docs/behaviour.md").read_text()
README = (ROOT / "README.md").read_text()


def rows(section):
    """The cells of the table below ``section``."""
    text = BEHAVIOUR.split(f"## {section}\n")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_error_is_in_the_table_as_the_catalogue_has_it():
    table = {row[0].strip("`"): row[1:] for row in rows("Errors")}
    assert table == {
        fault.code: [str(fault.status), fault.type, "yes" if fault.retryable else "no", fault.when]
        for fault in CATALOGUE.values()
    }


def test_times_and_limits_are_the_codes():
    timeouts = "\n".join(" ".join(row) for row in rows("Timeouts"))
    config = DataplaneConfig(extproc="unix:/a", ads="unix:/b", control="unix:/c", egress="unix:/d")
    assert f"(SGLang) {sglang.HOLD_SECONDS * 1000:g} ms" in timeouts
    assert f"(vLLM, Mooncake) {vllm.HOLD_SECONDS:g} s" in timeouts
    assert f"that nobody wants any more (Mooncake) {LEFTOVER_SECONDS:g} s" in timeouts
    assert f"{LINGER_SECONDS * 1000:g} ms" in timeouts
    assert f"abort request to a worker, and the like {ABORT_SECONDS:g} s" in timeouts
    assert f"connecting to a worker {config.connect_timeout:g} s" in timeouts
    assert f"pool {config.upstream_idle_timeout:g} s" in timeouts
    assert config.idle_timeout - config.request_timeout == 5
    limits = "\n".join(" ".join(row) for row in rows("Limits"))
    assert f"(`n`) {MAX_SAMPLES} " in limits
    assert f"for one request {CANDIDATES} " in limits


def test_defaults_named_are_the_settings():
    fields = Settings.model_fields
    for flag, value in re.findall(r"`--([a-z-]+)`,? \(?(\d+)(?: s| MiB)?\)?", BEHAVIOUR):
        default = fields[flag.replace("-", "_")].default
        assert default in (int(value), int(value) << 20), flag


def test_every_path_is_in_the_table_and_in_envoys_routes():
    documented = {path for row in rows("Paths") for path in re.findall(r"`([^`]+)`", row[0])}
    assert set(APIS) <= documented
    assert set(APIS) == set(INFERENCE_PATHS)
    assert {path for path, api in APIS.items() if api.flow is Flow.PAIR} == set(DECODE_PATHS)
    assert {path for path, api in APIS.items() if api.flow is Flow.PREFILL_ONLY} == set(PREFILL_PATHS)


def test_every_request_metric_is_in_the_table():
    metrics = Metrics()
    RequestMetrics(metrics)
    documented = {name for row in rows("Metrics") for name in re.findall(r"`([a-z_]+)`", row[0])}
    assert set(re.findall(r"# TYPE (\S+)", metrics.render().decode())) <= documented


def commands(text):
    """The indented shell commands of a document, continuation lines joined."""
    blocks = re.findall(r"^    (\S(?:\\\n|.)*)", text, re.MULTILINE)
    return [re.sub(r"\\\n\s*", "", block).split("  #")[0].rstrip() for block in blocks]


def test_the_launch_command_of_the_readme_is_accepted():
    (launch,) = [command for command in commands(README) if "pd-extproc launch" in command]
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    settings = read_settings(parser.parse_args(split_prefill(shlex.split(launch)[2:])))
    assert [worker.bootstrap_port for worker in settings.prefill] == [8998, 8998]
    assert len(settings.decode) == 2
    assert settings.port == 30000


@pytest.mark.parametrize("verb", re.findall(r"make ([a-z-]+)", README))
def test_every_verb_of_the_readme_is_in_the_makefile(verb):
    assert re.search(rf"^{verb}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("document", [*ROOT.glob("docs/*.md"), ROOT / "README.md"], ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
        assert (document.parent / target).exists(), target
