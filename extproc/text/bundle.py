"""The archive that ``GetTokenizer`` streams: put together, checked, unpacked where it can do no harm.

``smg.grpc.common.GetTokenizerChunk``: pieces of a zip file; the last one names the whole one's SHA-256 as hexadecimal
digits. What is unpacked are tokenizer files, without directories; anything else in the archive is left where it is.
"""

from __future__ import annotations

import hashlib
import zipfile
import zlib
from io import BytesIO
from pathlib import Path
from typing import Final

from extproc.text.files import FilesError, is_tokenizer_file

LARGEST_ARCHIVE: Final = 256 << 20  # bytes
LARGEST_CONTENT: Final = 512 << 20  # bytes of all files together, unpacked
MOST_FILES: Final = 64
_PIECE: Final = 1 << 20


class Bundle:
    """An archive that comes in chunks."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._sha256 = ""

    def add(self, data: bytes, sha256: str) -> None:
        """Take the next chunk. Raises FilesError when it is too much, or comes after the last one."""
        if self._sha256:
            raise FilesError("the archive goes on after its checksum")
        self._data += data
        self._sha256 = sha256
        if len(self._data) > LARGEST_ARCHIVE:
            raise FilesError(f"the archive has more than {LARGEST_ARCHIVE} bytes")

    def unpack(self, directory: Path) -> None:
        """Check the whole and write its tokenizer files into ``directory``. Blocks. Raises FilesError."""
        if not self._data:
            raise FilesError("the worker sent an empty archive")
        if not self._sha256:
            raise FilesError("the archive ended without its checksum")
        if hashlib.sha256(self._data).hexdigest() != self._sha256.lower():
            raise FilesError("the archive is not what its checksum says")
        try:
            with zipfile.ZipFile(BytesIO(self._data)) as archive:
                _unpack(archive, directory)
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
            raise FilesError(f"the archive cannot be read: {error}") from None
        except OSError as error:
            raise FilesError(f"the archive cannot be unpacked: {error.strerror or error}") from None


def _unpack(archive: zipfile.ZipFile, directory: Path) -> None:
    wanted = [entry for entry in archive.infolist() if is_tokenizer_file(entry.filename) and "/" not in entry.filename]
    names = {entry.filename for entry in wanted}
    if len(wanted) > MOST_FILES or len(names) < len(wanted):
        raise FilesError("the archive has too many files, or one of them twice")
    left = LARGEST_CONTENT
    for entry in wanted:
        if "\\" in entry.filename or entry.filename.startswith("."):
            raise FilesError(f"the archive has a file {entry.filename!r}")
        # A size in an archive's directory is what somebody wrote there: what comes out is counted.
        with archive.open(entry) as packed, (directory / entry.filename).open("xb") as file:
            while piece := packed.read(_PIECE):
                left -= len(piece)
                if left < 0:
                    raise FilesError(f"the archive has more than {LARGEST_CONTENT} bytes in it")
                file.write(piece)
