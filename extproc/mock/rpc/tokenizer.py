"""``GetTokenizer``: a tokenizer's files as the engines' servers send them.

Source: ``smg-grpc-servicer`` 0.14.1, ``tokenizer_bundle.py``.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from extproc.mock.rpc.engines import COMMON

CHUNK: Final = 64 * 1024
_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "tiktoken.model",
    "chat_template.json",
    "preprocessor_config.json",
)
_GLOBS: Final = ("*.tiktoken", "*.jinja", "*.model")


def bundle(directory: Path) -> bytes:
    """The zip file of a directory. Raises FileNotFoundError when there is nothing to send."""
    files = {name: directory / name for name in _FILES if (directory / name).is_file()}
    files |= {file.name: file for pattern in _GLOBS for file in directory.glob(pattern)}
    if not files:
        raise FileNotFoundError(f"No tokenizer files found in {directory}")
    return zipped({name: file.read_bytes() for name, file in files.items()})


def zipped(files: Mapping[str, bytes]) -> bytes:
    """The zip file of files by their names."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return made.getvalue()


def chunks(archive: bytes, sha256: str | None = None) -> Iterator[Any]:
    """``GetTokenizerChunk`` messages; the last one has the checksum, the archive's own unless it is given."""
    checksum = hashlib.sha256(archive).hexdigest() if sha256 is None else sha256
    for start in range(0, len(archive), CHUNK):
        last = start + CHUNK >= len(archive)
        yield COMMON.GetTokenizerChunk(data=archive[start : start + CHUNK], sha256=checksum if last else "")
