"""The Gateway API Inference Extension: a gateway that knows InferencePools asks us as it asks any endpoint picker."""

from __future__ import annotations

from typing import Any, Final

from extproc.dataplane.snippets.config import SnippetConfig
from extproc.dataplane.snippets.document import comment, documents, kubernetes
from extproc.dataplane.snippets.foreign import http_route
from extproc.names import CLUSTER

_POOLS: Final = "inference.networking.k8s.io"
_ROUTE: Final = "pd-inference"

_HEAD: Final = """
Gateway API Inference Extension (endpoint picker protocol 1.0), for whichever gateway implements it.

The sidecar (deploy/kubernetes has it as a Deployment):

$ pd-extproc launch --no-envoy --egress direct --destination both --no-retry-released --pd-disaggregation
  --extproc-address {listen} --service-discovery --service-discovery-namespace {place.namespace}
  --service-discovery-port {place.worker_port} --prefill-selector pd-role=prefill --decode-selector pd-role=decode

- Needs a gateway whose Envoy is 1.40, and which shows the picker whole bodies (FULL_DUPLEX_STREAMED, as the protocol
  has it), without TLS or with that of its mesh.
- Needs the Gateway {place.gateway} in namespace {place.namespace}, and pods of workers with the label pd-pool:
  {place.workers}, all on port {place.worker_port}: --service-discovery must find the same.
- With llm-d's routing sidecars in the decode pods: --mode select-only in the place of --egress direct.
- Cannot: gRPC workers, and another attempt after a release (--no-retry-released). Every token of an answer passes the
  sidecar, since such gateways show the picker answers, too.
- Buffer limits, fail-over and retries are the gateway's own: it goes on to the next worker of the list only if it
  retries refused connections, and only with bodies that it keeps (1 MB by default).
- Where the gateway names a subset of endpoints (x-gateway-destination-endpoint-subset), both workers are of that: it
  must have some of both roles.
- failureMode: FailClose makes it fail closed.
"""


def inference_pool(config: SnippetConfig) -> str:
    """InferencePool and HTTPRoute."""
    place = config.place
    head = comment(_HEAD.format(place=place, listen=config.listen))
    pool = {
        "targetPorts": [{"number": place.worker_port}],
        "selector": {"matchLabels": {"pd-pool": place.workers}},
        "endpointPickerRef": {
            "name": place.service,
            "port": {"number": config.extproc_port},
            "failureMode": "FailClose",
        },
    }
    rule: dict[str, Any] = {
        "filters": [{"type": "RequestHeaderModifier", "requestHeaderModifier": {"remove": [CLUSTER]}}],
        "backendRefs": [{"group": _POOLS, "kind": "InferencePool", "name": place.workers}],
        "timeouts": {"request": "0s"},
    }
    return documents(
        head,
        ("", kubernetes(f"{_POOLS}/v1", "InferencePool", place.workers, place.namespace, pool)),
        (
            "",
            kubernetes(
                "gateway.networking.k8s.io/v1", "HTTPRoute", _ROUTE, place.namespace, http_route(place.gateway, rule)
            ),
        ),
    )
