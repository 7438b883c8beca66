"""Options of the peer gateway (``smg launch``) that this version does not have.

They are recognised in every source, so that a command line taken over from smg is refused with the option's name
instead of being half obeyed. An option leaves this list in the change that implements it.
"""

from __future__ import annotations

# smg 1.13.0; names without the leading dashes, aliases included.
_OPTIONS = """
backend balance-token-usage-threshold block-size
cache-boundaries cache-index cache-match-threshold cache-threshold cache-ttl-secs
chat-template
decode-selector
disable-tokenizer-autoload discovery-check-interval-secs discovery-file discovery-provider
enable-igw enable-trace encode encode-selector epd-disaggregation
eviction-interval eviction-interval-secs header-read-timeout-secs health-check-port idle-connection-timeout-secs
job-queue-capacity job-queue-concurrency kv-connector-annotation kv-engine-id-annotation kv-index
log-dir max-background-responses max-buffered-request-bytes
max-concurrent-requests max-tree-size mcp-config-path mm-allow-private-media-hosts
mm-allowed-media-domains mm-per-request-image-limit mm-pixel-cache-mb mm-processing model
model-id-from model-path multimodal-max-inflight-bytes otlp-traces-endpoint overlap-decay
overload-token-usage-threshold parser pd-admission-wait-secs
prefill-max-inflight-requests-per-worker prefill-queue-size prefill-queue-timeout-secs prefill-selector
priority-scheduler-enabled
prometheus-duration-buckets queue-size queue-timeout-secs rate-limit-tokens-per-second reasoning-parser
remove-unhealthy-workers router-selector
selection-accounting-ttl-ms selection-temperature selector service-discovery service-discovery-namespace
service-discovery-port sse-keepalive-secs stream-body-stall-timeout-secs
stream-request-bodies-over tenant-api-key tokenizer-path tool-call-parser upstream-http2
upstream-pool-idle-timeout-secs worker-auto-recovery worker-overload-protection worker-overload-shed
worker-overload-token-usage worker-overload-waiting-requests worker-stale-secs
worker-startup-check-interval worker-startup-delay worker-startup-timeout-secs worker-urls
"""
_POLICIES = "cache_aware"

# Other names of the peer's for an option, and what it is called here.
ALIASES = {
    "sticky-sessions": "routing-key-override",
    "sticky-key-idle-secs": "max-idle-secs",
    "spill-abs-threshold": "balance-abs-threshold",
    "spill-rel-threshold": "balance-rel-threshold",
}

NOT_AVAILABLE_YET = frozenset(_OPTIONS.split())
POLICIES_NOT_AVAILABLE_YET = frozenset(_POLICIES.split())


def not_available(shown_name: str) -> str:
    """The message for an option under the name its source gives it (``--queue-size``, ``PD_EXTPROC_QUEUE_SIZE``)."""
    return f"{shown_name} is an option of smg that is not available yet"
