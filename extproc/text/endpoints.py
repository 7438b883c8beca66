"""``/tokenize``, ``/detokenize`` and ``/v1/messages/count_tokens`` for models that gRPC workers serve: answered here.

Requests are those of vLLM 0.32 (``entrypoints/serve/tokenize/protocol.py``) and SGLang 0.5.23
(``entrypoints/openai/protocol.py``), answers have what either gives, and the peer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import orjson

from extproc.apis.table import COUNT_TOKENS, DETOKENIZE, TOKENIZE, Api
from extproc.errors import GatewayError
from extproc.generation.asked import ChatPrompt
from extproc.text.anthropic import conversation
from extproc.text.entry import Ready
from extproc.text.limits import Limits
from extproc.text.service import Texts
from extproc.text.threads import Cancel, nothing

_ARRAY: Final = "must be a list of token ids, or a list of such lists"
Then = Callable[[bytes | GatewayError], None]


class TextEndpoints:
    """The answers.

    Args:
        texts: the tokenizers.
        runtime_of: the engine that serves a model: it decides whether ``/detokenize`` shows special tokens unless the
            request says (vLLM does, SGLang does not).
    """

    def __init__(self, texts: Texts, runtime_of: Callable[[str], str] = lambda _model: "vllm") -> None:
        self._texts = texts
        self._runtime_of = runtime_of

    def answer(self, api: Api, raw: bytes, model: str | None, then: Then) -> Cancel:
        """Call ``then`` with the JSON that answers ``raw``, or an error: at once or later, see Texts.prepare.

        Args:
            api: TOKENIZE, DETOKENIZE or COUNT_TOKENS, or the same at another path.
            raw: the request's body.
            model: whose tokenizer; None for the first.
            then: is called on the event loop.
        """
        try:
            ready = self._texts.ready(model)
            body = _object(raw)
        except GatewayError as error:
            then(error)
            return nothing
        work = {TOKENIZE.name: self._tokenized, DETOKENIZE.name: self._detokenized, COUNT_TOKENS.name: _counted}[
            api.name
        ]
        limits = self._texts.limits(ready.name)
        return self._texts.run(lambda: orjson.dumps(work(ready, limits, body)), len(raw), then)

    def _tokenized(self, ready: Ready, limits: Limits, body: Mapping[str, Any]) -> dict[str, Any]:
        prompt, messages = body.get("prompt"), body.get("messages")
        if messages is not None:
            chat = self._chat(body, messages)
            ids = encoded(ready, chat)
            found: dict[str, Any] = {"count": len(ids), "tokens": ids}
        else:
            special = body.get("add_special_tokens", True) is not False
            texts = [prompt] if isinstance(prompt, str) else prompt
            if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
                raise GatewayError("invalid_type", "prompt must be a text or a list of texts", param="prompt")
            lists = [ready.encoder.encode(text, special=special) for text in texts]
            counts, lengths = [len(ids) for ids in lists], [len(text) for text in texts]
            one = isinstance(prompt, str)
            found = {
                "count": counts[0] if one else counts,
                "tokens": lists[0] if one else lists,
                "char_count": lengths[0] if one else lengths,
            }
            ids = lists[0] if one else []
        words = [ready.tokenizer.word(token) for token in ids] if body.get("return_token_strs") is True else None
        context = limits.context or ready.tokenizer.context
        return {**found, "max_model_len": context if context is not None else -1, "token_strs": words}

    def _chat(self, body: Mapping[str, Any], messages: object) -> ChatPrompt:
        if (
            not isinstance(messages, list)
            or not messages
            or not all(isinstance(m, dict) and m.get("role") for m in messages)
        ):
            raise GatewayError("invalid_type", "messages must be a list of messages with roles", param="messages")
        template = body.get("chat_template")
        if template is not None:
            self._texts.check_template(template)
        kwargs, tools = body.get("chat_template_kwargs"), body.get("tools")
        continues = body.get("continue_final_message") is True
        begins = body.get("add_generation_prompt", not continues) is not False
        if continues and begins:
            message = "Cannot set both `continue_final_message` and `add_generation_prompt` to True."
            raise GatewayError("invalid_type", message, param="continue_final_message")
        return ChatPrompt(
            messages,
            tools=tools if isinstance(tools, list) else None,
            template_kwargs=kwargs if isinstance(kwargs, dict) else {},
            add_generation_prompt=begins,
            continue_final_message=continues,
            chat_template=template,
            add_special_tokens=body.get("add_special_tokens") is True,
        )

    def _detokenized(self, ready: Ready, limits: Limits, body: Mapping[str, Any]) -> dict[str, Any]:
        tokens = body.get("tokens")
        if not isinstance(tokens, list):
            raise GatewayError("invalid_type", f"tokens {_ARRAY}", param="tokens")
        lists: Sequence[Any] = tokens if tokens and isinstance(tokens[0], list) else [tokens]
        tokenizer = ready.tokenizer
        for ids in lists:
            if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
                raise GatewayError("invalid_type", f"tokens {_ARRAY}", param="tokens")
            limits.check_ids(ids, tokenizer.vocab_size, "tokens")
        skip = body.get("skip_special_tokens", self._runtime_of(ready.name) != "vllm") is not False
        texts = [tokenizer.decode(ids, skip_special=skip) for ids in lists]
        text = texts if lists is tokens else texts[0]
        return {"prompt": text, "text": text}


def _counted(ready: Ready, _limits: Limits, body: Mapping[str, Any]) -> dict[str, Any]:
    return {"input_tokens": len(encoded(ready, conversation(body)))}


def encoded(ready: Ready, chat: ChatPrompt) -> list[int]:
    """The tokens of a conversation."""
    return ready.encoder.encode(ready.tokenizer.chat(chat), special=chat.add_special_tokens)


def _object(raw: bytes) -> Mapping[str, Any]:
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise GatewayError("invalid_json", f"the body is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise GatewayError("invalid_json", "the body is not a JSON object")
    return body
