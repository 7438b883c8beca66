"""How long prompts may be: what the engine would refuse is refused before anything is sent to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NoReturn

from extproc.errors import GatewayError


@dataclass(frozen=True, slots=True)
class Limits:
    """What the workers of a model take, the least of them all. None: they do not say.

    Attributes:
        context: tokens of prompt and answer together. A prompt needs room for one token of an answer.
        prompt: tokens of a prompt (SGLang: fewer than its ``max_req_input_len``).
        vocab: ids are below.
        strict: prompt and ``max_tokens`` must fit together (SGLang 0.5.23, ``_validate_one_request``); else the answer
            is as long as there is room, and ``max_tokens`` alone must fit (vLLM 0.32, ``get_max_tokens``).
    """

    context: int | None = None
    prompt: int | None = None
    vocab: int | None = None
    strict: bool = False

    @classmethod
    def of(cls, labels: Iterable[tuple[str, Mapping[str, str]]]) -> Limits:
        """Those of workers with these runtimes and labels."""
        context: list[int] = []
        prompt: list[int] = []
        vocab: list[int] = []
        strict = False
        for runtime, of_worker in labels:
            if (tokens := _number(of_worker, "max_context_length") or _number(of_worker, "max_model_len")) is not None:
                context.append(tokens)
            if runtime != "vllm":
                strict = True
                if (tokens := _number(of_worker, "max_req_input_len")) is not None:
                    prompt.append(tokens - 1)
            if (tokens := _number(of_worker, "vocab_size")) is not None:
                vocab.append(tokens)
        return cls(min(context, default=None), min(prompt, default=None), max(vocab, default=None), strict=strict)

    @property
    def most(self) -> int | None:
        """Tokens that a prompt may have at most, if its answer is to have one."""
        known = [limit for limit in (None if self.context is None else self.context - 1, self.prompt) if limit]
        return min(known, default=None)

    def check(self, tokens: int, max_tokens: int | None, param: str) -> None:
        """Raise GatewayError (400) when a prompt of so many tokens would be refused.

        Args:
            tokens: of the prompt.
            max_tokens: of the answer, at most; None: as many as fit.
            param: the request's field with the prompt.
        """
        context, most = self.context, self.most
        if context is not None and max_tokens is not None and max_tokens > context:
            _refuse(f"max_tokens={max_tokens} cannot be greater than the model's context of {context} tokens", None)
        if max_tokens == 0 and self.prompt is None:
            most = context
        if most is not None and tokens > most:
            limit = context if context is not None and tokens >= context else most + 1
            _refuse(
                f"This model's maximum context length is {limit} tokens. However, your prompt contains {tokens} input "
                "tokens, which leaves no room for an answer. Please reduce the length of the input prompt.",
                param,
            )
        if self.strict and context is not None and max_tokens is not None and tokens + max_tokens > context:
            _refuse(
                f"This model's maximum context length is {context} tokens. However, you requested "
                f"{tokens + max_tokens} tokens: {tokens} in the prompt and {max_tokens} for the answer. Please reduce "
                "one of them.",
                param,
            )

    def check_text(self, characters: int, longest: int, param: str) -> None:
        """Refuse a text that is too long however it is tokenised: no token has more than ``longest`` characters.

        So a text of any length costs no more than the largest that is taken (vLLM 0.32, ``_text_len_check``).
        """
        most = self.most
        if most is not None and characters > (most + 1) * longest:
            _refuse(
                f"This model's maximum context length is {most + 1} tokens. However, your prompt contains {characters} "
                "characters, which are more tokens than that. Please reduce the length of the input prompt.",
                param,
            )

    def check_ids(self, ids: Iterable[int], known: int, param: str) -> None:
        """Raise GatewayError (400) when the model has no such token; the tokenizer has those below ``known``."""
        most = max(known, self.vocab or 0)
        if (largest := max(ids, default=0)) >= most:
            raise GatewayError("invalid_value", f"Token id {largest} is out of vocabulary", param=param)


def _number(labels: Mapping[str, str], name: str) -> int | None:
    text = labels.get(name, "")
    return int(text) if text.isdecimal() and int(text) else None


def _refuse(message: str, param: str | None) -> NoReturn:
    raise GatewayError("context_length_exceeded", message, param=param)
