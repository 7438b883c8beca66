"""A prefill worker's bootstrap server: whether it answers, and, for Mooncake, which engine cores it knows.

SGLang's decode workers ask it for the prefill's addresses, vLLM's Mooncake connector likewise; where it does not
answer, requests fail or are computed twice, though both workers are healthy.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from extproc.workers.client import NoAnswerError, UnreachableError, WorkerClient
from extproc.workers.kv_engines import QUERY, QueryError, agree, of_answer, of_registration, shown_id
from extproc.workers.worker import MOONCAKE, MOONCAKE_BOOTSTRAP_PORT, KvEngine, Role, Worker

_NO_ID = "no engine id: the decode recomputes each prompt"


class Bootstrap(NamedTuple):
    """What was found.

    Attributes:
        engines: the engine cores that a decode must be told of.
        trouble: what is wrong, for people; empty when all is well.
        settled: looking again soon would not show anything else.
        addresses: where the engine cores listen; see :class:`extproc.workers.kv_engines.Told`.
    """

    engines: tuple[KvEngine, ...] = ()
    trouble: str = ""
    settled: bool = True
    addresses: Mapping[str, object] = MappingProxyType({})


def unpinned(engines: tuple[KvEngine, ...]) -> str:
    """What is wrong with engine cores of which nobody chooses one: a decode cannot be told whose cache it is to get."""
    if len(engines) < 2:
        return ""
    return f"{len(engines)} engine cores, and no --dp-aware: the decode recomputes each prompt"


def is_mooncake(worker: Worker) -> bool:
    """Whether the bootstrap server of ``worker`` is Mooncake's."""
    return worker.role is Role.PREFILL and worker.runtime == "vllm" and worker.kv_connector == MOONCAKE


async def look(client: WorkerClient, worker: Worker, engine_id: str, *, ip: str, within: float) -> Bootstrap:
    """Look at the bootstrap server of ``worker`` at address ``ip``; nothing is asked of workers that need none.

    Args:
        client: asks.
        worker: as registered and identified.
        engine_id: the one it was registered with, empty when with none.
        ip: where the worker is.
        within: seconds that an answer may take.
    """
    if worker.role is not Role.PREFILL:
        return Bootstrap()
    if is_mooncake(worker):
        return await _mooncake(client, worker, engine_id, ip, within)
    if worker.runtime == "vllm":
        return Bootstrap()
    port = worker.bootstrap_port
    if port is None:
        return Bootstrap()
    try:
        await client.connect_beside(worker, port, ip=ip)
    except UnreachableError as error:
        return Bootstrap(trouble=_silent(worker, port, error), settled=False)
    return Bootstrap()


async def _mooncake(client: WorkerClient, worker: Worker, engine_id: str, ip: str, within: float) -> Bootstrap:
    port = worker.bootstrap_port or MOONCAKE_BOOTSTRAP_PORT
    registered = of_registration(engine_id, worker.labels)
    lacking = "" if registered else f"; {_NO_ID}"
    try:
        answer = await client.get_beside(worker, port, QUERY, within=within, ip=ip)
        if not answer.ok:
            raise NoAnswerError(f"GET {QUERY}: HTTP {answer.status}")
        asked, addresses = of_answer(answer.body)
    except NoAnswerError as error:
        return Bootstrap(registered, _silent(worker, port, error) + lacking, settled=False)
    except QueryError as error:
        trouble = f"bootstrap port {_name(worker, port)}: GET {QUERY}: {error}"
        return Bootstrap(registered, trouble + lacking, settled=False)
    if not asked:  # the engine's workers have not registered with it yet
        trouble = f"bootstrap port {_name(worker, port)} knows no engine yet"
        return Bootstrap(registered, trouble + lacking, settled=False)
    if not registered or agree(engine_id, registered, asked):
        return Bootstrap(asked, addresses=addresses)
    # The engine itself says so: the registration is of an earlier start, or mistaken.
    trouble = f"registered with engine id {shown_id(registered)}, but the server says {shown_id(asked)}"
    return Bootstrap(asked, trouble, addresses=addresses)


def _silent(worker: Worker, port: int, why: Exception) -> str:
    return f"bootstrap port {_name(worker, port)} does not answer ({why})"


def _name(worker: Worker, port: int) -> str:
    return f"{worker.bootstrap_host}:{port}"
