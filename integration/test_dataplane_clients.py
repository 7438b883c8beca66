"""The client port of a real Envoy: paths, headers, Envoy's own answers, fail-over."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from dataplane_rig import Rig, Unreachable, Worker, answer, garbage, hang_up, never, unreachable

from extproc.dataplane.paths import CONTROL_PATHS, DECODE_PATHS, INFERENCE_PATHS, NOT_IMPLEMENTED_PATHS
from extproc.errors import CATALOGUE
from extproc.names import NAMING
from extproc.workers.endpoints import ROLES

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    rig = Rig(tmp_path_factory.mktemp("rig"), max_payload_bytes=30_000_000, connect_timeout=0.5)
    await rig.start()
    yield rig
    await rig.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hasty(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    """One that does not wait long for anybody."""
    rig = Rig(tmp_path_factory.mktemp("hasty"), request_timeout=1.0, timeout_margin=0.5)
    await rig.start()
    yield rig
    await rig.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workers(rig: Rig) -> AsyncIterator[dict[str, Worker | Unreachable]]:
    with unreachable(refuses=True) as dead, unreachable(refuses=False) as full:
        yield {
            "a": await rig.worker(),
            "b": await rig.worker(),
            "hangs_up": await rig.worker(hang_up),
            "garbage": await rig.worker(garbage),
            "dead": dead,
            "full": full,
        }


@pytest_asyncio.fixture(loop_scope="module")
async def fleet(rig: Rig, workers: dict[str, Any]) -> dict[str, Any]:
    """One worker of every kind, known to Envoy; ``dead`` refuses, ``full`` never accepts."""
    await rig.know(*(worker.endpoint for worker in workers.values()))
    return workers


async def raw(rig: Rig, request: bytes) -> bytes:
    """Everything that comes back for ``request`` on a connection of its own."""
    reader, writer = await asyncio.open_connection(rig.host, rig.port)
    writer.write(request)
    async with asyncio.timeout(60):
        received = await reader.read()
    writer.close()
    return received


# Paths


@pytest.mark.parametrize("path", INFERENCE_PATHS)
async def test_inference_paths_reach_a_worker(rig: Rig, fleet: dict[str, Any], path: str) -> None:
    reply = await rig.post(fleet["a"].address, path=f"{path}?x=%20%2F")
    assert (reply.status, reply.body.decode()) == (200, fleet["a"].address)
    assert fleet["a"].requests[-1].path == f"{path}?x=%20%2F"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/responses/resp_1?stream=true"),
        ("DELETE", "/v1/responses/resp_1"),
        ("POST", "/v1/responses/resp_1/cancel"),
    ],
)
async def test_stored_responses_reach_a_decode_worker(rig: Rig, method: str, path: str) -> None:
    worker = await rig.worker()
    await rig.know(worker.endpoint, prefill=())
    reply = await rig.request(method, path, headers={"t-to": worker.address})
    assert (reply.status, reply.body.decode()) == (200, worker.address)
    assert worker.requests[-1].line.startswith(f"{method} {path} ")


@pytest.mark.parametrize("path", DECODE_PATHS)
async def test_the_service_may_choose_a_prefill_worker(rig: Rig, path: str) -> None:
    prefill, decode = await rig.worker(), await rig.worker()
    await rig.know(decode.endpoint, prefill=(prefill.endpoint,))
    reply = await rig.post(prefill.address, b'{"a":1}', path, {"t-cluster": "prefill"})
    assert (reply.status, reply.body.decode()) == (200, prefill.address)
    assert prefill.requests[-1].body == b'{"a":1}'
    assert "x-pd-cluster" not in prefill.requests[-1].names
    assert rig.extproc.responses[-1]["x-pd-upstream"] == prefill.address


async def test_a_client_may_not_choose_a_prefill_worker(rig: Rig) -> None:
    prefill, decode = await rig.worker(), await rig.worker()
    await rig.know(decode.endpoint, prefill=(prefill.endpoint,))
    theirs = {"x-pd-cluster": "prefill"}
    assert (await rig.post(decode.address, headers=theirs)).body.decode() == decode.address
    assert "x-pd-cluster" not in rig.extproc.requests[-1]
    assert (await rig.post(prefill.address, headers=theirs)).error[1] == "no_available_workers"
    assert prefill.requests == []


@pytest.mark.parametrize("path", INFERENCE_PATHS)
async def test_other_methods_are_told_which_one_is_right(rig: Rig, path: str) -> None:
    reply = await rig.request("GET", path)
    assert reply.error == (405, "method_not_allowed", "method_not_allowed")
    assert reply.headers["allow"] == "POST"
    assert reply.headers["content-type"] == "application/json"


@pytest.mark.parametrize("path", [*CONTROL_PATHS, "/workers/a-b?force=1", "/v1/models/org/model"])
async def test_control_paths_reach_the_control_api(rig: Rig, path: str) -> None:
    before = len(rig.extproc.requests)
    assert (await rig.request("GET", path)).json == {"control": f"GET {path}"}
    assert (await rig.request("DELETE", path)).json == {"control": f"DELETE {path}"}
    assert len(rig.extproc.requests) == before


@pytest.mark.parametrize("path", NOT_IMPLEMENTED_PATHS)
async def test_what_a_disaggregated_fleet_cannot_do(rig: Rig, path: str) -> None:
    assert (await rig.request("POST", path, b"{}")).error == (501, "not_implemented", "not_implemented")


@pytest.mark.parametrize("path", ["/", "/metrics", "/v1/chat/completions/", "//workers", "/V1/models", "/workersx"])
async def test_everything_else_is_not_there(rig: Rig, path: str) -> None:
    reply = await rig.request("POST", path, b"{}")
    assert reply.error == (404, "not_found", "not_found")
    assert reply.headers["content-type"] == "application/json"


async def test_ext_proc_may_change_the_path(rig: Rig, fleet: dict[str, Any]) -> None:
    reply = await rig.post(fleet["a"].address, path="/rerank?q=1", headers={"t-path": "/v1/rerank?q=1"})
    assert reply.status == 200
    assert fleet["a"].requests[-1].path == "/v1/rerank?q=1"


# Headers


async def test_what_a_worker_is_sent(rig: Rig, fleet: dict[str, Any]) -> None:
    sent = {
        "x-request-id": "mine",
        "x-forwarded-for": "203.0.113.9",
        "traceparent": "00-1-2-01",
        "x-gateway-destination-endpoint": fleet["b"].address,
        "x-pd-cluster": "prefill",
        "x-pd-anything": "1",
        "x-envoy-retry-on": "5xx",
        "x-envoy-upstream-rq-timeout-ms": "1",
        "x-envoy-max-retries": "9",
    }
    reply = await rig.post(fleet["a"].address, headers=sent)
    assert reply.body.decode() == fleet["a"].address
    assert fleet["a"].requests[-1].names - {"accept", "accept-encoding", "user-agent", "content-type"} == {
        "host",
        "content-length",
        "x-request-id",
        "traceparent",
        "x-forwarded-for",
        "x-forwarded-proto",
    }
    assert fleet["a"].requests[-1].header("x-request-id") == "mine"
    assert fleet["a"].requests[-1].header("host") == fleet["a"].address
    seen = rig.extproc.requests[-1]
    assert not [name for name in seen if name.startswith("x-pd-") or name == "x-gateway-destination-endpoint"]
    assert [name for name in seen if name.startswith("x-envoy-")] == ["x-envoy-external-address"]


async def test_envoy_makes_no_request_id(rig: Rig, fleet: dict[str, Any]) -> None:
    await rig.post(fleet["a"].address)
    assert "x-request-id" not in rig.extproc.requests[-1]
    assert "x-request-id" not in fleet["a"].requests[-1].names


async def test_a_workers_answer_passes_unchanged(rig: Rig) -> None:
    headers = "server: uvicorn\r\nretry-after: 7\r\nx-mine: 1\r\ndate: Thu, 01 Jan 1970 00:00:00 GMT\r\n"
    worker = await rig.worker(answer(b'{"error":"too long"}', "422 Unprocessable Entity", headers))
    await rig.know(worker.endpoint)
    reply = await rig.post(worker.address)
    assert (reply.status, reply.body) == (422, b'{"error":"too long"}')
    assert reply.headers == {
        "server": "uvicorn",
        "retry-after": "7",
        "x-mine": "1",
        "date": "Thu, 01 Jan 1970 00:00:00 GMT",
        "content-length": "20",
        "x-pd-upstream": worker.address,
    }


async def test_a_worker_cannot_pose_as_the_gateway(rig: Rig) -> None:
    headers = "x-pd-upstream: 9.9.9.9:9\r\nx-pd-error-code: fake\r\nx-pd-local-reply: UF\r\nx-pd-late: 1\r\n"
    headers += "".join(f"{name}: 9\r\n" for name in NAMING)
    worker = await rig.worker(answer(b"", headers=headers))
    await rig.know(worker.endpoint)
    reply = await rig.post(worker.address)
    assert {name: value for name, value in reply.headers.items() if name.startswith("x-pd-")} == {
        "x-pd-upstream": worker.address
    }


async def test_ext_proc_learns_who_answered(rig: Rig, fleet: dict[str, Any]) -> None:
    await rig.post(f"{fleet['dead'].address},{fleet['b'].address}")
    assert rig.extproc.responses[-1]["x-pd-upstream"] == fleet["b"].address


# Fail-over


async def test_the_first_destination_is_taken(rig: Rig, fleet: dict[str, Any]) -> None:
    for first, second in (("a", "b"), ("b", "a")):
        reply = await rig.post(f"{fleet[first].address},{fleet[second].address}")
        assert reply.body.decode() == fleet[first].address


@pytest.mark.parametrize("bad", ["dead", "full"])
async def test_a_worker_that_cannot_be_connected_to_is_passed_over(rig: Rig, fleet: dict[str, Any], bad: str) -> None:
    reply = await rig.post(f"{fleet[bad].address},{fleet['b'].address}")
    assert (reply.status, reply.body.decode()) == (200, fleet["b"].address)


async def test_an_unknown_destination_is_passed_over(rig: Rig, fleet: dict[str, Any]) -> None:
    assert (await rig.post(f"127.0.0.1:1,{fleet['b'].address}")).body.decode() == fleet["b"].address


async def test_a_body_of_20_mb_is_sent_again_whole(rig: Rig, fleet: dict[str, Any]) -> None:
    body = bytes(range(256)) * 78_125
    reply = await rig.post(f"{fleet['dead'].address},{fleet['b'].address}", body)
    assert reply.status == 200
    assert fleet["b"].requests[-1].body == body


async def test_a_request_that_was_sent_is_never_sent_again(rig: Rig, fleet: dict[str, Any]) -> None:
    before = len(fleet["a"].requests)
    reply = await rig.post(f"{fleet['hangs_up'].address},{fleet['a'].address}")
    assert reply.status == 502
    assert len(fleet["a"].requests) == before


async def test_a_stale_connection_is_not_retried_either(rig: Rig) -> None:
    """Envoy cannot tell whether a worker that closes an idle connection has seen the request; hence the idle limit."""
    first = [answer(b"one"), hang_up]

    async def behave(request, writer):  # type: ignore[no-untyped-def]
        return await first.pop(0)(request, writer)

    worker, other = await rig.worker(behave), await rig.worker()
    await rig.know(worker.endpoint, other.endpoint)
    assert (await rig.post(worker.address)).body == b"one"
    assert (await rig.post(f"{worker.address},{other.address}")).status == 502
    assert other.requests == []


# Envoy's own answers


@pytest.mark.parametrize(
    ("to", "code"),
    [
        (["dead"], "unreachable"),
        (["dead", "dead"], "unreachable"),
        (["full"], "unreachable"),
        (["dead", None], "unreachable"),
        ([None], "no_available_workers"),
        ([], "no_available_workers"),
        (["hangs_up"], "connection_lost"),
        (["garbage"], "connection_lost"),
        (["dead", "hangs_up"], "connection_lost"),
    ],
)
@pytest.mark.parametrize(("path", "role"), [("/v1/chat/completions", "decode"), ("/v1/rerank", "prefill")])
async def test_what_a_client_is_told(
    rig: Rig, fleet: dict[str, Any], to: list[str | None], code: str, path: str, role: str
) -> None:
    reply = await rig.post(",".join(fleet[name].address if name else "127.0.0.1:1" for name in to), path=path)
    if code != "no_available_workers":
        code = f"{role}_{code}"
    assert reply.error == (CATALOGUE[code].status, code, code)
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers.get("retry-after") == ("1" if reply.status == 503 else None)
    assert rig.extproc.responses[-1]["x-pd-error-code"] == code


async def test_a_worker_that_never_accepts_a_leg(rig: Rig, fleet: dict[str, Any]) -> None:
    assert (await rig.leg(fleet["full"].address)).headers["x-pd-local-reply"] == "UF"


async def test_silence_of_a_worker_ends_behind_our_own_deadline(hasty: Rig) -> None:
    silent = await hasty.worker(never)
    await hasty.know(silent.endpoint)
    begin = asyncio.get_running_loop().time()
    reply = await hasty.post(silent.address)
    assert reply.error == (504, "request_timeout", "request_timeout")
    assert asyncio.get_running_loop().time() - begin >= 1.4
    async with asyncio.timeout(60):
        await silent.closed_early.wait()


async def test_silence_of_the_ext_proc_service_ends_too(hasty: Rig) -> None:
    """First the idle timer fires, then nobody replies about the headers of Envoy's own answer."""
    worker = await hasty.worker()
    await hasty.know(worker.endpoint)
    reply = await hasty.post(worker.address, headers={"t-hold": "1"})
    assert reply.error == (503, "extproc_unavailable", "extproc_unavailable")


