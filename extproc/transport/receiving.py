"""What becomes of a leg whose receiver fails: the failure stays that leg's own."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from extproc.transport.interface import Lost

if TYPE_CHECKING:
    from collections.abc import Callable

    from extproc.transport.interface import LegReceiver

_log = logging.getLogger(__name__)


class Receiving(ABC):
    """A leg, as far as it keeps its receiver's exceptions from whatever brings its answer."""

    __slots__ = ("_receiver",)

    _receiver: LegReceiver | None  # None when the leg is over

    @abstractmethod
    def cancel(self) -> None:
        """See ``Leg.cancel``."""

    def _crashed(self) -> None:
        """To be called while the receiver's exception is being handled."""
        _log.exception("the receiver of a leg failed")
        receiver = self._receiver
        self.cancel()
        if receiver is not None:
            self._last(lambda: receiver.lost(Lost.RESET, "internal error"))

    def _last(self, callback: Callable[[], None]) -> None:
        """Tell the receiver of the leg's end."""
        try:
            callback()
        except Exception:  # noqa: BLE001 -- nothing more can be done for it
            _log.exception("the receiver of a leg failed at its end")
