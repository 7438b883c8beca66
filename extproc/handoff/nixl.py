"""vLLM's NixlConnector: prefill first, then the decode fetches the KV cache from where the prefill's answer says.

What: the prefill leg asks for remote decode; its answer's ``kv_transfer_params`` name its engine, blocks and side
channel; the decode leg gets that object, byte for byte: new keys appear in it every few months.
When to use: workers registered with ``kv_connector: NixlConnector``.
Fields: ``do_remote_decode`` true, ``do_remote_prefill`` false and four nulls, which older engines want, on the prefill
leg; ``do_remote_prefill``, ``remote_engine_id``, ``remote_block_ids``, ``remote_request_id``, ``remote_host``,
``remote_port`` must be in what comes back.
Failure: an answer without them makes the decode compute the prompt itself. Blocks that no decode fetches stay with the
prefill for the lease (30 s by default); a decode worker that rejects a request bearing the parameters has them freed at
once, and that is how they are freed here.
Source: vllm 0.32 distributed/kv_transfer/kv_connector/v1/nixl/pull_scheduler.py, entrypoints/generate/base/serving.py.
"""

from __future__ import annotations

from typing import Final

from extproc.apis.json_object import Edits, LegEdits
from extproc.apis.request import InferenceRequest
from extproc.handoff import vllm
from extproc.handoff.handoff import Handed, Kv, Plan
from extproc.workers.worker import Worker

ASK: Final = (
    b'{"do_remote_decode":true,"do_remote_prefill":false,'
    b'"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}'
)
_WHOLE: Final = LegEdits()


class NixlHandoff(vllm.VllmHandoff):
    """See the module, and Handoff."""

    name = "nixl"
    in_turn = True
    tells_tokens = True

    def plan(
        self,
        request: InferenceRequest,
        prefill: Worker,  # noqa: ARG002 - Handoff's signature
        edits: LegEdits = _WHOLE,
        *,
        trust_client: bool = False,
        decode: Worker | None = None,  # noqa: ARG002 - Handoff's signature
    ) -> Plan:
        """See Handoff."""
        return Plan(vllm.prefill_body(request, edits, ASK, trust_client=trust_client), b"")

    def handed(
        self,
        request: InferenceRequest,
        plan: Plan,  # noqa: ARG002 - Handoff's signature
        edits: Edits,
        answer: bytes,
        *,
        trust_client: bool = False,
    ) -> Handed:
        """See Handoff."""
        returned = vllm.Returned.of(answer, needed=True) if answer else vllm.Returned()
        body = vllm.decode_body(request, edits, returned.told, trust_client=trust_client)
        return Handed(body, Kv.HANDED if returned.params else Kv.RECOMPUTED, returned.params)
