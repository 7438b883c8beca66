"""``n`` samples of a prompt as ``n`` requests of one sample each: what differs between them.

An SGLang pair never answers a single request for several samples, whatever its rooms are.
"""

from __future__ import annotations

from typing import Final

import orjson

from extproc.apis.json_object import JsonObject
from extproc.apis.request import InferenceRequest

_INT64: Final = 1 << 63
_ONE: Final = b"1"


def sample_edits(request: InferenceRequest, sample: int) -> dict[str, bytes]:
    """The top-level fields in which the request for one sample differs from the client's, as raw JSON.

    The sample count becomes 1. A seed becomes seed + ``sample``, as vLLM does for its samples: equal seeds would give
    equal samples where the engine samples deterministically; where it does not, it ignores seeds. A ``rid`` becomes
    ``rid_<sample>``, since one worker refuses a second live request of the same name. Lists of prompts stay whole.
    Empty for a request of one sample.

    Args:
        request: the client's request.
        sample: 0 <= sample < ``request.samples``.
    """
    if request.samples == 1:
        return {}
    api, body = request.api, request.body
    assert api.samples_key is not None, "only these have more than one sample"
    edits: dict[str, bytes] = {}
    if api.samples_in is None:
        edits[api.samples_key] = _ONE
        if (seed := _seed(body, "seed", sample)) is not None:
            edits["seed"] = seed
    else:
        edits[api.samples_in] = _sampling(body, api.samples_in, api.samples_key, sample)
    if api.rid_key is not None and (rid := body.get(api.rid_key)) is not None:
        edits[api.rid_key] = orjson.dumps(_renamed(rid, sample))
    return edits


def _seed(holder: JsonObject, key: str, sample: int) -> bytes | None:
    """The sample's seed, within the engine's 64 bits; None when there is none, or the engine will refuse it anyway."""
    seed = holder.get(key)
    if type(seed) is not int:
        return None
    return b"%d" % ((seed + sample + _INT64) % (2 * _INT64) - _INT64)


def _sampling(body: JsonObject, key: str, samples_key: str, sample: int) -> bytes:
    """SGLang's ``sampling_params`` for one sample: an object, or a list of one per prompt."""
    if body.first_byte(key) == ord("["):
        return b"[%b]" % b",".join(_sampling_of_one(raw, samples_key, sample) for raw in body.items_of(key))
    raw = body.raw_value(key)
    assert raw is not None, "it holds the sample count"
    return _sampling_of_one(raw, samples_key, sample)


def _sampling_of_one(raw: bytes, samples_key: str, sample: int) -> bytes:
    params = JsonObject(raw)
    edits = {samples_key: _ONE}
    if (seed := _seed(params, "sampling_seed", sample)) is not None:
        edits["sampling_seed"] = seed
    return params.edited(edits)


def _renamed(rid: object, sample: int) -> object:
    if isinstance(rid, list):
        return [_renamed(one, sample) for one in rid]
    return f"{rid}_{sample}" if isinstance(rid, str) else rid
