"""How a worker's answer with a success status says that its generation broke off.

Only what the API itself says counts, not what it echoes of the client's: the Responses API gives ``metadata`` and
``tools`` back, which may look like anything.
"""

from __future__ import annotations

import re
from typing import Any, Final

import orjson

_BROKEN: Final = ("abort", "error")
_FAILED: Final = ("failed", "cancelled")
# Cheap, and rarely true: most answers are not looked into any further.
_HINT: Final = re.compile(rb'"(?:abort|error|failed|cancelled)"')


def broke_off(answer: bytes) -> bool:
    """Whether ``answer`` says so: of chat, completions, Messages, Responses, or ``/generate`` (one item, or a list).

    Seen: ``finish_reason`` "abort" (vLLM, SGLang) or {"type": "abort"} (SGLang's ``meta_info``), "error" (vLLM),
    ``status`` "failed" or "cancelled" (Responses).
    """
    if _HINT.search(answer) is None:
        return False
    try:
        said = orjson.loads(answer)
    except orjson.JSONDecodeError:
        return False
    return any(_item_broke_off(item) for item in (said if isinstance(said, list) else [said]))


def _item_broke_off(item: Any) -> bool:
    if not isinstance(item, dict):
        return False
    choices = item.get("choices")
    holders = [item.get("meta_info"), *(choices if isinstance(choices, list) else [])]
    reasons = [holder.get("finish_reason") for holder in holders if isinstance(holder, dict)]
    kinds = [reason.get("type") if isinstance(reason, dict) else reason for reason in reasons]
    return item.get("stop_reason") in _BROKEN or item.get("status") in _FAILED or any(kind in _BROKEN for kind in kinds)
