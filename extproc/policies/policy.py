"""What a policy is, and what it may know of a request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from extproc.workers.worker import Worker


class RequestView(Protocol):
    """The part of a request that placement and policies need; an InferenceRequest is one."""

    @property
    def model(self) -> str | None:
        """The model that it names; None when it names none."""

    @property
    def fields(self) -> Mapping[str, bytes]:
        """The (last) value of every header, by lower-case name."""

    @property
    def notes(self) -> dict[object, object]:
        """What a policy has worked out of the request, under a key of its own: it is asked more than once."""

    @property
    def within(self) -> frozenset[str] | None:
        """The endpoints ("ip:port", see Worker) among which all its workers must be; None: any."""

    def prompt_tokens(self) -> int:
        """About how many tokens its prompts have, all together."""

    def prompt_bytes(self, most: int | None = None) -> bytes:
        """Its prompt as it stands in the body: a JSON string, list of messages or list of token ids.

        ``most``: only so many bytes of its beginning.
        """

    def own_id(self) -> str:
        """The id that the body gives it (SGLang's ``rid``); empty when there is none, or one for each prompt."""

    def prompt_context(self) -> bytes:
        """What else the model reads before its prompt, such as tools, as it stands in the body; mostly nothing."""


class Policy(ABC):
    """Ranks the workers of one role that could serve a request, and may learn from what became of it."""

    # Whether :meth:`learn` and :meth:`forget` do anything; who does not learn need not be told.
    learns = False
    # Whether :meth:`over` does anything.
    holds = False

    @abstractmethod
    def rank(self, candidates: Sequence[Worker], limit: int, request: RequestView) -> Sequence[Worker]:
        """At most ``limit`` of ``candidates`` (at least one), best first.

        The first is meant to serve; the others are where Envoy may go when it refuses the connection. ``candidates``
        is the fleet's own tuple, the same object until something changes, or one made for this request.
        """

    def take_back(self, request: RequestView) -> None:  # noqa: B027 - most keep nothing
        """Nothing comes of the last :meth:`rank` or :meth:`pass_over`, for ``request``: it is as if it had not been."""

    def pass_over(
        self, candidates: Sequence[Worker], limit: int, request: RequestView, fits: Callable[[Worker], bool]
    ) -> Sequence[Worker]:
        """The same as the last :meth:`rank`, whose first does not fit, but of those that do; it counts instead of that.

        Nobody, and nothing counts, where none fits.
        """
        self.take_back(request)
        left = tuple(worker for worker in candidates if fits(worker))
        return self.rank(left, limit, request) if left else ()

    def learn(self, request: RequestView, worker: Worker) -> None:  # noqa: B027 - most policies learn nothing
        """A leg of ``request`` on ``worker`` was answered as it should be: its KV cache has the prompt."""

    def held(self, request: RequestView, workers: Sequence[Worker]) -> Mapping[Worker, int]:  # noqa: ARG002
        """About how many tokens of the beginning of the prompt the KV caches of ``workers`` are known to hold.

        Others may be there, too; one that is not there holds none.
        """
        return {}

    def over(self, notes: dict[object, object]) -> None:  # noqa: B027
        """The request with these notes is over, however it ended: nothing of it is under way any more."""

    def forget(self, worker: Worker) -> None:  # noqa: B027
        """``worker`` is gone, or may be another process: what it had is lost."""
