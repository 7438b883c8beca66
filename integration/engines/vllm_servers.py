"""Real vLLM servers on the CPU: prefill and decode with NIXL or Mooncake, and an aggregated one to compare with.

As a program, ``vllm_servers.py nixl|mooncake``: starts a pair and the aggregated server, prints their addresses and how
to register them, and keeps them until Ctrl-C.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from typing import Any

import servers
from servers import MODEL, MODEL_DIRECTORY, Server, free_port

CONNECTORS = {"nixl": "NixlConnector", "mooncake": "MooncakeConnector"}
BLOCKS = 1024
BLOCK_SIZE = 32  # tokens; the CPU wants a multiple of 32
PUBLISHED_BLOCKS = 100  # more than the longest prompt, 2048 tokens
PREFILL_CONTEXT = 1024  # tokens
COMMON = (
    *("--served-model-name", MODEL, "--host", "127.0.0.1"),
    *("--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "16"),
    *("--block-size", str(BLOCK_SIZE), "--num-gpu-blocks-override", str(BLOCKS)),
    *("--enforce-eager", "--distributed-executor-backend", "uni"),
    "--enable-scale-out",  # /inference/v1/generate
)
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # else "uni" is made "mp", which notices transfers seconds late
    "VLLM_ENABLE_RESPONSES_API_STORE": "1",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
    "UCX_TLS": "tcp,sm,self",
    "UCX_NET_DEVICES": "lo",
}


@dataclass(slots=True)
class VllmServer(Server):
    """One vLLM server. ``registration``: the body of ``POST /workers`` that fits."""

    registration: dict[str, Any] = field(default_factory=dict)


def aggregated() -> VllmServer:
    """A server that does all by itself."""
    return _server("aggregated")


def ranked() -> VllmServer:
    """The same, of two data-parallel ranks."""
    return _server("ranked", "--data-parallel-size", "2", VLLM_ENABLE_V1_MULTIPROCESSING="1")


def publishing() -> VllmServer:
    """One that does all by itself, with a small KV cache of which it publishes the events."""
    ports = {"endpoint": free_port(), "replay_endpoint": free_port()}
    config = {"enable_kv_cache_events": True, "publisher": "zmq"}
    config |= {name: f"tcp://*:{port}" for name, port in ports.items()}
    blocks = ("--num-gpu-blocks-override", str(PUBLISHED_BLOCKS))
    server = _server("publishing", "--kv-events-config", json.dumps(config), *blocks, VLLM_SERVER_DEV_MODE="1")
    here = {name: f"tcp://127.0.0.1:{port}" for name, port in ports.items()}
    labels = {"kv_events": here["endpoint"], "kv_events_replay": here["replay_endpoint"]}
    server.registration = {"url": server.url, "worker_type": "prefill", "labels": labels}
    return server


def prefill(connector: str, name: str = "prefill") -> VllmServer:
    """A prefill worker; ``connector`` is a key of CONNECTORS."""
    ports = {"bootstrap_port": free_port()} if connector == "mooncake" else {}
    # A smaller context than the decode's: there are prompts that only the prefill refuses.
    return _worker(
        connector, name, "kv_producer", {"worker_type": "prefill", **ports}, "--max-model-len", str(PREFILL_CONTEXT)
    )


def decode(connector: str, name: str = "decode") -> VllmServer:
    """A decode worker."""
    return _worker(connector, name, "kv_consumer", {"worker_type": "decode"})


def _worker(connector: str, name: str, role: str, registration: dict[str, Any], *arguments: str) -> VllmServer:
    config: dict[str, Any] = {"kv_connector": CONNECTORS[connector], "kv_role": role}
    environment = {}
    if connector == "nixl":
        config |= {"kv_buffer_device": "cpu", "kv_load_failure_policy": "fail"}
        environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port())  # unique on a machine
    else:
        config["kv_connector_extra_config"] = {"mooncake_protocol": "tcp"}
        if (port := registration.get("bootstrap_port")) is not None:
            environment["VLLM_MOONCAKE_BOOTSTRAP_PORT"] = str(port)
    server = _server(f"{connector}-{name}", "--kv-transfer-config", json.dumps(config), *arguments, **environment)
    server.registration = {"url": server.url, "kv_connector": CONNECTORS[connector], **registration}
    return server


def _server(name: str, *arguments: str, **environment: str) -> VllmServer:
    port = free_port()
    command = (str(servers.python("vllm")), "-m", "vllm.entrypoints.cli.main", "serve", str(MODEL_DIRECTORY))
    return VllmServer(
        f"vllm-{name}",
        port,
        (*command, "--port", str(port), *COMMON, *arguments),
        ENVIRONMENT | environment,
        "/health",
    )


if __name__ == "__main__":
    kind = sys.argv[1]
    pair = prefill(kind), decode(kind)
    for worker in pair:
        print("POST /workers", json.dumps(worker.registration), flush=True)
    servers.serve(*pair, aggregated())
