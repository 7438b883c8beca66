"""A model's tokenizer files: which they are, what they say, and whether they are others than before."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import orjson

# What ``GetTokenizer`` bundles (``smg-grpc-servicer`` 0.14.1, ``tokenizer_bundle.py``), but for what is of images.
NAMES: Final = frozenset(
    {
        "tokenizer.json",
        "tokenizer_config.json",
        "config.json",
        "generation_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "vocab.txt",
        "merges.txt",
        "tokenizer.model",
        "tiktoken.model",
        "chat_template.json",
    }
)
PATTERNS: Final = ("*.tiktoken", "*.jinja", "*.model")
# One of these makes a directory a tokenizer's.
_VOCABULARIES: Final = frozenset({"tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model", "tiktoken.model"})
LARGEST: Final = 256 << 20  # bytes of a file; the largest vocabularies have some 35 MB
# Where a model's config says how many tokens it was made for, in the order in which vLLM looks (``get_max_len``).
_CONTEXTS: Final = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")


class FilesError(Exception):
    """A directory or archive from which no tokenizer can be made; the message says why."""


def is_tokenizer_file(name: str) -> bool:
    """Whether a file of this name, without directories, is read."""
    return name in NAMES or any(name.endswith(pattern[1:]) for pattern in PATTERNS)


def is_directory_of_tokenizer(path: Path) -> bool:
    """Whether there is a vocabulary in the directory."""
    try:
        return any((path / name).is_file() for name in _VOCABULARIES) or any(path.glob("*.tiktoken"))
    except OSError:
        return False


def files_of(path: Path) -> list[Path]:
    """The tokenizer's files in a directory, by name. Raises FilesError when there is no vocabulary among them."""
    if not is_directory_of_tokenizer(path):
        raise FilesError(f"{path} has no tokenizer files")
    try:
        return sorted(file for file in path.iterdir() if is_tokenizer_file(file.name) and file.is_file())
    except OSError as error:
        raise FilesError(f"{path} cannot be read: {error.strerror}") from None


def fingerprint(files: Iterable[Path]) -> str:
    """A digest of the files' names and contents: the same wherever they are, however they came."""
    digest = hashlib.sha256()
    for file in files:
        try:
            size = file.stat().st_size
            if size > LARGEST:
                raise FilesError(f"{file.name} has {size} bytes; at most {LARGEST} are read")
            content = file.read_bytes()
        except OSError as error:
            raise FilesError(f"{file} cannot be read: {error.strerror}") from None
        digest.update(b"%b %d\n%b" % (file.name.encode(), len(content), content))
    return digest.hexdigest()


def context_of(path: Path) -> int | None:
    """How many tokens the model's config says that it takes; None where it does not."""
    config = json_of(path / "config.json")
    for said in (config, config.get("text_config"), config.get("llm_config")):
        if isinstance(said, dict):
            for name in _CONTEXTS:
                if type(value := said.get(name)) is int and value > 0:
                    return value
    return None


def eos_of(path: Path) -> frozenset[int]:
    """The ids that end an answer, of the generation config and the model's config: engines stop at all of them."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        config = json_of(path / name)
        for said in (config, config.get("text_config")):
            value = said.get("eos_token_id") if isinstance(said, dict) else None
            found |= {item for item in (value if isinstance(value, list) else [value]) if type(item) is int}
    return frozenset(found)


def json_of(path: Path) -> Mapping[str, Any]:
    """A file's JSON object; empty where there is none."""
    try:
        value = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return {}
    return value if isinstance(value, dict) else {}
