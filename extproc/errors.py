"""Every error a client can be told, in one catalogue; ``docs/behaviour.md`` shows it as a table (tested)."""

from __future__ import annotations

from dataclasses import dataclass

import orjson


@dataclass(frozen=True, slots=True)
class Fault:
    """A kind of error: its machine-readable code, HTTP status, OpenAI error type and when it happens."""

    code: str
    status: int
    when: str
    retryable: bool = False

    @property
    def type(self) -> str:
        """The ``error.type`` that OpenAI clients know for the status."""
        if self.status == 429:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"


def _catalogue(*faults: Fault) -> dict[str, Fault]:
    catalogue = {fault.code: fault for fault in faults}
    assert len(catalogue) == len(faults), "a code is there twice"
    return catalogue


CATALOGUE = _catalogue(
    Fault("invalid_json", 400, "the body is empty, is not JSON, or is not a JSON object"),
    Fault("invalid_type", 400, "a field that decides routing or splitting has the wrong type or an impossible value"),
    Fault(
        "invalid_value", 400, "over gRPC workers: the engine does not take the value of a field, or not with another"
    ),
    Fault(
        "unsupported_parameter",
        400,
        "over gRPC workers: a field that they cannot be told of, or that is not served over them yet (images, tools)",
    ),
    Fault("missing_required_parameter", 400, "the API's prompt field is absent"),
    Fault("duplicate_parameter", 400, "a field that decides routing or the handoff occurs twice in the body"),
    Fault("context_length_exceeded", 400, "gRPC workers: the prompt, or it and the answer, is longer than they take"),
    Fault("process_messages_failed", 400, "gRPC workers: the chat template refuses the messages, or there is none"),
    Fault("unauthorized", 401, "`--api-key` or `--control-plane-api-keys` is set, and the request bears none of them"),
    Fault("forbidden", 403, "the control API: the key may only read, or there is no key and the client is elsewhere"),
    Fault("model_not_found", 404, "no registered worker serves the named model"),
    Fault("not_found", 404, "no such path"),
    Fault("method_not_allowed", 405, "the path exists but not with this method"),
    Fault("payload_too_large", 413, "the body, or those of all its legs together, is larger than `--max-payload-size`"),
    Fault("rate_limit_exceeded", 429, "beyond `--rate-limit-tokens-per-second`, with no place to wait", retryable=True),
    Fault("admission_queue_full", 429, "`--max-concurrent-requests` run and `--queue-size` wait", retryable=True),
    Fault("admission_queue_timeout", 503, "it has waited for `--queue-timeout-secs`", retryable=True),
    Fault("scheduler_queue_full", 429, "`--priority-scheduler-enabled`: too many of its class wait", retryable=True),
    Fault("scheduler_queue_timeout", 503, "the same: it has waited as long as its class may", retryable=True),
    Fault("scheduler_preempted", 503, "the same: a more urgent request has taken its place", retryable=True),
    Fault("pd_prefill_queue_full", 429, "no prefill worker has room, `--prefill-queue-size` wait", retryable=True),
    Fault("pd_prefill_queue_timeout", 503, "it has waited for `--prefill-queue-timeout-secs`", retryable=True),
    Fault(
        "worker_overload_protection_shed",
        503,
        "every decode worker has as many requests as its engine runs, for `--pd-admission-wait-secs`; or all workers "
        "that could take the request are overloaded (`--worker-overload-shed`)",
        retryable=True,
    ),
    Fault("not_implemented", 501, "the API is not served by a prefill/decode fleet (embeddings, classify, audio)"),
    Fault(
        "no_available_workers",
        503,
        "no usable prefill or no usable decode worker at this moment, or none among the endpoints that a gateway names",
        retryable=True,
    ),
    Fault("no_compatible_pd_pair", 503, "no usable prefill and decode worker share a KV transfer protocol"),
    Fault("tokenizer_not_found", 503, "gRPC workers: the model's tokenizer is not there (yet)", retryable=True),
    Fault("tokenization_queue_full", 503, "gRPC workers: too many long prompts wait to be tokenised", retryable=True),
    Fault("tokenization_failed", 500, "gRPC workers: a defect in tokenising a prompt; the log has the traceback"),
    Fault(
        "no_models_available", 503, "no model is known that both a prefill and a decode worker serve", retryable=True
    ),
    Fault("no_prefill_servers", 503, "`/server_info` and the like: no usable prefill worker to ask", retryable=True),
    Fault("health_generate_failed", 503, "`/health_generate`: no pair answered; the message says why", retryable=True),
    Fault("extproc_unavailable", 503, "Envoy cannot reach the ext_proc service", retryable=True),
    Fault(
        "egress_unavailable",
        503,
        "the ext_proc service cannot reach Envoy's egress listener, or the proxy of `--egress`",
        retryable=True,
    ),
    Fault("draining", 503, "the gateway is shutting down and takes no new requests", retryable=True),
    Fault("prefill_rejected", 400, "the prefill worker answered with a 4xx status; it and the body are passed on"),
    Fault("prefill_unreachable", 503, "the prefill worker refuses connections", retryable=True),
    Fault(
        "prefill_connection_lost",
        502,
        "the prefill worker's connection broke before its answer was whole",
        retryable=True,
    ),
    Fault("prefill_failed", 502, "the prefill worker answered with a 5xx status (503, 504 are kept)", retryable=True),
    Fault(
        "pd_bootstrap_timeout",
        504,
        "the legs did not meet in their room within `--pd-bootstrap-timeout-secs`, or the engine's own time for that",
        retryable=True,
    ),
    Fault("prefill_timeout", 504, "Envoy gave up waiting for the prefill worker", retryable=True),
    Fault("decode_unreachable", 503, "every candidate decode worker refuses connections", retryable=True),
    Fault("decode_rejected", 400, "in a relayed request: the decode worker's 4xx status and body are passed on"),
    Fault(
        "decode_failed",
        502,
        "in a relayed request: the decode worker's 5xx status and body are passed on",
        retryable=True,
    ),
    Fault(
        "decode_connection_lost",
        502,
        "the decode worker's connection broke before its answer was whole",
        retryable=True,
    ),
    Fault("decode_timeout", 504, "in a relayed request: Envoy gave up waiting for the decode worker", retryable=True),
    Fault(
        "kv_missing",
        502,
        "`--kv-missing fail`: the prefill's answer does not say where the KV cache is, "
        "or its Mooncake engine id is not known",
    ),
    Fault("response_not_found", 404, "no decode worker is known to have made the stored response"),
    Fault("decode_bad_reply", 502, "an answer that must be merged is not what the API promises"),
    Fault("request_timeout", 504, "the request outlived `--request-timeout-secs`"),
    Fault("internal_error", 500, "a defect in the gateway; the log has the traceback"),
)


