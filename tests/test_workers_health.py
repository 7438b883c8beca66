"""The monitor against small engines on real sockets: joining, leaving, coming back, moving, being somebody else."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest
from fakes import Asked
from fleet import FAST, PACE, SLOW, Engine, Fleet, engine, eventually, fleet, spec, until

from extproc.errors import GatewayError
from extproc.policies.placement import Placer
from extproc.policies.round_robin import RoundRobinPolicy
from extproc.workers.health_state import HealthSettings, Pace
from extproc.workers.kv_config import KvConfig
from extproc.workers.registry import Change
from extproc.workers.spec import HealthOverrides
from extproc.workers.worker import NIXL, Role, Status

P, D = Role.PREFILL, Role.DECODE


class TestJoining:
    async def test_the_first_good_probe_makes_a_worker_usable(self) -> None:
        async with engine() as server, fleet() as f:
            worker = f.registry.add(spec(P, server.url, api_key="s3cret"))
            await until(f.registry, lambda: worker.usable)
            assert [path for path, _ in server.requests] == ["/health", "/v1/models", "/server_info", "/model_info"]
            assert all(headers["authorization"] == "Bearer s3cret" for _, headers in server.requests)
            assert all(headers["host"] == f"127.0.0.1:{server.port}" for _, headers in server.requests)
            assert (worker.model_ids, worker.bootstrap_port) == (("tiny",), server.bootstrap_port)
            assert f.registry.trouble(worker) == ""

    async def test_workers_registered_before_the_start_are_watched(self) -> None:
        async with engine() as server:
            f = Fleet(SLOW)
            worker = f.registry.add(spec(P, server.url))
            f.monitor.start()
            await until(f.registry, lambda: worker.usable)
            await f.monitor.stop()
            await f.registry.close()
            await f.client.close()

    async def test_one_that_is_down_at_start_joins_when_it_comes(self) -> None:
        server = Engine()
        await server.start()
        await server.stop()
        async with fleet() as f:
            worker = f.registry.add(spec(P, server.url))
            await f.is_said(worker, "Connection refused")
            assert worker.status is Status.PENDING
            assert f.registry.usable(P, None) == ()
            await server.start()
            await until(f.registry, lambda: worker.usable)
        await server.stop()

    async def test_one_that_failed_for_long_still_joins(self) -> None:
        async with engine(health=503) as server, fleet(HealthSettings(failure_threshold=1, interval=0.01)) as f:
            worker = f.registry.add(spec(P, server.url))
            await f.becomes(worker, Status.FAILED)
            assert f.registry.trouble(worker) == "GET /health: HTTP 503"
            server.health = 204
            await f.becomes(worker, Status.READY)

    async def test_the_endpoint_is_the_operators(self) -> None:
        async with engine(server_info_path="/ping") as server, fleet(HealthSettings(endpoint="/ping")) as f:
            worker = f.registry.add(spec(P, server.url))
            await f.becomes(worker, Status.READY)
            assert server.count("/health") == 0

    async def test_a_redirect_is_not_health(self) -> None:
        async with engine(health=302) as server, fleet() as f:
            worker = f.registry.add(spec(P, server.url))
            await f.is_said(worker, "GET /health: HTTP 302")

    async def test_silence_is_a_failure(self) -> None:
        async with engine(hang=True) as server, fleet(HealthSettings(timeout=0.02)) as f:
            worker = f.registry.add(spec(P, server.url))
            await f.is_said(worker, "GET /health: no answer within 0.02 s")

    async def test_without_health_checks_a_worker_counts_as_healthy(self) -> None:
        async with engine() as server, fleet(HealthSettings(enabled=False)) as f:
            worker = f.registry.add(spec(P, server.url))
            await until(f.registry, lambda: worker.usable)
            assert server.count("/health") == 0
            assert worker.model_ids == ("tiny",)

    async def test_without_health_checks_one_that_is_down_joins_when_it_says_what_it_is(self) -> None:
        server = Engine()
        await server.start()
        await server.stop()
        async with fleet(HealthSettings(enabled=False)) as f:
            worker = f.registry.add(spec(P, server.url))
            await f.is_said(worker, "cannot learn what it serves: GET /v1/models: Connection refused")
            assert worker.status is Status.PENDING
            await server.start()
            await until(f.registry, lambda: worker.usable)
            assert worker.model_ids == ("tiny",)
        await server.stop()

    async def test_without_health_checks_one_that_is_registered_as_what_it_is_needs_not_be_there(self) -> None:
        async with fleet(HealthSettings(enabled=False)) as f:
            worker = f.registry.add(spec(P, "http://127.0.0.1:1", cards=({"id": "tiny"},), runtime="sglang"))
            await until(f.registry, lambda: worker.usable)
            said = "does not tell everything of itself: GET /v1/models: Connection refused"
            assert f.registry.trouble(worker) == said

    async def test_without_health_checks_what_it_has_said_holds(self) -> None:
        async with engine() as server, fleet(HealthSettings(enabled=False), Pace(seek=0.01, report=0, doubt=0)) as f:
            worker = f.registry.add(spec(P, server.url))
            await until(f.registry, lambda: worker.usable)
            await server.stop()
            f.monitor.report_failure(worker)
            await f.is_said(worker, "does not say again what it is: GET /v1/models: Connection refused")
            assert (worker.usable, worker.model_ids) == (True, ("tiny",))

    async def test_a_workers_own_settings_count(self) -> None:
        async with engine(health=503) as server, fleet() as f:
            own = HealthOverrides(disable_health_check=True)
            worker = f.registry.add(spec(P, server.url, health=own))
            await until(f.registry, lambda: worker.usable)


class TestLeaving:
    async def test_failures_in_a_row_take_it_out_and_successes_bring_it_back(self) -> None:
        async with engine() as server, fleet(FAST) as f:
            worker = f.registry.add(spec(P, server.url))
            await until(f.registry, lambda: worker.usable)
            server.health = 500
            await f.becomes(worker, Status.NOT_READY)
            assert f.registry.usable(P, None) == ()
            server.health = 200
            seen = server.count("/health")
            await f.becomes(worker, Status.READY)
            assert server.count("/health") >= seen + 2

    async def test_a_reported_worker_is_out_at_once_not_at_the_interval(self) -> None:
        async with engine() as server, fleet(SLOW) as f:
            worker = f.registry.add(spec(P, server.url))
            await until(f.registry, lambda: worker.usable)
            await server.stop()
            f.monitor.report_unreachable(worker)
            await f.becomes(worker, Status.NOT_READY)
            await server.start()
            await f.becomes(worker, Status.READY)

    async def test_reports_of_a_healthy_worker_cost_few_probes(self) -> None:
        patient = replace(SLOW, transport_threshold=0)
        async with engine() as server, fleet(patient, Pace(report=0.1)) as f:
            worker = f.registry.add(spec(P, server.url))
            await until(f.registry, lambda: worker.usable)
            until_then = time.monotonic() + 0.25
            while time.monotonic() < until_then:
                f.monitor.report_unreachable(worker)
                await asyncio.sleep(0.001)
            assert server.count("/health") - 1 <= 3
            await eventually(lambda: server.count("/health") > 1)
            assert worker.usable

    async def test_a_report_during_a_probe_is_not_lost(self) -> None:
        async with engine() as server, fleet(SLOW) as f:
            worker = f.registry.add(spec(P, server.url))
            await until(f.registry, lambda: worker.usable)
            server.asked.clear()
            f.monitor.report_unreachable(worker)
            await server.asked.wait()  # the probe is under way
            f.monitor.report_unreachable(worker)
            await eventually(lambda: server.count("/health") >= 3)

    async def test_connections_refused_or_lost_in_a_row_take_it_out_before_any_probe(self) -> None:
        async with engine() as server, engine() as second, fleet(SLOW, Pace(report=60)) as f:
            worker, other = f.registry.add(spec(P, server.url)), f.registry.add(spec(P, second.url))
            await until(f.registry, lambda: worker.usable and other.usable)
            f.monitor.report_unreachable(worker)
            f.monitor.report_failure(worker)
            worker.answers += 1  # a request was answered between
            f.monitor.report_unreachable(worker)
            f.monitor.report_failure(worker)
            assert worker.usable
            f.monitor.report_unreachable(worker)
            assert worker.status is Status.NOT_READY
            assert f.registry.trouble(worker) == "3 requests in a row found no connection, or lost it"
            assert f.registry.usable(P, None) == (other,)
            for _ in range(3):
                f.monitor.report_failure(other)
            assert other.usable, "requests have nowhere else to go; a probe will tell"

    @pytest.mark.parametrize("gone", ["removed", "down"])
    async def test_when_no_other_is_left_it_is_used_again_until_a_probe_fails(self, gone: str) -> None:
        async with engine() as server, engine() as second, fleet(SLOW, Pace(seek=0.01, confirm=0.01, report=60)) as f:
            worker, other = f.registry.add(spec(P, server.url)), f.registry.add(spec(P, second.url))
            await until(f.registry, lambda: worker.usable and other.usable)
            for _ in range(3):
                f.monitor.report_failure(worker)
            assert f.registry.usable(P, None) == (other,)
            if gone == "removed":
                f.registry.remove(other)
            else:
                f.registry.set_status(other, Status.NOT_READY, "it is")
            assert f.registry.usable(P, None) == (worker,), "at once: whoever comes now is not turned away"
            assert f.registry.trouble(worker) == "requests lost connections, but no other is left"
            await eventually(lambda: not f.registry.trouble(worker))  # a probe has found it well
            await server.stop()
            f.monitor._watches[worker.id]._probed_at -= 60
            f.monitor.report_unreachable(worker)
            await f.becomes(worker, Status.NOT_READY)

    async def test_one_that_a_probe_has_found_down_is_not_used_again_for_lack_of_others(self) -> None:
        async with engine() as server, engine() as second, fleet(SLOW) as f:
            worker, other = f.registry.add(spec(P, server.url)), f.registry.add(spec(P, second.url))
            await until(f.registry, lambda: worker.usable and other.usable)
            await server.stop()
            for _ in range(3):
                f.monitor.report_failure(worker)
            await eventually(lambda: "found no connection" not in f.registry.trouble(worker))
            f.registry.remove(other)
            assert f.registry.usable(P, None) == ()

    async def test_the_last_for_a_model_stays_though_others_serve_another(self) -> None:
        async with engine() as server, engine(models=["small"]) as second, fleet(SLOW, Pace(report=60)) as f:
            worker, other = f.registry.add(spec(P, server.url)), f.registry.add(spec(P, second.url))
            await until(f.registry, lambda: worker.usable and other.usable)
            for _ in range(3):
                f.monitor.report_failure(worker)
            assert worker.usable

    async def test_it_comes_back_as_any_other_and_says_what_it_is(self) -> None:
        async with engine() as server, engine() as second, fleet(SLOW) as f:
            worker, other = f.registry.add(spec(P, server.url)), f.registry.add(spec(P, second.url))
            await until(f.registry, lambda: worker.usable and other.usable)
            seen, known = server.count("/health"), server.count("/server_info")
            for _ in range(3):
                f.monitor.report_unreachable(worker)
            assert worker.status is Status.NOT_READY
            await f.becomes(worker, Status.READY)
            assert server.count("/health") == seen + 2
            assert server.count("/server_info") == known + 1

    async def test_a_good_probe_between_starts_the_count_anew(self) -> None:
        async with engine() as server, engine() as second, fleet(SLOW) as f:
            worker, other = f.registry.add(spec(P, server.url)), f.registry.add(spec(P, second.url))
            await until(f.registry, lambda: worker.usable and other.usable)
            for _ in range(3):
                f.monitor.report_unreachable(worker)
                f.monitor.report_unreachable(worker)
                await eventually(lambda: not f.monitor._watches[worker.id]._refusals)
            assert worker.usable

    @pytest.mark.parametrize(
        "settings", [replace(SLOW, transport_threshold=0), HealthSettings(enabled=False, transport_threshold=1)]
    )
    async def test_reports_alone_take_nobody_out_where_that_is_not_wanted(self, settings: HealthSettings) -> None:
        async with engine() as server, fleet(settings) as f:
            worker = f.registry.add(spec(P, server.url))
            await until(f.registry, lambda: worker.usable)
            for _ in range(10):
                f.monitor.report_unreachable(worker)
                f.monitor.report_failure(worker)
            assert worker.usable

    async def test_trouble_that_somebody_else_has_seen_brings_a_probe_and_nothing_else(self) -> None:
        async with engine() as server, fleet(SLOW) as f:
            worker = f.registry.add(spec(P, server.url))
            await until(f.registry, lambda: worker.usable)
            for _ in range(10):
                f.monitor.look_again(worker)
            assert worker.usable
            await eventually(lambda: server.count("/health") == 2)

    async def test_reports_of_strangers_are_ignored(self) -> None:
        async with fleet() as f:
            worker = f.registry.add(spec(P, "http://nowhere:1"))
            f.registry.remove(worker)
            await until(f.registry, lambda: not len(f.registry))
            f.monitor.report_unreachable(worker)

    async def test_removal_ends_the_probe_under_way(self) -> None:
        async with engine(hang=True) as server, fleet() as f:
            worker = f.registry.add(spec(P, server.url))
            await server.asked.wait()
            f.registry.remove(worker)
            await eventually(lambda: f"watch-{worker.id}" not in {task.get_name() for task in asyncio.all_tasks()})
            await until(f.registry, lambda: not len(f.registry))


class TestIdentity:
    async def test_the_wrong_role_is_kept_out_and_joins_when_corrected(self) -> None:
        async with engine(mode="decode") as server, fleet() as f:
            worker = f.registry.add(spec(P, server.url))
            await f.becomes(worker, Status.FAILED)
            assert f.registry.trouble(worker) == "registered as prefill, but the server's disaggregation_mode is decode"
            assert f.registry.usable(P, None) == ()
            server.mode = "prefill"
            await f.becomes(worker, Status.READY)

    async def test_a_server_that_is_not_disaggregated_is_kept_out(self) -> None:
        async with engine(mode="null") as server, fleet() as f:
            worker = f.registry.add(spec(D, server.url))
            await f.becomes(worker, Status.FAILED)
            assert "not disaggregated" in f.registry.trouble(worker)

    async def test_one_that_does_not_say_is_not_used_and_asked_again(self, caplog: pytest.LogCaptureFixture) -> None:
        async with engine(model_listing=503) as server, fleet() as f:
            worker = f.registry.add(spec(P, server.url))
            await eventually(lambda: server.count("/v1/models") >= 3)
            reason = "cannot learn what it serves: GET /v1/models: HTTP 503"
            assert (worker.status, f.registry.trouble(worker)) == (Status.PENDING, reason)
            assert f.registry.usable(P, None) == ()
            assert reason in f.registry.readiness().reason
            said = [vars(record).get("reason") for record in caplog.records if record.levelname == "WARNING"]
            assert said == [reason], "once, however often it is asked"
            server.model_listing = 200
            await until(f.registry, lambda: worker.usable)
            assert f.registry.usable(P, "tiny") == (worker,)
            assert f.registry.usable(P, "anything") == ()

    async def test_questions_get_fewer(self) -> None:
        async with engine(model_listing=503) as server, fleet(SLOW, Pace(seek=0.01, seek_growth=4, jitter=0)) as f:
            f.registry.add(spec(P, server.url))
            begun = time.monotonic()
            await eventually(lambda: server.count("/v1/models") >= 4)
            assert time.monotonic() - begun >= 0.04 + 0.16 + 0.64

    async def test_models_that_nobody_has_named_are_not_unknown_while_a_worker_is_not_identified(self) -> None:
        """The client hears that nobody is there now (503), not that there is no such model (404)."""
        async with engine(model_listing=503) as server, fleet() as f:
            worker = f.registry.add(spec(P, server.url))
            await f.is_said(worker, "cannot learn what it serves")
            assert f.registry.knows_model("tiny")
            with pytest.raises(GatewayError) as caught:
                Placer(f.registry, RoundRobinPolicy(), RoundRobinPolicy()).pair(Asked("tiny"))
            assert caught.value.fault.code == "no_available_workers"

    @pytest.mark.parametrize("owner", ["sglang", "vllm"])
    @pytest.mark.parametrize(
        ("own", "why"),
        [(None, "it wants an api_key, and is registered with none"), ("wrong", "its api_key is wrong")],
    )
    async def test_one_that_wants_another_key_is_not_used(self, owner: str, own: str | None, why: str) -> None:
        async with engine(key="s3cret", owner=owner) as server, fleet() as f:
            worker = f.registry.add(spec(P, server.url, api_key=own))
            await f.is_said(worker, f"cannot learn what it serves: {why}; GET /v1/models: HTTP 401")
            assert worker.status is Status.PENDING
            f.registry.change(worker, spec(P, server.url, api_key="s3cret"))
            await until(f.registry, lambda: worker.usable)

    async def test_one_whose_key_is_changed_is_out(self) -> None:
        async with engine(key="s3cret") as server, fleet(SLOW, replace(PACE, doubt=0)) as f:
            worker = f.registry.add(spec(P, server.url, api_key="s3cret"))
            await until(f.registry, lambda: worker.usable)
            server.key = "another"
            f.monitor.report_failure(worker)
            await f.becomes(worker, Status.NOT_READY)
            assert "its api_key is wrong" in f.registry.trouble(worker)

    async def test_clients_may_bring_the_key_for_one_that_is_registered_as_what_it_is(self) -> None:
        async with engine(key="s3cret") as server, fleet() as f:
            registered = {"cards": ({"id": "tiny"},), "runtime": "sglang"}
            worker = f.registry.add(spec(P, server.url, **registered))
            await until(f.registry, lambda: worker.usable)
            assert "does not tell everything of itself: GET /v1/models: HTTP 401" in f.registry.trouble(worker)
            wrong = f.registry.add(spec(D, server.url, **registered, api_key="wrong"))
            await f.is_said(wrong, "its api_key is wrong")
            assert not wrong.usable

    async def test_a_registration_that_says_it_all_is_enough(self, caplog: pytest.LogCaptureFixture) -> None:
        async with engine(owner="vllm", model_listing=503) as server, fleet() as f:
            worker = f.registry.add(spec(P, server.url, cards=({"id": "mine"},), runtime="vllm"))
            await until(f.registry, lambda: worker.usable)
            trouble = "does not tell everything of itself: GET /v1/models: HTTP 503"
            assert trouble in f.registry.trouble(worker)
            assert trouble in caplog.text
            assert (worker.model_ids, worker.labels["version"]) == (("mine",), "0.32.0")
            server.model_listing = 200
            await until(f.registry, lambda: worker.listed != ())
            await eventually(lambda: trouble not in f.registry.trouble(worker))
            assert worker.model_ids == ("mine",)

    async def test_a_registration_of_another_engine_is_not_believed(self, caplog: pytest.LogCaptureFixture) -> None:
        async with engine(owner="vllm") as server, fleet(FAST) as f:
            worker = f.registry.add(spec(P, server.url, cards=({"id": "tiny"},), runtime="sglang"))
            await f.is_said(worker, "registered as sglang, but the server is vLLM")
            reasons = [str(vars(record).get("reason")) for record in caplog.records if record.levelname == "WARNING"]
            assert any("registered as sglang, but the server is vLLM" in reason for reason in reasons)
            assert not worker.usable
            f.registry.change(worker, spec(P, server.url, cards=({"id": "tiny"},), runtime="vllm"))
            await until(f.registry, lambda: worker.usable)

    @pytest.mark.parametrize("half", [{"cards": ({"id": "mine"},)}, {"runtime": "vllm"}])
    async def test_half_of_it_is_not(self, half: dict[str, Any]) -> None:
        async with engine(owner="vllm", model_listing=503) as server, fleet() as f:
            worker = f.registry.add(spec(P, server.url, **half))
            await f.is_said(worker, "cannot learn what it serves: GET /v1/models: HTTP 503")
            assert not worker.usable

    async def test_one_that_does_not_answer_again_is_what_it_was(self) -> None:
        async with engine() as server, fleet(SLOW, replace(PACE, doubt=0)) as f:
            worker = f.registry.add(spec(P, server.url))
            await until(f.registry, lambda: worker.usable)
            server.pages["/server_info"] = 503
            server.models = ["other"]
            before = server.count("/v1/models")
            f.monitor.report_failure(worker)
            await f.is_said(worker, "does not say again what it is: GET /server_info: HTTP 503")
            await eventually(lambda: server.count("/v1/models") >= before + 3)  # by and by
            assert (worker.usable, worker.model_ids, worker.labels["version"]) == (True, ("tiny",), "0.5.23")
            server.pages.clear()
            await until(f.registry, lambda: worker.model_ids == ("other",))
            await eventually(lambda: not f.registry.trouble(worker))

    async def test_a_vllm_server_too_busy_to_say_again_keeps_what_it_has_said(self) -> None:
        layout = b'vllm:cache_config_info{block_size="32",cache_dtype="auto"} 1.0\n'
        async with engine(mode=None, owner="vllm") as server, fleet(SLOW, replace(PACE, doubt=0)) as f:
            server.pages["/metrics"] = layout
            worker = f.registry.add(spec(D, server.url, kv=KvConfig(NIXL)))
            await until(f.registry, lambda: worker.usable)
            for page, status in (("/metrics", 503), ("/v1/models", 503)):
                server.pages[page] = status
                f.monitor.report_failure(worker)
                await f.is_said(worker, f"does not say again what it is: GET {page}: HTTP 503")
                assert (worker.labels["block_size"], worker.takes_token_ids) == ("32", True)
                del server.pages[page]
                server.pages["/metrics"] = layout
                await eventually(lambda: not f.registry.trouble(worker))
            server.pages["/metrics"] = layout.replace(b"32", b"64")
            f.monitor.report_failure(worker)
            await eventually(lambda: worker.labels["block_size"] == "64")

    async def test_a_vllm_server_that_tells_its_layout_late_is_used_and_asked_again(self) -> None:
        async with engine(mode=None, owner="vllm") as server, fleet() as f:
            server.pages["/metrics"] = 503
            worker = f.registry.add(spec(D, server.url, kv=KvConfig(NIXL)))
            await until(f.registry, lambda: worker.usable)
            assert f.registry.trouble(worker) == "does not tell everything of itself: GET /metrics: HTTP 503"
            server.pages["/metrics"] = b'vllm:cache_config_info{block_size="32",cache_dtype="auto"} 1.0\n'
            await eventually(lambda: worker.labels.get("block_size") == "32")
            await eventually(lambda: not f.registry.trouble(worker))

    @pytest.mark.parametrize("out", ["probes", "requests"])
    async def test_after_an_outage_it_must_say_again_what_it_is(self, out: str) -> None:
        async with engine() as server, engine() as second, fleet(FAST) as f:
            worker, other = f.registry.add(spec(P, server.url)), f.registry.add(spec(P, second.url))
            await until(f.registry, lambda: worker.usable and other.usable)
            server.pages["/server_info"] = 503
            server.models = ["other"]
            if out == "probes":
                server.health = 500
                await f.becomes(worker, Status.NOT_READY)
                server.health = 200
            else:
                for _ in range(3):
                    f.monitor.report_failure(worker)
            await f.is_said(worker, "cannot learn what it serves: GET /server_info: HTTP 503")
            seen = server.count("/health")
            await eventually(lambda: server.count("/health") >= seen + 3)
            assert worker.status is Status.NOT_READY
            assert f.registry.knows_model("tiny")
            server.pages.clear()
            await f.becomes(worker, Status.READY)
            assert worker.model_ids == ("other",)

    async def test_at_another_address_it_must_say_again_what_it_is(self) -> None:
        async with engine() as server, fleet(SLOW) as f:
            f.names["engine"] = ["127.0.0.1"]
            worker = f.registry.add(spec(P, f"http://engine:{server.port}"))
            await until(f.registry, lambda: worker.usable)
            server.model_listing = 503
            f.names["engine"] = ["127.0.0.2"]
            await f.becomes(worker, Status.NOT_READY)
            server.model_listing = 200
            await f.becomes(worker, Status.READY)

    async def test_one_that_lists_no_model_serves_none(self) -> None:
        async with engine(models=[], owner="vllm") as server, fleet() as f:
            worker = f.registry.add(spec(P, server.url))
            await f.is_said(
                worker, "cannot learn what it serves: it names no model, and is registered without `models`"
            )
            server.models = ["tiny"]
            server.owner = "somebody"
            server.pages["/server_info"] = server.pages["/model_info"] = 404
            await f.is_said(worker, "it does not say which engine it is, and is registered without `runtime_type`")
            server.owner = "vllm"
            await until(f.registry, lambda: worker.usable)

    async def test_what_an_engine_cannot_answer_keeps_nobody_out(self) -> None:
        async with engine() as server, fleet() as f:
            server.pages["/server_info"] = 500
            worker = f.registry.add(spec(P, server.url))
            await until(f.registry, lambda: worker.usable)
            assert f.registry.trouble(worker) == "does not tell everything of itself: GET /server_info: HTTP 500"
            assert worker.runtime == "sglang"

    async def test_is_read_again_after_an_outage_before_requests_come(self) -> None:
        async with engine() as server, fleet(FAST) as f:
            worker = f.registry.add(spec(P, server.url))
            await until(f.registry, lambda: worker.usable)
            server.health = 500
            await f.becomes(worker, Status.NOT_READY)
            server.models = ["other"]
            order: list[tuple[Change, tuple[str, ...]]] = []
            f.registry.subscribe(lambda _worker, change: order.append((change, worker.model_ids)))
            server.health = 200
            await f.becomes(worker, Status.READY)
            assert order == [(Change.IDENTITY, ("other",)), (Change.STATUS, ("other",))]

    async def test_is_read_once_while_all_is_well(self) -> None:
        async with engine() as server, fleet(HealthSettings(interval=0.005)) as f:
            f.registry.add(spec(P, server.url))
            await eventually(lambda: server.count("/health") >= 5)
            assert server.count("/server_info") == 1

    async def test_what_is_of_no_effect_is_said(self, caplog: pytest.LogCaptureFixture) -> None:
        async with fleet() as f, engine(mode="decode") as server:
            worker = f.registry.add(spec(D, server.url, bootstrap_port=8998))
            await f.becomes(worker, Status.READY)
            said = "bootstrap_port is of no effect: only prefill workers have a bootstrap server"
            assert f.registry.trouble(worker) == said
        assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [said]

    async def test_a_contradicting_bootstrap_port_is_said_but_obeyed(self, caplog: pytest.LogCaptureFixture) -> None:
        async with engine() as server, engine() as other, fleet() as f:
            worker = f.registry.add(spec(P, server.url, bootstrap_port=other.bootstrap_port))
            await until(f.registry, lambda: worker.usable)
            trouble = (
                f"registered with bootstrap port {other.bootstrap_port}, but the server says {server.bootstrap_port}"
            )
            assert f.registry.trouble(worker) == trouble
            assert trouble in caplog.text
            assert worker.bootstrap_port == other.bootstrap_port


class TestAddresses:
    async def test_a_name_is_resolved_and_the_worker_asked_there(self) -> None:
        async with engine() as server, fleet() as f:
            f.names["engine"] = ["127.0.0.1"]
            worker = f.registry.add(spec(P, f"http://engine:{server.port}"))
            await until(f.registry, lambda: worker.usable)
            assert worker.endpoint == f"127.0.0.1:{server.port}"
            assert server.requests[0][1]["host"] == f"engine:{server.port}"
            assert f.envoy.published[-1].prefill[0].hostname == "engine"

    async def test_a_name_that_does_not_exist_yet(self) -> None:
        async with engine() as server, fleet() as f:
            worker = f.registry.add(spec(P, f"http://engine:{server.port}"))
            await f.is_said(worker, "cannot resolve engine: Name or service not known")
            assert worker.status is Status.PENDING
            f.names["engine"] = ["127.0.0.1"]
            await until(f.registry, lambda: worker.usable)

    async def test_a_changed_address_replaces_the_endpoint(self) -> None:
        async with engine() as server, fleet() as f:
            f.names["engine"] = ["127.0.0.1"]
            worker = f.registry.add(spec(P, f"http://engine:{server.port}"))
            await until(f.registry, lambda: worker.usable)
            f.names["engine"] = ["127.0.0.2"]
            await until(f.registry, lambda: worker.endpoint == f"127.0.0.2:{server.port}")
            await eventually(lambda: server.count("/server_info") == 2)  # it may be another server

    async def test_a_name_that_vanishes_keeps_its_address_and_says_so(self) -> None:
        async with engine() as server, fleet(FAST) as f:
            f.names["engine"] = ["127.0.0.1"]
            worker = f.registry.add(spec(P, f"http://engine:{server.port}"))
            await until(f.registry, lambda: worker.usable)
            del f.names["engine"]
            await f.is_said(worker, "cannot resolve engine: Name or service not known; keeping 127.0.0.1")
            assert worker.usable
            f.names["engine"] = ["127.0.0.1"]
            await eventually(lambda: not f.registry.trouble(worker))

    async def test_one_of_several_that_refuses_connections_is_passed_over(self) -> None:
        async with engine(host="127.0.0.2") as server, fleet() as f:
            f.names["engine"] = ["127.0.0.2", "127.0.0.1"]  # the lower one is tried first
            worker = f.registry.add(spec(P, f"http://engine:{server.port}"))
            await until(f.registry, lambda: worker.usable and worker.endpoint == f"127.0.0.2:{server.port}")

    async def test_a_literal_is_never_looked_up(self) -> None:
        async with engine() as server, fleet(FAST) as f:
            worker = f.registry.add(spec(P, server.url))
            await until(f.registry, lambda: worker.usable)
            assert f.looked_up == 0

    async def test_two_names_of_one_server_are_one_worker(self) -> None:
        async with engine() as server, fleet() as f:
            f.names |= {"a": ["127.0.0.1"], "b": ["127.0.0.1"]}
            first = f.registry.add(spec(P, f"http://a:{server.port}"))
            await until(f.registry, lambda: first.usable)
            second = f.registry.add(spec(P, f"http://b:{server.port}"))
            await f.becomes(second, Status.FAILED)
            assert f"127.0.0.1:{server.port} is already the prefill worker http://a" in f.registry.trouble(second)
            assert f.registry.usable(P, None) == (first,)
            f.registry.remove(first)
            await until(f.registry, lambda: second.usable)

    async def test_ipv6(self) -> None:
        server = Engine(host="::1")
        try:
            await server.start()
        except OSError:
            pytest.skip("no IPv6 here")
        async with fleet() as f:
            worker = f.registry.add(spec(P, f"http://[::1]:{server.port}"))
            await until(f.registry, lambda: worker.usable)
            assert worker.endpoint == f"[::1]:{server.port}"
            assert server.requests[0][1]["host"] == f"[::1]:{server.port}"
        await server.stop()


async def test_probes_under_way_are_bounded() -> None:
    async with engine(hang=True) as server, fleet(SLOW, Pace(concurrency=3)) as f:
        f.names |= {f"w{number}": [f"127.0.0.{number + 1}"] for number in range(10)}
        server_everywhere = [f.registry.add(spec(P, f"http://w{number}:{server.port}")) for number in range(10)]
        await eventually(lambda: len(server.requests) >= 3)
        await asyncio.sleep(0.02)
        assert len(server.requests) == 3
        assert all(worker.status is Status.PENDING for worker in server_everywhere)


async def test_a_defect_does_not_end_the_watch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with engine() as server, fleet() as f:
        ask = f.client.get_often
        broken = [True]

        async def get(*arguments: object, **named: object) -> object:
            if broken[0]:
                raise RuntimeError("a defect")
            return await ask(*arguments, **named)  # type: ignore[arg-type]

        monkeypatch.setattr(f.client, "get_often", get)
        worker = f.registry.add(spec(P, server.url))
        await eventually(lambda: "a defect" in caplog.text)
        broken[0] = False
        await f.becomes(worker, Status.READY)
