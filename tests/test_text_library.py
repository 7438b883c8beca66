"""Where tokenizers come from: found for the models of gRPC workers, loaded once, again when they are others."""

from __future__ import annotations

import asyncio
import logging
import shutil
import subprocess
import sys
import threading
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from fleet import Fleet, eventually, fleet, spec

from extproc.errors import GatewayError
from extproc.mock import RpcMock
from extproc.settings import Settings
from extproc.text import library as module
from extproc.text.entry import State
from extproc.texts import TextParts
from extproc.workers.pairing import PairingMode
from extproc.workers.readiness import assess
from extproc.workers.worker import Role, Status, Worker, WorkerUrl
from tests.tokenizers_made import CHATML, directory

P, D = Role.PREFILL, Role.DECODE
NOWHERE = Path("/models/tiny")  # as a worker that was not started from a directory


class Rig:
    """A fleet of gRPC workers with its tokenizers."""

    def __init__(self, workers: Fleet, **settings):
        self.fleet = workers
        self.parts = TextParts(Settings(**settings), workers.registry, workers.client)
        self.library = self.parts.library

    async def add(self, mock: RpcMock, role: Role = D) -> Worker:
        worker = self.fleet.registry.add(spec(role, mock.url))
        await self.fleet.becomes(worker, Status.READY)
        return worker

    async def entry(self, state: State = State.READY, model: str = "tiny"):
        await eventually(lambda: (found := self.library.get(model)) is not None and found.state is state)
        return self.library.get(model)


@asynccontextmanager
async def rig(**settings):
    async with fleet() as workers:
        made = Rig(workers, **settings)
        try:
            yield made
        finally:
            await made.parts.stop()


@pytest.fixture
def model(tmp_path):
    return directory(tmp_path / "tiny")


@pytest.fixture
def other(tmp_path):
    return directory(tmp_path / "other", "llama")


async def test_the_workers_own_files(model):
    async with RpcMock("vllm", "decode", tokenizer=model) as mock, rig() as r:
        worker = await r.add(mock)
        entry = await r.entry()
        assert entry.source == f"{mock.url} GetTokenizer"
        assert r.parts.texts.of("tiny").encode("low", special=True)[0] == 0
        assert worker.no_tokenizer == ""
        assert "no tokenizer" not in r.fleet.registry.trouble(worker)


@pytest.mark.parametrize("engine", ["sglang", "tokenspeed"])
async def test_those_of_other_engines(model, engine):
    async with RpcMock(engine, "decode", tokenizer=model) as mock, rig() as r:
        await r.add(mock)
        assert (await r.entry()).ready.tokenizer._runtime == engine


async def test_the_path_that_a_worker_reports(model, monkeypatch):
    async with RpcMock("vllm", "decode") as mock, rig() as r:
        monkeypatch.setattr(type(mock.facts), "model_info", reporting(type(mock.facts).model_info, model))
        await r.add(mock)
        assert (await r.entry()).source == str(model)
        assert mock.count("GetTokenizer") == 0


def reporting(model_info, path):
    def reported(facts):
        said = model_info(facts)
        said.tokenizer_path = str(path)
        return said

    return reported


@pytest.mark.parametrize("option", ["model_path", "tokenizer_path"])
async def test_the_path_that_the_operator_names(model, other, option):
    async with RpcMock("vllm", "decode", tokenizer=other) as mock, rig(**{option: str(model)}) as r:
        await r.add(mock)
        assert (await r.entry()).source == str(model)
        assert mock.count("GetTokenizer") == 0


async def test_the_tokenizers_path_wins_over_the_models(model, other):
    async with RpcMock("vllm", "decode") as mock, rig(model_path=str(other), tokenizer_path=str(model)) as r:
        await r.add(mock)
        assert (await r.entry()).source == str(model)


async def test_a_path_that_is_not_there_leaves_it_to_the_worker(model):
    async with RpcMock("vllm", "decode", tokenizer=model) as mock, rig(model_path="/nowhere") as r:
        await r.add(mock)
        assert (await r.entry()).source.endswith("GetTokenizer")


async def test_the_operators_path_is_not_that_of_another_model(model, other, tmp_path):
    third = directory(tmp_path / "third", "gemma")
    async with (
        RpcMock("vllm", "decode", tokenizer=other) as first,
        RpcMock("vllm", "decode", model="third", tokenizer=third) as second,
        rig(model_path=str(model)) as r,
    ):
        await r.add(first)
        assert (await r.entry()).source == str(model)
        await r.add(second)
        assert (await r.entry(model="third")).source.endswith("GetTokenizer")