@pytest.mark.parametrize("status", ["400", "429", "500", "502", "503", "504"])
async def test_answers_of_the_ext_proc_service_pass_untouched(rig: Rig, status: str) -> None:
    reply = await rig.post(headers={"t-immediate": status})
    assert (reply.status, reply.json) == (int(status), {"from": "ext_proc"})
    assert reply.headers["x-pd-error-code"] == "from_ext_proc"
    assert "retry-after" not in reply.headers


async def test_the_ext_proc_service_goes_and_returns(rig: Rig, fleet: dict[str, Any]) -> None:
    await rig.extproc.stop()
    reply = await rig.post(fleet["a"].address)
    assert reply.error == (503, "extproc_unavailable", "extproc_unavailable")
    assert reply.headers["retry-after"] == "1"
    await rig.extproc.start()
    assert (await rig.post(fleet["a"].address)).status == 200


async def test_the_ext_proc_service_ends_a_stream(rig: Rig) -> None:
    reply = await rig.post(headers={"t-abort": "1"})
    assert reply.error == (503, "extproc_unavailable", "extproc_unavailable")


async def test_the_control_api_goes_and_returns(rig: Rig) -> None:
    await rig.stop_control()
    reply = await rig.request("GET", "/workers")
    assert reply.error == (503, "extproc_unavailable", "extproc_unavailable")
    await rig.start_control()
    assert (await rig.request("GET", "/workers")).status == 200


