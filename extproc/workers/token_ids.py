"""Whether a vLLM decode worker takes the prompt's token ids from a chat's ``kv_transfer_params``.

Nothing that the server says of itself tells (0.32: neither ``/version`` nor ``/openapi.json``). So it is asked with an
empty list: one that knows the key refuses it by name before the engine hears of it (``renderers/online_renderer.py``),
any other computes one token.
"""

from __future__ import annotations

from typing import Final, Protocol

import orjson

from extproc.workers.client import Answer, NoAnswerError

LABEL: Final = "takes_prompt_token_ids"
_PATH: Final = "/v1/chat/completions"
_MESSAGES: Final = ({"role": "user", "content": "x"},)
_NAMES: Final = ("kv_transfer_params['prompt_token_ids']", "kv_transfer_params.prompt_token_ids")


class Post(Protocol):
    """``POST path`` of the worker in question, with a JSON body; raises NoAnswerError."""

    async def __call__(self, path: str, body: object) -> Answer: ...


async def takes_token_ids(post: Post, model: str) -> bool | None:
    """Ask a worker that serves ``model``. One that does not answer to the point does not take them.

    None: no answer at all. That is no reason to ask again: one that does not know the key computes a token for it.
    """
    body = {"model": model, "messages": _MESSAGES, "max_tokens": 1, "kv_transfer_params": {"prompt_token_ids": []}}
    try:
        answer = await post(_PATH, body)
    except NoAnswerError:
        return None
    return answer.status == 400 and _names_them(answer.body)


def _names_them(body: bytes) -> bool:
    try:
        error = orjson.loads(body)["error"]
        said = f"{error.get('message')} {error.get('param')}"
    except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError):
        return False
    return any(name in said for name in _NAMES)
