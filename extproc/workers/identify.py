"""Asking a server what it is, as far as it has to be asked; whether that is enough to use it, and what does not fit.

A worker is identified when it is known which engine it is and which models it serves: by its own word, or by a
registration that says both. Anything else that it does not tell is a doubt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final, Protocol

from extproc.workers import connectors, ranks, token_ids
from extproc.workers.client import Answer, NoAnswerError
from extproc.workers.from_spec import registered_runtime
from extproc.workers.metadata import Ask, Metadata, check_kind, read_metadata
from extproc.workers.rank_count import rank_count
from extproc.workers.spec import WorkerSpec
from extproc.workers.worker import Role, Worker

CANNOT_LEARN: Final = "cannot learn what it serves"


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
        MismatchError: it is not what it is registered as.
    """
    found = await read_metadata(get, spec.runtime)
    check_kind(spec.role, spec.kv.connector, found)
    models = spec.model_ids or found.model_ids
    if found.runtime != "vllm" or not models or found.busy:
        return found
    if token_reuse and spec.role is Role.DECODE:
        found = replace(found, takes_token_ids=await token_ids.takes_token_ids(post, models[0]))
    try:
        return replace(found, dp_size=await rank_count(post, models[0])) if dp_aware else found
    except NoAnswerError as error:
        return replace(found, failed=(*found.failed, str(error)))


def unidentified(spec: WorkerSpec, found: Metadata) -> str:
    """Why a worker that says ``found`` of itself must not be used, of which nothing else is known; empty: it may be.

    Without a key of its own in the registration, a worker that wants one may be meant for clients that bring theirs.
    """
    runtime = registered_runtime(spec)
    registered = bool(spec.cards) and runtime is not None
    if found.locked and (spec.api_key is not None or not registered):
        why = "its api_key is wrong" if spec.api_key is not None else "it wants an api_key, and is registered with none"
    elif registered:
        return ""
    elif found.busy:
        why = ""
    elif not (spec.cards or found.model_ids):
        why = "it names no model, and is registered without `models`"
    elif (runtime or found.runtime) is None:
        why = "it does not say which engine it is, and is registered without `runtime_type`"
    else:
        return ""
    return f"{CANNOT_LEARN}: {'; '.join(filter(None, (why, *found.failed)))}"


def doubts(worker: Worker, spec: WorkerSpec, found: Metadata, *, dp_aware: bool) -> str:
    """What should be said of a worker that is used although it says ``found`` of itself; empty when nothing."""
    rank_doubt = ranks.doubt(spec, found) if dp_aware else ""
    untold = f"does not tell everything of itself: {'; '.join(found.failed)}" if found.failed else ""
    return "; ".join(filter(None, (_contradiction(worker, spec, found), rank_doubt, untold)))


def _contradiction(worker: Worker, spec: WorkerSpec, found: Metadata) -> str:
    in_pairs = spec.role in (Role.PREFILL, Role.DECODE)
    asked = worker.url.is_grpc
    if in_pairs and worker.runtime == "vllm" and (doubt := connectors.doubt(worker.kv_connector, asked=asked)):
        return doubt
    named, told = spec.kv.engine_id, found.kv.engine_id
    if spec.role is Role.PREFILL and named and told and named != told:
        return f"registered with engine id {named}, but the server says {told}"
    registered, own = spec.bootstrap_port, found.bootstrap_port
    if spec.role is Role.PREFILL and registered is not None and own is not None and registered != own:
        return f"registered with bootstrap port {registered}, but the server says {own}"
    return ""