# Clients of all kinds


async def test_malformed_requests_never_reach_ext_proc(rig: Rig) -> None:
    before = len(rig.extproc.requests)
    await rig.extproc.has_ended(before)  # those of the tests before
    requests = {
        b"NONSENSE\r\n\r\n": b"400",
        b"POST /generate HTTP/1.1\r\nhost: x\r\nx-long: " + b"a" * 70_000 + b"\r\n\r\n": b"431",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n": b"400",
        b"CONNECT other:80 HTTP/1.1\r\nhost: x\r\n\r\n": b"404",
    }
    replies = await asyncio.gather(*(raw(rig, request) for request in requests))
    assert [reply[9:12] for reply in replies] == list(requests.values())
    assert len(rig.extproc.requests) == rig.extproc.ended == before


async def test_http_1_0(rig: Rig) -> None:
    received = await raw(rig, b"GET /readiness HTTP/1.0\r\n\r\n")
    assert received.startswith(b"HTTP/1.0 200 ")
    assert received.endswith(b'{"control": "GET /readiness"}')


async def test_an_offer_to_upgrade_is_declined(rig: Rig, fleet: dict[str, Any]) -> None:
    headers = {"connection": "upgrade", "upgrade": "h2c", "http2-settings": "AAMAAABkAAQAAP__"}
    assert (await rig.post(fleet["a"].address, headers=headers)).status == 200
    headers = {"connection": "upgrade", "upgrade": "websocket"}
    assert (await rig.post(fleet["a"].address, headers=headers)).status == 200
    assert "upgrade" not in fleet["a"].requests[-1].names