async def test_the_hub_is_not_asked_for_what_a_worker_names(monkeypatch, model):
    asked = []

    def snapshot_download(name, *, allow_patterns, local_files_only):
        asked.append((name, local_files_only))
        assert "*.jinja" in allow_patterns
        raise OSError("no network")

    import huggingface_hub  # noqa: PLC0415 -- what is called is looked up there

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    async with RpcMock("vllm", "decode", tokenizer=model) as mock, rig(model_path="org/named") as r:
        monkeypatch.setattr(type(mock.facts), "model_info", reporting(type(mock.facts).model_info, "org/reported"))
        await r.add(mock)
        await r.entry()
    assert asked[:2] == [("org/named", False), ("org/reported", True)]


async def test_the_hub_has_what_the_operator_names(monkeypatch, model, other):
    import huggingface_hub  # noqa: PLC0415

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(model))
    async with RpcMock("vllm", "decode", tokenizer=other) as mock, rig(model_path="org/tiny") as r:
        await r.add(mock)
        assert (await r.entry()).source == "org/tiny"


async def test_a_hub_that_does_not_answer_holds_up_nobody(monkeypatch, model, tmp_path):
    import huggingface_hub  # noqa: PLC0415

    asked, gate = threading.Event(), threading.Event()

    def hang(*_, **__):
        asked.set()
        gate.wait()
        return str(model)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", hang)
    third = directory(tmp_path / "third", "gemma")
    async with (
        RpcMock("vllm", "decode", tokenizer=model) as one,
        RpcMock("vllm", "decode", model="third", tokenizer=third) as two,
        rig(model_path="org/tiny") as r,
    ):
        await r.add(one)
        await eventually(asked.is_set)
        await r.add(two)
        await r.entry(model="third")
        assert r.library.get("tiny").state is State.LOADING
    gate.set()


async def test_without_one_everybody_is_told(caplog):
    async with RpcMock("vllm", "decode", tokenizer=NOWHERE) as mock, rig() as r:
        worker = await r.add(mock)
        entry = await r.entry(State.FAILED)
        assert "No tokenizer files found in /models/tiny" in entry.reason
        assert "/models/tiny: no tokenizer files there" in entry.reason
        assert "no tokenizer: " in r.fleet.registry.trouble(worker)
        assert caplog.text.count("no tokenizer") == 1
        with pytest.raises(GatewayError, match="log") as raised:
            r.parts.texts.ready("tiny")
        assert mock.url not in str(raised.value)


def test_the_fleet_is_ready_when_some_model_can_be_made_tokens_of():
    def ready(role, model, missing):
        worker = Worker(f"{role.value}-{model}", WorkerUrl.parse(f"grpc://{role.value}-{model}:1"), role, (model,))
        worker.status, worker.endpoint, worker.no_tokenizer = Status.READY, "10.0.0.1:1", missing
        return worker

    mute = [ready(role, "a", "it is being loaded") for role in (P, D)]
    assert assess(mute, PairingMode.LENIENT).reason == "tokenizer not yet registered"
    assert assess([*mute, *(ready(role, "b", "") for role in (P, D))], PairingMode.LENIENT).ready


async def test_it_is_looked_for_again(monkeypatch, model):
    monkeypatch.setattr(module, "RETRY_SECONDS", (0.01,))
    async with RpcMock("vllm", "decode", tokenizer=model) as mock, rig() as r:
        mock.errors["GetTokenizer"] = grpc.StatusCode.UNAVAILABLE
        worker = await r.add(mock)
        await r.entry(State.FAILED)
        assert worker.no_tokenizer
        mock.errors.clear()
        await r.entry()
        assert not worker.no_tokenizer


async def test_a_tokenizer_that_is_another_is_loaded_anew(monkeypatch, model, other, caplog):
    monkeypatch.setattr(module, "LOOK_AGAIN_SECONDS", 0.0)
    caplog.set_level(logging.INFO)
    async with RpcMock("vllm", "decode", tokenizer=model) as mock, rig() as r:
        worker = await r.add(mock)
        entry = await r.entry()
        first = entry.ready
        r.library.look(worker)  # it came back
        await eventually(lambda: entry.task is None)
        assert entry.ready is first
        mock.tokenizer = other
        r.library.look(worker)
        await eventually(lambda: entry.ready is not first)
        assert "the tokenizer is another" in caplog.messages
        mock.errors["GetTokenizer"] = grpc.StatusCode.INTERNAL
        second = entry.ready
        r.library.look(worker)
        await eventually(lambda: entry.task is None)
        assert (entry.ready, worker.no_tokenizer) == (second, "")


