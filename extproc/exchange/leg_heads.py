"""Where legs go: the heads of those that we send through the egress listener, and their destinations."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from extproc.apis.table import Api
from extproc.exchange.gateway import Gateway
from extproc.exchange.headers import RequestHead
from extproc.names import CLUSTER, DESTINATION
from extproc.transport.interface import Header
from extproc.workers.endpoints import DECODE_CLUSTER, DECODE_GRPC_CLUSTER, PREFILL_CLUSTER, PREFILL_GRPC_CLUSTER
from extproc.workers.ranks import RANK_HEADER
from extproc.workers.worker import Role, Worker

RANK: Final = RANK_HEADER.encode()
_CLUSTERS: Final = {
    (Role.PREFILL, False): PREFILL_CLUSTER.encode(),
    (Role.DECODE, False): DECODE_CLUSTER.encode(),
    (Role.PREFILL, True): PREFILL_GRPC_CLUSTER.encode(),
    (Role.DECODE, True): DECODE_GRPC_CLUSTER.encode(),
}
# Of the client's headers, what a gRPC server is shown as metadata: it takes few (8 KiB by default), those whose names
# end with -bin must be base64, and its own begin with grpc-.
TO_GRPC: Final = frozenset({b"traceparent", b"tracestate", b"baggage", b"x-smg-routing-key"})
_AUTHORIZATION: Final = b"authorization"


def leg_headers(
    gateway: Gateway, head: RequestHead, path: bytes, workers: Sequence[Worker], request_id: bytes, size: int
) -> list[Header]:
    """The head of a leg to the first of ``workers`` that accepts a connection (all of one role, API key and rank)."""
    first = workers[0]
    if first.over_grpc:
        return _grpc_headers(gateway, head, path, workers, request_id)
    pseudo, fixed = _leg_prefix(first.url.authority, first.role, destinations(workers))
    headers: list[Header] = [
        *pseudo,
        (b":path", path),
        *fixed,
        (b"content-length", b"%d" % size),
        (b"x-request-id", request_id),
    ]
    if first.dp_rank is not None and (rank := rank_named(first)):
        headers.append((RANK, rank))
    if first.api_key is not None:
        headers.append((b"authorization", b"Bearer " + first.api_key.encode()))
    elif gateway.api_key is None:
        headers += head.forwarded
        return headers
    # The client's authorization is the gateway's own key, or not for this worker.
    headers += [field for field in head.forwarded if field[0] != _AUTHORIZATION]
    return headers


def _grpc_headers(
    gateway: Gateway, head: RequestHead, path: bytes, workers: Sequence[Worker], request_id: bytes
) -> list[Header]:
    """The same of a gRPC call."""
    first = workers[0]
    pseudo, fixed = _grpc_prefix(first.url.authority, first.role, destinations(workers))
    headers: list[Header] = [*pseudo, (b":path", path), *fixed, (b"x-request-id", request_id)]
    if first.api_key is not None:
        headers.append((_AUTHORIZATION, b"Bearer " + first.api_key.encode()))
    elif gateway.api_key is None:
        headers += [field for field in head.forwarded if field[0] == _AUTHORIZATION]
    headers += [field for field in head.forwarded if field[0] in TO_GRPC]
    return headers


def rank_named(worker: Worker) -> bytes:
    """The value of the header by which a leg names the rank that it is for; empty where no header does.

    SGLang's stands in the body, which all of its versions read.
    """
    return b"" if worker.dp_rank is None or worker.runtime != "vllm" else b"%d" % worker.dp_rank


def destinations(workers: Sequence[Worker]) -> str:
    """The endpoints of ``workers`` as Envoy wants them."""
    return workers[0].endpoint or "" if len(workers) == 1 else ",".join([w.endpoint or "" for w in workers])


@lru_cache(4096)  # there are few orders of few workers
def _leg_prefix(authority: str, role: Role, endpoints: str) -> tuple[tuple[Header, ...], tuple[Header, ...]]:
    """What every leg to these workers has: pseudo headers, and others."""
    return (
        ((b":method", b"POST"), (b":scheme", b"http"), (b":authority", authority.encode())),
        (
            (CLUSTER.encode(), _CLUSTERS[role, False]),
            (DESTINATION.encode(), endpoints.encode()),
            (b"content-type", b"application/json"),
        ),
    )


@lru_cache(4096)
def _grpc_prefix(authority: str, role: Role, endpoints: str) -> tuple[tuple[Header, ...], tuple[Header, ...]]:
    """The same of a gRPC call."""
    return (
        ((b":method", b"POST"), (b":scheme", b"http"), (b":authority", authority.encode())),
        (
            (CLUSTER.encode(), _CLUSTERS[role, True]),
            (DESTINATION.encode(), endpoints.encode()),
            (b"content-type", b"application/grpc"),
            (b"te", b"trailers"),
        ),
    )


def cluster_of(worker: Worker) -> bytes:
    """Envoy's cluster for a worker."""
    return _CLUSTERS[worker.role, worker.over_grpc]


def leg_path(api: Api, client_path: str) -> bytes:
    """The worker's path for a request to ``client_path``, with its query."""
    if client_path == api.worker_path:
        return client_path.encode("latin-1")
    _, mark, query = client_path.partition("?")
    return (api.worker_path + mark + query).encode("latin-1")
