"""Who may use the control API: keys, this machine, and what is written down."""

from __future__ import annotations

import asyncio
import logging
import socket
import uuid
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import make_mocked_request
from control_rig import running
from fleet import FakeEnvoy

from extproc.control.api import ControlApi
from extproc.control.auth import Access
from extproc.control.client import client_of, foreign_origin
from extproc.control.keys import ControlKey, KeyRole, key_of, of_api_key
from extproc.workers.client import WorkerClient
from extproc.workers.registry import Registry

ADMIN = ControlKey.parse("ops:Operations:admin:k-admin:with:colons")
USER = ControlKey.parse("dash::user:k-user")
KEYS = Access(keys=(ADMIN, USER))
BODY = {"url": "http://10.0.0.1:1", "worker_type": "decode"}
ELSEWHERE = {"x-forwarded-for": "10.1.2.3"}
CHANGES = [
    ("POST", "/workers"),
    ("PUT", f"/workers/{uuid.uuid4()}"),
    ("PATCH", f"/workers/{uuid.uuid4()}"),
    ("DELETE", f"/workers/{uuid.uuid4()}"),
    ("POST", "/flush_cache"),
    ("POST", "/start_profile"),
    ("POST", "/stop_profile"),
]
READS = ["/workers", f"/workers/{uuid.uuid4()}", "/get_loads", "/server_info", "/openapi.json", "/health_generate"]


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


class TestKeys:
    def test_a_key_is_read_and_only_its_hash_kept(self) -> None:
        assert (ADMIN.id, ADMIN.name, ADMIN.role) == ("ops", "Operations", KeyRole.ADMIN)
        assert (USER.id, USER.name, USER.role) == ("dash", "", KeyRole.USER)
        assert "k-user" not in repr(USER)
        assert len(USER.digest) == 32

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "a",
            "a:b:c",
            "a:b:root:s3cret",
            ":b:user:s3cret",
            "a:b:user:",
            "a:b:user: s3cret",
            "a:b:user:s\u00e9cret",
        ],
    )
    def test_texts_that_are_none_are_not_repeated(self, text: str) -> None:
        with pytest.raises(ValueError, match=r"admin|ASCII") as refusal:
            ControlKey.parse(text)
        assert "s3cret" not in str(refusal.value)

    def test_whose_it_is(self) -> None:
        keys = (ADMIN, USER, of_api_key("k-api"))
        assert key_of("Bearer k-admin:with:colons", keys) is ADMIN
        assert key_of("bearer  k-user ", keys) is USER
        assert key_of("Bearer k-api", keys) is keys[2]
        for wrong in ("", "k-user", "Basic k-user", "Bearer k-use", "Bearer k-users", "Bearer "):
            assert key_of(wrong, keys) is None


class TestWithKeys:
    @pytest.mark.parametrize(("method", "path"), CHANGES)
    async def test_only_an_admin_changes_anything(self, method: str, path: str) -> None:
        async with running(access=KEYS) as api:
            nobody = await api.ask(method, path, json={})
            assert (nobody.status, nobody.json["error"]["code"]) == (401, "unauthorized")
            user = await api.ask(method, path, json={}, headers=bearer("k-user"))
            assert (user.status, user.json["error"]["code"]) == (403, "forbidden")
            assert "k-user" not in user.text
            admin = await api.ask(method, path, json={}, headers=bearer("k-admin:with:colons") | ELSEWHERE)
            assert admin.status not in (401, 403)

    @pytest.mark.parametrize("path", READS)
    async def test_a_user_reads(self, path: str) -> None:
        async with running(access=KEYS) as api:
            assert (await api.get(path)).status == 401
            assert (await api.get(path, headers=bearer("k-user"))).status not in (401, 403)

    async def test_clients_of_the_models_need_no_key_where_the_models_need_none(self) -> None:
        async with running(access=KEYS) as api:
            assert (await api.get("/v1/models")).status == 503
            assert (await api.get("/v1/models/x")).status == 404
        async with running(access=Access("k-api", KEYS.keys)) as api:
            assert (await api.get("/v1/models")).status == 401
            for key in ("k-api", "k-user"):
                assert (await api.get("/v1/models", headers=bearer(key))).status == 503

    async def test_the_api_key_is_an_admins(self) -> None:
        async with running(access=Access("k-api", (USER,))) as api:
            assert (await api.ask("POST", "/workers", json=BODY, headers=bearer("k-api"))).status == 202

    @pytest.mark.parametrize("path", ["/liveness", "/health", "/readiness"])
    async def test_probes_need_no_key(self, path: str) -> None:
        async with running(access=KEYS) as api:
            assert (await api.get(path)).status in (200, 503)


