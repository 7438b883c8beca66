"""What is read of a pod, and of what the Kubernetes API says of pods: the rest is not even decoded.

Source: https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1/ and, of lists and watches,
https://kubernetes.io/docs/reference/using-api/api-concepts/.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

import msgspec


class Meta(msgspec.Struct, frozen=True):
    """``metadata``; times are RFC 3339, UTC."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    version: str = msgspec.field(name="resourceVersion", default="")
    created: str | None = msgspec.field(name="creationTimestamp", default=None)
    deleted: str | None = msgspec.field(name="deletionTimestamp", default=None)  # when it is to be gone
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


class Condition(msgspec.Struct, frozen=True):
    """One of ``status.conditions``."""

    type: str
    status: str


class Status(msgspec.Struct, frozen=True):
    """``status``."""

    phase: str = ""
    ip: str | None = msgspec.field(name="podIP", default=None)
    conditions: tuple[Condition, ...] | None = None


class Spec(msgspec.Struct, frozen=True):
    """``spec``."""

    node: str | None = msgspec.field(name="nodeName", default=None)


class PodState(Enum):
    """How far a pod is; the values are those of the metric's label ``state``."""

    READY = "ready"
    NOT_READY = "not_ready"  # starts, or its readiness probe fails
    TERMINATING = "terminating"
    FINISHED = "finished"  # its containers have ended for good


class Pod(msgspec.Struct, frozen=True):
    """A pod."""

    metadata: Meta
    spec: Spec = Spec()
    status: Status = Status()

    @property
    def name(self) -> str:
        """``namespace/name``, which no two pods have at the same time."""
        return f"{self.metadata.namespace}/{self.metadata.name}"

    @property
    def state(self) -> PodState:
        """See PodState."""
        if self.metadata.deleted is not None:
            return PodState.TERMINATING
        if self.status.phase in ("Succeeded", "Failed"):
            return PodState.FINISHED
        ready = any(condition.type == "Ready" and condition.status == "True" for condition in self.conditions)
        placed = self.status.phase == "Running" and self.status.ip and self.metadata.uid
        return PodState.READY if ready and placed else PodState.NOT_READY

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """What is said of its condition."""
        return self.status.conditions or ()


class ListMeta(msgspec.Struct, frozen=True):
    """``metadata`` of a list; ``more`` continues it."""

    version: str = msgspec.field(name="resourceVersion", default="")
    more: str | None = msgspec.field(name="continue", default=None)


class PodList(msgspec.Struct, frozen=True):
    """One page of a list."""

    metadata: ListMeta
    pods: tuple[Pod, ...] | None = msgspec.field(name="items", default=None)

    @property
    def items(self) -> tuple[Pod, ...]:
        """The pods; an empty list may be null."""
        return self.pods or ()


class Event(msgspec.Struct, frozen=True):
    """A line of a watch: ADDED, MODIFIED, DELETED with a pod, BOOKMARK with a version only, ERROR with a Failure."""

    type: str
    object: msgspec.Raw


class Failure(msgspec.Struct, frozen=True):
    """The API's ``Status``, as the body of an error and in ERROR events."""

    code: int = 0
    reason: str = ""
    message: str = ""


PODS: Final = msgspec.json.Decoder(PodList)
POD: Final = msgspec.json.Decoder(Pod)
EVENT: Final = msgspec.json.Decoder(Event)
FAILURE: Final = msgspec.json.Decoder(Failure)