async def test_expect_100_continue(rig: Rig, fleet: dict[str, Any]) -> None:
    body = b"x" * 3_000_000
    url, headers = f"{rig.url}/generate", {"t-to": fleet["a"].address}
    async with rig.session.post(url, data=io.BytesIO(body), headers=headers, expect100=True) as response:
        assert response.status == 200
    assert fleet["a"].requests[-1].body == body
    assert "expect" not in fleet["a"].requests[-1].names


async def test_a_chunked_upload(rig: Rig, fleet: dict[str, Any]) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for piece in (b"one ", b"two ", b"three"):
            yield piece
            await asyncio.sleep(0)

    url, headers = f"{rig.url}/generate", {"t-to": fleet["a"].address}
    async with rig.session.post(url, data=pieces(), headers=headers) as response:
        assert response.status == 200
    assert fleet["a"].requests[-1].body == b"one two three"
    assert fleet["a"].requests[-1].header("content-length") == "13"


async def test_an_empty_body(rig: Rig, fleet: dict[str, Any]) -> None:
    assert (await rig.post(fleet["a"].address, b"")).status == 200
    assert fleet["a"].requests[-1].body == b""


async def test_pipelined_requests_are_answered_in_order(rig: Rig, fleet: dict[str, Any]) -> None:
    one = "POST /generate HTTP/1.1\r\nhost: x\r\nt-to: {}\r\ncontent-length: 2\r\n{}\r\n{{}}"
    a, b = fleet["a"].address, fleet["b"].address
    received = await raw(rig, (one.format(a, "") + one.format(b, "connection: close\r\n")).encode())
    assert received.count(b"HTTP/1.1 200 OK") == 2
    assert received.index(a.encode()) < received.index(b.encode())


