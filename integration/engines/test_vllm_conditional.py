"""Real vLLM: short prompts that run on the decode worker alone."""

from __future__ import annotations

import json
from collections.abc import Iterator

import aiohttp
import pytest
import rig
import servers
from rig import Body, post
from vllm_answers import comparable
from vllm_cases import CHAT, CHAT_PATH, COMPLETION, COMPLETIONS_PATH, GREEDY, MESSAGES, MESSAGES_PATH
from vllm_rig import counted, fresh, hits, known, seconds_until_idle
from vllm_servers import VllmServer

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(not servers.installed("vllm"), reason="not installed: make integration-engines"),
]

LEAST = 100


@pytest.fixture(scope="session")
def conditional_gateway(
    vllm_workers: tuple[str, VllmServer, VllmServer],  # noqa: ARG001 - in its time
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[str]:
    """A gateway that has short prompts run on the decode worker."""
    with rig.gateway(tmp_path_factory.mktemp("gateway"), "--pd-min-prompt-tokens", str(LEAST)) as url:
        yield url


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", [CHAT_PATH, COMPLETIONS_PATH, MESSAGES_PATH])
async def test_a_decode_worker_serves_a_short_prompt_alone(
    path: str,
    conditional_gateway: str,
    vllm_workers: tuple[str, VllmServer, VllmServer],
    aggregated: VllmServer,
    client: aiohttp.ClientSession,
    *,
    stream: bool,
) -> None:
    _, prefill, decode = vllm_workers
    await known(client, conditional_gateway, prefill, decode)
    for words, kv in ((2, "local"), (120, "handed")):
        body: Body = {
            CHAT_PATH: {**CHAT, **GREEDY, "messages": [{"role": "user", "content": fresh(words)}]},
            COMPLETIONS_PATH: {**COMPLETION, **GREEDY, "prompt": fresh(words)},
            MESSAGES_PATH: {**MESSAGES, "messages": [{"role": "user", "content": fresh(words)}]},
        }[path] | {"stream": stream}
        fetched = await hits(client, decode)
        computed = (await counted(client, prefill))["vllm:prompt_tokens_total"]
        async with client.post(conditional_gateway + path, json=body) as response:
            ours = await response.text()
            assert response.status == 200, ours
            assert response.headers["x-pd-kv"] == kv
            assert ("x-pd-prefill" in response.headers) is (kv == "handed")
        assert (await hits(client, decode) > fetched) is (kv == "handed")
        assert ((await counted(client, prefill))["vllm:prompt_tokens_total"] > computed) is (kv == "handed")
        if path != MESSAGES_PATH:
            single = await post(client, aggregated.url, path, body)
            assert comparable(ours, stream=stream) == comparable(single, stream=stream)
        else:
            assert stream or json.loads(ours)["usage"]["output_tokens"] > 0
    assert await seconds_until_idle(client, prefill, decode) < 3