def error_body(code: str, message: str, param: str | None = None, error_type: str | None = None) -> bytes:
    """The JSON body of an error: ``{"error": {"type", "code", "message", "param"}}``."""
    kind = error_type or CATALOGUE[code].type
    return orjson.dumps({"error": {"type": kind, "code": code, "message": message, "param": param}})


class GatewayError(Exception):
    """An error that ends one request with a catalogue fault.

    Args:
        code: a code of the catalogue.
        message: what is wrong, for the client.
        param: the request's field that is wrong.
        retry_after: the value of ``Retry-After``.
        status: the status to answer with, where it is not the fault's own.
        passed_on: content type and body of a worker's own answer, to be passed on instead of ours.
        answered: the status that a worker answered with, where it did.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after: int | bytes | None = None,
        status: int | None = None,
        passed_on: tuple[bytes, bytes] | None = None,
        answered: int = 0,
    ) -> None:
        super().__init__(message)
        self.fault = CATALOGUE[code]
        self.message = message
        self.param = param
        self.retry_after = retry_after
        self.status = status or self.fault.status
        self.passed_on = passed_on
        self.answered = answered

    @property
    def body(self) -> bytes:
        """The body to answer with."""
        return self.passed_on[1] if self.passed_on else error_body(self.fault.code, self.message, self.param)

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """The headers to answer with."""
        headers = [
            (b"content-type", self.passed_on[0] if self.passed_on else b"application/json"),
            (b"x-pd-error-code", self.fault.code.encode()),
        ]
        if self.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        if self.fault.code == "scheduler_preempted":
            headers.append((b"x-smg-preempted", b"true"))  # the peer's, to tell it from an overload
        if self.retry_after is not None:
            value = self.retry_after if isinstance(self.retry_after, bytes) else b"%d" % self.retry_after
            headers.append((b"retry-after", value))
        return headers


class InvalidUrlError(ValueError):
    """A worker URL that cannot be used; ``reason`` says why."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(f"{url!r}: {reason}" if url else reason)
        self.url = url
        self.reason = reason
