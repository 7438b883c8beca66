"""Where an engine publishes its KV cache events.

By labels of its worker, as its ``--kv-events-config`` has it: ``kv_events`` (``endpoint``), ``kv_events_replay``
(``replay_endpoint``), ``kv_events_topic`` (``topic``); else by what holds for all workers. SGLang tells these in
``/server_info``. An engine adds its data-parallel rank to the ports (``offset_endpoint_port`` in vllm 0.32
distributed/kv_events.py and sglang 0.5.23 disaggregation/kv_events.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from extproc.workers.figures import count_in
from extproc.workers.worker import Worker

LABEL: Final = "kv_events"
REPLAY_LABEL: Final = "kv_events_replay"
TOPIC_LABEL: Final = "kv_events_topic"
OFF: Final = "off"
_ENDPOINT: Final = re.compile(r"tcp://(?P<host>\*|\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(?P<port>\d{1,5})")
_ANYWHERE: Final = frozenset({"*", "0.0.0.0", "[::]"})  # noqa: S104 - what an engine listens on
_MOST_PORT: Final = 65535


class SourceError(ValueError):
    """This is no place where events can be had; the message says why."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """``host``: empty for the worker's own."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """``tcp://HOST:PORT``; a host of ``*`` is the worker's. Raises SourceError."""
        found = _ENDPOINT.fullmatch(text)
        if found is None or not 0 < int(found["port"]) <= _MOST_PORT:
            raise SourceError(f"{text!r} is not tcp://HOST:PORT, with * for the worker's host")
        return cls("" if found["host"] in _ANYWHERE else found["host"], int(found["port"]))

    def of(self, worker: Worker) -> str:
        """The address where the events of ``worker`` are, one of its server's ranks perhaps. Raises SourceError."""
        port = self.port + (worker.dp_rank or 0)
        if port > _MOST_PORT:
            raise SourceError(f"port {port} of rank {worker.dp_rank} is none")
        return f"tcp://{self.host or worker.url.bracketed_host}:{port}"


@dataclass(frozen=True, slots=True)
class Common:
    """What holds for workers that say nothing themselves."""

    endpoint: Endpoint | None = None
    replay: Endpoint | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """Where one worker's events are.

    Attributes:
        endpoint: to subscribe to.
        replay: where those that were missed can be had again; empty: nowhere.
        topic: that they are published under; empty: any.
    """

    endpoint: str
    replay: str = ""
    topic: str = ""


def source_of(worker: Worker, common: Common) -> Source | None:
    """Where the events of ``worker`` are; None: it has none. Raises SourceError."""
    labels = worker.labels
    said = labels.get(LABEL, "")
    if said == OFF:
        return None
    endpoint = Endpoint.parse(said) if said else common.endpoint
    if endpoint is None:
        return None
    ranks = count_in(labels.get("dp_size", "")) or 1
    if worker.dp_rank is None and ranks > 1:
        raise SourceError(f"{ranks} data-parallel ranks, and no --dp-aware: who holds what would not be chosen by")
    replay_said = labels.get(REPLAY_LABEL, "")
    replay = Endpoint.parse(replay_said) if replay_said else None if said else common.replay
    return Source(endpoint.of(worker), "" if replay is None else replay.of(worker), labels.get(TOPIC_LABEL, ""))


def labels_of(descriptor: Any) -> Mapping[str, str]:
    """The labels that SGLang's ``kv_events`` in ``/server_info`` (0.5.23) comes to; empty when it publishes none.

    Its host is left out: where it is not a wildcard, it is how the server itself calls its machine.
    """
    if not isinstance(descriptor, dict) or descriptor.get("publisher") != "zmq":
        return {}
    ports = {LABEL: "endpoint_port_base", REPLAY_LABEL: "replay_endpoint_port_base"}
    found = {
        label: f"tcp://*:{port}" for label, name in ports.items() if type(port := descriptor.get(name)) is int and port
    }
    topic = descriptor.get("topic")
    if LABEL in found and isinstance(topic, str) and topic:
        found[TOPIC_LABEL] = topic
    return found if LABEL in found else {}
