"""Workers that are found: pods of a Kubernetes API, with a real Envoy in front, and a file that others write."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml
from product import Product, soon

from extproc.mock import Fault, Point, SglangMock
from extproc.mock.vllm.worker import NIXL, VllmMock
from extproc.workers.worker import Status, Worker
from tests.kube_api import KubeApi, pod

pytestmark = pytest.mark.asyncio(loop_scope="function")

PATH = "/v1/chat/completions"
SELECTORS = {"prefill_selector": "app=sglang role=prefill", "decode_selector": "app=sglang role=decode"}


def chat(**fields: object) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], **fields}


class Cluster:
    """Mock workers as pods: each has an address of its own on this machine."""

    def __init__(self, api: KubeApi) -> None:
        self.api = api
        self.mocks: list[SglangMock | VllmMock] = []

    async def run(self, role: str, host: str, port: int = 0) -> SglangMock:
        """Start an engine."""
        mock = SglangMock(role, host=host, port=port)
        await mock.start()
        self.mocks.append(mock)
        return mock

    def show(self, mock: SglangMock, **more: Any) -> dict[str, Any]:
        """Have the API tell of its pod, which is called as its address is."""
        annotations = {"smg.ai/worker-ports": str(mock.port)}
        if mock.role == "prefill":
            annotations["sglang.ai/bootstrap-port"] = str(mock.bootstrap_port)
        labels = {"app": "sglang", "role": mock.role}
        name = f"pod-{mock.host.replace('.', '-').replace(':', 'x')}"
        shown = pod(name, labels, mock.host, annotations=annotations, node="node-1", **more)
        self.api.put(shown)
        return shown

    async def stop(self) -> None:
        for mock in self.mocks:
            await mock.stop()


@pytest_asyncio.fixture
async def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    async with KubeApi() as api:
        config = tmp_path / "kubeconfig"
        config.write_text(yaml.safe_dump(api.kubeconfig()))
        monkeypatch.setenv("KUBECONFIG", str(config))
        monkeypatch.setenv("no_proxy", "*")
        made = Cluster(api)
        yield made
        await made.stop()


def gateway(**settings: Any) -> Product:
    """A gateway that looks for pods, and is told of no worker."""
    kubernetes = {"service_discovery": True, "service_discovery_namespace": "inference", **SELECTORS}
    return Product(0, 0, wait=False, shutdown_grace_period_secs=30, **(kubernetes | settings))


def at(workers: list[Worker], mock: SglangMock | VllmMock) -> list[Worker]:
    """The workers at a mock's address."""
    return [worker for worker in workers if str(worker.url) == mock.url]


async def usable(product: Product, *mocks: SglangMock | VllmMock) -> None:
    """Wait until these can be used."""
    await product.fleet(lambda workers: all(any(w.usable for w in at(workers, mock)) for mock in mocks))


async def test_pods_serve_end_and_are_replaced(cluster: Cluster) -> None:
    prefill = await cluster.run("prefill", "127.0.0.2")
    first, second = await cluster.run("decode", "127.0.0.3"), await cluster.run("decode", "127.0.0.4")
    async with gateway(prefill_policy="round_robin", decode_policy="round_robin") as product:
        readiness = await product.client.get("/readiness")
        assert readiness.status == 503
        cluster.show(prefill)
        pods = {mock: cluster.show(mock) for mock in (first, second)}
        await usable(product, prefill, first, second)
        assert (await product.client.get("/readiness")).status == 200
        answer = await product.post(PATH, chat())
        assert (answer.status, answer.header("x-pd-handoff")) == (200, "sglang")
        shown = (await product.client.get("/workers")).json["workers"]
        assert {worker["labels"]["smg.ai/pod-name"] for worker in shown} == {
            "pod-127-0-0-2",
            "pod-127-0-0-3",
            "pod-127-0-0-4",
        }
        await product.forget()
        for mock in cluster.mocks:
            mock.clear()

        # A pod is to end while it writes: it writes to the end, and nobody else is sent there.
        go_on = asyncio.Event()
        for mock in (first, second):
            mock.fail(Fault(hang=Point.MID_BODY, until=go_on, tokens=100))
        exchange = await product.client.open(PATH, chat(stream=True))
        head = await exchange.head()
        assert head.status == 200
        await soon(lambda: first.legs or second.legs, "no decode leg")
        busy, other = (first, second) if first.legs else (second, first)
        for mock in (first, second):
            mock.behave()
        (worker,) = at(list(product.service.registry), busy)
        cluster.show(busy, terminating=True)
        await product.fleet(lambda _: worker.status is Status.DRAINING)
        for _ in range(4):
            assert (await product.post(PATH, chat())).status == 200
        assert (len(busy.legs), len(other.legs)) == (1, 4)
        assert worker in product.service.registry, "its request is still under way"
        go_on.set()
        whole = await exchange.whole()
        assert whole.body.count(b"data: ") > 100
        assert whole.body.endswith(b"data: [DONE]\n\n")
        await product.fleet(lambda workers: worker not in workers)
        cluster.api.delete(pods[busy])

        # Its successor has the same name and the same address.
        port = busy.port
        await busy.stop()
        cluster.mocks.remove(busy)
        successor = await cluster.run(busy.role, busy.host, port)
        cluster.show(successor, uid="another")
        await usable(product, successor)
        for _ in range(4):
            assert (await product.post(PATH, chat())).status == 200
        assert successor.legs

        # While it is used it is replaced by one of which nobody saw the end of the former.
        (worker,) = at(list(product.service.registry), successor)
        cluster.show(successor, uid="a third")
        await product.fleet(lambda workers: worker not in workers and any(w.usable for w in at(workers, successor)))

        # Not ready: no new requests; ready again: used again.
        (worker,) = at(list(product.service.registry), successor)
        cluster.show(successor, uid="a third", ready=False)
        await product.fleet(lambda _: not worker.usable)
        successor.clear()
        for _ in range(4):
            assert (await product.post(PATH, chat())).status == 200
        assert not successor.legs
        cluster.show(successor, uid="a third")
        await product.fleet(lambda _: worker.usable)
        for _ in range(4):
            assert (await product.post(PATH, chat())).status == 200
        assert successor.legs


