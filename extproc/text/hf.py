"""A tokenizer that ``transformers`` loads, from a directory and never from a hub.

``transformers`` decides what the tokenizer is, as it does in the engines. The work on a request is then the Rust
library's (``tokenizers``), and the chat template's (``jinja2``, in the sandbox that ``transformers`` makes for it).

Facts, measured on tokenizers 0.23 with a vocabulary of 150,000 tokens: ``encode`` keeps the interpreter lock all the
time, ``encode_batch_fast`` gives it back; a loaded vocabulary has some 130 MB, ``transformers`` itself 45.

Loading keeps the lock for 0.3 to 0.5 s in one piece: the Rust library's ``Tokenizer.from_file`` (of classes with an
``__init__`` of their own, as Qwen's: ``BPE(vocab, merges)``), which never gives it back and cannot be done in steps; a
process of its own would not help, since what it made would have to be read here in the same way. Another 0.1 to 0.2 s
is ``transformers`` reading ``tokenizer.json`` once more. It happens once for each model, when its first worker comes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from extproc.errors import GatewayError
from extproc.text.conversation import Style, suited
from extproc.text.detokenizers import ByPieces, ByWindow
from extproc.text.files import FilesError, context_of, eos_of
from extproc.text.pieces import Pieces, decoder_parts, is_local
from extproc.text.tokenizer import Detokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer

    from extproc.generation.asked import ChatPrompt

# What a template is rendered with that is no client's to give in ``chat_template_kwargs``.
_OURS: Final = frozenset(
    {
        "conversations",
        "messages",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "return_assistant_tokens_mask",
        "tokenize",
        "self",
    }
)
_MOST_TEMPLATES: Final = 16  # whose styles are kept; clients may bring templates of their own
_LONGEST_COMPLAINT: Final = 1000  # characters of what a template says


def quiet_libraries() -> None:
    """What the libraries are told before they are imported: no advice, and one thread per text, which is ours."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")


