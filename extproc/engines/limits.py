"""What an engine's own server refuses of sampling values, and what can only be told with other words."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final, NoReturn

import orjson

from extproc.apis.table import CHAT, COMPLETIONS, GENERATE, Api
from extproc.errors import GatewayError
from extproc.generation.asked import Asked
from extproc.generation.sampling import Sampling

ANY_OBJECT: Final = '{"type": "object"}'  # the schema that SGLang's own server takes for json_object
_DEFAULTS: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_GREEDY: Final = 1e-5  # a temperature below is 0 to both engines


@lru_cache(256)
def defaults_in(label: str) -> Mapping[str, Any]:
    """The sampling values in a worker's label, which is JSON; none where it is nothing that can be read."""
    try:
        found = orjson.loads(label) if label else {}
    except orjson.JSONDecodeError:
        return {}
    if not isinstance(found, dict):
        return {}
    return {
        name: value
        for name in _DEFAULTS
        if isinstance(value := found.get(name), int | float) and not isinstance(value, bool)
    }


def is_cold(sampling: Sampling) -> bool:
    """Whether the temperature is 0, as far as the engines are concerned."""
    return sampling.temperature is not None and sampling.temperature < _GREEDY


def is_greedy(sampling: Sampling) -> bool:
    """Whether there is nothing random in how tokens are chosen."""
    return is_cold(sampling) or sampling.top_k == 1


def named(api: Api, field: str) -> str:
    """What a client calls the sampling value ``field``, a name of OpenAI's."""
    if api is not GENERATE:
        return field
    return f"sampling_params.{'sampling_seed' if field == 'seed' else field}"


def refuse_value(api: Api, field: str, why: str) -> NoReturn:
    """Raise GatewayError: the engine does not take the sampling value ``field`` (see :func:`named`)."""
    name = named(api, field)
    raise GatewayError("invalid_value", f"`{name}` {why}", param=name)


def check_stops(api: Api, sampling: Sampling, most: int) -> None:
    """Raise GatewayError where there are more than ``most`` stop strings."""
    if len(sampling.stop) > most:
        refuse_value(api, "stop", f"must be no more than {most} strings")


def refuse_prompt_logprobs(asked: Asked) -> None:
    """Raise GatewayError for an engine that does not tell log probabilities of a prompt, where they are asked for."""
    if asked.prompt_logprobs is None:
        return
    if asked.api is CHAT:
        name = "prompt_logprobs"
    elif asked.api is COMPLETIONS:
        name = "echo" if asked.echo else "prompt_logprobs"
    else:
        name = "logprob_start_len"
    why = f"`{name}`: the engine does not tell log probabilities of the prompt over gRPC"
    raise GatewayError("unsupported_parameter", why, param=name)


def choice_grammar(choices: str) -> str:
    """The grammar (EBNF) of one out of a JSON list of strings, as vLLM makes it itself."""
    return "root ::= " + " | ".join(_literal(choice) for choice in orjson.loads(choices))


def _literal(text: str) -> str:
    return orjson.dumps(text).decode()
