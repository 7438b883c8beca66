"""``pd-extproc mock``: one mock worker as a program."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from typing import Any

import uvloop

from extproc.mock.rpc.worker import RpcMock
from extproc.mock.sglang.engine import Layout, Patience
from extproc.mock.sglang.rendezvous import DEFAULT_PORT
from extproc.mock.sglang.worker import SglangMock
from extproc.mock.vllm.worker import MOONCAKE, NIXL, VllmMock


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--engine", choices=["sglang", "vllm", "tokenspeed"], default="sglang", help="whose rules to follow"
    )
    parser.add_argument("--grpc", action="store_true", help="the engine's gRPC server; TokenSpeed has no other")
    parser.add_argument(
        "--role",
        choices=["prefill", "decode", "regular", "aggregated"],
        default="regular",
        help="what to be; regular and aggregated are the same",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=0, help="port to listen on; 0: a free one")
    parser.add_argument(
        "--bootstrap-port",
        type=int,
        default=DEFAULT_PORT,
        help="prefill of SGLang or Mooncake: port where decodes meet it; 0: a free one",
    )
    parser.add_argument("--model", default="tiny", help="served model name")
    parser.add_argument("--dp-size", type=int, default=1, help="how many data-parallel ranks")
    parser.add_argument("--tokens", type=int, default=16, help="length of an answer that nothing limits")
    parser.add_argument("--first-token-delay-ms", type=float, default=0.0, help="time that a prefill takes")
    parser.add_argument("--token-delay-ms", type=float, default=0.0, help="time between two tokens")
    parser.add_argument("--keep-alive", type=float, default=5.0, help="seconds until an idle connection is closed")
    parser.add_argument("--record", type=int, default=1000, help="how many requests to remember")
    parser.add_argument("--grace", type=float, default=5.0, help="seconds to finish requests after SIGTERM")
    _add_sglang(parser.add_argument_group("sglang"))
    _add_vllm(parser.add_argument_group("vllm"))


def _add_sglang(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--health-delay-ms", type=float, default=0.0, help="time that /health takes")
    group.add_argument("--disconnect-delay-ms", type=float, default=0.0, help="time to notice a client that left")
    group.add_argument("--death-delay-ms", type=float, default=2500.0, help="decode: time to notice a dead prefill")
    group.add_argument("--connect-timeout", type=float, default=15.0, help="decode: seconds to try a bootstrap port")
    group.add_argument("--wait-timeout", type=float, default=300.0, help="seconds that a leg waits for the other")
    group.add_argument("--kv-cache-dtype", default="auto", help="type of the cache; both of a pair must have the same")
    group.add_argument("--page-size", type=int, default=1, help="tokens of a page; both of a pair must have the same")
    group.add_argument("--attention-backend", default="torch_native", help="shown in /server_info")
    group.add_argument("--dtype", default="float32", help="type of the model, shown in /server_info")
    group.add_argument(
        "--disaggregation-transfer-backend", default="mooncake", metavar="NAME", help="shown in /server_info"
    )


def _add_vllm(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--kv-connector", choices=[NIXL, MOONCAKE], help="how KV is passed on; default: NIXL in a pair")
    group.add_argument("--engine-id", help="the engine's id; default: a random one")
    group.add_argument("--side-channel-host", help="address that decodes fetch caches at; default: --host")
    group.add_argument("--side-channel-port", type=int, default=0, help="where decodes fetch caches; 0: a free port")
    group.add_argument("--max-model-len", type=int, default=131_072, help="longest prompt and answer together")
    group.add_argument("--kv-blocks", type=int, default=16_384, help="how many blocks the cache has")
    group.add_argument("--lease", type=float, help="prefill: seconds that blocks wait for a decode")
    group.add_argument(
        "--kv-load-failure-policy", choices=["fail", "recompute"], default="fail", help="decode: what to do without KV"
    )
    group.add_argument("--load-failure-delay", type=float, default=5.0, help="decode: seconds until it gives up")
    group.add_argument("--old-engine", action="store_true", help="prefill: no parameters after a stop token")
    group.add_argument("--dev-mode", action="store_true", help="as VLLM_SERVER_DEV_MODE=1: /reset_prefix_cache")
    group.add_argument("--profiler", action="store_true", help="as --profiler-config: /start_profile, /stop_profile")
    group.add_argument("--kv-events", action="store_true", help="publish KV events; the ready line says where")
    group.add_argument("--no-token-ids", action="store_true", help="prompt_token_ids for a chat are ignored")
    group.add_argument("--no-prompt-tokens-details", action="store_true", help="usage does not tell cached tokens")


def run(options: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; returns 0, or 1 after a request that ends the engine, 2 when a port is taken."""
    if options.grpc or options.engine == "tokenspeed":
        mock: SglangMock | VllmMock | RpcMock = _rpc(options)
    else:
        mock = _vllm(options) if options.engine == "vllm" else _sglang(options)
    return uvloop.run(_serve(mock, options.engine, options.grace))


