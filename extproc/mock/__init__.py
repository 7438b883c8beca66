"""Strict mock workers: they speak an engine's HTTP over real sockets, with its rules, and record what they get."""

from extproc.mock.faults import Fault, Point, Rule
from extproc.mock.recorder import Outcome, Record
from extproc.mock.sglang.worker import SglangMock
from extproc.mock.vllm.worker import VllmMock
from extproc.mock.worker import MockWorker

__all__ = ["Fault", "MockWorker", "Outcome", "Point", "Record", "Rule", "SglangMock", "VllmMock"]
