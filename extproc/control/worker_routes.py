"""``/workers``: registering, showing and removing workers, with the peer's statuses and JSON."""

from __future__ import annotations

import uuid

from aiohttp import web

from extproc.control.replies import reply, worker_fault
from extproc.control.worker_info import worker_details, worker_list
from extproc.control.worker_spec import SpecError, parse_worker_spec
from extproc.workers.registry import Registry, WorkerExistsError
from extproc.workers.worker import Worker


class WorkerRoutes:
    """The handlers; ``registry`` does the work."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def routes(self) -> list[web.RouteDef]:
        """What to add to the application."""
        return [
            web.get("/workers", self._list),
            web.post("/workers", self._add),
            web.get("/workers/{id}", self._show),
            web.delete("/workers/{id}", self._remove),
        ]

    async def _list(self, request: web.Request) -> web.Response:
        return reply(worker_list(self._registry, request.query.get("model")))

    async def _add(self, request: web.Request) -> web.Response:
        try:
            spec = parse_worker_spec(await request.read())
            worker = self._registry.add(spec)
        except ConnectionResetError:
            return worker_fault(400, "BAD_REQUEST", "the request was not sent completely")  # to nobody: the client left
        except SpecError as error:
            return worker_fault(400, "BAD_REQUEST", str(error))
        except WorkerExistsError as error:
            return worker_fault(409, "WORKER_ALREADY_EXISTS", f"{error}. DELETE /workers/{error.worker.id} first.")
        location = f"/workers/{worker.id}"
        accepted: dict[str, object] = {
            "status": "accepted",
            "worker_id": worker.id,
            "url": str(worker.url),
            "location": location,
            "message": "Worker addition queued for background processing",
        }
        if spec.idle:  # ours
            accepted["warnings"] = spec.idle
        response = reply(accepted, 202)
        response.headers["location"] = location
        return response

    async def _show(self, request: web.Request) -> web.Response:
        found = self._find(request)
        return found if isinstance(found, web.Response) else reply(worker_details(self._registry, found))

    async def _remove(self, request: web.Request) -> web.Response:
        found = self._find(request)
        if isinstance(found, web.Response):
            return found
        self._registry.remove(found)
        message = "Worker removal queued for background processing"
        return reply({"status": "accepted", "worker_id": found.id, "message": message}, 202)

    def _find(self, request: web.Request) -> Worker | web.Response:
        given = request.match_info["id"]
        try:
            worker_id = str(uuid.UUID(given))
        except ValueError:
            return worker_fault(400, "BAD_REQUEST", f"Invalid worker id '{given}': expected a UUID")
        worker = self._registry.get(worker_id)
        return worker or worker_fault(404, "WORKER_NOT_FOUND", f"Worker {worker_id} not found")
