"""vLLM behind the mock's HTTP front: blocks, the KV connector's part in a request, what its core does not survive."""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from extproc.mock import engine
from extproc.mock.engine import Pace, RequestError
from extproc.mock.generation import CONTEXT, END_OF_TEXT, Prompt, Text
from extproc.mock.vllm.blocks import Blocks, Pins
from extproc.mock.vllm.metrics import Metric
from extproc.mock.vllm.peers import LoadError

if TYPE_CHECKING:
    from extproc.mock.recorder import Record

INTERNAL_ERROR = "Internal server error"
VERSION = "0.32.0"


class Role(Enum):
    """The values are the engine's ``kv_role``."""

    PREFILL = "kv_producer"
    DECODE = "kv_consumer"
    AGGREGATED = "kv_both"


class Kv(Enum):
    """What became of the KV cache that a request was to fetch, from good to bad."""

    TRANSFERRED = "transferred"
    RECOMPUTED = "recomputed"  # nothing was fetched, whether or not it was asked for
    FOREIGN = "foreign"  # that of another prompt, or of nothing at all: the text is wrong
    FAILED = "failed"  # the request failed with it
    STUCK = "stuck"  # the request waits for what nobody will send


_WORSE = list(Kv)


@dataclass(frozen=True, slots=True)
class Options:
    """How one engine process is set up. Times are in seconds."""

    model: str = "mock-model"
    root: str | None = None  # what ``/v1/models`` calls the model's directory
    dp_size: int = 1  # --data-parallel-size: engine cores behind one server
    max_model_len: int = CONTEXT
    block_size: int = 16
    blocks: int = 16_384
    prefix_caching: bool = True
    prompt_tokens_details: bool = True  # --enable-prompt-tokens-details
    store: bool = True  # VLLM_ENABLE_RESPONSES_API_STORE
    old_engine: bool = False  # a prefill that ends by a stop, such as end-of-text, returns no parameters
    eos_first: str = ""  # prompts that contain it are answered by end-of-text alone
    recompute: bool = False  # kv_load_failure_policy
    load_failure_delay: float = 5.0  # until a decode gives up on a prefill that it cannot reach
    lease: float = 30.0  # how long a prefill's blocks wait for a decode
    knows_token_ids: bool = True  # kv_transfer_params.prompt_token_ids; older engines ignore the key
    version: str = VERSION
    cache_dtype: str = "auto"
    enforce_handshake_compat: bool = True  # NIXL: fetch from no engine of another version or model
    dev_mode: bool = False  # VLLM_SERVER_DEV_MODE
    profiler: bool = False  # --profiler-config
    kv_events: bool = False  # --kv-events-config
    stuck: bool = True  # incomplete parameters hold a request for ever, as they do in 0.32; False: it recomputes


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence(engine.Sequence):
    """One text being written. ``rid`` is the engine's internal id, ``external`` the one that clients know."""

    external: str = ""
    ids_in: list[int] = field(default_factory=list)  # the prompt as tokens
    min_tokens: int = 0
    handoff: dict[str, Any] | None = None  # kv_transfer_params, as they came
    wanted_rank: int | None = None  # None: the engine chooses
    reads_cache: bool = True  # False: prompt logprobs are wanted, so every token of the prompt is computed
    record: Record | None = None
    blocks: list[int] = field(default_factory=list)
    cached: int = 0  # tokens of the prompt that were not computed
    created: int = 0  # tokens of the prompt that were put into the prefix cache
    loading: bool = False
    returned: dict[str, Any] | None = None  # kv_transfer_params of the answer

    @property
    def digest(self) -> int:
        """Tells prompts apart, whether they come as text or as tokens."""
        return Prompt(ids=tuple(self.ids_in)).digest

    @property
    def capped(self) -> bool:
        """Whether it ended by length as the engine's core sees it, which looks for no stop strings."""
        finish = self.finish or {}
        return finish.get("type") == "length" or (
            isinstance(finish.get("matched"), str) and len(self.text.ids) == self.limits.max_new_tokens
        )

    @property
    def ended_by_token(self) -> bool:
        """Whether end-of-text or a stop token ended it."""
        finish = self.finish or {}
        return finish.get("type") == "stop" and isinstance(finish.get("matched"), int)


Batch = engine.Batch[Sequence]


