"""What a gRPC server says of itself, read into what is kept of a worker. Pure.

Source: the protos, and the servers made from them, ``smg-grpc-servicer`` 0.14.1 with vLLM 0.32 and SGLang 0.5.23. In
proto3 a number or text that is not said is 0 or empty, so neither is taken for a fact; labels have the peer's names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from extproc.workers.connectors import canonical
from extproc.workers.kv_config import KvConfig
from extproc.workers.metadata import Metadata, assemble, card_of, label_text
from extproc.workers.rpc.as_json import of_struct
from extproc.workers.rpc.services import Service

# Of a model, in whichever message it is. False is said of the first two, too.
_ALWAYS: Final = ("is_generation", "supports_vision")
# What changes while vLLM runs, and what has a place of its own.
_NOT_OF_VLLM: Final = (
    "active_requests",
    "is_paused",
    "last_receive_timestamp",
    "uptime_seconds",
    "server_type",
    "kv_connector",
    "kv_role",
    "kv_engine_id",
    "data_parallel_size",
)
_LAYOUT_OF_VLLM: Final = ("kv_cache_dtype", "block_size", "attention_backend", "model_dtype")
# Of the some hundred settings of SGLang and TokenSpeed, keys among them, those that are shown besides the usual ones.
_SETTINGS: Final = (
    "pairing_protocol",
    "block_size",
    "max_num_seqs",
    "mm_item_limits",
    "engine_reasoning_parser",
    "constrained_decoding_start",
    "grammar_backend",
    "skip_tokenizer_init",
)


def metadata_of(service: Service, model: Any, server: Any, version: str) -> Metadata:
    """What the answers of an engine say.

    Args:
        service: whose.
        model, server: its ``GetModelInfoResponse`` and ``GetServerInfoResponse``.
        version: as its loads tell it; empty when they do not.
    """
    if service.runtime == "vllm":
        return _of_vllm(model, server, version)
    return _of_settings(service, model, server)


def _of_vllm(model: Any, server: Any, version: str) -> Metadata:
    facts = _facts(server, without=_NOT_OF_VLLM)
    ranks = server.data_parallel_size
    labels = {
        **_facts(model),
        **{name: value for name, value in facts.items() if name not in _LAYOUT_OF_VLLM},
        **({"version": version} if version else {}),
        **({"dp_size": ranks} if ranks > 0 else {}),
    }
    entries = _entries(model)
    return Metadata(
        model_ids=tuple(str(entry["id"]) for entry in entries),
        cards=tuple(card_of(entry, _model_of(model)) for entry in entries),
        labels=_texts(labels),
        layout=_texts({name: value for name, value in facts.items() if name in _LAYOUT_OF_VLLM}),
        runtime="vllm",
        listed=entries,
        dp_size=ranks if ranks > 0 else None,
        kv=KvConfig(canonical(server.kv_connector), server.kv_role, server.kv_engine_id),
    )


def _of_settings(service: Service, model: Any, server: Any) -> Metadata:
    """SGLang and TokenSpeed send their settings as they are."""
    settings = of_struct(server.server_args)
    version = settings.get("version") or getattr(server, f"{service.runtime}_version", "")
    settings |= {"version": version} if version else {}
    settings.setdefault("page_size", None)
    if settings["page_size"] is None:  # the setting; SGLang's scheduler knows what came of it
        layout = of_struct(server.scheduler_info).get("hicache_object_layout")
        settings["page_size"] = layout.get("page_size") if isinstance(layout, dict) else None
    found = assemble(_entries(model), settings, _model_of(model), service.runtime)
    more = {name: settings[name] for name in _SETTINGS if settings.get(name) not in (None, "", False)}
    return replace(found, labels={**_texts(_facts(model)), **found.labels, **_texts(more)})


def _entries(model: Any) -> tuple[Mapping[str, object], ...]:
    """What the engine's HTTP server would list as its models: the one, under the name that it is served by."""
    name = model.served_model_name or model.model_path
    if not name:
        return ()
    said = {"root": model.model_path, "max_model_len": model.max_context_length}
    return ({"id": name, **{key: value for key, value in said.items() if value}},)


def _model_of(model: Any) -> dict[str, object]:
    """The same message with the names that HTTP servers have; TokenSpeed serves nothing but generation."""
    return {"is_generation": True, **_facts(model)}


def _facts(message: Any, without: Sequence[str] = ()) -> dict[str, Any]:
    """The fields that say something: numbers, texts, lists of them."""
    found: dict[str, Any] = {}
    for name, field in message.DESCRIPTOR.fields_by_name.items():
        value = getattr(message, name)
        if name in without or field.message_type is not None:
            continue
        if field.is_repeated:
            value = list(value)
        if value or name in _ALWAYS:
            found[name] = value
    return found


def _texts(facts: Mapping[str, Any]) -> dict[str, str]:
    return {name: label_text(value) for name, value in facts.items()}
