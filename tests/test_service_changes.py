"""What becomes of requests, and of what is known of caches, when a worker changes: what the service passes on."""

from __future__ import annotations

from pathlib import Path

import pytest
from fleet import spec

from extproc.service import Service
from extproc.settings import Settings
from extproc.workers.kv_config import KvConfig
from extproc.workers.worker import MOONCAKE, KvEngine, Role, Status, Worker


class Told:
    """A service that has not been started, and what its request path was told."""

    def __init__(self, directory: Path, patch: pytest.MonkeyPatch) -> None:
        self.service = Service(Settings(run_dir=directory, extproc_address=f"unix:{directory}/x"))
        self.lost: list[Worker] = []
        self.forgotten: list[Worker] = []
        patch.setattr(self.service.gateway, "prefill_lost", self.lost.append)
        patch.setattr(self.service.gateway.placer, "forget", self.forgotten.append)

    def add(self, role: Role) -> Worker:
        worker = self.service.registry.add(spec(role, f"http://{role.value}:1", kv=KvConfig(MOONCAKE)))
        self.service.registry.set_status(worker, Status.READY)
        return worker

    def take(self) -> tuple[list[Worker], list[Worker]]:
        told = list(self.lost), list(self.forgotten)
        self.lost.clear()
        self.forgotten.clear()
        return told


@pytest.fixture
async def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Told:
    return Told(tmp_path, monkeypatch)


async def test_of_a_prefill_that_is_out_or_has_restarted_nothing_is_waited_for(told: Told) -> None:
    registry, worker = told.service.registry, told.add(Role.PREFILL)
    registry.set_engines(worker, (KvEngine(0, "first"),))
    assert told.take() == ([], [])
    registry.set_engines(worker, (KvEngine(0, "second"),))  # another process, seen before any probe failed
    assert told.take() == ([worker], [worker])
    registry.restarted(worker, ["second"])  # the same, under its former id
    assert told.take() == ([worker], [worker])
    registry.restarted(worker, ["first"])
    assert told.take() == ([], [])
    registry.set_status(worker, Status.NOT_READY)
    assert told.take() == ([worker], [worker])


async def test_of_a_decode_only_its_cache_is_forgotten(told: Told) -> None:
    worker = told.add(Role.DECODE)
    told.service.registry.set_status(worker, Status.FAILED)
    assert told.take() == ([], [worker])
