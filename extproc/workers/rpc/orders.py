"""What is ordered of a gRPC server: to flush its cache, to start or stop its profiler.

Every engine's service has the three, with messages in common (``smg_grpc_proto``: ``common.proto``). The body
has the fields of the request: ``timeout_s``; ``output_dir``, ``num_steps`` and the like. Another field is an error.
vLLM refuses a profile with options (``smg-grpc-servicer`` 0.14.1, ``vllm/admin.py``).
"""

from __future__ import annotations

from google.protobuf import json_format

from extproc.workers.rpc.channels import Channels, UnimplementedError
from extproc.workers.rpc.services import service_of
from extproc.workers.worker import Worker


class NotDoneError(Exception):
    """The server did not do it; the message says why."""


async def do(channels: Channels, worker: Worker, method: str, body: object, *, within: float) -> None:
    """Have the server of a worker do ``method``; ``body`` is an object as JSON has it, or None.

    Raises NotDoneError, NoAnswerError.
    """
    service = service_of(worker.runtime)
    request = service.request(method)
    try:
        json_format.ParseDict(body or {}, request)
    except json_format.ParseError as error:
        raise NotDoneError(f"{method}: {str(error).splitlines()[0]}") from None
    try:
        answer = await channels.ask(worker, service.path(method), request, service.response(method), within=within)
    except UnimplementedError as error:
        raise NotDoneError(f"{error}; this server does not have it") from None
    if not answer.success:
        raise NotDoneError(f"{method}: not done" + (f": {answer.message}" if answer.message else ""))
