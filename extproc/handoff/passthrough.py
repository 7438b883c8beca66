"""vLLM workers whose connector needs no word of ours: a shared store (LMCache and the like), or one we do not know.

What: a one-token prefill leg without any fields, then the decode leg; whatever ``kv_transfer_params`` the prefill's
answer has are relayed. When to use: workers registered with another connector than NIXL or Mooncake, or with none.
Fields: none. Failure: none that can be seen here: a decode that does not find the cache computes the prompt itself.
Source: vllm 0.32 distributed/kv_transfer/kv_connector/v1/lmcache_connector.py, example_connector.py.
"""

from __future__ import annotations

from extproc.apis.json_object import Edits, LegEdits
from extproc.apis.request import InferenceRequest
from extproc.handoff import vllm
from extproc.handoff.handoff import Handed, Kv, Plan
from extproc.workers.worker import Worker

_WHOLE = LegEdits()


class PassthroughHandoff(vllm.VllmHandoff):
    """See the module, and Handoff."""

    name = "passthrough"
    in_turn = True

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
        return Plan(vllm.prefill_body(request, edits, b"", trust_client=trust_client), b"")

    def handed(
        self,
        request: InferenceRequest,
        plan: Plan,  # noqa: ARG002 - Handoff's signature
        edits: Edits,
        answer: bytes,
        *,
        trust_client: bool = False,
    ) -> Handed:
        """See Handoff. Without parameters the cache is where the connectors share it, as far as anybody can tell."""
        params = vllm.Returned.of(answer, needed=False).params if answer else b""
        body = vllm.decode_body(request, edits, params, trust_client=trust_client)
        return Handed(body, Kv.HANDED if params else Kv.UNKNOWN if answer else Kv.RECOMPUTED, params)