class Connector(ABC):
    """The KV connector of one process."""

    name: ClassVar[str]

    @abstractmethod
    def survive(self, sequence: Sequence) -> None:
        """Raise CrashError for parameters that the engine's core does not survive when it schedules a request."""

    @abstractmethod
    def incomplete(self, params: dict[str, Any]) -> bool:
        """Whether parameters that ask for a remote prefill lack what it takes."""

    @abstractmethod
    async def load(self, params: dict[str, Any], rank: int) -> int:
        """Fetch the KV cache for a rank: the digest of the prompt that it was computed from; raises LoadError."""

    @abstractmethod
    def release_remote(self, params: dict[str, Any], rank: int) -> None:
        """Have a rank let the prefill free its blocks without fetching them. Raises CrashError."""

    @abstractmethod
    def finished(self, sequence: Sequence) -> dict[str, Any] | None:
        """A request has ended: pin its blocks if a decode will come; the parameters of its answer."""

    def metrics(self) -> list[Metric]:
        """What it adds to ``/metrics``."""
        return []

    @abstractmethod
    async def start(self, host: str, port: int) -> None:
        """Listen for decodes."""

    @abstractmethod
    def stop(self) -> list[asyncio.Task[Any]]:
        """Break every connection; the tasks that end by that."""


class Engine(engine.Engine[Sequence]):
    """One engine process."""

    def __init__(self, role: Role, options: Options) -> None:
        super().__init__()
        self.role = role
        self.options = options
        self.blocks = Blocks(options.blocks, options.block_size)
        self.pins = Pins(self.blocks, options.lease)
        self.connector: Connector | None = None
        self.totals = [Totals() for _ in range(options.dp_size)]  # by rank
        self._last: dict[int, Gauges] = {}  # that ranks which hang have reported
        self._loads: set[asyncio.Task[int]] = set()
        self._turn = 0  # of the rank that gets the next request for none

    def admit(self, batch: Batch) -> None:
        """Take a batch in; raises RequestError where the engine refuses, CrashError where it dies."""
        ranks = self.options.dp_size
        for sequence in batch.sequences:
            wanted = sequence.wanted_rank
            if wanted is not None and not 0 <= wanted < ranks:
                raise RequestError(f"data_parallel_rank {wanted} is out of range [0, {ranks}).")
            if wanted is None:
                self._turn = (self._turn + 1) % ranks
            sequence.rank = self._turn if wanted is None else wanted
        super().admit(batch)

    def abort(self, external: list[str]) -> None:
        """End live requests by the ids that clients know, as ``/inference/v1/abort_requests`` does."""
        for sequence in list(self.live.values()):
            if sequence.external in external and sequence.stopper is not None and not sequence.stopper.done():
                sequence.stopper.set_result(None)

    def reject(self, params: dict[str, Any] | None, rank: int | None = None) -> None:
        """A request is refused before it reaches the core: the prefill need not keep its blocks; raises CrashError."""
        if self.connector is not None and params and params.get("do_remote_prefill"):
            self.connector.release_remote(params, rank or 0)

    def release(self, batch: Batch) -> None:
        """Forget a batch, finished or not."""
        super().release(batch)
        for sequence in batch.sequences:
            self.blocks.give(sequence.blocks)
            sequence.blocks = []

    def kill(self) -> list[asyncio.Task[Any]]:
        """Nothing is kept and fetched any more; the tasks that end by that."""
        loads: list[asyncio.Task[Any]] = list(self._loads)
        for load in loads:
            load.cancel()
        self.pins.clear()
        return loads if self.connector is None else [*loads, *self.connector.stop()]

    def hang(self, rank: int) -> None:
        """See the base; what is sent to it is not among its figures."""
        self._last[rank] = self.gauges(rank)
        super().hang(rank)

    def gauges(self, rank: int) -> Gauges:
        """What a rank reports of itself."""
        if self.hangs_since(rank) is not None:
            return self._last[rank]
        loading = [sequence.loading for sequence in self.live.values() if sequence.rank == rank]
        return Gauges(len(loading) - sum(loading), sum(loading), self.blocks.usage)

    async def _begin(self, sequence: Sequence, pace: Pace) -> bool:
        options = self.options
        digest = sequence.digest
        text = self._text(sequence, pace, digest)
        sequence.blocks = await self.blocks.take(sequence.prompt.length + len(text.ids), digest)
        if self.connector is not None:
            self.connector.survive(sequence)
        if options.prefix_caching and sequence.reads_cache:
            sequence.cached = self.blocks.cached(sequence.ids_in)
            sequence.created = len(sequence.ids_in) // options.block_size * options.block_size - sequence.cached
        self.totals[sequence.rank].queried(sequence)
        source = await self._fetch(sequence)
        if sequence.finish is not None:
            return False
        if source is None and pace.first_token:
            await sequence.sleep(pace.first_token)
        if source is not None and source != digest:
            self.blocks.rewrite(sequence.blocks, source)
            text = self._text(sequence, pace, source)
        sequence.text = text
        return True

    def _end(self, sequence: Sequence) -> None:
        if sequence.stopped:
            sequence.finish = {"type": "abort"}
        else:
            sequence.finish = sequence.text.finish
        self.totals[sequence.rank].ended(sequence)
        if self.connector is not None and sequence.handoff:
            sequence.returned = self.connector.finished(sequence)
            if sequence.returned is not None and sequence.written == 1:
                sequence.returned["remote_prefill_cached_tokens"] = sequence.cached

    def _text(self, sequence: Sequence, pace: Pace, source: int) -> Text:
        options, limits = self.options, sequence.limits
        marker = options.eos_first
        if marker and marker in sequence.prompt.as_text and not limits.ignore_eos and not sequence.min_tokens:
            return Text([END_OF_TEXT], [""], {"type": "stop", "matched": END_OF_TEXT}, END_OF_TEXT)
        natural = max(pace.tokens, sequence.min_tokens)
        return self.write(sequence.prompt, limits, natural, context=options.max_model_len, source=source)

    # --- the hand-off ---

    async def _fetch(self, sequence: Sequence) -> int | None:
        """The KV cache that the parameters ask for: its prompt's digest; None: the prompt is computed here."""
        params = sequence.handoff
        connector = self.connector
        if connector is None or not params or not params.get("do_remote_prefill"):
            if self.role is Role.DECODE:
                self._mark(sequence, Kv.RECOMPUTED)
            return None
        if connector.incomplete(params):
            if self.options.stuck and sequence.reads_cache:
                self._mark(sequence, Kv.STUCK)
                await self._never(sequence)
            self._mark(sequence, Kv.RECOMPUTED)
            return None
        if not sequence.reads_cache:
            connector.release_remote(params, sequence.rank)
            self._mark(sequence, Kv.RECOMPUTED)
            return None
        return await self._load(connector, sequence, params)

    async def _load(self, connector: Connector, sequence: Sequence, params: dict[str, Any]) -> int | None:
        sequence.loading = True
        loading = asyncio.get_running_loop().create_task(connector.load(params, sequence.rank))
        self._loads.add(loading)
        loading.add_done_callback(self._loads.discard)
        try:
            # once begun, a transfer is finished, whether or not the client stays: the prefill's blocks get free
            source = await asyncio.shield(loading)
        except asyncio.CancelledError:
            loading.add_done_callback(_looked_at)
            raise
        except LoadError:
            if not self.options.recompute:
                sequence.finish = {"type": "error", "message": INTERNAL_ERROR, "status_code": 500}
                self._mark(sequence, Kv.FAILED)
            else:
                self._mark(sequence, Kv.RECOMPUTED)
            return None
        finally:
            sequence.loading = False
        self.totals[sequence.rank].hits += sequence.prompt.length - sequence.cached
        sequence.cached, sequence.created = sequence.prompt.length, 0
        remote = params.get("remote_prefill_cached_tokens")
        if isinstance(remote, int):
            sequence.cached = remote
        self._mark(sequence, Kv.TRANSFERRED if source == sequence.digest else Kv.FOREIGN)
        return source

    async def _never(self, sequence: Sequence) -> None:
        sequence.loading = True
        if sequence.stopper is not None:
            await sequence.stopper
        sequence.finish = {"type": "abort"}

    @staticmethod
    def _mark(sequence: Sequence, kv: Kv) -> None:
        record = sequence.record
        if record is not None and (record.kv is None or _WORSE.index(Kv(record.kv)) < _WORSE.index(kv)):
            record.kv = kv.value