async def test_http_2(rig: Rig, fleet: dict[str, Any]) -> None:
    connection = await rig.http2()
    replies = []
    for name in ("a", "b"):
        headers = {
            ":method": "POST",
            ":path": "/generate",
            ":scheme": "http",
            ":authority": "x",
            "t-to": fleet[name].address,
        }
        replies.append(connection.streams[connection.send(headers, b"{}")].done)
    assert [(await reply).body.decode() for reply in replies] == [fleet["a"].address, fleet["b"].address]
    connection.transport.close()


async def test_a_client_that_leaves_ends_the_leg_and_the_stream(rig: Rig) -> None:
    silent = await rig.worker(never)
    await rig.know(silent.endpoint)
    asking = asyncio.create_task(rig.post(silent.address))
    async with asyncio.timeout(60):
        await silent.arrived.wait()
    asking.cancel()
    async with asyncio.timeout(60):
        await silent.closed_early.wait()
    await rig.extproc.has_ended(len(rig.extproc.requests))


async def test_a_worker_that_breaks_off_cuts_the_answer(rig: Rig) -> None:
    first_piece_is_out = asyncio.Event()

    async def behave(_: object, writer: asyncio.StreamWriter) -> bool:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n")
        await first_piece_is_out.wait()
        writer.transport.abort()
        return False

    worker = await rig.worker(behave)
    await rig.know(worker.endpoint)
    headers = {"t-to": worker.address}
    async with rig.session.post(f"{rig.url}/generate", data=b"{}", headers=headers) as response:
        assert await response.content.readexactly(5) == b"hello"
        first_piece_is_out.set()
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()


async def test_statistics_for_operators(rig: Rig) -> None:
    clusters = (await rig.envoy.admin.clusters())["cluster_statuses"]
    assert {each["name"] for each in clusters} == {*ROLES, "extproc", "ads", "answers", "control"}
    assert await rig.envoy.admin.gauge("cluster.decode.upstream_rq_total") > 0
    assert await rig.envoy.admin.gauge("no.such.thing") == 0
    await rig.know((await rig.worker()).endpoint)
    clusters = (await rig.envoy.admin.clusters())["cluster_statuses"]
    decode = next(each for each in clusters if each["name"] == "decode")
    assert "rq_active" in {stat["name"] for host in decode["host_statuses"] for stat in host["stats"]}
