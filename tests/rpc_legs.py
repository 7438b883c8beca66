"""Legs to gRPC workers, read back: what an engine's server would see of them."""

from __future__ import annotations

from smg_grpc_proto.generated import sglang_scheduler_pb2, tokenspeed_scheduler_pb2, vllm_engine_pb2

from extproc.engines.frames import frame, messages

PROTOS = {"sglang": sglang_scheduler_pb2, "vllm": vllm_engine_pb2, "tokenspeed": tokenspeed_scheduler_pb2}


def request_in(runtime, body):
    """The one ``GenerateRequest`` of a leg's body."""
    (message,) = messages(body)
    return PROTOS[runtime].GenerateRequest.FromString(message)


def abort_in(runtime, order):
    """Path, and the ``AbortRequest`` of an order."""
    path, body = order
    (message,) = messages(body)
    return path, PROTOS[runtime].AbortRequest.FromString(message)


def response(runtime, **fields):
    """A ``GenerateResponse``, serialised."""
    return PROTOS[runtime].GenerateResponse(**fields).SerializeToString()


def answer(runtime, **complete):
    """The body of a leg's answer: one complete message."""
    said = {"finish_reason": "length", **complete}
    return frame(response(runtime, complete=PROTOS[runtime].GenerateComplete(**said)))