def _looked_at(load: asyncio.Task[int]) -> None:
    """Nobody waits for it any more."""
    if not load.cancelled():
        load.exception()


class Gauges(NamedTuple):
    """What a rank says of this moment: requests that run, and that wait for a KV cache; how full its cache is."""

    running: int
    loading: int
    usage: float


@dataclass(slots=True)
class Totals:
    """Counters of ``/metrics``."""

    prompt: int = 0
    generated: int = 0
    queries: int = 0  # tokens looked up in remote caches
    hits: int = 0  # tokens fetched from there
    local_queries: int = 0
    local_hits: int = 0
    ends: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("stop", "length", "abort", "error"), 0))

    def queried(self, sequence: Sequence) -> None:
        """A request is scheduled."""
        self.prompt += sequence.prompt.length
        self.local_queries += sequence.prompt.length
        self.local_hits += sequence.cached
        if sequence.handoff and sequence.handoff.get("do_remote_prefill"):
            self.queries += sequence.prompt.length - sequence.cached

    def ended(self, sequence: Sequence) -> None:
        """A request is over."""
        self.generated += sequence.written
        self.ends[str((sequence.finish or {}).get("type"))] += 1


def core_id(engine_id: str, rank: int, dp_size: int) -> str:
    """The id of a rank's engine core (0.32, ``v1/engine/core.py``, ``run_engine_core``)."""
    return f"{engine_id}_dp{rank}" if dp_size > 1 else engine_id


def new_id(digits: int = 16) -> str:
    """A random id as the engine makes them."""
    return f"{random.getrandbits(4 * digits):0{digits}x}"
