"""The engines that are spoken to over gRPC, by their names."""

from __future__ import annotations

from typing import Final

from extproc.engines.engine import Engine
from extproc.engines.sglang import SglangEngine
from extproc.engines.tokenspeed import TokenspeedEngine
from extproc.engines.vllm import VllmEngine

_ENGINES: Final[dict[str, Engine]] = {
    engine.runtime: engine for engine in (SglangEngine(), VllmEngine(), TokenspeedEngine())
}
_OTHERS: Final = _ENGINES["sglang"]


def engine_of(runtime: str) -> Engine:
    """The engine of a worker of ``runtime``; SGLang where nobody has said."""
    return _ENGINES.get(runtime, _OTHERS)
