"""Somebody else's ext_proc filter in front of the product's, as body-based routing or a guard may be."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import yaml
from envoy.service.ext_proc.v3 import external_processor_pb2 as ep
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as ep_grpc

DUPLEX = "FULL_DUPLEX_STREAMED"
MARK = "x-other-filter"  # set on every request
_CHUNK = 62_000  # bytes; as much as one message may carry safely
_NAME = "other"


def with_filter(bootstrap: str, port: int, request_mode: str, response_mode: str) -> str:
    """Envoy's configuration with a filter of these body modes in front of all others of the client listener."""
    config = yaml.safe_load(bootstrap)
    resources = config["static_resources"]
    processing = {
        "request_header_mode": "SEND",
        "request_body_mode": request_mode,
        "response_header_mode": "SEND" if response_mode != "NONE" else "SKIP",
        "response_body_mode": response_mode,
        "request_trailer_mode": "SEND" if request_mode == DUPLEX else "SKIP",
        "response_trailer_mode": "SEND" if response_mode == DUPLEX else "SKIP",
    }
    added = {
        "name": _NAME,
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor",
            "grpc_service": {"envoy_grpc": {"cluster_name": _NAME}, "timeout": "0s"},
            "message_timeout": "30s",
            "allow_content_length_header": True,
            "processing_mode": processing,
        },
    }
    for filters in _client_filters(resources["listeners"]):
        filters.insert(0, added)
    resources["clusters"].append(_cluster(port))
    return yaml.safe_dump(config)


def _client_filters(listeners: list[Any]) -> list[list[Any]]:
    """The HTTP filters of listeners that have the product's."""
    chains = [chain for listener in listeners for chain in listener.get("filter_chains", ())]
    managers = [each["typed_config"] for chain in chains for each in chain["filters"]]
    found = [manager["http_filters"] for manager in managers if "http_filters" in manager]
    return [filters for filters in found if any(each["name"] == "ext_proc" for each in filters)]


def _cluster(port: int) -> dict[str, Any]:
    address = {"socket_address": {"address": "127.0.0.1", "port_value": port}}
    protocol = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    return {
        "name": _NAME,
        "connect_timeout": "2s",
        "load_assignment": {
            "cluster_name": _NAME,
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": address}}]}],
        },
        "typed_extension_protocol_options": {
            protocol: {
                "@type": f"type.googleapis.com/{protocol}",
                "explicit_http_config": {"http2_protocol_options": {}},
            }
        },
    }


class OtherFilter(ep_grpc.ExternalProcessorServicer):
    """Gives back what it is given, whichever way it comes; on threads of its own, as another process would.

    Args:
        request_mode, response_mode: as in :func:`with_filter`.
    """

    def __init__(self, request_mode: str, response_mode: str) -> None:
        self._duplex = {"request": request_mode == DUPLEX, "response": response_mode == DUPLEX}
        self._server = grpc.server(ThreadPoolExecutor(8), options=[("grpc.max_receive_message_length", -1)])
        ep_grpc.add_ExternalProcessorServicer_to_server(self, self._server)

    def start(self) -> int:
        """Serve; returns the port."""
        port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()
        return int(port)

    def stop(self) -> None:
        """Serve no more."""
        self._server.stop(0).wait()

    def Process(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:  # noqa: ARG002, N802 - the protocol's
        """Each message is answered by one of its kind, a duplex body by as many as it needs."""
        for message in requests:
            kind = message.WhichOneof("request")
            way, _, part = kind.partition("_")
            if part == "body" and self._duplex[way]:
                for piece in _pieces(message):
                    streamed = ep.ProcessingResponse()
                    getattr(streamed, kind).response.body_mutation.streamed_response.CopyFrom(piece)
                    yield streamed
                continue
            answer = ep.ProcessingResponse()
            getattr(answer, kind).SetInParent()
            if kind == "request_headers":
                option = answer.request_headers.response.header_mutation.set_headers.add()
                option.header.key, option.header.raw_value = MARK, b"seen"
            yield answer


def _pieces(message: Any) -> Iterator[Any]:
    """What came, in pieces that are small enough."""
    body = getattr(message, message.WhichOneof("request"))
    for start in range(0, max(1, len(body.body)), _CHUNK):
        ends = body.end_of_stream and start + _CHUNK >= len(body.body)
        yield ep.StreamedBodyResponse(body=body.body[start : start + _CHUNK], end_of_stream=ends)
