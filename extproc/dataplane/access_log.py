"""What Envoy says of client requests: the operator's access log, and reports of answers under way for the service."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from envoy_data_plane.envoy.config.accesslog.v3 import (
    AccessLog,
    AccessLogFilter,
    AndFilter,
    LogTypeFilter,
    MetadataFilter,
)
from envoy_data_plane.envoy.config.core.v3 import (
    ApiVersion,
    GrpcService,
    GrpcServiceEnvoyGrpc,
    SubstitutionFormatString,
)
from envoy_data_plane.envoy.data.accesslog.v3 import AccessLogType
from envoy_data_plane.envoy.extensions.access_loggers.grpc.v3 import CommonGrpcAccessLogConfig, HttpGrpcAccessLogConfig
from envoy_data_plane.envoy.extensions.access_loggers.stream.v3 import StdoutAccessLog
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import (
    HttpConnectionManagerHcmAccessLogOptions,
)
from envoy_data_plane.envoy.type.matcher.v3 import MetadataMatcher, MetadataMatcherPathSegment, ValueMatcher

from extproc.dataplane.config import DataplaneConfig
from extproc.dataplane.messages import any_of, seconds, struct
from extproc.names import PROGRESS_NAMESPACE, WATCHED

_PROGRESS_SECONDS: Final = 2.0  # between two reports of one answer


def access_logs(config: DataplaneConfig) -> list[AccessLog]:
    """All logs of the clients' listener, which needs :func:`access_log_options` for them."""
    return [_reports(config.extproc_cluster), *([_lines()] if config.access_log else [])]


def access_log_options() -> HttpConnectionManagerHcmAccessLogOptions:
    """How often."""
    return HttpConnectionManagerHcmAccessLogOptions(access_log_flush_interval=seconds(_PROGRESS_SECONDS))


def _reports(cluster: str) -> AccessLog:
    """Of the answers that the service asks about by metadata, every few seconds while they last, over gRPC."""
    asked = MetadataMatcher(
        filter=PROGRESS_NAMESPACE,
        path=[MetadataMatcherPathSegment(key=WATCHED)],
        value=ValueMatcher(present_match=True),
    )
    filters = [
        _of_type(AccessLogType.DownstreamPeriodic),
        AccessLogFilter(metadata_filter=MetadataFilter(matcher=asked, match_if_key_not_found=False)),
    ]
    logger = HttpGrpcAccessLogConfig(
        common_config=CommonGrpcAccessLogConfig(
            log_name="progress",
            grpc_service=GrpcService(envoy_grpc=GrpcServiceEnvoyGrpc(cluster_name=cluster, skip_envoy_headers=True)),
            transport_api_version=ApiVersion.V3,
            buffer_size_bytes=0,  # each line at once
            buffer_flush_interval=timedelta(hours=1),  # so there is nothing that this would be for
        )
    )
    return AccessLog(
        name="envoy.access_loggers.http_grpc",
        filter=AccessLogFilter(and_filter=AndFilter(filters=filters)),
        typed_config=any_of(logger),
    )


def _of_type(kind: AccessLogType) -> AccessLogFilter:
    return AccessLogFilter(log_type_filter=LogTypeFilter(types=[kind]))


def _lines() -> AccessLog:
    """One JSON object per request, to standard output, as containers want it."""
    line = struct(
        time="%START_TIME%",
        request_id="%REQ(X-REQUEST-ID)%",  # as the worker was told it: for vLLM, without its prefix
        answer_request_id="%RESP(X-REQUEST-ID)%",
        client="%DOWNSTREAM_REMOTE_ADDRESS_WITHOUT_PORT%",
        protocol="%PROTOCOL%",
        method="%REQ(:METHOD)%",
        path="%REQ(:PATH)%",
        status="%RESPONSE_CODE%",
        details="%RESPONSE_CODE_DETAILS%",
        flags="%RESPONSE_FLAGS%",
        bytes_in="%BYTES_RECEIVED%",
        bytes_out="%BYTES_SENT%",
        milliseconds="%DURATION%",
        cluster="%UPSTREAM_CLUSTER%",
        upstream="%UPSTREAM_REMOTE_ADDRESS%",
        attempts="%UPSTREAM_REQUEST_ATTEMPT_COUNT%",
    )
    logger = StdoutAccessLog(log_format=SubstitutionFormatString(json_format=line))
    return AccessLog(
        name="envoy.access_loggers.stdout",
        filter=_of_type(AccessLogType.DownstreamEnd),
        typed_config=any_of(logger),
    )
