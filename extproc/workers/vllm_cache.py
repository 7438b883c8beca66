"""How a vLLM server's KV cache is laid out, as far as its ``/metrics`` tell.

The gauge ``vllm:cache_config_info`` has the fields of its CacheConfig as labels, a line for each engine core (vLLM
0.32, ``v1/metrics/loggers.py``; ``config/cache.py``, ``metrics_info``). It is not there with ``--disable-log-stats``.
"""

from __future__ import annotations

import re
from typing import Final

PATH: Final = "/metrics"
_LINE: Final = re.compile(rb"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)
_FIELD: Final = re.compile(rb'(?:^|,)(block_size|cache_dtype)="([^"\\]*)"')
_LABELS: Final = {b"block_size": "block_size", b"cache_dtype": "kv_cache_dtype"}


def layout_of(metrics: bytes) -> dict[str, str]:
    """The labels ``block_size`` and ``kv_cache_dtype``; neither where it is not said, or cores differ in it."""
    lines = [dict(_FIELD.findall(line)) for line in _LINE.findall(metrics)]
    found = {}
    for field, label in _LABELS.items():
        values = {line.get(field, b"None") for line in lines}
        if len(values) == 1 and (value := values.pop()) not in (b"", b"None"):
            found[label] = value.decode("latin-1")
    return found
