"""A worker's registration, by ``POST /workers`` or in the YAML file: read strictly.

So a typing error is an answer and not a surprise later.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from pydantic import BaseModel, ValidationError

from extproc.workers import registration_body as form
from extproc.workers.connectors import WITHOUT_CONNECTORS
from extproc.workers.kv_config import KvConfig, KvConfigError, kv_config
from extproc.workers.refusals import NAMES, refusals
from extproc.workers.spec import HealthOverrides, HttpPool, Overload, Resilience, WorkerSpec
from extproc.workers.worker import Role, WorkerUrl, is_ip_address

# Labels that mean the field of the same name, as with the peer, for registrars that know labels only.
_LIFTED = ("kv_connector", "kv_role", "kv_engine_id", "bootstrap_port")
_RANKS = "dp_size"  # a field that means the label of the same name
_KV = ("kv_connector", "kv_role", "kv_engine_id")
_GROUPS: Mapping[str, type[BaseModel]] = {
    "health": form.Health,
    "resilience": form.Resilience,
    "overload": form.Overload,
    "http_pool": form.HttpPool,
}
# What answers have and registrations do not.
_SHOWN_ONLY = frozenset(
    {"id", "model_id", "is_healthy", "status", "status_reason", "load", "http2", "pd_pairing", "job_status"}
)


class RegistrationError(ValueError):
    """Such a worker cannot be served; the message says why."""


class FormError(RegistrationError):
    """A field is missing, unknown or of the wrong type; the message names it."""


def registration(value: Mapping[str, Any]) -> WorkerSpec:
    """What a registration's fields say. Raises InvalidUrlError, FormError, RegistrationError."""
    value = _without_refused(value)
    try:
        return _spec(form.Body.model_validate(_ranks_as_label(_lifted(value))))
    except ValidationError as error:
        raise FormError(_problems(error, form.Body)) from None
    except KvConfigError as error:
        raise RegistrationError(str(error)) from None


def patched(spec: WorkerSpec, patch: Mapping[str, Any]) -> WorkerSpec:
    """``spec`` with the fields of ``patch`` instead; null takes a field or a label back to its default.

    The rest stays, be it given or not; labels, health, resilience and overload are merged. Raises as
    :func:`registration`.
    """
    for name in form.FIXED:
        if name in patch and patch[name] != as_registration(spec)[name]:
            raise RegistrationError(f"`{name}` cannot change: DELETE the worker and register the other one")
    patch = _without_refused({name: given for name, given in patch.items() if name not in form.FIXED})
    try:
        form.Patch.model_validate(patch)
    except ValidationError as error:
        raise FormError(_problems(error, form.Patch)) from None
    changed = registration(_merged(as_registration(spec), _lifted(dict(patch))))
    changed = replace(changed, engine_models_too=spec.engine_models_too and "models" not in patch)
    if "kv_engine_id" in patch:
        return changed
    return replace(changed, engine_id_named=spec.engine_id_named and bool(changed.kv.engine_id))


def as_registration(spec: WorkerSpec) -> dict[str, Any]:
    """The fields that say ``spec``: what :func:`registration` would read it from."""
    optional = {
        "models": [dict(card) for card in spec.cards],
        "labels": dict(spec.labels),
        "runtime_type": spec.runtime,
        "api_key": spec.api_key,
        "bootstrap_host": spec.bootstrap_host,
        "bootstrap_port": spec.bootstrap_port,
        "kv_connector": spec.kv.connector,
        "kv_role": spec.kv.role,
        "kv_engine_id": spec.kv.engine_id,
        "kv_block_size": spec.kv_block_size,
        "max_connection_attempts": spec.max_connection_attempts,
        "load_monitor_interval_secs": spec.load_monitor_interval_secs,
        "health": said(spec.health),
        "resilience": said(spec.resilience),
        "overload": said(spec.overload),
        "http_pool": said(spec.http_pool),
        "multimodal_tensor_transport": spec.multimodal_tensor_transport,
        "multimodal_shm_min_bytes": spec.multimodal_shm_min_bytes,
    }
    return {
        "url": str(spec.url),
        "worker_type": spec.role.value,
        "priority": spec.priority,
        "cost": spec.cost,
        **{name: value for name, value in optional.items() if value or value == 0},
    }


def said(group: HealthOverrides | Resilience | Overload | HttpPool) -> dict[str, Any]:
    """The members that are given, as JSON has them."""
    members = {name: value for name, value in asdict(group).items() if value is not None}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in members.items()}


def _without_refused(value: Mapping[str, Any]) -> dict[str, Any]:
    """``value``, less what says nothing. Raises RegistrationError for what is known and not served."""
    if found := list(refusals(value)):
        raise RegistrationError("; ".join(found))
    return {name: given for name, given in value.items() if name not in NAMES}


def _lifted(value: dict[str, Any]) -> dict[str, Any]:
    """The body with what its labels say of fields in the fields; a field of its own wins."""
    labels = value.get("labels")
    if not isinstance(labels, dict):
        return value
    found = {name: labels[name] for name in _LIFTED if isinstance(labels.get(name), str)}
    rest = {name: label for name, label in labels.items() if name not in found}
    port = found.get("bootstrap_port", "")
    if port.isascii() and port.isdigit() and len(port) < 6:
        found["bootstrap_port"] = int(port)
    given = {name: field for name, field in value.items() if field is not None or name not in found}
    return {**found, **given, "labels": rest}


