"""Which prefill and decode workers can hand a KV cache over to each other, as far as anybody has said.

Compared are the parts of :class:`~extproc.workers.pairing_key.Pairing`, unless both workers have the label
``pairing_protocol``: then only that is. ``--pd-pairing-mode`` says what a part means that nobody has said: it fits
anything (``lenient``), nothing (``strict``), or nothing is compared at all (``off``). The parts and the label are the
peer's; the peer names the modes and does not say more of them. A worker over HTTP and one over gRPC never fit, whatever
the mode and the label: what one answers is not what the other is to be sent.

What the engines themselves compare: a SGLang decode (0.5.23, ``disaggregation/common/conn.py``,
``try_ensure_parallel_info``) the page size and the cache's data type, letter by letter, and its scheduler ends when
they differ; a vLLM decode with NIXL (0.32, ``kv_connector/v1/nixl/metadata.py``, ``compute_nixl_compatibility_hash``)
a hash of vLLM's and the connector's version, the model's name, data type and shape, the attention backend, the cache's
data type and more, and it fails the request, unless told not to look (``enforce_handshake_compat``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import lru_cache
from typing import Final

from extproc.workers.pairing_key import ANY, UNKNOWN, Pairing
from extproc.workers.worker import Worker, is_ip_address

_LAYOUT: Final = ("transport", "kv_cache_dtype", "page_size", "attention_backend", "model_dtype")
# Not in a worker's key: where they differ, their values are named besides.
_HANDSHAKE: Final = ("version", "model_path")
_MODE: Final = "connection_mode"
_NAMES: Final = (_MODE, "pairing_protocol", "runtime", *_LAYOUT, *_HANDSHAKE)
# "auto" leaves these to the engine, which may well choose what the other one was told. What becomes of an "auto" cache
# type depends on the checkpoint too, but both engines compare the word itself.
_LEFT_OPEN: Final = ("attention_backend", "model_dtype")
_AUTO: Final = "auto"
_TORCH: Final = "torch."
_SHORT: Final = {"half": "float16", "float": "float32", "bf16": "bfloat16"}
_VERSION: Final = re.compile(r"v?(\d{1,9})\.(\d{1,9})")
_HASHED_SINCE: Final = (0, 13)  # vLLM pull request 29503
ITSELF: Final = "the only one that fits is the same server, which is registered as prefill and as decode worker"
_SHOWN: Final = 8  # keys or values of one side in a message


class PairingMode(Enum):
    """What a part that nobody has said means; the values are those of ``--pd-pairing-mode``."""

    OFF = "off"  # nothing is compared
    LENIENT = "lenient"  # it fits anything
    STRICT = "strict"  # it fits nothing


def may_pair(prefill: Worker, decode: Worker, mode: PairingMode) -> bool:
    """Whether ``decode`` may fetch what ``prefill`` has computed."""
    return not mismatch(prefill.pairing, decode.pairing, mode) and not same_server(prefill, decode)


def same_server(prefill: Worker, decode: Worker) -> bool:
    """Whether both are one server, registered twice: it has nothing to hand over to itself.

    One address under two names may be a proxy that tells servers apart by name; under a name and by itself it is not.
    """
    if prefill.base_url == decode.base_url:
        return True
    if prefill.endpoint is None or prefill.endpoint != decode.endpoint:
        return False
    return is_ip_address(prefill.url.host) or is_ip_address(decode.url.host)


def in_both_roles(prefills: Iterable[Worker], decodes: Iterable[Worker]) -> Callable[[Worker], bool]:
    """Tells of a worker whether it may be in both roles; for those of which it is true, :func:`same_server` decides."""
    marks = [{mark for worker in side for mark in (worker.base_url, worker.endpoint)} for side in (prefills, decodes)]
    both = (marks[0] & marks[1]) - {None}
    return lambda worker: bool(both) and (worker.base_url in both or worker.endpoint in both)


def share_model(one: Worker, other: Worker) -> bool:
    """Whether both serve some model; a worker that has not said which serves any."""
    if one.model_ids == other.model_ids or not one.model_ids or not other.model_ids:
        return True
    return not set(one.model_ids).isdisjoint(other.model_ids)


def hand_over_alike(one: Worker, other: Worker) -> bool:
    """Whether what was prepared for one prefill worker, or for one that answers alone, can be sent to the other."""
    return (
        one.runtime == other.runtime
        and one.kv_connector == other.kv_connector
        and one.pairing.connection_mode == other.pairing.connection_mode
    )


def pairing_key(worker: Worker) -> str:
    """What the control API shows as ``pd_pairing``."""
    return worker.pairing.key


@lru_cache(maxsize=4096)
def mismatch(prefill: Pairing, decode: Pairing, mode: PairingMode) -> tuple[str, ...]:
    """The parts in which the two do not fit, by their names; empty when they may be paired."""
    if prefill.connection_mode != decode.connection_mode:
        return (_MODE,)
    if mode is PairingMode.OFF:
        return ()
    if prefill.protocol and decode.protocol:
        return () if prefill.protocol == decode.protocol else ("pairing_protocol",)
    if prefill.runtime != decode.runtime:
        return ("runtime",)  # what else differs says nothing then
    strict = mode is PairingMode.STRICT
    return tuple(
        part
        for part in (*_LAYOUT, *_HANDSHAKE)
        if not _fit(part, getattr(prefill, part), getattr(decode, part), strict=strict)
    )


def of_one_model(prefills: Sequence[Worker], decodes: Sequence[Worker]) -> list[tuple[Worker, Worker]]:
    """The pairs that have a model in common, one of each kind of worker; those in both roles are kinds of their own."""
    doubled = in_both_roles(prefills, decodes)
    kinds = [
        {(worker.model_ids, worker.pairing, doubled(worker) and worker.base_url): worker for worker in side}.values()
        for side in (prefills, decodes)
    ]
    return [(prefill, decode) for prefill in kinds[0] for decode in kinds[1] if share_model(prefill, decode)]


def served_models(prefills: Sequence[Worker], decodes: Sequence[Worker], mode: PairingMode) -> dict[str, None]:
    """The models that some pair of these has said it serves, in order of the prefill workers."""
    pairs = [pair for pair in of_one_model(prefills, decodes) if may_pair(*pair, mode)]
    return dict.fromkeys(model for prefill, decode in pairs for model in prefill.model_ids if model in decode.model_ids)


def why_none(pairs: Sequence[tuple[Worker, Worker]], mode: PairingMode) -> str:
    """Why none of ``pairs`` may be, in the peer's words; empty when one may, or there are none."""
    found = difference(pairs, mode)
    if not found and pairs and all(same_server(*pair) for pair in _fitting(pairs, mode)):
        return f"No prefill/decode pair: {ITSELF}"
    return f"No prefill/decode pair shares a KV transfer protocol ({found})" if found else ""


