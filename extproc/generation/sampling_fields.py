"""How to sample, read from a client's JSON: OpenAI's names with both engines' extensions, and SGLang's own.

Values are checked as far as both engines agree; what only one of them refuses, its adapter does (``engines/``).
Source: vllm 0.32 sampling_params.py; sglang 0.5.23 srt/sampling/sampling_params.py.
"""

from __future__ import annotations

import re
from typing import Any, Final

from extproc.errors import GatewayError
from extproc.generation import values
from extproc.generation.constraints import constraint_of, native_constraint_of
from extproc.generation.sampling import Sampling
from extproc.generation.values import LARGEST_ID, Fields

MOST_STOPS: Final = 32  # SGLang's limit; vLLM's own server takes 4 unless told otherwise
_TOKEN_ID: Final = re.compile(r"[0-9]{1,10}")
_SEEDS: Final = (-(2**63), 2**63 - 1)
_INCLUDES: Final = ("include_stop_str_in_output", "no_stop_trim")  # vLLM's name and SGLang's
# fmt: off
_SHARED: Final = frozenset({
    "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "logit_bias",
    "no_stop_trim",
})
# fmt: on
OPENAI_FIELDS: Final = _SHARED | {"max_tokens", "min_tokens", "include_stop_str_in_output", "seed"}
NATIVE_FIELDS: Final = _SHARED | {"max_new_tokens", "min_new_tokens", "sampling_seed"}


def openai_sampling(fields: Fields, max_tokens: int | None) -> Sampling:
    """What a body of Chat Completions or Completions says; the caller reads ``max_tokens``. Raises GatewayError."""
    return _sampling(fields, max_tokens, "min_tokens", "seed", constraint_of(fields))


def native_sampling(fields: Fields, max_tokens: int | None) -> Sampling:
    """What ``sampling_params`` of ``/generate`` say. Raises GatewayError."""
    return _sampling(fields, max_tokens, "min_new_tokens", "sampling_seed", native_constraint_of(fields))


def _sampling(fields: Fields, max_tokens: int | None, least: str, seed: str, constraint: Any) -> Sampling:
    min_tokens = fields.count(least) or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise GatewayError(
            "invalid_value", f"`{fields.name(least)}` is more than the most that may be generated", param=least
        )
    return Sampling(
        temperature=_at_least(fields, "temperature", 0.0),
        top_p=_top_p(fields),
        top_k=_top_k(fields),
        min_p=_between(fields, "min_p", 0.0, 1.0),
        frequency_penalty=_between(fields, "frequency_penalty", -2.0, 2.0),
        presence_penalty=_between(fields, "presence_penalty", -2.0, 2.0),
        repetition_penalty=_repetition_penalty(fields),
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop=_stop(fields),
        stop_token_ids=_stop_token_ids(fields),
        ignore_eos=fields.boolean("ignore_eos"),
        include_stop=any(fields.boolean(name) for name in _INCLUDES),
        skip_special_tokens=fields.boolean("skip_special_tokens", default=True),
        spaces_between_special_tokens=fields.boolean("spaces_between_special_tokens", default=True),
        seed=_seed(fields, seed),
        logit_bias=_logit_bias(fields),
        constraint=constraint,
    )


def _between(fields: Fields, name: str, least: float, most: float) -> float | None:
    found = fields.number(name)
    if found is not None and not least <= found <= most:
        values.wrong(fields.name(name), f"in [{least:g}, {most:g}]")
    return found


def _at_least(fields: Fields, name: str, least: float) -> float | None:
    found = fields.number(name)
    if found is not None and found < least:
        values.wrong(fields.name(name), f"at least {least:g}")
    return found


def _top_p(fields: Fields) -> float | None:
    found = fields.number("top_p")
    if found is not None and not 0.0 < found <= 1.0:
        values.wrong(fields.name("top_p"), "in (0, 1]")
    return found


def _top_k(fields: Fields) -> int | None:
    """Both engines take -1 for all tokens, vLLM 0 too, which SGLang refuses."""
    found = fields.count("top_k", least=-1)
    return -1 if found == 0 else found


def _repetition_penalty(fields: Fields) -> float | None:
    found = fields.number("repetition_penalty")
    if found is not None and found <= 0.0:
        values.wrong(fields.name("repetition_penalty"), "greater than zero")
    return found


def _stop(fields: Fields) -> tuple[str, ...]:
    found = fields.texts("stop")
    name = fields.name("stop")
    if len(found) > MOST_STOPS:
        values.wrong(name, f"no more than {MOST_STOPS} strings")
    if not all(found):
        values.wrong(name, "made of strings that are not empty")
    return tuple(dict.fromkeys(found))


def _stop_token_ids(fields: Fields) -> tuple[int, ...]:
    found, name = fields.get("stop_token_ids"), fields.name("stop_token_ids")
    if found is None:
        return ()
    if not isinstance(found, list):
        values.wrong(name, "a list of token ids")
    return tuple(dict.fromkeys(values.count(item, name, 0, LARGEST_ID) for item in found if item is not None))


def _seed(fields: Fields, name: str) -> int | None:
    found = fields.integer(name)
    if found is not None and not _SEEDS[0] <= found <= _SEEDS[1]:
        values.wrong(fields.name(name), "a 64-bit integer")
    return found


def _logit_bias(fields: Fields) -> tuple[tuple[int, float], ...]:
    found, name = fields.mapping("logit_bias") or {}, fields.name("logit_bias")
    if not all(_TOKEN_ID.fullmatch(token) and int(token) <= LARGEST_ID for token in found):
        values.wrong(name, "an object whose keys are token ids")
    return tuple((int(token), values.number(bias, name)) for token, bias in found.items())
