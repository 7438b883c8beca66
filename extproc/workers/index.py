"""What is asked of all workers together: who may be given requests, in pairs too, and for which models.

It is worked out once after each change, so that a request pays a few dict lookups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from extproc.workers.pairing import PairingMode, served_models
from extproc.workers.pairs import Pairs
from extproc.workers.readiness import Readiness, assess
from extproc.workers.worker import Role, Worker

_SUBSETS: Final = 64  # sets of endpoints; another is worked out anew (measured: 1 ms for 500 of 1,000 workers)


@dataclass(frozen=True, slots=True, eq=False)
class _Side:
    """The usable workers of one role for one model.

    Attributes:
        all: those that circuit breakers let through.
        easy: those of them that are not overloaded; the same object where none is.
        chosen: ``easy``, or ``all`` where there is nobody in ``easy`` and overloaded workers may be used.
    """

    all: tuple[Worker, ...]
    easy: tuple[Worker, ...]
    chosen: tuple[Worker, ...]

    @classmethod
    def of(cls, workers: tuple[Worker, ...], *, sheds: bool) -> _Side:
        easy = tuple(worker for worker in workers if not worker.overloaded)
        if len(easy) == len(workers):
            easy = workers
        return cls(workers, easy, easy if easy or sheds else workers)


@dataclass(frozen=True, slots=True)
class _OfRole:
    """The usable workers of one role by model.

    A worker that its circuit breaker shuts out is left out as long as there is another of its kind (see
    :class:`~extproc.workers.worker.Pairing`). Where there is none, requests go to it all the same: it may do better
    than the error that the client would get instead, and where it does not, that error says why. A cause that all
    workers have in common, such as a client's requests that no engine takes, must not stop the whole fleet. Workers
    that are dead are kept out by their probes.
    """

    by_model: dict[str | None, _Side]
    any_model: _Side  # those that serve whatever they are asked for

    def side(self, model: str | None) -> _Side:
        found = self.by_model.get(model)
        return self.any_model if found is None else found


class Index:
    """See the module.

    Args:
        workers: all that are registered, in whatever state. What those serve that get no requests is not counted.
        pairing: how prefill and decode workers are compared.
        sheds: overloaded workers are not used even where there are no others.
    """

    def __init__(self, workers: Callable[[], Iterable[Worker]], pairing: PairingMode, *, sheds: bool = False) -> None:
        self._workers = workers
        self._pairing = pairing
        self._sheds = sheds
        self._of_roles: dict[Role, _OfRole] = {}
        # By identity of the usable workers, and whether those that are overloaded are among them in any case.
        self._pairs: dict[tuple[int, int, bool, bool], Pairs] = {}
        self._of_models: dict[str | None, Pairs] = {}  # the same by the model, for those that workers serve
        self._models: dict[str, None] | None = None
        self._served: dict[str, None] | None = None
        self._readiness: Readiness | None = None
        self._within: dict[frozenset[str], Index] = {}

    def forget(self) -> None:
        """Something of a worker is another."""
        self._of_roles = {}
        self._pairs = {}
        self._of_models = {}
        self._models = self._served = None
        self._readiness = None
        self._within = {}

    def forget_reasons(self) -> None:
        """What is said of a worker is another, and nothing else."""
        self._readiness = None

    def usable(self, role: Role, model: str | None) -> Sequence[Worker]:
        """See Registry."""
        return self._side(role, model).chosen

    def with_overloaded(self, role: Role, model: str | None) -> Sequence[Worker]:
        """See Registry."""
        side = self._side(role, model)
        return side.chosen if self._sheds else side.all

    def sheds(self, role: Role, model: str | None) -> bool:
        """See Registry."""
        side = self._side(role, model)
        return bool(side.all) and not side.chosen

    def healthy(self, role: Role) -> Sequence[Worker]:
        """See Registry."""
        return tuple(worker for worker in self._workers() if worker.role is role and worker.works)

    def pairs(self, model: str | None) -> Pairs:
        """See Registry. (Measured: 0.1 µs.)"""
        found = self._of_models.get(model)
        if found is None:
            prefills, decodes = self._side(Role.PREFILL, model), self._side(Role.DECODE, model)
            key = (id(prefills), id(decodes), model is None, False)
            found = self._pairs.get(key)
            if found is None:
                found = self._pairs[key] = self._pair(prefills, decodes, model)
            if model is None or model in self.models():  # clients can name any number of others
                self._of_models[model] = found
        return found

    def within(self, endpoints: frozenset[str]) -> Index:
        """See Registry. Where those are all that can be used, it is this one."""
        found = self._within.get(endpoints)
        if found is None:
            placed = [worker for worker in self._workers() if worker.endpoint is not None]
            named = [worker for worker in placed if worker.endpoint in endpoints]
            all_named = len(named) == len(placed)
            found = self if all_named else Index(lambda: named, self._pairing, sheds=self._sheds)
            while len(self._within) >= _SUBSETS:
                del self._within[next(iter(self._within))]
            self._within[endpoints] = found
        return found

    def all_pairs(self, model: str | None) -> Pairs:
        """The pairs of all that circuit breakers let through, whether or not they are overloaded."""
        prefills, decodes = self._side(Role.PREFILL, model), self._side(Role.DECODE, model)
        key = (id(prefills), id(decodes), model is None, True)
        found = self._pairs.get(key)
        if found is None:
            crowded = (Role.PREFILL, Role.DECODE)
            any_model = model is None
            found = Pairs(prefills.all, decodes.all, self._pairing, any_model=any_model, crowded=crowded)
            self._pairs[key] = found
        return found

    def models(self) -> Mapping[str, None]:
        """Every model id that a worker is known to serve, in order of registration."""
        if self._models is None:
            self._models = dict.fromkeys(model for worker in self._serving() for model in worker.model_ids)
        return self._models

    def served(self) -> Mapping[str, None]:
        """Those of :meth:`models` that a pair of workers, in whatever state, serves."""
        if self._served is None:
            serving = list(self._serving())
            prefills, decodes = ([w for w in serving if w.role is role] for role in (Role.PREFILL, Role.DECODE))
            of_pairs = served_models(prefills, decodes, self._pairing)
            self._served = {model: None for model in self.models() if model in of_pairs}
        return self._served

    def knows_model(self, model: str) -> bool:
        """See Registry."""
        return model in self.models() or any(not worker.model_ids for worker in self._serving())

    def readiness(self) -> Readiness:
        """See Registry."""
        if self._readiness is None:
            self._readiness = assess(list(self._workers()), self._pairing)
        return self._readiness

    def _serving(self) -> Iterator[Worker]:
        return (worker for worker in self._workers() if not worker.unserved)

    def _side(self, role: Role, model: str | None) -> _Side:
        workers = self._of_roles.get(role)
        if workers is None:
            workers = self._of_roles[role] = self._build(role)
        return workers.side(model)

    def _pair(self, prefills: _Side, decodes: _Side, model: str | None) -> Pairs:
        """The pairs of those that are not overloaded; where they make none, with the fewest that must be among them."""
        any_model = model is None
        if prefills.easy is prefills.all and decodes.easy is decodes.all:
            return Pairs(prefills.all, decodes.all, self._pairing, any_model=any_model)
        if self._sheds:
            found = Pairs(prefills.easy, decodes.easy, self._pairing, any_model=any_model)
            found.sheds = not found.prefills and bool(self.all_pairs(model).prefills)
            return found
        wider = partial(self.all_pairs, model)
        for some, others, crowded in (
            (prefills.easy, decodes.easy, ()),
            (prefills.all, decodes.easy, (Role.PREFILL,)),
            (prefills.easy, decodes.all, (Role.DECODE,)),
        ):
            found = Pairs(some, others, self._pairing, any_model=any_model, crowded=crowded, wider=wider)
            if found.prefills:
                return found
        return wider()

    def _build(self, role: Role) -> _OfRole:
        usable = tuple(worker for worker in self.healthy(role) if worker.usable)
        models = dict.fromkeys(model for worker in usable for model in worker.model_ids)
        side = partial(_Side.of, sheds=self._sheds)
        by_model: dict[str | None, _Side] = {
            model: side(_sought([w for w in usable if not w.model_ids or model in w.model_ids])) for model in models
        }
        by_model[None] = side(_sought(usable))
        return _OfRole(by_model, side(_sought([w for w in usable if not w.model_ids])))


def _sought(workers: Sequence[Worker]) -> tuple[Worker, ...]:
    """``workers`` but for those that are shut out, unless there would be none of their kind."""
    sought = [worker for worker in workers if not worker.breaker.shuts_out]
    if len(sought) < len(workers):
        kinds = {worker.pairing for worker in sought}
        sought = [worker for worker in workers if not worker.breaker.shuts_out or worker.pairing not in kinds]
    return tuple(sought)
