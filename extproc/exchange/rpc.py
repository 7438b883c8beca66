"""What requests for gRPC workers need besides: their prompts as tokens, and answers made of tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final, Protocol

from extproc.apis.request import MAX_PROMPTS, InferenceRequest
from extproc.apis.table import COUNT_TOKENS, DETOKENIZE, GENERATE, TOKENIZE, Api, Flow
from extproc.engines.sequences import sequences, vocabulary_of
from extproc.engines.table import engine_of
from extproc.errors import GatewayError
from extproc.exchange.record import Record
from extproc.generation.asked import Asked
from extproc.generation.parse import parse, serves
from extproc.handoff.grpc import Sequences
from extproc.handoff.grpc_table import RpcHandoffs
from extproc.merge.answer import JoinedAnswer
from extproc.merge.sequences import sequences_answer
from extproc.policies.placement import Placer
from extproc.text.tokenizer import Prepared, Tokenizer
from extproc.transcode.transcoder import Transcoder
from extproc.workers.worker import Role, Worker

_REMEMBERED: Final = 64  # sets of workers
_TOKEN_BYTES: Final = 3  # of a token id in a message, at most
_HERE: Final = frozenset({TOKENIZE.name, DETOKENIZE.name, COUNT_TOKENS.name})
Then = Callable[[tuple[Prepared, ...] | GatewayError], None]


class Texts(Protocol):
    """The tokenizers; see text.service."""

    def of(self, model: str | None) -> Tokenizer | None:
        """The tokenizer of a model, if it is there."""

    def prepare(self, asked: Asked, then: Then) -> Callable[[], None]:
        """Make the prompts tokens, and tell ``then``, at once or later. What is returned cancels."""

    def run(
        self, work: Callable[[], None], size: int, then: Callable[[GatewayError | None], None]
    ) -> Callable[[], None]:
        """Do ``work``, which takes as long as making so many characters tokens; the same."""


class Endpoints(Protocol):
    """Answers what is asked about texts and tokens; see text.endpoints."""

    def answer(
        self, api: Api, raw: bytes, model: str | None, then: Callable[[bytes | GatewayError], None]
    ) -> Callable[[], None]:
        """Answer a request of ``api`` with its body: tell ``then``, at once or later. What is returned cancels."""


class Rpc:
    """What all such requests share.

    Args:
        texts: the tokenizers.
        endpoints: answers requests about texts and tokens.
        handoffs: prepare legs that meet.
        wall: seconds since the epoch.

    Attributes:
        workers: the gRPC workers that are registered, in whatever state. Whoever knows sets it; most fleets have none.
        others: the other ones, likewise.
    """

    def __init__(self, texts: Texts, endpoints: Endpoints, handoffs: RpcHandoffs, wall: Callable[[], float]) -> None:
        self.texts = texts
        self.endpoints = endpoints
        self.handoffs = handoffs
        self.wall = wall
        self.workers: Collection[Worker] = frozenset()
        self.others: Collection[Worker] = frozenset()
        self._known: dict[int, tuple[Sequence[Worker], bool]] = {}

    def may_serve(self, placer: Placer, request: InferenceRequest) -> bool:
        """Whether gRPC workers are among those that may be given ``request`` now, and serve its API."""
        if not serves(request.api):
            return False
        return any(self._some(placer.usable(request, role)) for role in (Role.PREFILL, Role.DECODE))

    def others_serve(self, request: InferenceRequest) -> bool:
        """Whether other workers than gRPC's are there for ``request``, though they may not be usable now.

        Nor may they be given it, where a gateway names others: that is no reason to say that nobody can serve it.
        """
        model, roles = request.model, {Role.PREFILL, Role.DECODE}
        found = {each.role for each in self.others if model is None or not each.model_ids or model in each.model_ids}
        return (Role.PREFILL in found) if request.api.flow is Flow.PREFILL_ONLY else roles <= found

    def named(self, placer: Placer, request: InferenceRequest) -> InferenceRequest:
        """``request``, or where it names no model the same for one that a pair serves: what is tokens, is one model's.

        The body stays as it is. Unchanged where there is none, or no tokenizer.
        """
        if request.model is not None:
            return request
        workers = placer.usable(request, Role.PREFILL)
        models = dict.fromkeys(model for worker in workers if worker.over_grpc for model in worker.model_ids)
        for model in models:
            named = request._replace(model=model)
            if self.texts.of(model) is not None and placer.has_pair(named, (), None):
                return named
        return request

    def answers(self, placer: Placer, request: InferenceRequest) -> bool:
        """Whether a request about texts and tokens is answered here: nobody but gRPC workers has the model."""
        if request.api.name not in _HERE:
            return False
        workers = placer.usable(request, Role.PREFILL)
        return self._some(workers) and all(worker.over_grpc for worker in workers)

    def _some(self, workers: Sequence[Worker]) -> bool:
        """Whether some of ``workers`` are gRPC's. The sets are the same objects until a worker has changed."""
        known = self._known.get(id(workers))
        if known is None or known[0] is not workers:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            known = self._known[id(workers)] = workers, any(worker.over_grpc for worker in workers)
        return known[1]


