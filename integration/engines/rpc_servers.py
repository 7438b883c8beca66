"""Real prefill/decode pairs of the engines' gRPC servers: vLLM with NIXL or Mooncake, SGLang.

As a program, ``rpc_servers.py nixl|mooncake|sglang``: starts a pair, prints its addresses and how to register it, and
keeps it until Ctrl-C.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import servers
import sglang_servers
import vllm_servers
from servers import MODEL, MODEL_DIRECTORY, Server, free_port
from vllm_servers import CONNECTORS

KINDS = (*CONNECTORS, "sglang")
SGLANG_BOOTSTRAP_PORT = 31548
_SERVING = b"\x08\x01"
_VLLM = (
    *("--served-model-name", MODEL, "--host", "127.0.0.1"),
    *("--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "16"),
    *("--block-size", "32", "--num-gpu-blocks-override", str(vllm_servers.BLOCKS)),
    *("--enforce-eager", "--distributed-executor-backend", "uni", "--grpc"),
)


@dataclass(slots=True)
class RpcServer(Server):
    """One engine behind gRPC. ``registration``: the body of ``POST /workers`` that fits."""

    registration: dict[str, Any] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """Its address."""
        return f"grpc://127.0.0.1:{self.port}"

    def answers(self) -> bool:
        """Whether it says that it is ready."""
        with grpc.insecure_channel(f"127.0.0.1:{self.port}") as channel:
            try:
                return channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=5)[:2] == _SERVING
            except grpc.RpcError:
                return False


def engine_of(kind: str) -> str:
    """The engine of a kind of pair, as setup.sh calls it."""
    return "sglang" if kind == "sglang" else "vllm"


def pair(kind: str) -> tuple[RpcServer, RpcServer]:
    """A prefill and a decode server, not started."""
    if kind == "sglang":
        bootstrap = ("--disaggregation-bootstrap-port", str(SGLANG_BOOTSTRAP_PORT))
        return (
            _sglang("prefill", 31361, {"bootstrap_port": SGLANG_BOOTSTRAP_PORT}, *bootstrap),
            _sglang("decode", 31371, {}),
        )
    ports = {"bootstrap_port": free_port()} if kind == "mooncake" else {}
    return _vllm(kind, "prefill", "kv_producer", ports), _vllm(kind, "decode", "kv_consumer", {})


def _sglang(role: str, port: int, registered: dict[str, Any], *arguments: str) -> RpcServer:
    """Ports must not be neighbours: it takes some beside its own."""
    command = (str(servers.python("sglang")), "-m", "sglang.launch_server", "--model-path", str(MODEL_DIRECTORY))
    mode = ("--smg-grpc-mode", "--disaggregation-mode", role, *sglang_servers.TRANSFER, *arguments)
    server = RpcServer(
        f"rpc-sglang-{role}",
        port,
        (*command, "--port", str(port), *sglang_servers.COMMON, *mode),
        {**sglang_servers.ENVIRONMENT, "SMG_SGLANG_SERVICER_WARMUP": "off"},  # 50 prompts: half a minute on a CPU
        "",
    )
    server.registration = {"url": server.url, "worker_type": role, **registered}
    return server


def _vllm(kind: str, role: str, kv_role: str, ports: dict[str, Any]) -> RpcServer:
    config: dict[str, Any] = {"kv_connector": CONNECTORS[kind], "kv_role": kv_role}
    environment = {**vllm_servers.ENVIRONMENT, "SMG_VLLM_SERVICER_WARMUP": "off"}
    if kind == "nixl":
        config |= {"kv_buffer_device": "cpu", "kv_load_failure_policy": "fail"}
        environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port())  # unique on a machine
    else:
        config["kv_connector_extra_config"] = {"mooncake_protocol": "tcp"}
        if ports:
            environment["VLLM_MOONCAKE_BOOTSTRAP_PORT"] = str(ports["bootstrap_port"])
    port = free_port()
    command = (str(servers.python("vllm")), "-m", "vllm.entrypoints.cli.main", "serve", str(MODEL_DIRECTORY))
    server = RpcServer(
        f"rpc-{kind}-{role}",
        port,
        (*command, "--port", str(port), *_VLLM, "--kv-transfer-config", json.dumps(config)),
        environment,
        "",
    )
    server.registration = {"url": server.url, "worker_type": role, **ports}
    return server


@contextmanager
def running(kind: str) -> Iterator[tuple[RpcServer, RpcServer]]:
    """A pair, ready."""
    started = pair(kind)
    with servers.running(*started):
        yield started


if __name__ == "__main__":
    chosen = pair(sys.argv[1])
    for worker in chosen:
        print("POST /workers", json.dumps(worker.registration), flush=True)
    servers.serve(*chosen)
