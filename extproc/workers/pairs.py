"""Who may be paired with whom: worked out once for a set of workers, so that a request pays two dict lookups.

Workers are compared by kind (what they need of a partner, and their models), of which a fleet has few: 500 prefill and
500 decode workers take less than 1 ms.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TypeAlias

from extproc.workers.pairing import (
    ITSELF,
    PairingMode,
    difference,
    hand_over_alike,
    in_both_roles,
    mismatch,
    of_one_model,
    same_server,
    share_model,
)
from extproc.workers.topology import NOWHERE, Place, tiers
from extproc.workers.worker import Role, Worker

Kind: TypeAlias = tuple[object, object]
Tiers: TypeAlias = tuple[Sequence[Worker], ...]


class Pairs:
    """The pairs of two sets of usable workers.

    Every sequence it gives is the same object as long as it lives, for policies to tell by.

    Args:
        prefills, decodes: the workers.
        mode: how they are compared.
        any_model: no model was asked for: both must serve a common one; else all serve the one that was.
        crowded: the roles of which only those that are overloaded are left, so that the least loaded is to be chosen.
        wider: makes the pairs of these workers and of those that were left out, for they are overloaded; None: nobody
            was, or those are not to be used at all.

    Attributes:
        mode, wider: as above.
        sheds: there are no pairs because those that would make them are overloaded, and not to be used.
        prefills_crowded, decodes_crowded: what ``crowded`` says.
        usable_prefills, usable_decodes: all, with a partner or without.
        prefills: those that have a partner.
    """

    def __init__(
        self,
        prefills: Sequence[Worker],
        decodes: Sequence[Worker],
        mode: PairingMode,
        *,
        any_model: bool,
        crowded: Collection[Role] = (),
        wider: Callable[[], Pairs] | None = None,
    ) -> None:
        self.mode = mode
        self.prefills_crowded = Role.PREFILL in crowded
        self.decodes_crowded = Role.DECODE in crowded
        self.wider = wider
        self.sheds = False
        self.usable_prefills = prefills
        self.usable_decodes = decodes
        self._any_model = any_model
        self._located = any(w.place is not NOWHERE for w in prefills) and any(w.place is not NOWHERE for w in decodes)
        self._paired: dict[Role, set[Kind]] = {Role.PREFILL: set(), Role.DECODE: set()}
        self._partners = self._by_kind()
        self._doubled = in_both_roles(prefills, decodes)
        self._others: dict[tuple[int, str], Sequence[Worker]] = {}  # partners without the server itself
        fit = tuple(worker for worker in prefills if self._partners_of(worker))
        self.prefills: Sequence[Worker] = prefills if len(fit) == len(prefills) else fit
        self._alone: dict[tuple[Role, Kind], str] = {}
        self._alike: dict[tuple[str, str, str], Sequence[Worker]] = {}
        self._tiers: dict[Worker, Tiers] = {}
        self._seen_from: dict[tuple[int, Place], Tiers] = {}  # by identity of the partners

    def tiers(self, prefill: Worker) -> Tiers:
        """The partners of ``prefill``, one of :attr:`prefills`: the nearest first, those equally near together."""
        found = self._tiers.get(prefill)
        if found is None:
            found = self._tiers[prefill] = self._tiers_of(prefill)
        return found

    def like(self, worker: Worker) -> Sequence[Worker]:
        """Those of :attr:`prefills` that hand over as ``worker`` does."""
        kind = (worker.runtime, worker.kv_connector, worker.pairing.connection_mode)
        found = self._alike.get(kind)
        if found is None:
            alike = tuple(prefill for prefill in self.prefills if hand_over_alike(prefill, worker))
            found = self._alike[kind] = self.prefills if len(alike) == len(self.prefills) else alike
        return found

    def why_alone(self, worker: Worker) -> str:
        """Why ``worker``, usable or not, has no partner; empty when it has, or when there is nobody to be one."""
        role, kind = worker.role, self._kind(worker)
        others = self.usable_decodes if role is Role.PREFILL else self.usable_prefills
        if not others or role not in self._paired:
            return ""
        if kind in self._paired[role]:
            return f"no usable {others[0].role.value} worker fits ({ITSELF})" if self._is_its_own(worker) else ""
        why = self._alone.get((role, kind))
        if why is None:
            pairs = of_one_model([worker], others) if role is Role.PREFILL else of_one_model(others, [worker])
            reason = difference(pairs, self.mode) if pairs else "none has a model in common"
            why = f"no usable {others[0].role.value} worker fits ({reason})" if reason else ""
            self._alone[role, kind] = why
        return why

    def _partners_of(self, prefill: Worker) -> Sequence[Worker]:
        """All that fit but the server itself; the same object for those that have the same."""
        partners = self._partners[self._kind(prefill)]
        if not self._doubled(prefill):
            return partners
        key = id(partners), prefill.base_url
        if key not in self._others:
            others = tuple(worker for worker in partners if not same_server(prefill, worker))
            self._others[key] = partners if len(others) == len(partners) else others
        return self._others[key]

    def _is_its_own(self, worker: Worker) -> bool:
        """Whether a worker that is in both roles has no partner but itself."""
        if not self._doubled(worker):
            return False
        if worker.role is Role.PREFILL:
            return worker in self.usable_prefills and not self._partners_of(worker)
        served = worker in self.usable_decodes
        return served and not any(worker in self._partners_of(prefill) for prefill in self.prefills)

    def _tiers_of(self, prefill: Worker) -> Tiers:
        partners = self._partners_of(prefill)
        place = prefill.place if self._located else NOWHERE
        seen = self._seen_from.get((id(partners), place))
        if seen is None:
            seen = self._seen_from[id(partners), place] = tiers(place, partners)
        return seen

    def _kind(self, worker: Worker) -> Kind:
        return worker.pairing, worker.model_ids if self._any_model else None

    def _by_kind(self) -> dict[Kind, Sequence[Worker]]:
        """The partners of each kind of prefill worker; the same object for kinds that have the same."""
        kinds = {self._kind(worker): worker for worker in self.usable_decodes}
        groups: dict[frozenset[Kind], Sequence[Worker]] = {frozenset(kinds): self.usable_decodes, frozenset(): ()}
        found: dict[Kind, Sequence[Worker]] = {}
        for kind, prefill in {self._kind(worker): worker for worker in self.usable_prefills}.items():
            fitting = frozenset(own for own, decode in kinds.items() if self._fit(prefill, decode))
            if fitting not in groups:
                groups[fitting] = tuple(worker for worker in self.usable_decodes if self._kind(worker) in fitting)
            found[kind] = groups[fitting]
            if fitting:
                self._paired[Role.PREFILL].add(kind)
                self._paired[Role.DECODE] |= fitting
        return found

    def _fit(self, prefill: Worker, decode: Worker) -> bool:
        fits = not mismatch(prefill.pairing, decode.pairing, self.mode)
        return fits and (not self._any_model or share_model(prefill, decode))
