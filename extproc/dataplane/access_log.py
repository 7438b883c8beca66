"""Envoy's access log of client requests: one JSON object per line."""

from __future__ import annotations

from envoy_data_plane.envoy.config.accesslog.v3 import AccessLog
from envoy_data_plane.envoy.config.core.v3 import SubstitutionFormatString
from envoy_data_plane.envoy.extensions.access_loggers.stream.v3 import StdoutAccessLog

from extproc.dataplane.messages import any_of, struct


def client_access_log() -> list[AccessLog]:
    """To standard output, as containers want it."""
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
    return [AccessLog(name="envoy.access_loggers.stdout", typed_config=any_of(logger))]
