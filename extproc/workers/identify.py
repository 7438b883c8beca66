"""Asking a server what it is, as far as it has to be asked; what of its registration that does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

from extproc.workers import connectors, ranks, token_ids
from extproc.workers.client import Answer
from extproc.workers.metadata import Ask, Metadata, check_kind, read_metadata
from extproc.workers.rank_count import rank_count
from extproc.workers.spec import WorkerSpec
from extproc.workers.worker import Role, Worker


class Post(Protocol):
    """``POST path`` of the server in question, with a JSON body and headers; raises NoAnswerError."""

    async def __call__(self, path: str, body: object, headers: Mapping[str, str] = ...) -> Answer: ...


async def identify(get: Ask, post: Post, spec: WorkerSpec, *, token_reuse: bool, dp_aware: bool) -> Metadata:
    """Ask the server registered by ``spec``.

    Args:
        get, post: the way to it; both raise NoAnswerError.
        spec: its registration.
        token_reuse: whether a decode worker is also asked for :mod:`extproc.workers.token_ids`.
        dp_aware: whether vLLM is also asked for :mod:`extproc.workers.rank_count`.

    Raises:
        MetadataError: it does not say what it is.
        MismatchError: it is not what it is registered as.
        NoAnswerError: it does not answer.
    """
    found = await read_metadata(get, spec.runtime)
    check_kind(spec.role, spec.kv.connector, found)
    models = spec.model_ids or found.model_ids
    if found.runtime != "vllm" or not models:
        return found
    if token_reuse and spec.role is Role.DECODE and await token_ids.takes_token_ids(post, models[0]):
        found = replace(found, takes_token_ids=True, labels={**found.labels, token_ids.LABEL: "true"})
    return replace(found, dp_size=await rank_count(post, models[0])) if dp_aware else found


def doubts(worker: Worker, spec: WorkerSpec, found: Metadata, *, dp_aware: bool) -> str:
    """What should be said of a worker that is used although it says ``found`` of itself; empty when nothing."""
    rank_doubt = ranks.doubt(spec, found) if dp_aware else ""
    return "; ".join(filter(None, (_contradiction(worker, spec, found), rank_doubt)))


def _contradiction(worker: Worker, spec: WorkerSpec, found: Metadata) -> str:
    in_pairs = spec.role in (Role.PREFILL, Role.DECODE)
    if in_pairs and worker.runtime == "vllm" and (doubt := connectors.doubt(worker.kv_connector)):
        return doubt
    registered, own = spec.bootstrap_port, found.bootstrap_port
    if spec.role is Role.PREFILL and registered is not None and own is not None and registered != own:
        return f"registered with bootstrap port {registered}, but the server says {own}"
    return ""
