"""A worker's archive does no harm, whatever is in it; directories are known by what is in them."""

from __future__ import annotations

import hashlib
import io
import shutil
import zipfile

import pytest

from extproc.mock.rpc.tokenizer import bundle, chunks
from extproc.text import bundle as module
from extproc.text.bundle import Bundle
from extproc.text.files import FilesError, context_of, eos_of, files_of, fingerprint
from extproc.text.hf import load
from tests.tokenizers_made import directory


def archive(*entries, compression=zipfile.ZIP_DEFLATED):
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", compression) as file:
        for name, content in entries:
            file.writestr(name, content)
    return made.getvalue()


def received(data, sha256=None):
    made = Bundle()
    for chunk in chunks(data, sha256):
        made.add(chunk.data, chunk.sha256)
    return made


def test_what_a_server_sends_is_what_it_has(tmp_path):
    given = directory(tmp_path / "given")
    (given / "model.safetensors").write_bytes(b"weights")
    into = tmp_path / "into"
    into.mkdir()
    received(bundle(given)).unpack(into)
    assert {file.name for file in into.iterdir()} == {file.name for file in given.iterdir()} - {"model.safetensors"}
    assert fingerprint(files_of(into)) == fingerprint(files_of(given))
    assert load(into).encode("low", special=False) == load(given).encode("low", special=False)


@pytest.mark.parametrize(
    "name",
    [
        "../tokenizer.json",
        "/tmp/tokenizer.json",
        "a/tokenizer.json",
        "tokenizer.py",
        "modeling.bin",
        "a\\tokenizer.json",
    ],
)
def test_nothing_else_is_written_and_nothing_elsewhere(tmp_path, name):
    into = tmp_path / "a" / "into"
    into.mkdir(parents=True)
    received(archive((name, "x"), ("vocab.json", "{}"))).unpack(into)
    assert [str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.is_file()] == ["a/into/vocab.json"]


@pytest.mark.parametrize(
    ("data", "sha256", "says"),
    [
        (archive(("tokenizer.json", "{}")), "0" * 64, "checksum"),
        (archive(("tokenizer.json", "{}")), "", "without its checksum"),
        (b"no archive", None, "cannot be read"),
        (b"", None, "empty"),
        (archive(("..model", "x")), None, "a file"),
        (archive(("a\\b.model", "x")), None, "a file"),
        (archive(*[(f"{n}.model", "x") for n in range(100)]), None, "too many"),
    ],
)
def test_what_is_wrong_with_it_is_said(tmp_path, data, sha256, says):
    with pytest.raises(FilesError, match=says):
        received(data, sha256).unpack(tmp_path)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_file_is_there_once(tmp_path):
    with pytest.raises(FilesError, match="twice"):
        received(archive(("vocab.json", "{}"), ("vocab.json", "[]"))).unpack(tmp_path)


def test_an_archive_is_not_too_large(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LARGEST_CONTENT", 1000)
    with pytest.raises(FilesError, match="more than 1000 bytes in it"):
        received(archive(("tokenizer.json", b"\0" * 2_000_000))).unpack(tmp_path)
    monkeypatch.setattr(module, "LARGEST_ARCHIVE", 100)
    with pytest.raises(FilesError, match="more than 100 bytes"):
        received(b"x" * 101)


def test_a_size_that_an_archive_tells_is_not_believed(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LARGEST_CONTENT", 1000)
    data = bytearray(archive(("tokenizer.json", b"\0" * 5000)))
    at = data.index(b"PK\x01\x02")
    data[at + 24 : at + 28] = (10).to_bytes(4, "little")  # its size, in the directory
    with pytest.raises(FilesError):
        received(bytes(data)).unpack(tmp_path)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 1000


def test_nothing_follows_the_checksum():
    made = Bundle()
    made.add(b"x", hashlib.sha256(b"x").hexdigest())
    with pytest.raises(FilesError, match="after its checksum"):
        made.add(b"y", "")


def test_a_fingerprint_is_of_names_and_contents(tmp_path):
    given = directory(tmp_path / "given")
    mark = fingerprint(files_of(given))
    copy = shutil.copytree(given, tmp_path / "copy")
    (copy / "model.safetensors").write_bytes(b"weights")
    assert fingerprint(files_of(copy)) == mark
    (copy / "chat_template.jinja").write_text("x")
    assert fingerprint(files_of(copy)) != mark


def test_what_the_files_say(tmp_path):
    given = directory(tmp_path, eos_token_id=[2, 7], max_position_embeddings=77)
    assert (context_of(given), eos_of(given)) == (77, {1, 2, 3, 7})
    loaded = load(given)
    assert (loaded.context, loaded.eos_ids) == (77, {1, 2, 3, 7})
    (given / "config.json").write_text('{"text_config": {"max_position_embeddings": 5, "eos_token_id": 9}}')
    assert (context_of(given), eos_of(given)) == (5, {1, 3, 9})
    (given / "config.json").write_text("no json")
    assert context_of(given) is None


def test_a_directory_without_a_tokenizer(tmp_path):
    with pytest.raises(FilesError, match="no tokenizer files"):
        files_of(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(FilesError, match="transformers cannot load"):
        load(tmp_path)