class HfTokenizer:
    """Implements :class:`extproc.text.tokenizer.Tokenizer`.

    Args:
        loaded: a ``PreTrainedTokenizerBase``.
        directory: whose.
        template: a chat template's text, or the name of one of the model's, instead of the model's first.
        runtime: the engine whose server's way of treating messages is followed.
    """

    def __init__(self, loaded: Any, directory: Path, *, template: str | None = None, runtime: str = "vllm") -> None:
        from transformers.utils.chat_template_utils import render_jinja_template  # noqa: PLC0415

        self._loaded = loaded
        self._render: Callable[..., Any] = render_jinja_template
        self._template = template
        self._runtime = runtime
        self._rust: RustTokenizer | None = getattr(loaded, "backend_tokenizer", None)
        added: Mapping[int, Any] = loaded.added_tokens_decoder
        self._added = {number: token.content.encode() for number, token in added.items()}
        self._special = frozenset(number for number, token in added.items() if token.special)
        if self._rust is None:
            self._special |= frozenset(loaded.all_special_ids)
        self.vocab_size = max(len(loaded), 1 + max(self._added, default=0))
        own = {loaded.eos_token_id} if type(loaded.eos_token_id) is int else set()
        self.eos_ids = eos_of(directory) | own
        self.context = context_of(directory)
        self._pieces: Pieces | None = None
        self._kept: Pieces | None = None
        self._per_byte = False
        self.is_byte_level = False
        if self._rust is not None:
            self._rust.no_truncation()  # which a tokenizer.json may ask for
            self._rust.no_padding()
            parts = decoder_parts(self._rust)
            self._per_byte = any(part["type"] == "ByteFallback" for part in parts)
            self.is_byte_level = any(part["type"] == "ByteLevel" for part in parts)
            if is_local(parts):
                self._pieces, self._kept = Pieces(self._rust), Pieces(self._rust, self._special)
        self._styles: dict[str, Style] = {}
        # In small steps: the interpreter lock is given back between them.
        self.longest = max((len(self.word(number)) for number in range(self.vocab_size)), default=1)

    @property
    def has_template(self) -> bool:
        """Whether conversations can be rendered without a client's own template."""
        return bool(self._template or self._loaded.chat_template)

    @property
    def special_texts(self) -> tuple[str, ...]:
        """The texts of the special tokens."""
        return tuple(self._added[number].decode() for number in sorted(self._special) if number in self._added)

    def encode(self, text: str, *, special: bool) -> list[int]:
        """See Tokenizer."""
        if self._rust is None:
            ids: list[int] = self._loaded.encode(text, add_special_tokens=special)
        else:
            ids = self._rust.encode_batch_fast([text], add_special_tokens=special)[0].ids
        return ids

    def chat(self, prompt: ChatPrompt) -> str:
        """See Tokenizer."""
        tools = [dict(tool) for tool in prompt.tools] if prompt.tools else None
        try:
            template = self._loaded.get_chat_template(prompt.chat_template or self._template, tools=tools)
        except ValueError:
            raise GatewayError(
                "process_messages_failed",
                "the model has no chat template; --chat-template gives it one",
                param="messages",
            ) from None
        given = {name: value for name, value in prompt.template_kwargs.items() if name not in _OURS}
        try:
            # What ``apply_chat_template`` does, but for bringing messages into a form that they have (measured: 70 µs).
            (rendered,), _ = self._render(
                conversations=[suited(prompt.messages, self._style(template))],
                tools=tools,
                documents=[dict(document) for document in prompt.documents] if prompt.documents else None,
                chat_template=template,
                add_generation_prompt=prompt.add_generation_prompt,
                continue_final_message=prompt.continue_final_message,
                **{**self._loaded.special_tokens_map, **given},
            )
        except Exception as error:  # noqa: BLE001 -- whatever a template says is about the client's messages
            raise GatewayError("process_messages_failed", _complaint(error), param="messages") from None
        return str(rendered)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True, spaces_between: bool = True) -> str:
        """See Tokenizer."""
        if skip_special or spaces_between:
            return self._decoded(list(ids), skip_special=skip_special)
        whole = self.detokenizer((), skip_special=skip_special, spaces_between=spaces_between)
        return whole.add(ids) + whole.end()

    def token(self, id: int) -> tuple[str, bytes]:  # noqa: A002 -- see Tokenizer
        """See Tokenizer."""
        pieces = self._pieces
        data = self._decoded([id], skip_special=False).encode() if pieces is None else pieces[id]
        return data.decode(errors="replace"), data

    def word(self, id: int) -> str:  # noqa: A002 -- as above
        """How the vocabulary writes a token; "" for an id that it does not have."""
        return self._loaded.convert_ids_to_tokens(id) or ""

    def detokenizer(
        self, prompt_ids: Sequence[int] = (), *, skip_special: bool = True, spaces_between: bool = True
    ) -> Detokenizer:
        """See Tokenizer."""
        pieces = self._kept if skip_special else self._pieces
        if pieces is None:
            skipped = self._special if skip_special else frozenset()
            return ByWindow(lambda ids: self._decoded(ids, skip_special=False), prompt_ids, skipped)
        added = None if skip_special or spaces_between else self._added
        return ByPieces(pieces, prompt_ids, per_byte=self._per_byte, added=added)

    def _decoded(self, ids: list[int], *, skip_special: bool) -> str:
        if self._rust is not None:
            text: str = self._rust.decode(ids, skip_special_tokens=skip_special)
            return text
        known = [one for one in ids if one < self.vocab_size]  # others have no text, as those of the library
        return str(self._loaded.decode(known, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False))

    def _style(self, template: str) -> Style:
        style = self._styles.get(template)
        if style is None:
            if len(self._styles) >= _MOST_TEMPLATES:
                self._styles.clear()
            style = self._styles[template] = Style.of(template, _syntax_tree(template), self._runtime)
        return style


def load(directory: Path, *, template: str | None = None, runtime: str = "vllm") -> HfTokenizer:
    """Load what is in ``directory``. Blocks for seconds, and keeps the interpreter lock for some of them.

    ``template`` is a Jinja file, or the name of one of the model's chat templates. Raises FilesError when there is no
    tokenizer that can be loaded without running the model's own code, or no such template.
    """
    quiet_libraries()
    try:
        from transformers import AutoTokenizer  # type: ignore[import-not-found, unused-ignore] # noqa: PLC0415

        loaded = AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
        chosen = None if template is None else _chosen(template, loaded)
        return HfTokenizer(loaded, directory, template=chosen, runtime=runtime)
    except FilesError:
        raise
    except BaseException as error:  # the Rust library's panics are no Exceptions
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise FilesError(f"transformers cannot load the tokenizer: {_complaint(error)}") from error


def _chosen(template: str, loaded: Any) -> str:
    """The template's text, or the name that ``loaded`` knows it by."""
    own = loaded.chat_template
    if isinstance(own, dict) and template in own:
        return template
    path = Path(template).expanduser()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        names = f" (it has {', '.join(own)})" if isinstance(own, dict) else ""
        raise FilesError(f"chat template {template}: no template of the model{names}, and no file: {error}") from None


def _syntax_tree(template: str) -> Any:
    """The template's syntax tree, with the extensions that transformers knows; None where it has none."""
    from transformers.utils.chat_template_utils import _compile_jinja_template  # noqa: PLC0415

    try:
        return _compile_jinja_template(template).environment.parse(template)
    except Exception:  # noqa: BLE001 -- rendering will say what is wrong
        return None


def _complaint(error: BaseException) -> str:
    """What a template or a library has to say, in one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:_LONGEST_COMPLAINT]
