"""How tokens are to be chosen, whoever chooses them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class Shape(Enum):
    """What an answer can be forced to be; the values are for messages."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    GRAMMAR = "grammar"
    STRUCTURAL_TAG = "structural_tag"
    CHOICE = "choice"


class Constraint(NamedTuple):
    """What the answer is forced to be.

    Attributes:
        shape: of what kind ``text`` is.
        text: the schema or the structural tag as JSON, the expression, the grammar (EBNF), a JSON list of the choices;
            empty for any object.
    """

    shape: Shape
    text: str = ""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample one sequence. None: the client does not say, so the model's default holds, or else the engine's.

    Attributes:
        max_tokens: to generate at most; None for as many as fit.
        stop: strings that end the answer.
        stop_token_ids: tokens that do.
        include_stop: leave in the text what ended it.
        seed: of a sequence; the samples of a request have this and the next ones.
        logit_bias: pairs of a token id and what is added to its logit.
        constraint: what the answer must look like.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    seed: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    constraint: Constraint | None = None
