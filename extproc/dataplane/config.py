"""All inputs of the Envoy configuration."""

from __future__ import annotations

from dataclasses import dataclass

from extproc.names import EXTPROC_CLUSTER

DEBIAN_CA_FILE = "/etc/ssl/certs/ca-certificates.crt"


@dataclass(frozen=True, slots=True)
class DataplaneConfig:
    """What Envoy must know.

    Addresses are ``unix:/path`` or ``host:port`` (IPv6 host in brackets), times are in seconds.
    """

    extproc: str  # ext_proc gRPC service
    ads: str  # ADS gRPC service
    control: str  # control API, HTTP/1.1
    # Where Envoy listens for legs from the ext_proc service; None: nowhere. Who reaches it can send to every worker.
    egress: str | None
    client_host: str = "0.0.0.0"  # noqa: S104  # a gateway serves the network unless told otherwise, like the peer
    client_port: int = 30000  # 0: any free port, see EnvoyProcess.client_address
    admin_port: int = 9901  # on 127.0.0.1 only; 0: any free port
    status_host: str = "0.0.0.0"  # noqa: S104  # metrics are for who collects them
    status_port: int = 0  # where what of the admin interface changes nothing may be read; 0: nowhere
    request_timeout: float = 1800.0
    timeout_margin: float = 5.0  # how much later than our own deadlines Envoy's timers fire; they are the safety net
    max_payload_bytes: int = 512 * 1024 * 1024
    concurrency: int | None = None  # Envoy's worker threads; None: one per core
    connect_timeout: float = 2.0
    # Below the 5 s after which uvicorn (SGLang, vLLM) closes an idle connection: a request is never sent into a
    # connection that the worker is just closing.
    upstream_idle_timeout: float = 3.0
    max_failovers: int = 8  # further workers of the ordered destination list that are tried when one is unreachable
    ca_file: str | None = DEBIAN_CA_FILE  # trusted for https:// workers; None: no https:// worker is ever trusted
    late_answers: bool = True  # the service may answer a request after it was released to a worker
    destination_header: bool = False  # the service names a released request's worker by a header
    access_log: bool = False  # one JSON line per client request on Envoy's stdout
    extproc_cluster: str = EXTPROC_CLUSTER  # by which the filters find the service; a mesh names its clusters itself
    # Whom Envoy says that it calls there. Empty: the cluster, whose name must look like a host's then: nghttp2 answers
    # others with PROTOCOL_ERROR.
    extproc_authority: str = ""

    @property
    def fetched_answers(self) -> bool:
        """Answers that the service makes are fetched from it; an Envoy that is not ours has no way for that."""
        return self.egress is not None

    @property
    def idle_timeout(self) -> float:
        """Silence after which Envoy gives up a stream by itself."""
        return self.request_timeout + self.timeout_margin


# Envoy and the service in containers of their own that share a volume for the egress socket; envoy/standalone.yaml.
STANDALONE = DataplaneConfig(
    extproc="extproc:50051",
    ads="extproc:50052",
    control="extproc:50053",
    egress="unix:/var/run/pd-extproc/egress.sock",
)