def _sglang(options: argparse.Namespace) -> SglangMock:
    return SglangMock(
        "regular" if options.role == "aggregated" else options.role,
        host=options.host,
        port=options.port,
        bootstrap_port=options.bootstrap_port,
        model=options.model,
        dp_size=options.dp_size,
        tokens=options.tokens,
        first_token_delay=options.first_token_delay_ms / 1000,
        token_delay=options.token_delay_ms / 1000,
        health_delay=options.health_delay_ms / 1000,
        disconnect_delay=options.disconnect_delay_ms / 1000,
        death_delay=options.death_delay_ms / 1000,
        connect_timeout=options.connect_timeout,
        wait_timeout=options.wait_timeout,
        layout=Layout(
            kv_cache_dtype=options.kv_cache_dtype,
            page_size=options.page_size,
            attention_backend=options.attention_backend,
            dtype=options.dtype,
            disaggregation_transfer_backend=options.disaggregation_transfer_backend,
        ),
        keep_alive=options.keep_alive,
        record_limit=options.record,
    )


def _vllm(options: argparse.Namespace) -> VllmMock:
    return VllmMock(
        "aggregated" if options.role == "regular" else options.role,
        connector=options.kv_connector,
        host=options.host,
        port=options.port,
        side_channel_host=options.side_channel_host,
        side_channel_port=options.side_channel_port,
        bootstrap_port=options.bootstrap_port,
        engine_id=options.engine_id,
        model=options.model,
        tokens=options.tokens,
        first_token_delay=options.first_token_delay_ms / 1000,
        token_delay=options.token_delay_ms / 1000,
        keep_alive=options.keep_alive,
        record_limit=options.record,
        dp_size=options.dp_size,
        max_model_len=options.max_model_len,
        blocks=options.kv_blocks,
        lease=options.lease,
        recompute=options.kv_load_failure_policy == "recompute",
        load_failure_delay=options.load_failure_delay,
        old_engine=options.old_engine,
        dev_mode=options.dev_mode,
        profiler=options.profiler,
        kv_events=options.kv_events,
        knows_token_ids=not options.no_token_ids,
        prompt_tokens_details=not options.no_prompt_tokens_details,
    )


def _rpc(options: argparse.Namespace) -> RpcMock:
    if options.engine != "vllm":
        return _rpc_mock(
            options,
            engine_options={
                "patience": Patience(options.death_delay_ms / 1000, options.connect_timeout, options.wait_timeout),
                "layout": Layout(kv_cache_dtype=options.kv_cache_dtype, page_size=options.page_size),
            },
        )
    in_a_pair = options.role in ("prefill", "decode")
    return _rpc_mock(
        options,
        connector=(options.kv_connector or NIXL) if in_a_pair else "",
        engine_id=options.engine_id,
        engine_options={
            "lease": options.lease,
            "recompute": options.kv_load_failure_policy == "recompute",
            "load_failure_delay": options.load_failure_delay,
            "old_engine": options.old_engine,
        },
    )


def _rpc_mock(options: argparse.Namespace, **others: Any) -> RpcMock:
    return RpcMock(
        options.engine,
        "regular" if options.role == "aggregated" else options.role,
        host=options.host,
        port=options.port,
        bootstrap_port=options.bootstrap_port,
        model=options.model,
        dp_size=options.dp_size,
        tokens=options.tokens,
        first_token_delay=options.first_token_delay_ms / 1000,
        token_delay=options.token_delay_ms / 1000,
        record_limit=options.record,
        **others,
    )


async def _serve(mock: SglangMock | VllmMock | RpcMock, engine: str, grace: float) -> int:
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked.set)
    try:
        await mock.start()
    except OSError as error:
        print(f"mock {mock.role}: {error}", file=sys.stderr)
        return 2
    where = f", bootstrap port {mock.bootstrap_port}" if mock.has_bootstrap else ""
    publisher = mock.publisher if isinstance(mock, VllmMock) else None
    if publisher is not None:
        where += f", KV events {publisher.endpoint}, replays {publisher.replay_endpoint}"
    print(f"mock {engine} {mock.role} ready on {mock.url}{where}", flush=True)
    waits = [loop.create_task(asked.wait()), loop.create_task(mock.crashed.wait())]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    if mock.crashed.is_set():
        print(f"mock {mock.role}: a request has ended the process, as it would have ended the engine", file=sys.stderr)
        return 1
    await mock.stop(grace)
    return 0
