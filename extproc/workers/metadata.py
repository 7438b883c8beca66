"""What a worker says of itself: models, engine settings, and whether it is the kind of worker it is registered as.

SGLang: ``/v1/models``, ``/server_info`` and ``/model_info``; in older versions the latter two begin with ``get_``.
vLLM: ``/v1/models``, ``/version`` and, of its KV cache, ``/metrics``. The labels are those the peer shows for such a
worker, and what :mod:`extproc.workers.pairing_key` wants to know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import orjson

from extproc.workers import vllm_cache
from extproc.workers.client import Answer, NoAnswerError
from extproc.workers.connectors import MULTI, WITHOUT_CONNECTORS, refusal
from extproc.workers.kv_config import WRONG_WAY, KvConfig
from extproc.workers.kv_event_source import labels_of
from extproc.workers.worker import Role

_SERVER_LABELS = (
    "model_path",
    "tokenizer_path",
    "served_model_name",
    "tp_size",
    "dp_size",
    "pp_size",
    "disaggregation_mode",
    "max_total_tokens",
    "max_running_requests",
    "version",
    "load_balance_method",
    "is_embedding",
)
_LAYOUT_LABELS = ("disaggregation_transfer_backend", "kv_cache_dtype", "page_size")
_SPLIT_BACKENDS = ("prefill_attention_backend", "decode_attention_backend")
_MODEL_LABELS = (
    "model_path",
    "tokenizer_path",
    "is_generation",
    "has_image_understanding",
    "has_audio_understanding",
    "model_type",
    "architectures",
)
# ``owned_by`` of /v1/models entries -> runtime
_OWNERS = {"sglang": "sglang", "nvidia": "sglang", "vllm": "vllm"}
_TITLES = {"sglang": "SGLang", "vllm": "vLLM"}  # who says so of itself, and nobody else does
_NOT_DISAGGREGATED = "null"  # what SGLang says of a server started without --disaggregation-mode
_MODELS = "/v1/models"
_ABSENT = (404, 405, 501)
_LOCKED = (401, 403)
_BUSY = (408, 425, 429, 502, 503, 504)
_GENERATES = ("chat", "completions", "responses", "tools")


class Ask(Protocol):
    """``GET path`` of the worker in question; raises NoAnswerError."""

    async def __call__(self, path: str) -> Answer: ...


class MismatchError(Exception):
    """The worker is not what it is registered as and must not be given requests."""


@dataclass(frozen=True, slots=True)
class Metadata:
    """What was found; empty and None where the worker does not say.

    Attributes not told of elsewhere:
        failed: questions that it has, and did not answer as it should: for people.
        busy: one of them may well be answered soon: no answer came, or a status that says so.
        locked: it does not list its models without a key, or not with this one.
    """

    model_ids: tuple[str, ...] = ()
    cards: tuple[Mapping[str, object], ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    # More labels, of how vLLM's KV cache is laid out: they matter where its connector moves blocks as they are.
    layout: Mapping[str, str] = field(default_factory=dict)
    runtime: str | None = None
    disaggregation_mode: str | None = None
    bootstrap_port: int | None = None
    takes_token_ids: bool | None = False  # see Worker; None: it was asked, and did not answer
    listed: tuple[Mapping[str, object], ...] = ()  # see Worker
    dp_size: int | None = None  # how many data-parallel ranks; vLLM must be asked (:mod:`extproc.workers.rank_count`)
    failed: tuple[str, ...] = ()
    busy: bool = False
    locked: bool = False
    # vLLM's connector, role and engine id, which are told over gRPC only.
    kv: KvConfig = field(default_factory=KvConfig)

    def after(self, former: Metadata | None) -> Metadata:
        """This, with what an engine of the same version said when it was last asked and did answer."""
        if self.takes_token_ids is not None:
            return self
        alike = former is not None and former.labels.get("version") == self.labels.get("version")
        return replace(self, takes_token_ids=former is not None and alike and former.takes_token_ids)


async def read_metadata(ask: Ask, runtime: str | None = None) -> Metadata:
    """Ask a worker what it is. ``runtime``, if known, is what it is registered as.

    A path that does not exist (404) is an answer: the worker does not say. What fails to come, or cannot be
    understood, is among ``failed``; after a question that nobody answers no other is put. Raises MismatchError when
    the worker says that it is another engine than that.
    """
    questions = _Questions(ask)
    models = _models(await questions.put(_MODELS))
    _check_engine(runtime, models)
    runtime = runtime or _owner(models)
    if runtime != "sglang":
        version = await questions.put("/version")
        if runtime is not None or isinstance(version.get("version"), str):
            return questions.seen(_of_vllm(models, version, await questions.layout()))
    server = await questions.put("/server_info", "/get_server_info")
    model = await questions.put("/model_info", "/get_model_info")
    return questions.seen(assemble(models, server, model, runtime or ("sglang" if server or model else None)))


def check_kind(role: Role, connector: str, found: Metadata) -> None:
    """Raise MismatchError when a worker of this kind cannot do what ``role`` asks of it, or has no ``connector``."""
    engine = WITHOUT_CONNECTORS.get(found.runtime or "")
    if connector and engine is not None:
        raise MismatchError(f"registered with kv_connector {connector}, but the server is {engine}, which has none")
    _check_connector(role, connector, found.kv)
    mode = found.disaggregation_mode
    if mode is None:
        return
    if mode == _NOT_DISAGGREGATED:
        if role is not Role.REGULAR:
            raise MismatchError(
                f"registered as {role.value}, but the server is not disaggregated (no --disaggregation-mode)"
            )
    elif mode != role.value:
        raise MismatchError(f"registered as {role.value}, but the server's disaggregation_mode is {mode}")


def _check_connector(role: Role, connector: str, own: KvConfig) -> None:
    """The same, of what vLLM says of its connector; a MultiConnector does not say which of several moves the cache."""
    if connector and own.connector not in ("", MULTI, connector):
        raise MismatchError(f"registered with kv_connector {connector}, but the server says {own.connector}")
    if reason := refusal(own.connector):
        raise MismatchError(reason)
    if (role, own.role) in WRONG_WAY:
        raise MismatchError(f"registered as {role.value}, but the server's kv_role is {own.role}")


def _check_engine(registered: str | None, models: Sequence[Mapping[str, object]]) -> None:
    """An owner that is no engine known here may well speak as the one that is registered."""
    owners = [str(entry.get("owned_by")) for entry in models]
    own = next((owner for owner in owners if owner in _TITLES), registered)
    if registered is not None and own is not None and own != registered:
        raise MismatchError(
            f"registered as {registered}, but the server is {_TITLES[own]}: register it with runtime_type {own}, or "
            "without one"
        )


class _Questions:
    """Puts questions to one worker, and keeps in mind which it did not answer as it should."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._failed: list[str] = []
        self._silent = False
        self.busy = False
        self._locked = False

    async def put(self, *paths: str) -> Mapping[str, object]:
        """The JSON object under the first of ``paths`` that exists; empty when none does, or the answer fails."""
        for path in paths:
            if self._silent:
                break
            try:
                answer = await self._ask(path)
            except NoAnswerError as error:
                self._silent = self.busy = True
                self._failed.append(str(error))
                break
            if answer.status not in _ABSENT:
                return self._read(path, answer)
        return {}

    async def layout(self) -> Mapping[str, str]:
        """Labels of vLLM's KV cache. One that is too busy for them is asked again; it may be used without."""
        if self.busy:
            return {}
        try:
            answer = await self._ask(vllm_cache.PATH)
        except NoAnswerError as error:
            self._failed.append(str(error))
            return {}
        if answer.status in _BUSY:
            self._failed.append(f"GET {vllm_cache.PATH}: HTTP {answer.status}")
        return vllm_cache.layout_of(answer.body) if answer.ok else {}

    def seen(self, found: Metadata) -> Metadata:
        """``found``, with what failed."""
        return replace(found, failed=tuple(self._failed), busy=self.busy, locked=self._locked)

    def _read(self, path: str, answer: Answer) -> Mapping[str, object]:
        if not answer.ok:
            self.busy |= answer.status in _BUSY
            self._locked |= path == _MODELS and answer.status in _LOCKED
            self._failed.append(f"GET {path}: HTTP {answer.status}")
            return {}
        try:
            value = orjson.loads(answer.body)
        except orjson.JSONDecodeError as error:
            self._failed.append(f"GET {path}: not JSON ({error})")
            return {}
        if not isinstance(value, dict):
            self._failed.append(f"GET {path}: not a JSON object")
            return {}
        return value


