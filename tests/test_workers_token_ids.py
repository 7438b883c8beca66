"""Which decode workers take a prompt's token ids: what they are asked, and which answers count."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from fleet import SLOW, Engine, Fleet, engine, eventually, fleet, spec, until

from extproc.workers.client import Answer, NoAnswerError
from extproc.workers.health_state import HealthSettings, Pace
from extproc.workers.kv_config import KvConfig
from extproc.workers.registry import Change
from extproc.workers.token_ids import takes_token_ids
from extproc.workers.worker import NIXL, Role, Worker

P, D = Role.PREFILL, Role.DECODE
CHAT = "/v1/chat/completions"
LABEL = "takes_prompt_token_ids"


def nixl(f: Fleet, server: Engine, role: Role = D, **more: Any) -> Worker:
    return f.registry.add(spec(role, server.url, kv=KvConfig(NIXL), **more))


class TestAnswers:
    @pytest.mark.parametrize(
        ("status", "body", "expected"),
        [
            (400, {"error": {"message": "`kv_transfer_params['prompt_token_ids']` must be", "param": None}}, True),
            (400, {"error": {"message": "no", "param": "kv_transfer_params.prompt_token_ids"}}, True),
            (400, {"error": {"message": "a chat template is needed", "param": None}}, False),
            (400, {"error": "kv_transfer_params.prompt_token_ids"}, False),
            (400, ["kv_transfer_params.prompt_token_ids"], False),
            (404, {"error": {"message": "no", "param": "kv_transfer_params.prompt_token_ids"}}, False),
            (200, {"error": {"message": "no", "param": "kv_transfer_params.prompt_token_ids"}}, False),
        ],
    )
    async def test_only_a_refusal_that_names_them_counts(self, status: int, body: object, *, expected: bool) -> None:
        async def post(_path: str, _body: object) -> Answer:
            return Answer(status, "application/json", orjson.dumps(body))

        assert await takes_token_ids(post, "tiny") is expected

    async def test_nonsense_does_not_and_silence_says_nothing(self) -> None:
        async def nonsense(_path: str, _body: object) -> Answer:
            return Answer(400, "text/plain", b"kv_transfer_params.prompt_token_ids")

        async def silence(_path: str, _body: object) -> Answer:
            raise NoAnswerError("none")

        assert not await takes_token_ids(nonsense, "tiny")
        assert await takes_token_ids(silence, "tiny") is None


class TestIdentification:
    async def test_a_decode_worker_is_asked_once_before_requests_come(self) -> None:
        async with engine(owner="vllm") as server, fleet(HealthSettings(interval=0.005)) as f:
            seen: list[tuple[Change, bool]] = []
            f.registry.subscribe(lambda worker, change: seen.append((change, worker.takes_token_ids)))
            worker = nixl(f, server, api_key="k")
            await until(f.registry, lambda: worker.usable)
            assert (Change.IDENTITY, True) in seen
            assert seen.index((Change.IDENTITY, True)) < seen.index((Change.STATUS, True))
            assert worker.labels[LABEL] == "true"
            assert f.registry.trouble(worker) == ""
            await eventually(lambda: server.count("/health") > 3)
            message = {"role": "user", "content": "x"}
            params: dict[str, list[int]] = {"prompt_token_ids": []}
            body = {"model": "tiny", "messages": [message], "max_tokens": 1, "kv_transfer_params": params}
            assert server.posts == [(CHAT, body)]
            assert next(headers for path, headers in server.requests if path == CHAT)["authorization"] == "Bearer k"

    async def test_one_that_computes_a_token_does_not_take_them(self) -> None:
        async with engine(owner="vllm", knows_token_ids=False) as server, fleet() as f:
            worker = nixl(f, server)
            await until(f.registry, lambda: worker.usable)
            assert server.count(CHAT) == 1
            assert not worker.takes_token_ids
            assert LABEL not in worker.labels
            assert f.registry.trouble(worker) == ""

    async def test_one_that_does_not_answer_in_time_joins_without(self) -> None:
        async with engine(owner="vllm", hang_posts=True) as server, fleet(HealthSettings(timeout=0.2)) as f:
            worker = nixl(f, server)
            await until(f.registry, lambda: worker.usable)
            assert server.count(CHAT) == 1
            assert not worker.takes_token_ids
            assert f.registry.trouble(worker) == ""

    async def test_one_that_does_not_answer_again_does_what_its_version_did(self) -> None:
        pace = Pace(seek=0.01, report=0.0, doubt=0.0)
        async with engine(owner="vllm") as server, fleet(HealthSettings(timeout=0.2, interval=60), pace) as f:
            worker = nixl(f, server)
            await until(f.registry, lambda: worker.usable)
            server.hang_posts = True
            told: list[Change] = []
            f.registry.subscribe(lambda _, change: told.append(change))
            f.monitor.report_failure(worker)
            await until(f.registry, lambda: Change.IDENTITY in told)
            assert worker.takes_token_ids
            assert worker.labels[LABEL] == "true"
            server.pages["/version"] = b'{"version": "0.31.0"}'
            f.monitor.report_failure(worker)
            await eventually(lambda: worker.labels["version"] == "0.31.0")
            assert not worker.takes_token_ids
            assert LABEL not in worker.labels

    async def test_a_registered_model_is_named(self) -> None:
        async with engine(owner="vllm", models=["tiny", "adapter"]) as server, fleet() as f:
            worker = nixl(f, server, cards=({"id": "adapter"},))
            await until(f.registry, lambda: worker.usable)
            assert server.posts[0][1]["model"] == "adapter"
            assert worker.takes_token_ids

    async def test_prefills_and_other_engines_are_not_asked(self) -> None:
        async with engine(owner="vllm") as prefill, engine(mode="decode") as sglang, fleet() as f:
            workers = nixl(f, prefill, P), f.registry.add(spec(D, sglang.url))
            await until(f.registry, lambda: all(worker.usable for worker in workers))
            assert prefill.posts == sglang.posts == []

    async def test_the_operator_can_forbid_it(self) -> None:
        async with engine(owner="vllm") as server, fleet(token_reuse=False) as f:
            worker = nixl(f, server)
            await until(f.registry, lambda: worker.usable)
            assert server.posts == []
            assert not worker.takes_token_ids

    async def test_one_that_comes_back_as_an_older_version_does_not_any_more(self) -> None:
        async with engine(owner="vllm") as server, fleet(SLOW, Pace(seek=0.01, report=0.0, doubt=0.0)) as f:
            worker = nixl(f, server)
            await until(f.registry, lambda: worker.usable)
            server.knows_token_ids = False
            f.monitor.report_failure(worker)
            await until(f.registry, lambda: not worker.takes_token_ids)
            assert LABEL not in worker.labels