def difference(pairs: Sequence[tuple[Worker, Worker]], mode: PairingMode) -> str:
    """In what ``pairs`` do not fit, and the keys of both sides; empty when one fits, or there are none.

    Whether the two are one server is not looked at.
    """
    found = [mismatch(prefill.pairing, decode.pairing, mode) for prefill, decode in pairs]
    if not all(found) or not found:
        return ""
    needs = [(prefill.pairing, decode.pairing) for prefill, decode in pairs]
    sides = [list(dict.fromkeys(side)) for side in zip(*needs, strict=True)]
    parts = [name for name in _NAMES if any(name in names for names in found)]
    said = [_listed(_compared(*pair) for pair in ordered) for ordered in (needs, [pair[::-1] for pair in needs])]
    message = f"mismatch on {_listed(parts)}; prefill: {said[0]}, decode: {said[1]}"
    for part in (_MODE, *_HANDSHAKE):
        if part in parts:
            values = [_listed(getattr(pairing, part) or UNKNOWN for pairing in side) for side in sides]
            message += f"; {part}: {values[0]} and {values[1]}"
    return message + _one_sided(needs) + (_unknown(parts, sides) if mode is PairingMode.STRICT else "")


def _compared(own: Pairing, other: Pairing) -> str:
    """The key by which ``own`` was compared with ``other``."""
    return own.key if other.protocol else own.structure


def _one_sided(needs: Sequence[tuple[Pairing, Pairing]]) -> str:
    """That an operator's word does not count, where there is one on one side only."""
    message = ""
    for at, (role, partner) in enumerate((("prefill", "decode"), ("decode", "prefill"))):
        words = [pair[at].protocol for pair in needs if pair[at].protocol and not pair[1 - at].protocol]
        if words:
            message += f"; pairing_protocol {_listed(words)} of {role} is not compared: {partner} has none"
    return message


def _unknown(parts: Sequence[str], sides: Sequence[Sequence[Pairing]]) -> str:
    """Which of the parts that do not fit nobody has said, which is why."""
    message = ""
    for role, side in zip(("prefill", "decode"), sides, strict=True):
        unsaid = [name for name in parts if any(getattr(one, name, "-") in ("", UNKNOWN) for one in side)]
        if unsaid:
            message += f"; not known of {role}, and strict wants it said, as by labels: {_listed(unsaid)}"
    return message


def _fitting(pairs: Iterable[tuple[Worker, Worker]], mode: PairingMode) -> list[tuple[Worker, Worker]]:
    return [(prefill, decode) for prefill, decode in pairs if not mismatch(prefill.pairing, decode.pairing, mode)]


def _fit(part: str, one: str, other: str, *, strict: bool) -> bool:
    if ANY in (one, other):
        return True
    if one in ("", UNKNOWN) or other in ("", UNKNOWN):
        return not strict
    if part == "model_dtype":
        one, other = _plain(one), _plain(other)
    if one == other:
        return True
    if part in _LEFT_OPEN and _AUTO in (one, other):
        return not strict
    return part == "version" and not strict and not _hashes(one) and not _hashes(other)


def _plain(dtype: str) -> str:
    """A model's data type by one name: ``torch.bfloat16`` is ``bfloat16``."""
    name = dtype.removeprefix(_TORCH)
    return _SHORT.get(name, name)


def _hashes(version: str) -> bool:
    """Whether vLLM of this version compares hashes; older ones of different versions may or may not get on."""
    found = _VERSION.match(version)
    return found is None or (int(found[1]), int(found[2])) >= _HASHED_SINCE


def _listed(names: Iterable[str]) -> str:
    """``["a", "b"]``, each once; what is beyond a few is only counted."""
    distinct: Sequence[str] = list(dict.fromkeys(names))
    shown = [f'"{name}"' for name in distinct[:_SHOWN]]
    if len(distinct) > _SHOWN:
        shown.append(f"and {len(distinct) - _SHOWN} more")
    return f"[{', '.join(shown)}]"