class TestWithoutKeys:
    @pytest.mark.parametrize(("method", "path"), CHANGES)
    @pytest.mark.parametrize(
        "forwarded", ["10.1.2.3", "127.0.0.1, 10.1.2.3", "10.1.2.3, 127.0.0.1", "::1, fd00::1", "x"]
    )
    async def test_other_machines_change_nothing_and_are_told_what_to_do(
        self, method: str, path: str, forwarded: str
    ) -> None:
        async with running() as api:
            answer = await api.ask(method, path, json=BODY, headers={"x-forwarded-for": forwarded})
            assert (answer.status, answer.json["error"]["code"]) == (403, "forbidden")
            for way in ("--api-key", "--control-plane-api-keys", "--control-plane-open"):
                assert way in answer.json["error"]["message"]
            assert len(api.registry) == 0

    @pytest.mark.parametrize(
        "forwarded", [None, "127.0.0.1", "127.8.9.10, ::1", "::ffff:127.0.0.1", "[::1]", " , 127.0.0.1"]
    )
    async def test_this_machine_may(self, forwarded: str | None) -> None:
        async with running() as api:
            headers = {} if forwarded is None else {"x-forwarded-for": forwarded}
            assert (await api.ask("POST", "/workers", json=BODY, headers=headers)).status == 202

    async def test_everybody_reads(self) -> None:
        async with running() as api:
            assert (await api.get("/workers", headers=ELSEWHERE)).status == 200

    async def test_everybody_may_if_the_operator_says_so(self) -> None:
        async with running(access=Access(open=True)) as api:
            assert (await api.ask("POST", "/workers", json=BODY, headers=ELSEWHERE)).status == 202

    @pytest.mark.parametrize(
        ("headers", "status"),
        [
            ({"origin": "http://evil.example"}, 403),
            ({"origin": "null"}, 403),
            ({"origin": "http://localhost:30000"}, 202),
            ({"origin": "http://[::1]:30000"}, 202),
            ({"forwarded": "for=127.0.0.1"}, 403),
        ],
    )
    async def test_a_web_page_of_elsewhere_is_not_on_this_machine(self, headers: dict[str, str], status: int) -> None:
        """A browser on it sends what any page tells it to."""
        async with running() as api:
            assert (await api.ask("POST", "/workers", json=BODY, headers=headers)).status == status

    async def test_a_process_at_the_unix_socket_is(self, tmp_path: Path) -> None:
        api = ControlApi(Registry(FakeEnvoy().publish), WorkerClient(), f"unix:{tmp_path}/c.sock")
        await api.start()
        async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(f"{tmp_path}/c.sock")) as session:
            async with session.post("http://control/workers", json=BODY) as response:
                assert response.status == 202
            async with session.post("http://control/workers", json=BODY, headers=ELSEWHERE) as response:
                assert response.status == 403
        await api.stop()


class _Socket:
    family = socket.AF_INET


