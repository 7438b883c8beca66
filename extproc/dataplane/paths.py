"""The paths of the client port: which of them are inference, which belong to the control API, which are not served.

One table for both sides: Envoy's routes are built from it, and the code behind them relies on it. Query strings never
take part in the match.
"""

from __future__ import annotations

# POST only. The decode worker answers the client.
DECODE_PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/generate",
    "/v1/messages",
    "/v1/responses",
    "/inference/v1/generate",
)

# Any method. The decode worker that made what lies below answers: responses that were stored.
DECODE_PREFIXES = ("/v1/responses/",)

# POST only. One prefill worker answers, nothing is handed over. `/rerank` becomes `/v1/rerank` in the ext_proc service,
# and `/v1/tokenize` `/tokenize`.
PREFILL_PATHS = (
    "/v1/rerank",
    "/rerank",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
    "/v1/tokenize",
    "/v1/detokenize",
)

INFERENCE_PATHS = DECODE_PATHS + PREFILL_PATHS

# Any method. Answered with 501: a prefill/decode fleet has no worker for them.
NOT_IMPLEMENTED_PATHS = (
    "/v1/embeddings",
    "/v1/classify",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/audio/speech",
    "/v1/images/generations",
)

# Any method; the control API answers wrong ones itself. `/metrics`, the gateway's own, has a port of its own.
CONTROL_PATHS = (
    "/workers",
    "/readiness",
    "/health",
    "/liveness",
    "/v1/models",
    "/get_loads",
    "/engine_metrics",
    "/get_server_info",
    "/get_model_info",
    "/server_info",
    "/model_info",
    "/health_generate",
    "/flush_cache",
    "/start_profile",
    "/stop_profile",
    "/openapi.json",
    "/v1/tokenizers",
)
CONTROL_PREFIXES = ("/workers/", "/v1/models/", "/v1/tokenizers/")