def _models(listing: Mapping[str, object]) -> Sequence[Mapping[str, object]]:
    data = listing.get("data")
    entries = data if isinstance(data, list) else []
    return [entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get("id"), str) and entry["id"]]


def _owner(models: Sequence[Mapping[str, object]]) -> str | None:
    for entry in models:
        owner = entry.get("owned_by")
        if isinstance(owner, str) and owner in _OWNERS:
            return _OWNERS[owner]
    return None


def _of_vllm(
    models: Sequence[Mapping[str, object]], version: Mapping[str, object], layout: Mapping[str, str]
) -> Metadata:
    """The first model listed is the base model; LoRA adapters follow it."""
    first = models[0] if models else {}
    said = {"served_model_name": first.get("id"), "model_path": first.get("root"), "version": version.get("version")}
    return Metadata(
        model_ids=tuple(dict.fromkeys(str(entry["id"]) for entry in models)),
        cards=tuple(card_of(entry, {"is_generation": True}) for entry in models),
        labels=_labels(said, tuple(said)) | _labels(first, ("max_model_len",)),
        layout=layout,
        runtime="vllm",
        listed=tuple(models),
    )


def assemble(
    models: Sequence[Mapping[str, object]],
    server: Mapping[str, object],
    model: Mapping[str, object],
    runtime: str | None,
) -> Metadata:
    """What SGLang, or an engine that speaks as it does, says: entries of its models, its settings, its model."""
    labels = {
        **_labels(model, _MODEL_LABELS),
        **_labels(server, _SERVER_LABELS),
        **_layout(server),
        **labels_of(server.get("kv_events")),
        **(_labels(models[0], ("max_model_len",)) if models else {}),
    }
    served = labels.get("served_model_name") or labels.get("model_path")
    entries = models or ([{"id": served}] if served else [])
    mode = server.get("disaggregation_mode", model.get("disaggregation_mode"))
    port = server.get("disaggregation_bootstrap_port")
    ranks = server.get("dp_size")
    return Metadata(
        model_ids=tuple(dict.fromkeys(str(entry["id"]) for entry in entries)),
        cards=tuple(card_of(entry, model) for entry in entries),
        labels=labels,
        runtime=runtime,
        disaggregation_mode=mode if isinstance(mode, str) and mode else None,
        bootstrap_port=port if type(port) is int and 0 < port < 65536 else None,
        listed=tuple(models),
        dp_size=ranks if type(ranks) is int and ranks > 0 else None,
    )


