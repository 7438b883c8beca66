"""Names shared by the data plane and whoever talks through it: headers, metadata, clusters."""

from __future__ import annotations

from typing import Final

# Where a request goes: an ordered, comma-separated list of "ip:port". A header on the egress listener (Envoy removes
# it), dynamic metadata of the same name on the client listener. The Gateway API Inference Extension named it.
DESTINATION: Final = "x-gateway-destination-endpoint"
METADATA_NAMESPACE: Final = "envoy.lb"
# Metadata of that namespace by which an Envoy of others tells an endpoint picker who served.
SERVED: Final = "x-gateway-destination-endpoint-served"
# Metadata by which it names the only endpoints that an endpoint picker may choose: a list of "ip:port".
SUBSET_NAMESPACE: Final = "envoy.lb.subset_hint"
SUBSET: Final = "x-gateway-destination-endpoint-subset"

# Which prefill worker the routing sidecar of llm-d beside a decode worker is to use, as "ip:port"; its name until 2026
# and since. Only with --mode select-only.
PREFILLER: Final = (b"x-prefiller-host-port", b"x-llm-d-prefiller-host-port")

# Dynamic metadata that marks an answer of whose progress the service wants to hear; the value names it.
PROGRESS_NAMESPACE: Final = "pd_extproc"
WATCHED: Final = "watched"

# Which cluster of workers.endpoints the destination belongs to. Egress: on every leg. Client listener: where it is not
# that of the path: PREFILL_CLUSTER on a path of pairs, gRPC workers', and ANSWERS_CLUSTER. Removed by the route.
CLUSTER: Final = "x-pd-cluster"

# Response header on answers of workers: "ip:port" of the one that really answered, after any fail-over.
UPSTREAM: Final = "x-pd-upstream"

# Response header of the egress listener on answers that Envoy made up itself; the value holds Envoy's response flags
# ("UF", "UH", "UC" ...). A worker's own header of this name never gets through.
LOCAL_REPLY: Final = "x-pd-local-reply"

# Response header by which the service asks for a second stream about an answer that it wants to give itself, long after
# the request was released. The value names the request; what is done with the header, ext_proc.py of the data plane
# says. A worker's own header of this name never gets through, and the service takes its own away again.
LATE: Final = "x-pd-late"

# Response header on every error the gateway made: a code of extproc.errors.CATALOGUE. Never a worker's.
ERROR_CODE: Final = "x-pd-error-code"

# Response headers by which the service says who served a request and how. A worker's own of these names never get
# through.
NAMING: Final = ("x-pd-prefill", "x-pd-decode", "x-pd-handoff", "x-pd-kv", "x-pd-attempts")

# Where a client's own request id is looked for unless the settings say otherwise; the first one present counts.
REQUEST_ID_HEADERS: Final = ("x-request-id", "x-correlation-id", "x-trace-id", "request-id")

# Request header to the control API: the address at the other end of the client's connection to Envoy.
CLIENT_ADDRESS: Final = "x-pd-client-address"

# Clients may not send headers with this prefix.
OUR_PREFIX: Final = "x-pd-"

EXTPROC_CLUSTER: Final = "extproc"
ADS_CLUSTER: Final = "ads"
CONTROL_CLUSTER: Final = "control"
ADMIN_CLUSTER: Final = "admin"
ANSWERS_CLUSTER: Final = "answers"  # the service once more, as a worker would be: answers that it makes itself

CLIENT_LISTENER: Final = "clients"
EGRESS_LISTENER: Final = "egress"
STATUS_LISTENER: Final = "status"
