"""Who is on this machine, told from what a real Envoy says; and the rest of the control API through it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from product import Product
from vllm_product import VllmProduct

from extproc.mock import Fault, Point
from extproc.workers.registration import as_registration

pytestmark = pytest.mark.asyncio(loop_scope="module")

NOBODY = {"url": "http://127.0.0.1:1", "worker_type": "decode"}
KEYS = ["ops:Ops:admin:k-admin", "dash:Dash:user:k-user"]


def own_address() -> str:
    """An address of this machine that is not its loopback, as a client elsewhere in the network has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 1))  # nothing is sent
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Product]:
    """Open, and listening to everybody, as in a container."""
    async with Product(decodes=1, host="0.0.0.0") as product:
        yield product


async def _from(address: str, product: Product, *headers: str) -> bytes:
    """What a client at ``address`` of this machine is answered when it registers a worker."""
    port = product.service.client_address[1]
    reader, writer = await asyncio.open_connection(address, port, local_addr=(address, 0))
    body = b'{"url": "http://127.0.0.1:1", "worker_type": "decode"}'
    head = [
        "POST /workers HTTP/1.1",
        "host: gateway",
        "connection: close",
        f"content-length: {len(body)}",
        *headers,
    ]
    writer.write("\r\n".join(head).encode() + b"\r\n\r\n" + body)
    answer = await reader.read()
    writer.close()
    return answer


FORGED = [
    (),
    ("x-forwarded-for: 127.0.0.1",),
    ("x-forwarded-for: 127.0.0.1", "x-forwarded-for: 127.0.0.1"),
    ("X-Forwarded-For: 127.0.0.1,",),
    ("x-envoy-external-address: 127.0.0.1", "x-real-ip: 127.0.0.1"),
    ("x-envoy-internal: true", "x-forwarded-for: ::1"),
    ("x-pd-client-address: 127.0.0.1",),
]


@pytest.mark.parametrize("headers", FORGED, ids=str)
async def test_a_client_elsewhere_changes_nothing_whatever_it_says(product: Product, headers: tuple[str, ...]) -> None:
    address = own_address()
    if address.startswith("127."):
        pytest.skip("this machine has no other address")
    answer = await _from(address, product, *headers)
    assert answer.startswith(b"HTTP/1.1 403 ")
    assert b'"code":"forbidden"' in answer
    assert address.encode() in answer
    assert b"--control-plane-open" in answer
    assert len(product.service.registry) == 2


async def test_a_client_on_this_machine_may(product: Product) -> None:
    answer = await _from("127.0.0.1", product)
    assert answer.startswith(b"HTTP/1.1 202 ")
    (worker,) = [worker for worker in product.service.registry if worker.url.port == 1]
    await product.client.delete(f"/workers/{worker.id}")
    await product.fleet(lambda workers: worker not in workers)


async def test_one_that_speaks_for_another_may_not(product: Product) -> None:
    """As a proxy on this machine does for its clients."""
    assert (await _from("127.0.0.1", product, "x-forwarded-for: 10.1.2.3")).startswith(b"HTTP/1.1 403 ")


async def test_everybody_reads(product: Product) -> None:
    headers = [("x-forwarded-for", "10.1.2.3")]
    for path in ("/workers", "/openapi.json", "/get_loads"):
        assert (await product.client.get(path, headers)).status == 200


async def test_the_whole_path_works(product: Product) -> None:
    answer = await product.client.get("/health_generate")
    assert (answer.status, answer.json["status"]) == (200, "ok")
    assert (answer.json["prefill"], answer.json["decode"]) == (product.prefills[0].url, product.decodes[0].url)
    assert (answer.json["handoff"], answer.json["kv"], answer.json["model"]) == ("sglang", "handed", "tiny")
    (prefill,), (decode,) = product.prefills[0].legs, product.decodes[0].legs
    assert prefill.json["bootstrap_room"] == decode.json["bootstrap_room"]


async def test_or_does_not(product: Product) -> None:
    answer = await product.client.get("/health_generate?model=nobody")
    assert (answer.status, answer.code) == (503, "health_generate_failed")
    assert "model_not_found" in answer.json["error"]["message"]


async def test_a_worker_is_changed_while_it_answers(product: Product) -> None:
    worker = next(worker for worker in product.service.registry if worker.url.port == product.decodes[0].port)
    before = product.service.registry.spec(worker)
    answer = await product.client.patch(f"/workers/{worker.id}", {"labels": {"zone": "a"}, "api_key": "k"})
    assert answer.status == 202
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
    assert (await product.post("/v1/chat/completions", chat)).status == 200
    assert product.decodes[0].legs[-1].header("authorization") == "Bearer k"
    product.service.registry.change(worker, before)


async def test_an_answer_under_way_outlives_its_workers_registration(product: Product) -> None:
    decode = product.decodes[0]
    go_on = asyncio.Event()
    decode.fail(Fault(hang=Point.MID_BODY, until=go_on, tokens=40))
    chat = {"model": "tiny", "stream": True, "messages": [{"role": "user", "content": "hello"}]}
    exchange = await product.client.open("/v1/chat/completions", chat)
    await exchange.head()
    for mock in product.mocks:
        worker = product.worker(mock)
        body = as_registration(product.service.registry.spec(worker)) | {"priority": 7}
        assert (await product.client.put(f"/workers/{worker.id}", body)).status == 202
        assert product.service.registry.get(worker.id) is worker
    go_on.set()
    reply = await exchange.whole()
    assert reply.events[-1] == "[DONE]"
    assert len(reply.events) > 40
    await product.ready()


async def test_flushing_is_passed_on(product: Product) -> None:
    answer = await product.client.post("/flush_cache", None)
    assert (answer.status, answer.json["workers_flushed"]) == (200, 2)


async def test_keys_of_the_control_api() -> None:
    async with Product(decodes=1, control_plane_api_keys=KEYS) as product:
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
        assert (await product.post("/v1/chat/completions", chat)).status == 200
        for key, read, write in ((None, 401, 401), ("k-user", 200, 403), ("k-admin", 200, 202)):
            headers = [("authorization", f"Bearer {key}")] if key else []
            assert (await product.client.get("/workers", headers)).status == read
            assert (await product.post("/workers", NOBODY, headers)).status == write


@pytest.mark.parametrize(
    ("settings", "warned"),
    [
        ({"host": "127.0.0.1"}, ""),
        ({"api_key": "k"}, ""),
        ({"control_plane_api_keys": KEYS}, ""),
        ({}, "THE CONTROL API IS OPEN: whoever is on this machine can register workers"),
        ({"control_plane_open": True}, "THE CONTROL API IS OPEN: whoever reaches it can register workers"),
    ],
    ids=str,
)
async def test_an_open_control_api_is_warned_of(
    settings: dict[str, object], warned: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with Product(0, 0, wait=False, **{"host": "0.0.0.0", **settings}):
        found = [message for message in caplog.messages if "CONTROL API" in message]
        assert len(found) == bool(warned)
        assert "".join(found).startswith(warned)


async def test_everybody_may_where_the_operator_says_so() -> None:
    address = own_address()
    async with Product(0, 0, wait=False, host="0.0.0.0", control_plane_open=True) as product:
        assert (await _from(address, product)).startswith(b"HTTP/1.1 202 ")


async def test_a_handoff_in_turn() -> None:
    async with VllmProduct(decodes=1) as product:
        answer = await product.client.get("/health_generate")
        assert (answer.status, answer.json["handoff"], answer.json["kv"]) == (200, "nixl", "handed")
