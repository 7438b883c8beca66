"""A control plane that is not ours: hands out listeners, routes and clusters over ADS, and never changes its mind."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
from envoy.service.discovery.v3 import ads_pb2_grpc, discovery_pb2
from envoy_data_plane.google.protobuf import Any as BetterprotoAny
from google.protobuf.any_pb2 import Any as AnyMessage

from extproc.dataplane.ads import ENDPOINTS_TYPE

Json = dict[str, Any]


class ForeignPlane:
    """Serves the resources of ``responses``, discovery responses as Envoy reads them from files."""

    def __init__(self, responses: Sequence[Json]) -> None:
        self._resources: dict[str, list[AnyMessage]] = {}
        for response in responses:
            for resource in response["resources"]:
                if "filter_chains" in resource:
                    resource["address"] = {"socket_address": {"address": "127.0.0.1", "port_value": 0}}
                packed = AnyMessage.FromString(bytes(BetterprotoAny.from_dict(resource)))  # which knows all its types
                self._resources.setdefault(packed.type_url, []).append(packed)
        self.asked: set[str] = set()  # types

    async def start(self) -> None:
        """Listen on any port."""
        self._server = grpc.aio.server()
        ads_pb2_grpc.add_AggregatedDiscoveryServiceServicer_to_server(_Servicer(self._serve), self._server)
        self._port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()

    async def stop(self) -> None:
        """End all streams."""
        await self._server.stop(grace=None)

    def bootstrap(self, addition: Json) -> Json:
        """The bootstrap of an Envoy of this plane's, with ``addition`` to it."""
        document = copy.deepcopy(addition)
        address = {"socket_address": {"address": "127.0.0.1", "port_value": self._port}}
        options = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
        document["static_resources"]["clusters"].append(
            {
                "name": "own_plane",
                "load_assignment": {
                    "cluster_name": "own_plane",
                    "endpoints": [{"lb_endpoints": [{"endpoint": {"address": address}}]}],
                },
                "typed_extension_protocol_options": {
                    options: {
                        "@type": f"type.googleapis.com/{options}",
                        "explicit_http_config": {"http2_protocol_options": {}},
                    }
                },
            }
        )
        source = {"ads": {}, "resource_api_version": "V3"}
        service = {"envoy_grpc": {"cluster_name": "own_plane"}}
        return {
            **document,
            "node": {"id": "a-gateway", "cluster": "a-mesh"},
            "dynamic_resources": {
                "ads_config": {"api_type": "GRPC", "transport_api_version": "V3", "grpc_services": [service]},
                "lds_config": source,
                "cds_config": source,
            },
        }

    async def _serve(self, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for request in requests:
            self.asked.add(request.type_url)
            if not request.response_nonce and request.type_url != ENDPOINTS_TYPE:
                yield discovery_pb2.DiscoveryResponse(
                    version_info="1",
                    nonce="1",
                    type_url=request.type_url,
                    resources=self._resources.get(request.type_url, []),
                )


class _Servicer(ads_pb2_grpc.AggregatedDiscoveryServiceServicer):  # type: ignore[misc]  # xds-protos has no types
    def __init__(self, serve: Any) -> None:
        self._serve = serve

    async def StreamAggregatedResources(self, requests: AsyncIterator[Any], _: Any) -> AsyncIterator[Any]:  # noqa: N802
        async for response in self._serve(requests):
            yield response
