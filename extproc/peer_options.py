"""Options of the peer gateway (``smg launch``) that this version does not have.

They are recognised in every source, so that a command line taken over from smg is refused with the option's name
instead of being half obeyed. An option leaves this list in the change that implements it.
"""

from __future__ import annotations

# smg 1.13.0; names without the leading dashes, aliases included.
_OPTIONS = """
backend enable-igw enable-trace encode epd-disaggregation header-read-timeout-secs
health-check-port idle-connection-timeout-secs job-queue-capacity job-queue-concurrency
kv-index log-dir max-background-responses max-buffered-request-bytes mcp-config-path
mm-allow-private-media-hosts mm-allowed-media-domains mm-per-request-image-limit mm-pixel-cache-mb mm-processing
multimodal-max-inflight-bytes otlp-traces-endpoint parser
prometheus-duration-buckets reasoning-parser remove-unhealthy-workers router-selector selection-accounting-ttl-ms
stream-body-stall-timeout-secs
stream-request-bodies-over tenant-api-key tool-call-parser upstream-http2
upstream-pool-idle-timeout-secs worker-auto-recovery worker-stale-secs
worker-startup-check-interval worker-startup-delay worker-startup-timeout-secs worker-urls
"""

# Other names of the peer's for an option, and what it is called here.
ALIASES = {
    "sticky-sessions": "routing-key-override",
    "sticky-key-idle-secs": "max-idle-secs",
    "spill-abs-threshold": "balance-abs-threshold",
    "spill-rel-threshold": "balance-rel-threshold",
    "cache-match-threshold": "cache-threshold",
    "eviction-interval": "eviction-interval-secs",
    "model": "model-path",
}

NOT_AVAILABLE_YET = frozenset(_OPTIONS.split())

# Of those that will not come: what there is instead.
INSTEAD = {
    "kv-index": "is an option of smg: here --kv-event-source has one index for all engines; leave it out",
    "selection-accounting-ttl-ms": "is an option of smg: here a choice counts until its leg ends; leave it out",
}


def not_available(option: str, shown_name: str) -> str:
    """The message for one of them under the name its source gives it (``--log-dir``, ``PD_EXTPROC_LOG_DIR``)."""
    return f"{shown_name} {INSTEAD.get(option, 'is an option of smg that is not available yet')}"
