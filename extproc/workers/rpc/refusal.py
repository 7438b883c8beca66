"""A request that a vLLM server refuses, but not before its KV connector has looked at the parameters.

Its gRPC server tells the connector of what is refused before the engine has it, as long as the parameters are those of
a decode (``smg-grpc-servicer`` 0.14.1, ``vllm/servicer.py``, ``_notify_kv_transfer_rejected``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final
from uuid import uuid4

import orjson
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from extproc.workers.no_answer import NoAnswerError
from extproc.workers.rpc.channels import Channels, StatusError
from extproc.workers.rpc.services import VLLM
from extproc.workers.worker import Worker

_REFUSED: Final = "INVALID_ARGUMENT"


async def be_refused(
    channels: Channels, worker: Worker, params: Mapping[str, object], *, within: float, ip: str | None = None
) -> None:
    """Have the server of ``worker`` refuse a request with these ``kv_transfer_params``.

    Raises NoAnswerError where it does anything else.
    """
    request = pb.GenerateRequest(
        request_id=f"refused-{uuid4().hex}",
        tokenized=pb.TokenizedInput(input_ids=[0]),
        sampling_params=pb.SamplingParams(max_tokens=0),
        kv_transfer_params_json=orjson.dumps(params).decode(),
    )
    try:
        await channels.ask(worker, VLLM.path("Generate"), request, bytes, within=within, ip=ip)
    except StatusError as error:
        if error.code == _REFUSED:
            return
        raise
    raise NoAnswerError("Generate: a request of no token was not refused")
