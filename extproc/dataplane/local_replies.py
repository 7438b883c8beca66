"""What clients are told when Envoy itself ends a request: JSON of the error catalogue instead of Envoy's plain text."""

from __future__ import annotations

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

from extproc.dataplane.endpoints import DECODE_CLUSTER, PREFILL_CLUSTER
from extproc.dataplane.messages import any_of, inline, set_header
from extproc.dataplane.names import CONTROL_CLUSTER, ERROR_CODE, LOCAL_REPLY
from extproc.errors import CATALOGUE, error_body

_FROM_EXT_PROC_FILTER = "response.code_details.startsWith('ext_proc_error')"
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


# The first row that fits wins. Envoy sets several flags at once when a retry ended differently from the first try, so
# the order says which of them is the news. Answers without flags are ours (direct responses, ImmediateResponse of the
# ext_proc service) and pass untouched.
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
    Reply(
        "prefill_unreachable",
        "no prefill worker that was chosen accepts connections",
        flags=_UNREACHABLE,
        expression=_to(PREFILL_CLUSTER),
    ),
    Reply(
        "decode_unreachable",
        "no decode worker that was chosen accepts connections",
        flags=_UNREACHABLE,
        expression=_to(DECODE_CLUSTER),
    ),
    Reply("no_available_workers", "the worker that was chosen is no longer there", flags=_NOBODY, retry_after=True),
    Reply(
        "prefill_connection_lost",
        "the prefill worker closed the connection before it answered",
        flags=_LOST,
        expression=_to(PREFILL_CLUSTER),
    ),
    Reply(
        "decode_connection_lost",
        "the decode worker closed the connection before it answered",
        flags=_LOST,
        expression=_to(DECODE_CLUSTER),
    ),
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
    return LocalReplyConfig(
        mappers=[ResponseMapper(filter=every, headers_to_add=[set_header(LOCAL_REPLY, "%RESPONSE_FLAGS%")])]
    )


def _mapper(reply: Reply) -> ResponseMapper:
    headers = [set_header(ERROR_CODE, reply.code)]
    if reply.retry_after:
        headers.append(set_header("retry-after", _RETRY_AFTER_SECONDS))
    body = error_body(reply.code, reply.message).decode()
    return ResponseMapper(
        filter=_filter(reply),
        status_code=CATALOGUE[reply.code].status,
        headers_to_add=headers,
        body_format_override=SubstitutionFormatString(
            text_format_source=inline(body.replace("%", "%%")), content_type="application/json"
        ),
    )


def _filter(reply: Reply) -> AccessLogFilter:
    parts = []
    if reply.flags:
        parts.append(AccessLogFilter(response_flag_filter=ResponseFlagFilter(flags=list(reply.flags))))
    if reply.expression:
        parts.append(
            AccessLogFilter(
                extension_filter=ExtensionFilter(
                    name="envoy.access_loggers.extension_filters.cel",
                    typed_config=any_of(ExpressionFilter(expression=reply.expression)),
                )
            )
        )
    return parts[0] if len(parts) == 1 else AccessLogFilter(and_filter=AndFilter(filters=parts))
