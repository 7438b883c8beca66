"""What is known of how a worker hands KV cache over, and how that is written: ``runtime/transport/layout``.

The parts, the labels they are read from and the text are the peer's (smg 1.13). Where the facts come from: SGLang tells
its own in ``/server_info``; vLLM its version, its model's path, block size and cache type, and labels of the
registration must say the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

UNKNOWN: Final = "?"  # a part that nobody has said
ANY: Final = "*"  # a part that does not matter for this worker, in no mode
_FALSE: Final = ("false", "0", "no")


class Pairing(NamedTuple):
    """What must agree between a prefill and a decode worker; see :mod:`extproc.workers.pairing`.

    Empty where nobody has said.

    Attributes:
        runtime: the engine.
        transport: how it moves KV cache: ``nixl``, ``mooncake``, another connector's name in lower case, or ``?``.
        kv_cache_dtype: what the cache is made of, as the engine was told; ``auto`` is such a word, too.
        page_size: tokens of a page (SGLang) or block (vLLM).
        attention_backend: by whose kernels the cache is laid out, in lower case.
        model_dtype: what the model computes in.
        version, model_path: of vLLM with NIXL, whose handshake compares them; ``*`` elsewhere.
        protocol: the operator's own word for all of it (label ``pairing_protocol``), empty where there is none.
        connection_mode: ``http`` or ``grpc``: the parameters of a handoff have another form in each.
    """

    runtime: str
    transport: str
    kv_cache_dtype: str = ""
    page_size: str = ""
    attention_backend: str = ""
    model_dtype: str = ""
    version: str = ANY
    model_path: str = ANY
    protocol: str = ""
    connection_mode: str = "http"

    @classmethod
    def of(
        cls, runtime: str, transport: str, labels: Mapping[str, str], *, handshake: bool, connection_mode: str = "http"
    ) -> Pairing:
        """What a worker with these labels needs of its partner.

        Args:
            runtime: the engine.
            transport: as above.
            labels: a label that is empty, or ``?``, is as good as none: so an operator takes back what a server says.
            handshake: the worker is one of vLLM with NIXL that takes the cache of no engine unlike itself.
            connection_mode: as above.
        """
        return cls(
            runtime,
            transport,
            kv_cache_dtype=_said(labels, "kv_cache_dtype").lower(),
            page_size=_said(labels, "page_size") or _said(labels, "block_size"),
            attention_backend=_said(labels, "attention_backend").lower(),
            model_dtype=_said(labels, "model_dtype").lower(),
            version=_said(labels, "version") if handshake else ANY,
            model_path=_said(labels, "model_path") if handshake else ANY,
            protocol=_said(labels, "pairing_protocol"),
            connection_mode=connection_mode,
        )

    @property
    def key(self) -> str:
        """The text: the operator's word, or what :attr:`structure` says."""
        return self.protocol or self.structure

    @property
    def structure(self) -> str:
        """``runtime/transport/layout`` with what is known of the layout."""
        parts = {
            "dtype": self.kv_cache_dtype,
            "page": self.page_size,
            "attn": self.attention_backend,
            "model": self.model_dtype,
        }
        layout = ",".join(f"{name}={value}" for name, value in parts.items() if value)
        return f"{self.runtime}/{self.transport}/{layout or UNKNOWN}"


def enforces_handshake(labels: Mapping[str, str]) -> bool:
    """Whether a NIXL worker with these labels compares hashes: unless ``enforce_handshake_compat`` is ``false``."""
    return _said(labels, "enforce_handshake_compat").lower() not in _FALSE


def _said(labels: Mapping[str, str], name: str) -> str:
    value = labels.get(name, "").strip()
    return "" if value == UNKNOWN else value
