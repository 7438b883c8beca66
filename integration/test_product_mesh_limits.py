"""Where meshes differ: a worker that they do not know, the picker's header, its cluster's name, and its timer."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
from mesh_product import TRANSLATIONS, InMesh
from mesh_translation import of_inference_pool

from extproc.mock import Fault

pytestmark = pytest.mark.asyncio(loop_scope="function")

PATH = "/v1/chat/completions"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
POOL = "inference-pool"


@pytest.mark.parametrize("snippet", ["istio", "envoy-gateway"])
async def test_a_worker_that_the_mesh_does_not_know_is_an_error_and_never_another(snippet):
    async with InMesh(1, 1, snippet=snippet, known=["prefill"], disable_retries=True) as product:
        answer = await product.post(PATH, CHAT)
        assert answer.status == 503
        await product.settled()
        assert len(product.prefill.legs) <= 1  # its own, unless the error was faster, and not the decode's


@pytest.mark.parametrize(("snippet", "status"), [("istio", 503), ("envoy-gateway", 503), (POOL, 500)])
async def test_without_the_sidecar_no_worker_gets_anything(snippet, status):
    def elsewhere(objects, workers, _):
        return TRANSLATIONS[snippet](objects, workers, "/nobody/listens/here")

    async with InMesh(1, 1, snippet=snippet, translation=elsewhere) as product:
        answer = await product.post(PATH, CHAT)
        assert answer.status == status
        assert not product.prefill.legs
        assert not product.decode.legs


async def test_the_gateway_of_a_pool_takes_any_other_worker():
    """Its rule for a worker that it does not know is its own. The engine that gets the wrong leg refuses it."""
    async with InMesh(1, 1, snippet=POOL, known=["prefill"], disable_retries=True) as product:
        both_have_come = asyncio.Event()
        product.prefill.fail(Fault(until=both_have_come))
        exchange = await product.client.open(PATH, CHAT)
        await product.prefill.received(2)
        both_have_come.set()
        assert (await exchange.whole()).status == 400
        assert len(product.prefill.legs) == 2
        await product.settled()


async def test_a_gateway_that_reads_the_header():
    async with InMesh(1, 2, snippet=POOL, translation=partial(of_inference_pool, by_header=True)) as product:
        for _ in range(2):
            answer = await product.post(PATH, CHAT)
            assert answer.status == 200, answer.body
        assert [len(mock.legs) for mock in product.decodes] == [1, 1]
        await product.settled()


@pytest.mark.parametrize(("transport", "status"), [("ngh2", 500), ("grpcio", 200)])
async def test_a_cluster_whose_name_is_no_hosts(transport, status):
    """Envoy says the cluster's name as the authority: nghttp2 refuses ``|``, grpcio does not mind."""
    translation = partial(of_inference_pool, picker_cluster="outbound|50051||pd-extproc.llm.svc.cluster.local")
    async with InMesh(1, 1, snippet=POOL, translation=translation, grpc_transport=transport) as product:
        answer = await product.post(PATH, CHAT)
        assert answer.status == status
        await product.settled()


async def test_a_stream_that_is_longer_than_the_pickers_timer():
    """Gateways set a timeout for the picker's gRPC service: of 10 s, Istio and Envoy Gateway. It ends no stream."""
    async with InMesh(1, 1, snippet=POOL, translation=partial(of_inference_pool, picker_timeout="0.3s")) as product:
        product.decode.fail(Fault(delay_token=0.05, tokens=20))
        answer = await product.post(PATH, {**CHAT, "stream": True})
        assert answer.status == 200
        assert answer.events[-1] == "[DONE]"
        await product.settled()
