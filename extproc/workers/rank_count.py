"""How many data-parallel ranks a vLLM server has.

Nothing that the server says of itself tells. So it is sent a request for a rank that it cannot have: what refuses it
names the range (vllm 0.32, ``v1/engine/input_processor.py``: "data_parallel_rank 1000000 is out of range [0, 4)."),
before the engine hears of it. With a load balancer for each rank (``--data-parallel-external-lb``) the range is [0, 1).
A server that does not read the header computes one token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, Protocol

from extproc.workers.client import Answer
from extproc.workers.ranks import RANK_HEADER

NO_RANK: Final = "1000000"
_PATH: Final = "/v1/completions"
_RANGE: Final = re.compile(rb"data_parallel_rank %b is out of range \[0, (\d{1,6})\)" % NO_RANK.encode())


class Post(Protocol):
    """``POST path`` of the worker in question, with a JSON body and headers; raises NoAnswerError."""

    async def __call__(self, path: str, body: object, headers: Mapping[str, str]) -> Answer: ...


async def rank_count(post: Post, model: str) -> int | None:
    """Ask a server of ``model``; None where it does not answer to the point. Raises NoAnswerError."""
    body = {"model": model, "prompt": "x", "max_tokens": 1}
    answer = await post(_PATH, body, {RANK_HEADER: NO_RANK})
    match = _RANGE.search(answer.body) if answer.status == 400 else None
    return None if match is None else int(match[1])