def _ranks_as_label(value: dict[str, Any]) -> dict[str, Any]:
    """The body with its number of ranks in its labels too, where engines' own is. Raises RegistrationError."""
    ranks, labels = value.get(_RANKS), value.get("labels", {})
    if type(ranks) is not int or not isinstance(labels, dict):
        return value
    if labels.setdefault(_RANKS, str(ranks)) != str(ranks):
        raise RegistrationError(f"{_RANKS} is {ranks}, but the label {_RANKS} is {labels[_RANKS]!r}")
    return {**value, "labels": labels}


def _merged(document: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    if patch.get("kv_transfer_config") is not None:  # says all of it anew
        for name in _KV:
            document.pop(name, None)
    if _RANKS in patch:
        document.get("labels", {}).pop(_RANKS, None)
    if "runtime" in patch:
        document.pop("runtime_type", None)
    for name, given in patch.items():
        if given is None:
            document.pop(name, None)
        elif name in form.MERGED:
            members = {**document.get(name, {}), **given}
            document[name] = {member: value for member, value in members.items() if value is not None}
        else:
            document[name] = given
    return document


def _spec(body: form.Body) -> WorkerSpec:
    role, url = Role(body.worker_type), WorkerUrl.parse(body.url)
    named = KvConfig(body.kv_connector or "", body.kv_role or "", body.kv_engine_id or "")
    kv = kv_config(role, named, body.kv_transfer_config)
    if kv.connector and body.runtime_type in WITHOUT_CONNECTORS:
        raise RegistrationError(
            f"kv_connector {kv.connector}: {WITHOUT_CONNECTORS[body.runtime_type]} workers have none"
        )
    if body.connection_mode not in (None, url.connection_mode):
        raise RegistrationError(f"connection_mode is {body.connection_mode}, but the URL's scheme is {url.scheme}")
    if body.runtime_type == "tokenspeed" and not url.is_grpc:
        raise RegistrationError(
            f"runtime_type is tokenspeed, which is reached over gRPC, but the scheme is {url.scheme}"
        )
    resilience: dict[str, Any] = {
        name: tuple(member) if isinstance(member, list) else member
        for name, member in body.resilience.model_dump().items()
    }
    return WorkerSpec(
        url=url,
        role=role,
        cards=tuple(card.model_dump() for card in body.models),
        bootstrap_host=_bootstrap_host(body.bootstrap_host or "", url),
        bootstrap_port=body.bootstrap_port,
        api_key=body.api_key,
        priority=body.priority,
        cost=body.cost,
        labels=body.labels,
        runtime=None if body.runtime_type == "unspecified" else body.runtime_type,
        kv=kv,
        engine_id_named=bool(named.engine_id),
        health=HealthOverrides(**body.health.model_dump()),
        resilience=Resilience(**resilience),
        overload=Overload(**body.overload.model_dump()),
        load_monitor_interval_secs=body.load_monitor_interval_secs,
        kv_block_size=body.kv_block_size,
        max_connection_attempts=body.max_connection_attempts,
        http_pool=HttpPool(**(body.http_pool or form.HttpPool()).model_dump()),
        multimodal_tensor_transport=body.multimodal_tensor_transport,
        multimodal_shm_min_bytes=body.multimodal_shm_min_bytes,
    )


def _bootstrap_host(given: str, url: WorkerUrl) -> str:
    """As it stands in a URL; empty where it is that of ``url``. Raises RegistrationError."""
    bare = given.removeprefix("[").removesuffix("]").lower()
    if ":" not in bare:
        return "" if bare == url.host else bare
    if not is_ip_address(bare):
        raise RegistrationError(f"bootstrap_host: {given!r} is neither a name nor an IP address")
    return "" if bare == url.host else f"[{bare}]"


def _problems(error: ValidationError, model: type[BaseModel]) -> str:
    return "; ".join(_problem(item, model) for item in error.errors())


def _problem(item: Any, model: type[BaseModel]) -> str:
    field = ".".join(str(part) for part in item["loc"])
    match item["type"]:
        case "missing" if field == "worker_type":
            return "missing field `worker_type`: expected `prefill`, `decode`, `regular` or `encode`"
        case "missing":
            return f"missing field `{field}`"
        case "extra_forbidden" if field in _SHOWN_ONLY:
            return f"unknown field `{field}`: it is only shown"
        case "extra_forbidden":
            return f"unknown field `{field}`{_nearest(item['loc'], model)}"
        case "literal_error":
            return f"{field}: unknown variant {item['input']!r}, expected one of {item['ctx']['expected']}"
        case "model_type":
            return f"{field}: expected an object" + (", with an `id` at least" if item["loc"][0] == "models" else "")
    message = str(item["msg"])
    wanted = message.removeprefix("Input should be ")
    return f"{field}: {message if wanted == message else f'expected {wanted}'}"


def _nearest(loc: tuple[str | int, ...], model: type[BaseModel]) -> str:
    group = _GROUPS.get(str(loc[0])) if len(loc) > 1 else None
    known = (group or model).model_fields if group else [*model.model_fields, *NAMES]
    matches = difflib.get_close_matches(str(loc[-1]), known, n=1, cutoff=0.5)
    return f"; did you mean `{matches[0]}`?" if matches else ""
