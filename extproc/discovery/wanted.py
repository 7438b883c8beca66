"""What a source of workers says: who should be registered now."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from extproc.workers.spec import WorkerSpec
from extproc.workers.worker import Role

# Labels of found workers, as the peer has them.
PROVIDER_LABEL = "smg.ai/discovery-provider"
POD_NAME_LABEL = "smg.ai/pod-name"
POD_UID_LABEL = "smg.ai/pod-uid"
POD_NAMESPACE_LABEL = "smg.ai/pod-namespace"  # ours


class Key(NamedTuple):
    """Where a worker is, and as what; ``authority`` is ``host:port``, IPv6 in brackets."""

    role: Role
    authority: str


@dataclass(frozen=True, slots=True)
class Wanted:
    """A worker that should be registered.

    Attributes:
        spec: the registration; where ``protocol_known`` is False, over HTTP until the server has been asked.
        name: the pod's ``namespace/name``, or the entry's URL; for people.
        owner: the pod's uid: another one at the same address is another worker. Empty in a file.
        since: when the pod was made (RFC 3339, UTC); of two at one address the younger counts.
        ready: an unready one is kept, but not added, and is given no new requests.
        key: what it is told from others by; made once, because all are looked at after every change.
    """

    spec: WorkerSpec
    name: str
    owner: str = ""
    since: str = ""
    ready: bool = True
    protocol_known: bool = True
    key: Key = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", Key(self.spec.role, self.spec.url.authority))


def by_key(found: Iterable[Wanted]) -> dict[Key, Wanted]:
    """One for each address and role: of several a ready one, of several of these the youngest.

    An address passes from a pod that is gone to a new one before everybody has heard of the end of the first.
    """
    chosen: dict[Key, Wanted] = {}
    for wanted in found:
        key = wanted.key
        other = chosen.get(key)
        if other is None or (other.ready, other.since, other.owner) < (wanted.ready, wanted.since, wanted.owner):
            chosen[key] = wanted
    return chosen