@pytest.mark.parametrize(
    ("peer", "forwarded", "envoys", "address", "local"),
    [
        (("127.0.0.1", 1), None, None, "127.0.0.1", True),
        (("127.0.0.1", 1), "10.1.2.3", None, "127.0.0.1", False),
        # Through Envoy, which appends its own address for a client on its machine.
        (("127.0.0.1", 1), "10.7.7.7", "127.0.0.1", "127.0.0.1", True),
        (("127.0.0.1", 1), "127.0.0.1, 10.7.7.7", "::1", "::1", True),
        (("127.0.0.1", 1), "10.1.2.3, 10.7.7.7", "127.0.0.1", "127.0.0.1", False),
        (("127.0.0.1", 1), "10.1.2.3", "10.1.2.3", "10.1.2.3", False),
        (("127.0.0.1", 1), "127.0.0.1, 127.0.0.1", "10.1.2.3", "10.1.2.3", False),
        # Not through Envoy on this machine: whatever it says of others, it says itself.
        (("10.9.9.9", 1), "127.0.0.1", None, "10.9.9.9", False),
        (("10.9.9.9", 1), None, None, "10.9.9.9", False),
        (("10.9.9.9", 1), None, "127.0.0.1", "127.0.0.1 by way of 10.9.9.9", False),
        (("::ffff:127.0.0.1", 1, 0, 0), None, None, "::ffff:127.0.0.1", True),
    ],
)
def test_where_a_client_is(peer: Any, forwarded: str | None, envoys: str | None, address: str, local: bool) -> None:  # noqa: FBT001 - a parameter
    class Transport:
        def get_extra_info(self, name: str, default: object = None) -> object:
            return {"socket": _Socket, "peername": peer}.get(name, default)

    given = {"x-forwarded-for": forwarded, "x-pd-client-address": envoys}
    headers = {name: value for name, value in given.items() if value is not None}
    request = make_mocked_request("POST", "/workers", headers=headers, transport=Transport())
    assert client_of(request) == (address, local)
    assert foreign_origin(request) == ""


@pytest.mark.parametrize("name", [b"origin", b"x-pd-client-address", b"x-forwarded-for", b"authorization"])
async def test_headers_that_are_no_text_can_be_answered(name: bytes) -> None:
    async with running() as api:
        reader, writer = await asyncio.open_connection("127.0.0.1", api.api.port)
        head = b"POST /workers HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 2\r\n"
        writer.write(head + name + b": \xff\xfe\r\n\r\n{}")
        answer = await reader.read()
        writer.close()
    assert answer.startswith(b"HTTP/1.1 400 " if name == b"authorization" else b"HTTP/1.1 403 ")


async def test_a_defect_in_who_may_is_a_json_500(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr("extproc.control.auth.client_of", broken)
    async with running() as api:
        answer = await api.get("/workers")
    assert (answer.status, answer.json["error"]["code"]) == (500, "internal_error")


class TestAudit:
    @staticmethod
    def lines(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
        return [record for record in caplog.records if record.name == "extproc.control.audit"]

    async def test_every_change_is_written_down_with_the_keys_id(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "extproc.control.audit")
        headers = bearer("k-admin:with:colons") | {"x-request-id": "mine"}
        async with running(access=KEYS) as api:
            worker_id = (await api.ask("POST", "/workers", json=BODY, headers=headers)).json["worker_id"]
            patch = {"api_key": "s3cret", "labels": {"a": "b"}}
            await api.ask("PATCH", f"/workers/{worker_id}", json=patch, headers=headers)
            await api.get("/workers", headers=headers)
        added, changed = map(vars, self.lines(caplog))
        assert {
            name: added[name] for name in ("key", "key_name", "method", "path", "status", "request_id", "client")
        } == {
            "key": "ops",
            "key_name": "Operations",
            "method": "POST",
            "path": "/workers",
            "status": 202,
            "request_id": "mine",
            "client": "127.0.0.1",
        }
        assert (added["worker"], added["worker_id"], added["role"]) == ("http://10.0.0.1:1", worker_id, "decode")
        assert changed["fields"] == "api_key,labels"
        assert "s3cret" not in str(changed)
        assert "k-admin" not in str(changed)

    async def test_what_was_refused_too(self, caplog: pytest.LogCaptureFixture) -> None:
        async with running(access=KEYS) as api:
            await api.ask("POST", "/workers", json=BODY, headers=bearer("k-user"))
            await api.ask("POST", "/workers", json=BODY)
            await api.ask("POST", "/workers", json={}, headers=bearer("k-admin:with:colons"))
        found = [(record.levelname, vars(record)["key"], vars(record)["status"]) for record in self.lines(caplog)]
        assert found == [("WARNING", "dash", 403), ("WARNING", "none", 401), ("WARNING", "ops", 400)]
