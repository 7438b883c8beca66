"""Where a request goes."""

from __future__ import annotations

from typing import NamedTuple

from extproc.handoff.handoff import Handoff
from extproc.policies.placement import Pair


class Placed(NamedTuple):
    """A pair of workers, and how that pair hands over."""

    pair: Pair
    handoff: Handoff
