"""The model of the mock gRPC workers: its tokenizer, in the files that ``GetTokenizer`` streams, and what it writes.

The tokenizer is a byte-level BPE of 4096 tokens: 256 bytes, and words of two syllables with a space before them. What
is written depends on the prompt's token ids and the sampling parameters alone, is mostly words, and has now and then a
character that takes several tokens. ``written`` predicts it, ``decoded`` says how it reads.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Final

from extproc.mock.generation import Limits, Prompt, Text

VOCABULARY: Final = 4096
CONTEXT: Final = 2048
MARGIN: Final = 6  # tokens of it that SGLang and TokenSpeed keep
PADDING, BEGIN, END, TURN_BEGINS, TURN_ENDS = range(5)
SPECIAL: Final = ("<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE: Final = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_FIRST_BYTE: Final = len(SPECIAL)
_STORY: Final = 65_536
_OF_SEVERAL: Final = ("é", "ß", "語", "日", "🙂")  # characters of two to four tokens
_BETWEEN: Final = 12  # words, more or less, from one of them to the next
_SYLLABLES: Final = [consonant + vowel for consonant in "bdfgklmnprstvwyz" for vowel in "aeio"]
_FIRST_WORD: Final = _FIRST_BYTE + 256 + 2 * len(_SYLLABLES)


@cache
def pieces() -> tuple[bytes, ...]:
    """What each token reads as; nothing for special tokens."""
    syllables = [syllable.encode() for syllable in _SYLLABLES]
    spaced = [b" " + syllable for syllable in syllables]
    words = [first + second for first in spaced for second in syllables]
    known = [b""] * len(SPECIAL) + [bytes([byte]) for byte in range(256)] + syllables + spaced + words
    return tuple(known[:VOCABULARY])


def decoded(ids: Iterable[int], *, special: bool = False) -> str:
    """How token ids read, as a whole; ``special``: with the names of special tokens."""
    known = pieces()
    return b"".join(
        SPECIAL[token].encode() if special and token < len(SPECIAL) else known[token] for token in ids
    ).decode("utf-8", "replace")


@cache
def _story() -> list[int]:
    """An endless text to read from: where to start depends on the prompt. It has no special token."""
    dice = random.Random(20)  # noqa: S311 - text, not a secret
    ids: list[int] = []
    while len(ids) < _STORY:
        ids += dice.choices(range(_FIRST_WORD, VOCABULARY), k=dice.randrange(1, 2 * _BETWEEN))
        ids += [_FIRST_BYTE + byte for byte in dice.choice(_OF_SEVERAL).encode()]
    return ids[:_STORY]


def write(
    prompt: Prompt, limits: Limits, natural_length: int, *, context: int = CONTEXT, source: int | None = None
) -> Text:
    """As ``mock.generation.write``, of this model's vocabulary; ``pieces`` are left to :func:`decoded`."""
    available = max(context - prompt.length, 0)
    cap = available if limits.max_new_tokens is None else min(limits.max_new_tokens, available)
    start = _begin((prompt.digest if source is None else source) + limits.seed * 7919)
    # The end of text is held back until ``min_tokens`` have been written.
    natural_length = max(natural_length, limits.min_tokens + 1)
    if limits.ignore_eos or cap <= natural_length:
        ids, finish = _read(start, cap), _by_length(cap)
    else:
        ids, finish = [*_read(start, natural_length - 1), END], {"type": "stop", "matched": END}
    first = ids[0] if ids else _story()[start]
    if limits.stop or limits.stop_token_ids:
        ids, finish = _stopped(ids, finish, limits)
    return Text(ids, [], finish, first)


def written(ids: Sequence[int], limits: Limits | None = None, tokens: int = 16) -> Text:
    """What is written behind a prompt: all ids, also the one that ends it, and why it ends."""
    return write(Prompt(ids=tuple(ids)), limits or Limits(), tokens)


def _begin(number: int) -> int:
    """Where to start to read: at a word."""
    story, start = _story(), number % _STORY
    while story[start] < _FIRST_WORD:
        start = (start + 1) % _STORY
    return start


def _by_length(count: int) -> dict[str, object]:
    return {"type": "length", "length": count}


def _read(start: int, count: int) -> list[int]:
    story = _story()
    ids = story[start : start + count]
    while len(ids) < count:
        ids += story[: count - len(ids)]
    return ids


def _stopped(ids: list[int], finish: dict[str, object], limits: Limits) -> tuple[list[int], dict[str, object]]:
    """Cut behind the first stop token, or the token that completes a stop string."""
    known, text = pieces(), b""
    stops = [(stop.encode(), stop) for stop in limits.stop if stop]
    for count, token in enumerate(ids, 1):
        before, text = len(text), text + known[token]
        if count <= limits.min_tokens:
            continue
        if token in limits.stop_token_ids:
            return ids[:count], {"type": "stop", "matched": token}
        for needle, stop in stops:
            if text.find(needle, max(0, before - len(needle) + 1)) >= 0:
                return ids[:count], {"type": "stop", "matched": stop}
    return ids, finish


# --- files ---


@cache
def files() -> dict[str, bytes]:
    """The model's tokenizer files, by name."""
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(token) for token in range(len(SPECIAL))],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": True,
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [BEGIN], "tokens": ["<s>"]}},
        },
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": _vocabulary(),
            "merges": _merges(),
        },
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
        "chat_template": CHAT_TEMPLATE,
    }
    model = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "max_position_embeddings": CONTEXT,
        "bos_token_id": BEGIN,
        "eos_token_id": END,
        "pad_token_id": PADDING,
    }
    made = {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": config,
        "config.json": model,
        "generation_config.json": {"bos_token_id": BEGIN, "eos_token_id": END, "pad_token_id": PADDING},
    }
    return {name: json.dumps(content, ensure_ascii=False).encode() for name, content in made.items()}


def _added(token: int) -> dict[str, object]:
    return {
        "id": token,
        "content": SPECIAL[token],
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }


def _vocabulary() -> dict[str, int]:
    names = {text: token for token, text in enumerate(SPECIAL)}
    return names | {_named(piece): token for token, piece in enumerate(pieces()) if token >= _FIRST_BYTE}


def _merges() -> list[list[str]]:
    known = set(pieces())
    syllables = [_named(syllable.encode()) for syllable in _SYLLABLES]
    space = _named(b" ")
    return [
        *([syllable[0], syllable[1]] for syllable in syllables),
        *([space, syllable] for syllable in syllables),
        *(
            [space + first, second]
            for first in _SYLLABLES
            for second in _SYLLABLES
            if f" {first}{second}".encode() in known
        ),
    ]


def _named(piece: bytes) -> str:
    """How a byte-level vocabulary writes bytes: printable characters for themselves, 256 and more for the others."""
    return "".join(_alphabet()[byte] for byte in piece)


@cache
def _alphabet() -> list[str]:
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]
