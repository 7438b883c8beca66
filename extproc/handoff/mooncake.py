"""vLLM's MooncakeConnector: both legs at once, meeting under a transfer id at the prefill's bootstrap server.

What: the legs share a ``transfer_id`` that is minted here for every attempt; the decode is told which engine core
prefills and where its bootstrap server is, and has the KV cache pushed as soon as it is there. The prefill's answer
says nothing. When to use: workers registered with ``kv_connector: MooncakeConnector``. ``in_turn`` starts the decode
leg only when the prefill is done, for engines that want it so (``--mooncake-dispatch sequential``).
Fields: prefill ``do_remote_decode``, ``transfer_id``; decode ``do_remote_prefill``, ``transfer_id``,
``remote_engine_id``, ``remote_bootstrap_addr`` (``http://host:port``, an IPv6 address in brackets; port 8998 unless
registered). With several engine cores (data parallelism) each is a worker of its own, and the legs name its rank in a
header (``--dp-aware``); Responses, for which vLLM does not read it, are left to the decode.
Failure: without an engine id, or with several and none chosen, nothing can be minted, and the decode computes the
prompt itself. A cache that no decode
fetches stays with the prefill for 480 s unless a decode worker is made to say that it will not (see nixl). A decode
that waits for a prefill that does not come keeps its memory as long, even after its client has left: so a prefill leg
is let finish, for as long, while its decode leg is out, and one that was refused is followed by one of another prompt
under the same transfer id, which the decode throws away. The same answers a decode that asks in vain: the engine takes
a client that leaves before a whole answer for a request that it refused, and asks for the cache once more to have it
freed. Each such question occupies one of the prefill's 20 senders for 480 s; with all occupied, no decode gets a cache
any more. But where the prefill still keeps the cache, another prompt under its transfer id makes it forget, for ever,
whose those blocks are: so that comes only after a decode worker has had it freed.
Source: vllm 0.32 distributed/kv_transfer/kv_connector/v1/mooncake/mooncake_connector.py, and its example proxy.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

import orjson

from extproc.apis.json_object import Edits, JsonObject, LegEdits
from extproc.apis.request import InferenceRequest
from extproc.apis.table import RESPONSES
from extproc.errors import GatewayError
from extproc.handoff import vllm
from extproc.handoff.handoff import Alone, Handed, Kv, Plan
from extproc.workers.kv_engines import bootstrap_address
from extproc.workers.worker import Role, Worker

ASK: Final = b'{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":"%b"}'
_UNPIN_PATH: Final = b"/v1/completions"
_UNPIN: Final = b'{"prompt":"x","max_tokens":1,"kv_transfer_params":%b}'
_DETAILS: Final = ("prompt_tokens_details", "input_tokens_details")
_WHOLE: Final = LegEdits()
NO_ENGINE: Final = Alone(Role.DECODE, Kv.RECOMPUTED, "the prefill worker's engine id is not known", unknown=True)
SEVERAL_ENGINES: Final = Alone(
    Role.DECODE,
    Kv.RECOMPUTED,
    "the prefill worker has several engine cores (--dp-aware would choose one)",
    unknown=True,
)
_NO_SAY: Final = Alone(Role.DECODE, Kv.RECOMPUTED, "vLLM chooses the rank of a response itself")


class MooncakeHandoff(vllm.VllmHandoff):
    """See the module, and Handoff."""

    name = "mooncake"
    pushes = True

    def __init__(self, *, in_turn: bool = False) -> None:
        self.in_turn = self.tells_tokens = in_turn
        self.lets_finish = not in_turn

    def alone(self, request: InferenceRequest, prefill: Worker) -> Alone | None:
        """See Handoff."""
        found = super().alone(request, prefill)
        if found is not None:
            return found
        if len(prefill.kv_engines) != 1:
            return SEVERAL_ENGINES if prefill.kv_engines else NO_ENGINE
        return _NO_SAY if prefill.dp_rank is not None and request.api is RESPONSES else None

    def plan(
        self,
        request: InferenceRequest,
        prefill: Worker,
        edits: LegEdits = _WHOLE,
        *,
        trust_client: bool = False,
        decode: Worker | None = None,  # noqa: ARG002 - Handoff's signature
    ) -> Plan:
        """See Handoff. ``prefill`` has one engine core."""
        transfer = f"xfer-{random.getrandbits(128):032x}"
        (engine,) = prefill.kv_engines
        ask = ASK % transfer.encode()
        params = orjson.dumps(
            {
                "do_remote_decode": False,
                "do_remote_prefill": True,
                "remote_engine_id": engine.id,
                "remote_bootstrap_addr": bootstrap_address(prefill),
                "transfer_id": transfer,
            }
        )
        return Plan(
            vllm.prefill_body(request, edits, ask, trust_client=trust_client),
            vllm.decode_body(request, edits.decode, params, trust_client=trust_client),
            params=params,
        )

    def handed(
        self, request: InferenceRequest, plan: Plan, edits: Edits, answer: bytes, *, trust_client: bool = False
    ) -> Handed:
        """See Handoff. Where the cache is was known before."""
        if not answer:
            return Handed(vllm.decode_body(request, edits, b"", trust_client=trust_client), Kv.RECOMPUTED)
        told = _told(plan.params, answer)
        return Handed(vllm.decode_body(request, edits, told, trust_client=trust_client), Kv.HANDED)

    def unpins(self, plan: Plan) -> Sequence[tuple[bytes, bytes]]:
        """See Handoff."""
        transfer = orjson.loads(plan.params)["transfer_id"]
        return [(_UNPIN_PATH, _UNPIN % (ASK % transfer.encode()))]


def _told(params: bytes, answer: bytes) -> bytes:
    """``params``, and what else the decode should know of the prefill's answer: token ids, tokens from its cache.

    A decode reports the cached tokens that it is told; else all that it was sent, as if it had been cached (NIXL's own
    parameters tell them).
    """
    try:
        said = JsonObject(answer)
        usage, ids = said.get("usage"), said.raw_value("prompt_token_ids")
    except GatewayError:
        return params
    put = {}
    for key in _DETAILS if isinstance(usage, dict) else ():
        details = usage.get(key)
        if isinstance(details, dict) and type(details.get("cached_tokens")) is int:
            put["remote_prefill_cached_tokens"] = b"%d" % details["cached_tokens"]
    if ids and ids.startswith(b"["):
        put["prompt_token_ids"] = ids
    return JsonObject(params).edited(put)
