"""``/workers``: registering, showing, changing and removing workers, with the peer's statuses and JSON."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence

from aiohttp import web

from extproc.control.auth import AUDIT
from extproc.control.replies import reply, worker_fault
from extproc.control.worker_info import worker_details, worker_list
from extproc.control.worker_query import parse_worker_query
from extproc.control.worker_spec import SpecError, fields_of, members_of, parse_worker_patch, parse_worker_spec
from extproc.workers.registry import Registry, WorkerExistsError, WorkerLeavesError
from extproc.workers.spec import WorkerSpec
from extproc.workers.worker import Worker


class WorkerRoutes:
    """The handlers; ``registry`` does the work. ``aliases`` stand for models."""

    def __init__(self, registry: Registry, aliases: Mapping[str, str]) -> None:
        self._registry = registry
        self._aliases = aliases

    def routes(self) -> list[web.RouteDef]:
        """What to add to the application."""
        return [
            web.get("/workers", self._list),
            web.post("/workers", self._add),
            web.get("/workers/{id}", self._show),
            web.put("/workers/{id}", self._replace),
            web.patch("/workers/{id}", self._change),
            web.delete("/workers/{id}", self._remove),
        ]

    async def _list(self, request: web.Request) -> web.Response:
        try:
            wanted = parse_worker_query(request.query)
        except SpecError as error:
            return worker_fault(400, "BAD_REQUEST", str(error))
        model = wanted.model
        return reply(worker_list(self._registry, wanted._replace(model=model and self._aliases.get(model, model))))

    async def _add(self, request: web.Request) -> web.Response:
        try:
            spec = parse_worker_spec(await request.read())
            worker = self._registry.add(spec)
        except SpecError as error:
            return worker_fault(400, "BAD_REQUEST", str(error))
        except WorkerExistsError as error:
            return worker_fault(
                409,
                "WORKER_ALREADY_EXISTS",
                f"{error}. PUT or PATCH /workers/{error.worker.id} changes it; DELETE removes it first.",
            )
        location = f"/workers/{worker.id}"
        _audit(request, worker)
        response = _accepted(
            worker,
            self._warnings(worker, spec),
            "Worker addition queued for background processing",
            url=str(worker.url),
            location=location,
        )
        response.headers["location"] = location
        return response

    async def _show(self, request: web.Request) -> web.Response:
        found = self._find(request)
        return found if isinstance(found, web.Response) else reply(worker_details(self._registry, found))

    async def _replace(self, request: web.Request) -> web.Response:
        found = self._find(request)
        if isinstance(found, web.Response):
            return found
        try:
            spec = parse_worker_spec(await request.read())
            if found.ranks:
                raise SpecError("PUT is not supported for data-parallel workers; PATCH changes all ranks of a server")
            _check_same(found, spec)
            self._registry.replace(found, spec)
        except SpecError as error:
            return worker_fault(400, "BAD_REQUEST", str(error))
        except WorkerLeavesError as error:
            return worker_fault(409, "WORKER_REMOVAL_IN_PROGRESS", str(error))
        _audit(request, found)
        return _accepted(found, self._warnings(found, spec), "Worker replacement queued for background processing")

    async def _change(self, request: web.Request) -> web.Response:
        found = self._find(request)
        if isinstance(found, web.Response):
            return found
        try:
            body = await request.read()
            if self._registry.get(found.id) is None:  # meanwhile
                raise WorkerLeavesError(f"Worker {found.id} is being removed")
            spec = parse_worker_patch(body, self._registry.spec(found))
            before = self._warnings(found, self._registry.spec(found))
            self._registry.change(found, spec)
        except SpecError as error:
            return worker_fault(400, "BAD_REQUEST", str(error))
        except WorkerLeavesError as error:
            return worker_fault(409, "WORKER_REMOVAL_IN_PROGRESS", str(error))
        _audit(request, found, fields=",".join(fields_of(body)))
        given = members_of(body)
        warnings = [
            warning
            for warning in self._warnings(found, spec)
            if warning not in before or warning.partition(" ")[0] in given
        ]
        return _accepted(found, warnings, "Worker update queued for background processing")

    async def _remove(self, request: web.Request) -> web.Response:
        found = self._find(request)
        if isinstance(found, web.Response):
            return found
        self._registry.remove(found)
        _audit(request, found)
        message = "Worker removal queued for background processing"
        return reply({"status": "accepted", "worker_id": found.id, "message": message}, 202)

    def _warnings(self, worker: Worker, spec: WorkerSpec) -> Sequence[str]:
        """What is of no effect of a worker registered as ``spec``; what is about a field begins with its name."""
        unserved = (spec.unserved,) if spec.unserved else ()
        return (*unserved, *self._registry.idle(worker), *spec.unused)

    def _find(self, request: web.Request) -> Worker | web.Response:
        given = request.match_info["id"]
        try:
            worker_id = str(uuid.UUID(given))
        except ValueError:
            return worker_fault(400, "BAD_REQUEST", f"Invalid worker id '{given}': expected a UUID")
        worker = self._registry.get(worker_id)
        return worker or worker_fault(404, "WORKER_NOT_FOUND", f"Worker {worker_id} not found")


def _accepted(worker: Worker, warnings: Sequence[str], message: str, **more: object) -> web.Response:
    accepted: dict[str, object] = {"status": "accepted", "worker_id": worker.id, **more, "message": message}
    if warnings:  # ours
        accepted["warnings"] = warnings
    return reply(accepted, 202)


def _check_same(worker: Worker, spec: WorkerSpec) -> None:
    """Raise SpecError when ``spec`` is of another worker than ``worker``."""
    if spec.url != worker.url:
        raise SpecError(f"URL must match: worker {worker.id} is at {worker.url}, not {spec.url}")
    if spec.role is not worker.role:
        role = worker.role.value
        raise SpecError(
            f"`worker_type` cannot change: worker {worker.id} is a {role} worker; DELETE /workers/{worker.id}, then "
            f"POST /workers with `{spec.role.value}`"
        )


def _audit(request: web.Request, worker: Worker, **more: object) -> None:
    request[AUDIT] = {"worker": worker.name, "role": worker.role.value, "worker_id": worker.id, **more}