async def test_workers_that_come_together_are_asked_once(model):
    async with (
        RpcMock("vllm", "decode", tokenizer=model) as one,
        RpcMock("vllm", "prefill", tokenizer=model) as two,
        rig() as r,
    ):
        await asyncio.gather(r.add(one), r.add(two, P))
        await r.entry()
        assert one.count("GetTokenizer") + two.count("GetTokenizer") == 1


async def test_models_with_the_same_files_share_a_tokenizer(model):
    async with (
        RpcMock("vllm", "decode", tokenizer=model) as one,
        RpcMock("vllm", "decode", model="same", tokenizer=model) as two,
        rig() as r,
    ):
        await asyncio.gather(r.add(one), r.add(two))
        first, second = await r.entry(), await r.entry(model="same")
        assert first.ready.tokenizer is second.ready.tokenizer


async def test_a_tokenizer_goes_when_nobody_has_come_for_it(monkeypatch, model):
    monkeypatch.setattr(module, "KEPT_SECONDS", 0.01)
    async with RpcMock("vllm", "decode", tokenizer=model) as mock, rig() as r:
        worker = await r.add(mock)
        await r.entry()
        r.fleet.registry.remove(worker)
        await eventually(lambda: r.library.get("tiny") is None)


async def test_a_chat_template_of_the_operators(model, tmp_path):
    template = tmp_path / "own.jinja"
    template.write_text(CHATML.replace("im_start", "begin"))
    async with RpcMock("vllm", "decode", tokenizer=model) as mock, rig(chat_template=str(template)) as r:
        await r.add(mock)
        assert "begin" in (await r.entry()).ready.tokenizer._template


async def test_added_by_hand(model, other):
    async with RpcMock("vllm", "decode", tokenizer=other) as mock, rig(disable_tokenizer_autoload=True) as r:
        worker = await r.add(mock)
        assert "--disable-tokenizer-autoload" in worker.no_tokenizer
        assert r.library.get("tiny") is None
        r.library.add("tiny", str(model))
        entry = await r.entry()
        assert (entry.source, worker.no_tokenizer) == (str(model), "")
        with pytest.raises(KeyError, match=entry.id):
            r.library.add("tiny", str(other))
        r.library.remove(entry)
        assert r.library.get("tiny") is None
        assert "--disable-tokenizer-autoload" in worker.no_tokenizer


async def test_one_that_failed_can_be_replaced_by_hand(model):
    async with RpcMock("vllm", "decode", tokenizer=NOWHERE) as mock, rig() as r:
        await r.add(mock)
        await r.entry(State.FAILED)
        r.library.add("tiny", str(model))
        assert (await r.entry()).source == str(model)
        r.library.remove(r.library.get("tiny"))  # it is looked for as before
        await r.entry(State.FAILED)


def test_http_workers_need_none_and_nothing_is_imported(tmp_path):
    program = (
        "import sys\n"
        "from extproc.service import Service\n"
        "from extproc.settings import Settings\n"
        "import asyncio\n"
        "async def main():\n"
        "    Service(Settings(run_dir='{0}', extproc_address='unix:{0}/x', model_path='org/model'))\n"
        "asyncio.run(main())\n"
        "found = {{'transformers', 'tokenizers', 'jinja2', 'huggingface_hub'}} & set(sys.modules)\n"
        "assert not found, found\n"
    )
    command = [sys.executable, "-c", program.format(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


async def test_it_ends_while_it_loads(model):
    async with RpcMock("vllm", "decode", tokenizer=model) as mock:
        async with rig() as r:
            worker = await r.add(mock)
            entry = await r.entry()
            entry.ready, mock.hang = None, True
            r.library.look(worker)
            await eventually(lambda: mock.count("GetTokenizer") == 2)
            task = entry.task
        assert task.cancelled()


async def test_a_directory_may_vanish_while_it_is_looked_at(model, monkeypatch):
    monkeypatch.setattr(module, "LOOK_AGAIN_SECONDS", 0.0)
    async with RpcMock("vllm", "decode", tokenizer=NOWHERE) as mock, rig(model_path=str(model)) as r:
        worker = await r.add(mock)
        entry = await r.entry()
        shutil.rmtree(model)
        r.library.look(worker)
        await eventually(lambda: entry.task is None and entry.failures > 0)
        assert entry.ready is not None
