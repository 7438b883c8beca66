"""A real SGLang prefill/decode pair, and an aggregated server to compare with.

As a program: starts all three, prints their addresses and keeps them until Ctrl-C.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass

import servers
from servers import MODEL, MODEL_DIRECTORY, Server, free_port

BOOTSTRAP_PORT = 31598
RANKED_BOOTSTRAP_PORT = 31498
RANKS = 2
PAGE = 4
COMMON = (
    *("--host", "127.0.0.1", "--served-model-name", MODEL),
    *("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native"),
    *("--sampling-backend", "pytorch", "--grammar-backend", "none"),
    *("--mem-fraction-static", "0.3", "--max-total-tokens", "8192"),
    *("--disable-overlap-schedule", "--disable-cuda-graph", "--skip-server-warmup", "--sleep-on-idle"),
)
TRANSFER = ("--disaggregation-transfer-backend", "mooncake")
ENVIRONMENT = {
    "SGLANG_ON_CPU": "on",
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_HOST_IP": "127.0.0.1",
    "SGLANG_LOCAL_IP_NIC": "lo",
    "HOST_IP": "127.0.0.1",
    "MOONCAKE_PROTOCOL": "tcp",
    "MC_TCP_BIND_ADDRESS": "127.0.0.1",
}


def _server(name: str, port: int, *arguments: str) -> Server:
    """One SGLang server. Ports must not be neighbours: it takes some beside its own."""
    command = (str(servers.python("sglang")), "-m", "sglang.launch_server", "--model-path", str(MODEL_DIRECTORY))
    return Server(
        f"sglang-{name}", port, (*command, "--port", str(port), *COMMON, *arguments), ENVIRONMENT, "/model_info"
    )


@dataclass(frozen=True, slots=True)
class Engines:
    """The three servers."""

    prefill: Server
    decode: Server
    aggregated: Server

    @property
    def servers(self) -> tuple[Server, ...]:
        """All of them."""
        return self.prefill, self.decode, self.aggregated


def engines() -> Engines:
    """The three, not started."""
    bootstrap = ("--disaggregation-bootstrap-port", str(BOOTSTRAP_PORT))
    return Engines(
        _server("prefill", 31301, "--disaggregation-mode", "prefill", *bootstrap, *TRANSFER),
        _server("decode", 31311, "--disaggregation-mode", "decode", *TRANSFER),
        _server("aggregated", 31321),
    )


def publishing() -> Server:
    """One that does all by itself, in pages of PAGE tokens, and publishes its KV events; not started."""
    ports = {"endpoint": free_port(), "replay_endpoint": free_port()}
    config = {"publisher": "zmq", **{name: f"tcp://*:{port}" for name, port in ports.items()}}
    return _server("publishing", 31341, "--page-size", str(PAGE), "--kv-events-config", json.dumps(config))


def ranked() -> tuple[Server, Server]:
    """A prefill and a decode server of RANKS data-parallel ranks, not started."""
    bootstrap = ("--disaggregation-bootstrap-port", str(RANKED_BOOTSTRAP_PORT))
    ranks = ("--dp-size", str(RANKS))
    pair = (
        _server("ranked-prefill", 31401, "--disaggregation-mode", "prefill", *bootstrap, *TRANSFER, *ranks),
        _server("ranked-decode", 31451, "--disaggregation-mode", "decode", *TRANSFER, *ranks),
    )
    cores = [str(rank % (os.cpu_count() or 1)) for rank in range(RANKS)]
    for server in pair:
        server.environment = {**server.environment, "SGLANG_CPU_OMP_THREADS_BIND": "|".join(cores)}
    return pair


if __name__ == "__main__":
    print(f"bootstrap port {BOOTSTRAP_PORT}", flush=True)
    servers.serve(*engines().servers)
