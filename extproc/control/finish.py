"""What is seen to of every answer, whoever has made it: aiohttp itself makes some that no middleware meets."""

from __future__ import annotations

from typing import Final

from aiohttp import web

from extproc.control.replies import ERROR_CODE_HEADER, fault

_SERVER: Final = "server"
_EXPECTATION_FAILED: Final = 417


async def finish(request: web.Request, response: web.StreamResponse) -> None:
    """To be told of every answer that is about to be sent.

    It does not say which versions of Python and aiohttp run. An expectation other than ``100-continue``, which aiohttp
    refuses before anything of ours is asked, is refused in JSON.
    """
    response.headers.popall(_SERVER, None)
    if response.status != _EXPECTATION_FAILED or ERROR_CODE_HEADER in response.headers:
        return
    assert isinstance(response, web.Response)
    expected = request.headers.get("expect", "")[:64]
    refusal = fault(_EXPECTATION_FAILED, "invalid_request", f"Expect: {expected!r} is not met, only 100-continue is")
    assert isinstance(refusal.body, bytes)
    response.body = refusal.body
    response.headers.update({**refusal.headers, "content-length": str(len(refusal.body))})