class RpcRequest:
    """One request, as workers are given it that take tokens.

    Args:
        rpc: what all share.
        request, asked, prepared: what it asks for, and its prompts.
        record: of it.
        tokenizer: the model's.
    """

    __slots__ = ("_asked", "_created", "_name", "_prepared", "_request", "_rpc", "_tokenizer", "count")

    def __init__(
        self,
        rpc: Rpc,
        request: InferenceRequest,
        asked: Asked,
        prepared: Sequence[Prepared],
        record: Record,
        tokenizer: Tokenizer,
    ) -> None:
        self._rpc = rpc
        self._request = request
        self._asked = asked
        self._prepared = prepared
        self._name = record.request_id.decode("latin-1")
        self._tokenizer = tokenizer
        self._created = int(rpc.wall())
        self.count = len(prepared) * asked.samples

    @classmethod
    def read(cls, request: InferenceRequest) -> Asked:
        """What ``request`` asks for. Raises GatewayError (4xx, 501)."""
        return parse(request)

    @property
    def outdated(self) -> bool:
        """The model has another tokenizer now than the one that has made tokens of the prompts."""
        return self._rpc.texts.of(self._request.model) is not self._tokenizer

    @property
    def tokens(self) -> int:
        """How many tokens a prompt has, the longest one's."""
        return max(len(prompt.ids) for prompt in self._prepared)

    @property
    def is_single(self) -> bool:
        """One leg of each kind gives all of the answer, as it is."""
        return self.count == 1 and not (self._asked.batched and self._request.api is GENERATE)

    def check_size(self, limit: int) -> None:
        """See that there are not too many sequences, and their legs' bodies together no larger than ``limit`` bytes.

        Raises GatewayError (400, 413).
        """
        if self.count > MAX_PROMPTS:
            message = f"{self.count} sequences are more than {MAX_PROMPTS}: fewer samples, or prompts"
            raise GatewayError("invalid_type", message, param="n")
        size = 2 * _TOKEN_BYTES * self._asked.samples * sum(len(prompt.ids) for prompt in self._prepared)
        if size > limit:
            message = f"the bodies of {2 * self.count} legs take more than {limit} bytes"
            raise GatewayError("payload_too_large", message)

    def sequences(self, prefill: Worker, decode: Worker) -> Sequences:
        """How ``prefill`` hands over to workers like ``decode``. Raises GatewayError (400) for what they cannot do."""
        ids = [prompt.ids for prompt in self._prepared]
        made = sequences(self._asked, ids, engine_of(decode.runtime), decode.labels, self._name)
        return Sequences(self._rpc.handoffs.of(prefill), made)

    def transcoder(self, worker: Worker, index: int = 0) -> Transcoder:
        """What makes an answer of what ``worker`` says of one sequence."""
        asked = self._asked
        prompt = index // asked.samples
        return Transcoder(
            asked,
            self._prepared[prompt],
            self._tokenizer,
            engine_of(worker.runtime),
            id=self._id(index),
            model=self._request.model or next(iter(worker.model_ids), ""),
            created=self._created,
            sampling=asked.samplings[prompt] if asked.samplings else None,
            now=self._rpc.wall,
            vocabulary=vocabulary_of(worker.labels) or 0,
        )

    def answer(self) -> JoinedAnswer:
        """What puts the sequences' answers together."""
        asked = self._asked
        return sequences_answer(self._request, self.count, asked.samples, batched=asked.batched)

    def _id(self, index: int) -> str:
        """What the answer is called: as the client named it, or after the request's id."""
        rids = self._asked.rids
        if rids:
            return rids[min(index // self._asked.samples, len(rids) - 1)]
        prefix = self._request.api.id_prefix
        return self._name if self._name.startswith(prefix) else prefix + self._name
