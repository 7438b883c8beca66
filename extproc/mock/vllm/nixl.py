"""NIXL's pull connector: a decode reads the blocks that a prefill names in its answer, and then tells it to free them.

Nothing says whose KV cache the blocks hold: parameters of another prompt, used twice or used too late give a wrong text
and no error (0.32, ``distributed/kv_transfer/kv_connector/v1/nixl``). What is compared at first contact is a hash of
both engines' configurations (``metadata.py``, ``compute_nixl_compatibility_hash``); here, of version, model path and
cache type. With two block sizes the text was wrong on a CPU. Lines between the two processes (``peers``): ``pull
<number> <engine> <hash> <request> <block> <block size>`` reads and frees, ``free <number> <engine> <hash> <request>``
only frees.
"""

from __future__ import annotations

import asyncio
from typing import Any

from extproc.mock.engine import CrashError
from extproc.mock.lines import Lines
from extproc.mock.vllm.engine import Connector, Engine, Role, Sequence, core_id
from extproc.mock.vllm.metrics import Metric
from extproc.mock.vllm.peers import Listener, LoadError, Peers

_BYTES = 65_536  # of each transfer
_ANY = "any"  # the decode does not compare
_UNLIKE = "NIXL compatibility hash mismatch."
_REMOTE = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")


class Nixl(Connector):
    """The connector of one process; its side channel listens whatever the role, as there."""

    name = "NixlConnector"

    def __init__(self, engine: Engine, engine_id: str) -> None:
        self.engine_id = engine_id
        self.host = ""
        self.port = 0
        self.peers = Peers()
        self.listener = Listener(self._hear)
        self._engine = engine
        self._cores: dict[str, str] = {}  # pinned requests, and the engine core of each
        self._freeing: set[asyncio.Task[None]] = set()
        self._read = 0
        self._failed = 0
        self._late = 0

    async def start(self, host: str, port: int) -> None:
        """Listen for decodes."""
        self.host = host
        self.port = await self.listener.start(host, port)

    def stop(self) -> list[asyncio.Task[Any]]:
        """Break every connection."""
        self.listener.stop()
        self.peers.close()
        tasks: list[asyncio.Task[Any]] = list(self._freeing)
        for task in tasks:
            task.cancel()
        return tasks

    def survive(self, sequence: Sequence) -> None:
        """``assert num_external_tokens == 0``: a remote prefill without its blocks ends the engine's process."""
        params = sequence.handoff or {}
        if params.get("do_remote_prefill") and not params.get("remote_block_ids") and sequence.reads_cache:
            raise CrashError

    def incomplete(self, params: dict[str, Any]) -> bool:
        """Whether parameters that ask for a remote prefill lack what it takes."""
        return not all(name in params for name in _REMOTE)

    async def load(self, params: dict[str, Any], rank: int) -> int:  # noqa: ARG002 - Connector's signature
        """Read the prefill's blocks."""
        blocks = params["remote_block_ids"]
        first = blocks[0][0] if blocks and isinstance(blocks[0], list) and blocks[0] else 0
        try:
            if self._engine.role is Role.PREFILL:
                raise LoadError("a producer reads nothing")
            peer = await self.peers.peer(params["remote_host"], params["remote_port"])
            content = await peer.ask(
                "pull",
                params["remote_engine_id"],
                self._wanted_hash,
                params["remote_request_id"],
                first,
                self._engine.options.block_size,
            )
        except LoadError as error:
            self._failed += 1
            if str(error) != _UNLIKE:
                await asyncio.sleep(self._engine.options.load_failure_delay)
            raise
        self._read += 1
        return content

    def metrics(self) -> list[Metric]:
        """Transfers; the real engine has these only once there were some."""
        return [
            Metric("nixl_bytes_transferred", "histogram", self._read, suffix="_count"),
            Metric("nixl_bytes_transferred", "histogram", self._read * _BYTES, suffix="_sum"),
            Metric("nixl_num_failed_transfers_total", "counter", self._failed),
            Metric("nixl_num_failed_notifications_total", "counter", 0),
            Metric("nixl_num_kv_expired_reqs_total", "counter", self._engine.pins.expired),
            Metric("nixl_num_notifications_after_expiry_total", "counter", self._late),
        ]

    def release_remote(self, params: dict[str, Any], rank: int) -> None:  # noqa: ARG002 - Connector's signature
        """The prefill is told to free its blocks; parameters that do not say where are a ``KeyError`` in the core."""
        if self.incomplete(params) or "remote_block_ids" not in params:
            raise CrashError
        task = asyncio.get_running_loop().create_task(self._free(params))
        self._freeing.add(task)
        task.add_done_callback(self._freeing.discard)

    def finished(self, sequence: Sequence) -> dict[str, Any] | None:
        """Pin the blocks of a prefill that has ended by length or, in newer engines, by a stop token."""
        params = sequence.handoff or {}
        ended_well = sequence.capped or (sequence.ended_by_token and not self._engine.options.old_engine)
        if not params.get("do_remote_decode") or not ended_well:
            return None
        computed = sequence.prompt.length + sequence.written - 1
        engine = self._engine
        kept = sequence.blocks[: engine.blocks.needed(computed)]
        engine.blocks.give(sequence.blocks[len(kept) :])
        sequence.blocks = []
        engine.pins.hold(sequence.rid, kept, sequence.digest)
        core = self._cores[sequence.rid] = core_id(self.engine_id, sequence.rank, engine.options.dp_size)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [kept],
            "remote_engine_id": core,
            "remote_request_id": sequence.rid,
            "remote_host": self.host,
            "remote_port": self.port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": computed,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
        }

    @property
    def _hash(self) -> str:
        options = self._engine.options
        return f"{options.version} {options.root or options.model} {options.cache_dtype}"

    @property
    def _wanted_hash(self) -> str:
        return self._hash if self._engine.options.enforce_handshake_compat else _ANY

    async def _free(self, params: dict[str, Any]) -> None:
        try:
            peer = await self.peers.peer(params["remote_host"], params["remote_port"])
            await peer.ask("free", params["remote_engine_id"], self._wanted_hash, params["remote_request_id"])
        except LoadError:
            return  # its lease will end

    def _hear(self, peer: Lines, word: str, number: str, arguments: list[str]) -> None:
        engine_id, wanted, request, *block = arguments
        if wanted not in (_ANY, self._hash):
            peer.send(f"fail {number} {_UNLIKE}")
            return
        if engine_id != self._cores.get(request, engine_id) or not engine_id.startswith(self.engine_id):
            peer.send(f"fail {number} engine id mismatch")
            return
        self._cores.pop(request, None)
        alike = block[1:] == [str(self._engine.options.block_size)]
        content = self._engine.blocks.content(int(block[0])) if word == "pull" and alike else 0
        if not self._engine.pins.release(request):
            self._late += 1
        peer.send(f"kv {number} {content}")
