"""A gateway of an InferencePool that names a subset of its endpoints, in metadata of a filter in front of ours."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

import pytest
import pytest_asyncio
from google.protobuf.struct_pb2 import ListValue, Value
from mesh_product import InMesh, VllmInMesh
from mesh_translation import Json, of_inference_pool

from extproc.mock import Fault, SglangMock

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATH = "/v1/chat/completions"
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
KEY = "x-gateway-destination-endpoint-subset"
LIST, TEXT = "x-gateways-list", "x-gateways-text"  # what the filter in front makes its metadata of
_FILTER = "envoy.filters.http.header_to_metadata"


def _rule(header: str, **how: str) -> Json:
    said = {"metadata_namespace": "envoy.lb.subset_hint", "key": KEY, **how}
    return {"header": header, "on_header_present": said, "remove": True}


NAMING: Json = {
    "name": _FILTER,
    "typed_config": {
        "@type": "type.googleapis.com/envoy.extensions.filters.http.header_to_metadata.v3.Config",
        "request_rules": [_rule(LIST, type="PROTOBUF_VALUE", encode="BASE64"), _rule(TEXT, type="STRING")],
    },
}


def endpoints(mocks: Sequence[SglangMock]) -> list[str]:
    return [f"127.0.0.1:{mock.port}" for mock in mocks]


def named(*mocks: SglangMock, header: str = LIST) -> list[tuple[str, str]]:
    """The request's headers, for which the gateway names ``mocks``."""
    if header == TEXT:
        return [(TEXT, ",".join(endpoints(mocks)))]
    said = Value(list_value=ListValue(values=[Value(string_value=each) for each in endpoints(mocks)]))
    return [(LIST, base64.b64encode(said.SerializeToString()).decode())]


def asked(product: InMesh) -> set[SglangMock]:
    """Whoever got a leg."""
    return {mock for mock in product.mocks if mock.legs}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["sglang", "vllm"])
async def running(request: pytest.FixtureRequest) -> AsyncIterator[InMesh]:
    kind = InMesh if request.param == "sglang" else VllmInMesh
    translation = partial(of_inference_pool, before=[NAMING])
    async with kind(2, 3, snippet="inference-pool", translation=translation) as product:
        yield product


@pytest.mark.parametrize("header", [LIST, TEXT])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("samples", [1, 2])
async def test_only_the_pair_that_is_named_serves(product: InMesh, header: str, samples: int, *, stream: bool) -> None:
    pair = (product.prefills[1], product.decodes[2])
    alone = samples > 1 and isinstance(product, VllmInMesh)  # a vLLM decode computes the prompt of several by itself
    for _ in range(3):
        answer = await product.post(PATH, {**CHAT, "stream": stream, "n": samples}, named(*pair, header=header))
        assert answer.status == 200, answer.body
        assert not stream or answer.events[-1] == "[DONE]"
        assert answer.header("x-pd-prefill") == (None if alone else pair[0].url)
        assert answer.header("x-pd-decode") == pair[1].url
    assert asked(product) == set(pair[1:] if alone else pair)


async def test_of_several_that_are_named_all_serve(product: InMesh) -> None:
    some = (*product.prefills, *product.decodes[:2])
    for _ in range(4):
        assert (await product.post(PATH, CHAT, named(*some))).status == 200
    assert asked(product) == set(some)


async def test_without_a_list_all_serve(product: InMesh) -> None:
    for _ in range(6):
        assert (await product.post(PATH, CHAT)).status == 200
    assert asked(product) == set(product.mocks)


@pytest.mark.parametrize("who", ["nobody", "prefills", "decodes"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_list_without_a_pair_is_503(product: InMesh, who: str, *, stream: bool) -> None:
    some = {"nobody": (), "prefills": product.prefills, "decodes": product.decodes}[who]
    answer = await product.post(PATH, {**CHAT, "stream": stream}, named(*some))
    assert answer.status == 503
    assert answer.header("x-pd-error-code") == "no_available_workers"
    assert KEY in answer.json["error"]["message"]
    assert not asked(product)


@pytest.mark.parametrize("stream", [False, True])
async def test_one_that_refuses_is_followed_by_another_of_the_list(product: InMesh, *, stream: bool) -> None:
    """Envoy goes on to it by itself."""
    await product.decodes[1].refuse()
    some = (product.prefills[0], *product.decodes[1:])
    for _ in range(4):  # the one that refuses is the first choice of every other one, at least
        answer = await product.post(PATH, {**CHAT, "stream": stream}, named(*some))
        assert answer.status == 200, answer.body
    assert asked(product) == {product.prefills[0], product.decodes[2]}


@pytest.mark.parametrize("stream", [False, True])
async def test_another_attempt_stays_within_the_list(product: InMesh, *, stream: bool) -> None:
    """A prefill that fails is followed by the other one where that is named, and is the answer where it is not."""
    over_vllm = isinstance(product, VllmInMesh)
    first, second = product.prefills
    first.fail(Fault(status=503))
    if over_vllm:  # nothing is released before the prefill is done
        for _ in range(2):
            answer = await product.post(PATH, {**CHAT, "stream": stream}, named(first, second, product.decodes[0]))
            assert answer.status == 200, answer.body
        assert asked(product) == {first, second, product.decodes[0]}
    await product.forget()
    first.fail(Fault(status=503))
    answer = await product.post(PATH, {**CHAT, "stream": stream}, named(first, product.decodes[0]))
    assert answer.status == 503
    assert not second.legs
    assert not any(mock.legs for mock in product.decodes[1:])


async def test_a_client_cannot_name_workers(product: InMesh) -> None:
    """Not by the header of that name: only the gateway can, and what it says holds."""
    theirs = [(KEY, endpoints([product.prefills[0]])[0])]
    for _ in range(2):
        assert (await product.post(PATH, CHAT, theirs)).status == 200
    assert (await product.post(PATH, CHAT, [*theirs, *named(product.prefills[1], product.decodes[1])])).status == 200
    assert {mock for mock in product.prefills if mock.legs} == set(product.prefills)
    for mock in product.mocks:
        for leg in mock.legs:
            assert leg.header(KEY) is leg.header(LIST) is None
