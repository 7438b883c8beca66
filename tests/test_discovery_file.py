"""The file that lists workers: its forms, and how its changes are followed."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import yaml
from discovery_rig import running
from fleet import eventually

from extproc.discovery.file import FileWatcher
from extproc.discovery.file_format import FileError, read_workers
from extproc.discovery.state import DiscoveryState
from extproc.discovery.wanted import Key, Wanted
from extproc.workers.worker import Role

PAIR = [
    {"url": "http://p:8000", "worker_type": "prefill", "bootstrap_port": 8998, "labels": {"zone": "a"}},
    {"url": "grpc://d:8000", "worker_type": "decode", "api_key": "own"},
]
FLOW = """\
[{url: 'http://p:8000', worker_type: prefill, bootstrap_port: 8998, labels: {zone: a}},
 {url: 'grpc://d:8000', worker_type: decode, api_key: own}]"""
BOTH = [Key(Role.PREFILL, "p:8000"), Key(Role.DECODE, "d:8000")]


@pytest.mark.parametrize(
    "content",
    [
        json.dumps(PAIR),
        json.dumps({"version": 1, "workers": PAIR}),
        yaml.safe_dump(PAIR),
        yaml.safe_dump({"workers": PAIR}),
        f"# flow style\n{FLOW}",
        FLOW,
    ],
)
def test_forms(content: str) -> None:
    found = read_workers(content.encode(), "gateway's")
    assert list(found) == BOTH
    prefill, decode = (wanted.spec for wanted in found.values())
    assert (prefill.bootstrap_port, prefill.api_key, decode.api_key) == (8998, "gateway's", "own")
    assert prefill.labels == {"zone": "a", "smg.ai/discovery-provider": "file"}
    assert str(decode.url) == "grpc://d:8000"
    assert all(wanted.protocol_known and wanted.ready for wanted in found.values())


def test_a_fleet_without_workers() -> None:
    assert read_workers(b"[]", None) == {}
    assert read_workers(b'{"version": 1, "workers": []}', None) == {}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "it is empty; a fleet without workers is []"),
        (" \n", "it is empty; a fleet without workers is []"),
        ("# nothing\n", "expected a list of workers"),
        ("{}", "expected a list of workers"),
        ("workers: 1", "expected a list of workers"),
        ('{"version": 2, "workers": []}', "version is 2, expected 1"),
        ('{"workers": [], "other": 1}', "expected a list of workers, or version and workers; not other"),
        ("[1]", "worker 1: expected the fields of POST /workers"),
        ("- 1: 2", "worker 1: expected the fields of POST /workers"),
        ('[{"url": "http://p:1"}]', "worker 1: missing field `worker_type`"),
        ('[{"url": "p:1", "worker_type": "decode"}]', "worker 1: url: URL must start with a lowercase http://"),
        ('[{"url": "http://p:1", "worker_type": "decode", "rol": 1}]', "worker 1: unknown field `rol`"),
        (
            json.dumps([*PAIR, {"url": "https://d:8000", "worker_type": "decode"}]),
            "worker 3: https://d:8000 is a decode worker further up already",
        ),
        ("- url: http://p:1\n  url: http://p:2\n  worker_type: decode", "key 'url' occurs twice"),
        ("- [", "neither YAML nor JSON"),
        ('[{"url": ', "neither YAML nor JSON"),
        ("a: *b", "neither YAML nor JSON"),
        ("\x00", "neither YAML nor JSON"),
        ("- url: 2026-13-01", "neither YAML nor JSON: month must be in 1..12"),
        ("- !!int x", "neither YAML nor JSON"),
        ("- !!bool x", "neither YAML nor JSON"),
        ("- !!timestamp x", "neither YAML nor JSON"),
        (f"- {'9' * 5000}", "neither YAML nor JSON"),
    ],
)
def test_what_is_none(content: str, why: str) -> None:
    with pytest.raises(FileError) as refused:
        read_workers(content.encode(), None)
    assert why in str(refused.value)


# --- following it ---


def listing(*ports: int) -> str:
    return json.dumps([{"url": f"http://d:{port}", "worker_type": "decode"} for port in ports])


class Following:
    def __init__(self, path: Path, **pace: float) -> None:
        self.state = DiscoveryState("file")
        self.found: list[list[int]] = []
        self.refuses = False
        self.watcher = FileWatcher(path, None, self.state, self._took, **{"reread": 3600.0, "poll": 0.01} | pace)

    def _took(self, wanted: Mapping[Key, Wanted]) -> None:
        if self.refuses:
            raise ValueError("not this one")
        self.found.append([each.spec.url.port for each in wanted.values()])

    async def until(self, *ports: int) -> None:
        await eventually(lambda: self.found and self.found[-1] == list(ports))

    async def failed(self, times: int = 1) -> None:
        await eventually(lambda: self.state.failures.total() >= times)


@asynccontextmanager
async def following(path: Path, **pace: float) -> AsyncIterator[Following]:
    made = Following(path, **pace)
    async with running(made.watcher.run()):
        yield made


def _in_place(path: Path, content: str) -> None:
    path.write_text(content)


def _renamed(path: Path, content: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(content)
    new.replace(path)


def _as_a_config_map(path: Path, content: str) -> None:
    """As the kubelet does: FILE -> ..data/FILE, ..data -> a directory of its own for each state, renamed over."""
    base = path.parent
    state = base / f"..{len(list(base.iterdir()))}"
    state.mkdir()
    (state / path.name).write_text(content)
    link = base / "..data_tmp"
    link.symlink_to(state.name)
    link.replace(base / "..data")
    if not path.is_symlink():
        path.symlink_to(f"..data/{path.name}")


WAYS = pytest.mark.parametrize("write", [_in_place, _renamed, _as_a_config_map])
Write = Callable[[Path, str], None]


@WAYS
async def test_changes_are_followed(tmp_path: Path, write: Write) -> None:
    path = tmp_path / "workers.json"
    write(path, listing(1))
    async with following(path) as it:
        await it.until(1)
        assert (it.state.up, it.state.found) == (True, {("decode", "listed"): 1})
        write(path, listing(1, 2))
        await it.until(1, 2)
        write(path, listing(2))
        await it.until(2)
        write(path, "[]")
        await it.until()
        assert (it.state.up, it.state.found, it.state.failures) == (True, {}, {})


@WAYS
async def test_a_broken_one_changes_nothing(tmp_path: Path, write: Write, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "workers.json"
    write(path, listing(1))
    async with following(path) as it:
        await it.until(1)
        synced = it.state.synced
        with caplog.at_level(logging.INFO):
            write(path, '[{"url": "http://d:1"}]')
            await it.failed()
        assert (it.state.up, it.state.trouble, it.state.synced) == (False, "its file is not valid", synced)
        assert it.state.failures == {"invalid": 1}
        assert it.found == [[1]]
        assert "the last good one holds" in caplog.text
        assert "missing field `worker_type`" in str(vars(caplog.records[-1])["reason"])
        write(path, listing(1))  # as it was
        await eventually(lambda: it.state.up)
        assert it.found == [[1]]
        write(path, listing(3))
        await it.until(3)


async def test_what_cannot_be_registered_does_not_end_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "workers.json"
    path.write_text(listing(1))
    async with following(path) as it:
        await it.until(1)
        it.refuses = True
        path.write_text(listing(1, 2))
        await eventually(lambda: "registering what was found failed" in caplog.text)
        it.refuses = False
        path.write_text(listing(3))
        await it.until(3)


async def test_it_may_be_missing_at_first_and_later(tmp_path: Path) -> None:
    path = tmp_path / "workers.json"
    async with following(path) as it:
        await it.failed()
        assert it.state.doubt == "file discovery: its file cannot be read, and has found nobody yet"
        path.write_text(listing(1))
        await it.until(1)
        path.unlink()
        await it.failed(2)
        assert it.state.doubt == "file discovery: its file cannot be read"
        assert it.found == [[1]]
        path.write_text(listing(2))
        await it.until(2)


async def test_a_directory(tmp_path: Path) -> None:
    async with following(tmp_path) as it:
        await it.failed()
        assert it.state.failures == {"unreadable": 1}


async def test_what_cannot_be_told_from_its_times_is_found_by_reading_again(tmp_path: Path) -> None:
    path = tmp_path / "workers.json"
    path.write_text(listing(1))
    async with following(path, reread=0.02) as it:
        await it.until(1)
        before = path.stat()
        with path.open("r+") as file:
            file.write(listing(2))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        await it.until(2)


async def test_one_that_is_being_written_is_not_read_before_it_stays_the_same(tmp_path: Path) -> None:
    """Half a list in YAML is a list, too."""
    path = tmp_path / "workers.yaml"
    entries = ["- url: http://d:1\n  worker_type: decode\n", "- url: http://d:2\n  worker_type: decode\n"]
    path.write_text("".join(entries))
    it = Following(path, poll=0.0)
    watcher = it.watcher
    script = ["at first", "half", "half and a bit", "whole", "whole"]
    reads: list[int] = []
    look = watcher._look

    async def counted() -> None:
        reads.append(len(script))
        await look()

    watcher._stamp = lambda: script.pop(0) if script else "whole"  # type: ignore[method-assign,assignment,return-value]
    watcher._look = counted  # type: ignore[method-assign]
    task = asyncio.create_task(watcher.run())
    await eventually(lambda: len(reads) == 2)
    task.cancel()
    await asyncio.wait({task})
    assert reads == [4, 0], "at start, and once it stayed the same"


async def test_a_thousand_workers(tmp_path: Path) -> None:
    path = tmp_path / "workers.json"
    path.write_text(listing(*range(1, 1001)))
    async with following(path) as it:
        await it.until(*range(1, 1001))
