"""Prompts made tokens, for models that are served by gRPC workers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, TypeVar

from extproc.errors import GatewayError
from extproc.generation.asked import Asked, ChatPrompt, Prompt
from extproc.text.entry import Ready
from extproc.text.library import Library
from extproc.text.limits import Limits
from extproc.text.threads import Cancel, Threads, nothing
from extproc.text.tokenizer import Prepared, Tokenizer
from extproc.workers.worker import Worker

# Characters of a request's prompts that are tokenised on the event loop: some 0.3 ms. To a thread and back is 0.04 ms
# where one is idle (measured, ``python -m bench.text``).
INLINE_CHARACTERS: Final = 1024
RETRY_AFTER: Final = 5  # seconds; loading takes so long, and so does the pause after a first failure
_logger = logging.getLogger(__name__)
_T = TypeVar("_T")
Then = Callable[[tuple[Prepared, ...] | GatewayError], None]


class Texts:
    """The tokenizers of this process's models, and the threads that long prompts are tokenised in.

    Args:
        library: has the tokenizers.
        threads: for long prompts.
        workers: all that are registered.
        trust_templates: clients may bring chat templates of their own.
    """

    def __init__(
        self,
        library: Library,
        threads: Threads,
        workers: Callable[[], Iterable[Worker]],
        *,
        trust_templates: bool = False,
    ) -> None:
        self.library = library
        self._threads = threads
        self._workers = workers
        self._trust_templates = trust_templates
        self._limits: dict[str, Limits] = {}

    def of(self, model: str | None) -> Tokenizer | None:
        """The loaded tokenizer of a model (None: the first one there is); None while there is none."""
        entry = self.library.get(model)
        return None if entry is None or entry.ready is None else entry.ready.tokenizer

    def limits(self, model: str) -> Limits:
        """How long its prompts may be, as its gRPC workers say."""
        found = self._limits.get(model)
        if found is None:
            mine = (worker for worker in self._workers() if worker.url.is_grpc and model in worker.model_ids)
            found = self._limits[model] = Limits.of((worker.runtime, worker.labels) for worker in mine)
        return found

    def workers_changed(self) -> None:
        """Something of a worker is another."""
        self._limits.clear()

    def prepare(self, asked: Asked, then: Then) -> Cancel:
        """Render and tokenise all prompts, and check their lengths.

        Short prompts: ``then`` is called before this returns. Long ones: later, on the event loop, once. What is
        returned cancels: after it ``then`` is not called.

        ``then`` is given a GatewayError for: a template's or a length's complaint (400), a model without a tokenizer
        (503 ``tokenizer_not_found``), too many long prompts (503).
        """
        chat = asked.chat
        try:
            if chat is not None and chat.chat_template is not None:
                self.check_template(chat.chat_template)
            ready = self.ready(asked.model)
        except GatewayError as error:
            then(error)
            return nothing
        size = _characters(asked.prompts if chat is None else chat)
        limits = self.limits(ready.name)
        return self.run(lambda: _prepared(asked, ready, limits), size, then)

    def ready(self, model: str | None) -> Ready:
        """The model's tokenizer. Raises GatewayError (503) when there is none."""
        entry = self.library.get(model)
        if entry is None or entry.ready is None:
            of_model = f" of the model {model!r}" if model is not None else ""
            message = f"the tokenizer{of_model} is not there; the gateway's log and GET /workers say why"
            raise GatewayError("tokenizer_not_found", message, retry_after=RETRY_AFTER)
        return entry.ready

    def check_template(self, template: object) -> None:
        """Raise GatewayError (400) unless clients may bring a template, and this is one.

        A template is a program: it may take long, and see what others in its sandbox see.
        """
        if not isinstance(template, str):
            raise GatewayError("invalid_type", "chat_template must be a text", param="chat_template")
        if not self._trust_templates:
            message = "chat templates of requests are not taken; --trust-request-chat-template lets them be"
            raise GatewayError("process_messages_failed", message, param="chat_template")

    def run(self, work: Callable[[], _T], size: int, then: Callable[[_T | GatewayError], None]) -> Cancel:
        """Do ``work`` with a text of so many characters: at once if it is short, else in a thread; see prepare."""
        if size > INLINE_CHARACTERS:
            try:
                return self._threads.run(work, lambda outcome: then(_told(outcome)))
            except GatewayError as error:
                then(error)
                return nothing
        outcome: _T | BaseException
        try:
            outcome = work()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001 -- told below; the Rust library's panics are no Exceptions
            outcome = error
        then(_told(outcome))
        return nothing

    def stop(self) -> None:
        """Begin nothing more."""
        self._threads.stop()


def _prepared(asked: Asked, ready: Ready, limits: Limits) -> tuple[Prepared, ...]:
    tokenizer, encoder = ready.tokenizer, ready.encoder
    if asked.chat is not None:
        text = tokenizer.chat(asked.chat)
        limits.check_text(len(text), tokenizer.longest, "messages")
        ids = encoder.encode(text, special=asked.chat.add_special_tokens)
        return (_checked(text, ids, asked, 0, limits, "messages"),)
    param = "prompt" if asked.api.name == "completions" else "text"
    made = []
    for at, prompt in enumerate(asked.prompts):
        if isinstance(prompt, str):
            limits.check_text(len(prompt), tokenizer.longest, param)
            made.append(_checked(prompt, encoder.encode(prompt, special=asked.special), asked, at, limits, param))
            continue
        where = param if param == "prompt" else "input_ids"
        text = tokenizer.decode(prompt, skip_special=False) if asked.echo else ""
        made.append(_checked(text, prompt, asked, at, limits, where))
    return tuple(made)


def _checked(text: str, ids: Sequence[int], asked: Asked, at: int, limits: Limits, param: str) -> Prepared:
    sampling = asked.samplings[at] if asked.samplings else asked.sampling
    limits.check(len(ids), sampling.max_tokens, param)
    return Prepared(text, tuple(ids))


def _told(outcome: _T | BaseException) -> _T | GatewayError:
    """What came of it, as a client is told; what failed otherwise than it may is written down."""
    if not isinstance(outcome, BaseException) or isinstance(outcome, GatewayError):
        return outcome
    _logger.error("a prompt could not be tokenised", exc_info=outcome)
    return GatewayError("tokenization_failed", "the prompt could not be tokenised; the gateway's log says why")


def _characters(prompts: Sequence[Prompt] | ChatPrompt) -> int:
    """How much text there is to tokenise, about: that of values, however deep. A few µs for a short one."""
    if isinstance(prompts, ChatPrompt):
        found = _length(prompts.messages)
        return found + (_length(prompts.tools) if prompts.tools else 0)
    return sum(len(prompt) for prompt in prompts if isinstance(prompt, str))


def _length(value: object) -> int:
    found, left = 0, [value]
    while left:
        one = left.pop()
        if isinstance(one, str):
            found += len(one)
        elif isinstance(one, Mapping):
            left += one.values()
        elif isinstance(one, list | tuple):
            left += one
    return found