async def test_pods_that_vanish_in_a_gap_and_workers_of_others(cluster: Cluster) -> None:
    prefill, decode = await cluster.run("prefill", "127.0.0.2"), await cluster.run("decode", "127.0.0.3")
    api = cluster.api
    async with SglangMock("decode") as by_hand, gateway() as product:
        await product.add(by_hand)
        cluster.show(prefill)
        shown = cluster.show(decode)
        await usable(product, prefill, decode, by_hand)
        await api.until(lambda: api.watching)
        await api.stop()
        await soon(lambda: not _discovery(product).state.up, "nobody misses the API")
        assert (await product.post(PATH, chat())).status == 200, "what is known holds"
        assert (await product.client.get("/readiness")).status == 200
        api.delete(shown)
        api.forget()
        await api.start()
        await product.fleet(lambda workers: not at(workers, decode))
        assert at(list(product.service.registry), by_hand)
        assert (await product.post(PATH, chat())).status == 200
        page = await _metrics(product)
        assert 'pd_discovery_up{provider="kubernetes"} 1' in page
        assert 'pd_discovery_found{provider="kubernetes",role="prefill",state="ready"} 1' in page
        assert 'pd_discovery_changes_total{provider="kubernetes",change="removed"} 1' in page


async def test_annotations_of_vllm_and_a_policy_for_each_role(cluster: Cluster) -> None:
    """The peer has one policy for all that is found."""
    prefills = [VllmMock("prefill", connector=NIXL, host=f"127.0.0.{index}") for index in (2, 3)]
    decodes = [VllmMock("decode", connector=NIXL, host=f"127.0.0.{index}") for index in (4, 5)]
    for mock in (*prefills, *decodes):
        await mock.start()
        cluster.mocks.append(mock)
        annotations = {"smg.ai/worker-ports": str(mock.port), "smg.ai/kv-connector": "nixl"}
        labels = {"app": "sglang", "role": mock.role, "model": "mock-model"}
        cluster.api.put(pod(f"pod-{mock.host}", labels, mock.host, annotations=annotations))
    settings = {"prefill_policy": "round_robin", "decode_policy": "consistent_hashing"}
    async with gateway(**settings, model_id_from="label:model", token_reuse=False) as product:
        await usable(product, *prefills, *decodes)
        for mock in (*prefills, *decodes):
            mock.clear()
        body = chat(model="mock-model")
        for _ in range(4):
            answer = await product.post(PATH, body, [("x-smg-routing-key", "somebody")])
            assert (answer.status, answer.header("x-pd-handoff"), answer.header("x-pd-kv")) == (200, "nixl", "handed")
        assert [len(mock.legs) for mock in prefills] == [2, 2]
        assert sorted(len(mock.legs) for mock in decodes) == [0, 4]


async def test_ipv6(cluster: Cluster) -> None:
    try:
        prefill, decode = await cluster.run("prefill", "::1"), await cluster.run("decode", "::1")
    except OSError:
        pytest.skip("this machine has no IPv6")
    cluster.show(prefill, uid="p")
    shown = pod("d", {"app": "sglang", "role": "decode"}, "::1", annotations={"smg.ai/worker-ports": str(decode.port)})
    cluster.api.put(shown)
    async with gateway() as product:
        await product.fleet(lambda workers: len(workers) == 2 and all(worker.usable for worker in workers))
        assert {worker.url.bracketed_host for worker in product.service.registry} == {"[::1]"}
        assert (await product.post(PATH, chat())).status == 200


async def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "workers.yaml"
    file = {"discovery_provider": "file", "discovery_file": str(path)}
    async with (
        SglangMock("prefill") as prefill,
        SglangMock("decode") as first,
        SglangMock("decode") as second,
        Product(0, 0, wait=False, **file) as product,
    ):
        await soon(lambda: _discovery(product).state.failures, "nobody looks for the file")
        readiness = await product.client.get("/readiness")
        assert readiness.json["reason"].endswith("file discovery: its file cannot be read, and has found nobody yet")
        entries = [
            {"url": prefill.url, "worker_type": "prefill", "bootstrap_port": prefill.bootstrap_port},
            {"url": first.url, "worker_type": "decode"},
        ]
        path.write_text(yaml.safe_dump(entries))
        await usable(product, prefill, first)
        assert (await product.post(PATH, chat())).status == 200
        path.write_text("- url: http")
        await soon(lambda: not _discovery(product).state.up, "nobody minds a broken file")
        assert (await product.post(PATH, chat())).status == 200
        new = path.with_suffix(".new")
        new.write_text(yaml.safe_dump([entries[0], entries[1] | {"url": second.url}]))
        new.replace(path)
        await usable(product, prefill, second)
        await product.fleet(lambda workers: not at(workers, first))
        assert (await product.post(PATH, chat())).status == 200
        assert second.legs
        assert 'pd_discovery_failures_total{provider="file",reason="invalid"}' in await _metrics(product)


def _discovery(product: Product) -> Any:
    return product.service._discovery


async def _metrics(product: Product) -> str:
    return product.service._metrics._metrics.render().decode()
