"""What clients are told when Envoy itself ends a request: JSON of the error catalogue instead of Envoy's plain text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from envoy_data_plane.envoy.config.accesslog.v3 import (
    AccessLogFilter,
    AndFilter,
    ComparisonFilter,
    ComparisonFilterOp,
    ExtensionFilter,
    ResponseFlagFilter,
    StatusCodeFilter,
)
from envoy_data_plane.envoy.config.core.v3 import RuntimeUInt32, SubstitutionFormatString
from envoy_data_plane.envoy.extensions.access_loggers.filters.cel.v3 import ExpressionFilter
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import (
    LocalReplyConfig,
    ResponseMapper,
)

from extproc.dataplane.messages import any_of, inline, set_header
from extproc.errors import CATALOGUE, error_body
from extproc.names import CONTROL_CLUSTER, ERROR_CODE, LOCAL_REPLY
from extproc.workers.endpoints import ROLES

_FROM_EXT_PROC_FILTER = "response.code_details.startsWith('ext_proc_error')"

# When the last host of the list refused as well, the next try finds none, and Envoy's flag is that of the last try: UH.
# At the first try UH means that the destination is not in the cluster.
_USED_UP = ("UH",)
_AFTER_A_RETRY = "upstream.request_attempt_count > 1"

_UNREACHABLE = ("UF",)
_NOBODY = ("UH", "NC", "UO")
_LOST = ("UC", "UR", "LR", "UPE")
_LATE = ("UT", "SI", "DT", "UMSDR")
_RETRY_AFTER_SECONDS = "1"


@dataclass(frozen=True, slots=True)
class Reply:
    """One row: when Envoy answers by itself with one of ``flags`` (and ``expression`` holds), say ``code``."""

    code: str
    message: str
    flags: tuple[str, ...] = ()
    expression: str | None = None  # CEL over Envoy's attributes
    retry_after: bool = False


def _to(cluster: str) -> str:
    return f"xds.cluster_name == '{cluster}'"


def _to_workers(role: str) -> str:
    clusters = ", ".join(f"'{cluster}'" for cluster, of in ROLES.items() if of == role)
    return f"xds.cluster_name in [{clusters}]"


def _unreachable(role: str) -> tuple[Reply, Reply]:
    message = f"no {role} worker that was chosen accepts connections"
    to = _to_workers(role)
    return (
        Reply(f"{role}_unreachable", message, _UNREACHABLE, to, retry_after=True),
        Reply(f"{role}_unreachable", message, _USED_UP, f"{to} && {_AFTER_A_RETRY}", retry_after=True),
    )


def _lost(role: str) -> Reply:
    message = f"the {role} worker closed the connection before it answered"
    return Reply(f"{role}_connection_lost", message, _LOST, _to_workers(role))


# The first row that fits wins. Answers without flags are ours (direct responses, ImmediateResponse of the ext_proc
# service) and pass untouched.
REPLIES = (
    Reply(
        "extproc_unavailable",
        "the gateway's ext_proc service does not answer",
        expression=_FROM_EXT_PROC_FILTER,
        retry_after=True,
    ),
    Reply(
        "extproc_unavailable",
        "the gateway's control API does not answer",
        flags=_UNREACHABLE + _NOBODY + _LOST + _LATE,
        expression=_to(CONTROL_CLUSTER),
        retry_after=True,
    ),
    *_unreachable("prefill"),
    *_unreachable("decode"),
    Reply("no_available_workers", "the worker that was chosen is no longer there", flags=_NOBODY, retry_after=True),
    _lost("prefill"),
    _lost("decode"),
    Reply("request_timeout", "the request took too long", flags=_LATE),
    Reply("not_found", "no such path", flags=("NR",)),
)


def client_replies() -> LocalReplyConfig:
    """The client listener's rewriting of Envoy's own answers."""
    return LocalReplyConfig(mappers=[_mapper(reply) for reply in REPLIES])


def egress_replies() -> LocalReplyConfig:
    """Mark Envoy's own answers on the egress listener; they keep status and text, which only the service reads."""
    every = AccessLogFilter(
        status_code_filter=StatusCodeFilter(
            comparison=ComparisonFilter(
                op=ComparisonFilterOp.GE,
                value=RuntimeUInt32(default_value=0, runtime_key="pd_extproc.local_reply_min_status"),
            )
        )
    )
    used_up = _filter(_USED_UP, _AFTER_A_RETRY)
    return LocalReplyConfig(
        mappers=[
            ResponseMapper(filter=used_up, headers_to_add=[set_header(LOCAL_REPLY, _UNREACHABLE[0])]),
            ResponseMapper(filter=every, headers_to_add=[set_header(LOCAL_REPLY, "%RESPONSE_FLAGS%")]),
        ]
    )


def _mapper(reply: Reply) -> ResponseMapper:
    headers = [set_header(ERROR_CODE, reply.code)]
    if reply.retry_after:
        headers.append(set_header("retry-after", _RETRY_AFTER_SECONDS))
    body = error_body(reply.code, reply.message).decode()
    return ResponseMapper(
        filter=_filter(reply.flags, reply.expression),
        status_code=CATALOGUE[reply.code].status,
        headers_to_add=headers,
        body_format_override=SubstitutionFormatString(
            text_format_source=inline(body.replace("%", "%%")), content_type="application/json"
        ),
    )


def _filter(flags: Sequence[str], expression: str | None) -> AccessLogFilter:
    parts = []
    if flags:
        parts.append(AccessLogFilter(response_flag_filter=ResponseFlagFilter(flags=list(flags))))
    if expression:
        parts.append(
            AccessLogFilter(
                extension_filter=ExtensionFilter(
                    name="envoy.access_loggers.extension_filters.cel",
                    typed_config=any_of(ExpressionFilter(expression=expression)),
                )
            )
        )
    return parts[0] if len(parts) == 1 else AccessLogFilter(and_filter=AndFilter(filters=parts))
