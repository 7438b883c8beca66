"""``/openapi.json``: valid, complete, and what the API does, as schemathesis finds out by trying."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import jsonschema_rs
import pytest
import schemathesis
from control_rig import Api, running
from fleet import add_ready, spec, until

from extproc.control.auth import Access
from extproc.control.keys import ControlKey
from extproc.control.openapi import OPERATIONS, document
from extproc.control.trial_routes import Trial
from extproc.dataplane.paths import CONTROL_PATHS, CONTROL_PREFIXES
from extproc.mock import SglangMock
from extproc.workers.registration_body import Body
from extproc.workers.registry import Change
from extproc.workers.worker import Role, Worker

ADMIN = ControlKey.parse("a::admin:k-admin")
FUZZED_SECONDS = 300  # it takes some 30; a machine that has more to do is given time


async def _worked(model: str | None, _within: float) -> Trial:
    return Trial(
        ok=model != "broken", code="no_available_workers", prefill="p", decode="d", handoff="sglang", kv="handed"
    )


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    """With a prefill worker that answers and a model."""
    async with running(access=Access(keys=(ADMIN,)), try_pair=_worked) as made, SglangMock("prefill") as mock:
        worker = add_ready(made.registry, Role.PREFILL, mock.url, "tiny")
        await until(made.registry, lambda: worker.usable)
        yield made


async def test_it_is_valid(api: Api) -> None:
    answer = await api.get("/openapi.json", headers={"authorization": "Bearer k-admin"})
    found = answer.json
    assert (answer.status, found["openapi"], found) == (200, "3.1.0", document(Access(keys=(ADMIN,))))
    schemathesis.openapi.from_dict(found).validate()  # against the specification's own schema
    for shape in found["components"]["schemas"].values():
        jsonschema_rs.Draft202012Validator({**shape, "components": found["components"]})
    ids = [described["operationId"] for path in found["paths"].values() for described in path.values()]
    assert len(ids) == len(set(ids))


async def test_it_has_every_route_and_envoy_sends_each_here(api: Api) -> None:
    routes = {
        (route.method.lower(), route.resource.canonical)
        for route in api.api._runner.app.router.routes()
        if route.method != "HEAD" and route.resource
    }
    assert {(operation.method, operation.path) for operation in OPERATIONS} == routes
    whole = {operation.path for operation in OPERATIONS if "{" not in operation.path}
    assert set(CONTROL_PATHS) == whole
    below = {operation.path.partition("{")[0] for operation in OPERATIONS if "{" in operation.path}
    assert set(CONTROL_PREFIXES) == below


def test_a_document_that_is_not_valid_is_told_from_one_that_is() -> None:
    broken = document(Access())
    del broken["paths"]["/workers"]["post"]["responses"]["202"]["description"]
    with pytest.raises(jsonschema_rs.ValidationError):
        schemathesis.openapi.from_dict(broken).validate()


def test_it_says_what_a_registration_may_have() -> None:
    shapes = document(Access())["components"]["schemas"]
    assert shapes["Body"]["properties"].keys() == Body.model_fields.keys()
    assert shapes["Body"]["required"] == ["url", "worker_type"]
    assert shapes["Patch"]["properties"].keys() == Body.model_fields.keys() - {"url", "worker_type"}
    assert not shapes["Patch"]["additionalProperties"]


@pytest.mark.parametrize(
    ("access", "asks"),
    [
        (Access(), set()),
        (Access("k"), {"/workers", "/v1/models", "/get_loads", "/flush_cache"}),
        (Access(keys=(ADMIN,)), {"/workers", "/get_loads", "/flush_cache"}),
    ],
)
def test_who_is_asked_for_a_key(access: Access, asks: set[str]) -> None:
    paths = document(access)["paths"]
    looked_at = ["/workers", "/v1/models", "/get_loads", "/flush_cache", "/health", "/readiness"]
    assert {path for path in looked_at if next(iter(paths[path].values()))["security"]} == asks


CONFIGURATION = """\
[checks.positive_data_acceptance]
# What fits the schema may contradict itself, name a worker that is none, or meet none that could answer.
expected-statuses = ["2xx", "400", "404", "409", "503"]
[checks.not_a_server_error]
# There may be nobody to ask, and who is asked may not answer.
expected-statuses = ["2xx", "4xx", "502", "503"]
"""
FUZZING = ("--checks", "all", "--generation-deterministic", "--no-color", "--warnings", "off")


async def fuzz(api: Api, directory: Path, *options: str, configuration: str = "") -> None:
    """Have schemathesis find something that is not as the document says."""
    (directory / "schemathesis.toml").write_text(CONFIGURATION + configuration)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "schemathesis.cli", "--config-file", str(directory / "schemathesis.toml")),
        *("run", f"http://127.0.0.1:{api.api.port}/openapi.json", "--header", "Authorization: Bearer k-admin"),
        *(*FUZZING, *options),
        cwd=directory,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(FUZZED_SECONDS):
            said, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, said.decode()


@pytest.fixture
def accepted(caplog: pytest.LogCaptureFixture) -> Callable[[str], int]:
    """How often a method changed something."""
    caplog.set_level(logging.INFO, "extproc.control.audit")
    changes = ("extproc.control.audit", 202)
    return lambda method: sum(
        (record.name, vars(record).get("status"), vars(record).get("method")) == (*changes, method)
        for record in caplog.records
    )


async def test_the_api_is_what_the_document_says(api: Api, tmp_path: Path) -> None:
    """Each operation and sequences of them, with what fits and what does not."""
    await fuzz(api, tmp_path, "--phases", "examples,coverage,fuzzing,stateful", "--max-examples", "10")


async def test_registrations_are_what_the_document_says(
    api: Api, tmp_path: Path, accepted: Callable[[str], int]
) -> None:
    """Each worker is removed at once: most are of one URL, and the next one is not to find it taken."""

    def remove(worker: Worker, change: Change) -> None:
        if change is Change.ADDED:
            asyncio.get_running_loop().call_soon(api.registry.remove, worker)

    api.registry.subscribe(remove)
    await fuzz(
        api, tmp_path, "--include-operation-id", "add_worker", "--phases", "examples,coverage,fuzzing", "-n", "40"
    )
    assert accepted("POST") > 50


async def test_changes_are_what_the_document_says(api: Api, tmp_path: Path, accepted: Callable[[str], int]) -> None:
    """Of a worker that is there: of the URL that the document has for an example."""
    worker = api.registry.add(spec(Role.PREFILL, "http://prefill:8000"))
    await fuzz(
        api,
        tmp_path,
        *("--include-path", "/workers/{id}", "--exclude-method", "DELETE"),
        *("--phases", "examples,coverage,fuzzing", "--max-examples", "40"),
        configuration=f'[parameters]\n"path.id" = "{worker.id}"\n',
    )
    assert accepted("PUT") > 20
    assert accepted("PATCH") > 50