def _layout(server: Mapping[str, object]) -> dict[str, str]:
    """How the server moves and lays out its KV cache: by its settings after it has made up its mind (0.5.23).

    With kernels of their own for prefill or decode, ``attention_backend`` is not what runs: then nothing is said of it.
    """
    found = _labels(server, _LAYOUT_LABELS)
    if not any(server.get(name) for name in _SPLIT_BACKENDS):
        found |= _labels(server, ("attention_backend",))
    if "dtype" in server:
        found |= _labels({"model_dtype": server["dtype"]}, ("model_dtype",))
    return found


def _labels(source: Mapping[str, object], names: Sequence[str]) -> dict[str, str]:
    return {name: label_text(source[name]) for name in names if source.get(name) is not None}


def label_text(value: object) -> str:
    """A label's text: strings as they are, everything else as JSON."""
    return value if isinstance(value, str) else orjson.dumps(value).decode()


def card_of(entry: Mapping[str, object], model: Mapping[str, object]) -> Mapping[str, object]:
    """The card of one entry of a worker's models; ``model``: what it says of the model itself."""
    card: dict[str, object] = {"id": entry["id"]}
    if model.get("is_generation"):
        card["model_type"] = list(_GENERATES)
    known = {
        "hf_model_type": model.get("model_type"),
        "architectures": model.get("architectures"),
        "context_length": entry.get("max_model_len"),
        "tokenizer_path": model.get("tokenizer_path"),
    }
    return card | {name: value for name, value in known.items() if value is not None}
