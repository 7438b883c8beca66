"""The mock's recorder forgets the oldest, and in time."""

from extproc.mock.recorder import Outcome, Record, Recorder


def ended(recorder, body):
    record = Record("POST", "/", [], {}, inference=True)
    recorder.open(record)
    record.body = body
    recorder.close(record, Outcome.COMPLETED)
    return record


def test_only_so_many_are_kept():
    recorder = Recorder(limit=3)
    records = [ended(recorder, b"x") for _ in range(5)]
    assert list(recorder) == records[2:]


def test_only_so_many_bytes_are_kept():
    recorder = Recorder(limit=100, byte_limit=1000)
    records = [ended(recorder, b"x" * 400) for _ in range(5)]
    assert list(recorder) == records[3:]
    recorder.clear()
    assert len(recorder) == 0
    assert list(recorder) == []
    kept = [ended(recorder, b"x" * 400) for _ in range(2)]
    assert list(recorder) == kept


def test_what_is_live_is_never_forgotten():
    recorder = Recorder(limit=1, byte_limit=10)
    live = Record("POST", "/", [], {}, inference=True)
    recorder.open(live)
    ended(recorder, b"x" * 100)
    assert live in list(recorder)
