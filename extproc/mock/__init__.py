"""Strict mock workers: an engine's HTTP or gRPC over real sockets, with its rules; they record what they get."""

from extproc.mock.faults import Fault, Point, Rule
from extproc.mock.recorder import Outcome, Record
from extproc.mock.rpc.worker import RpcMock
from extproc.mock.sglang.worker import SglangMock
from extproc.mock.vllm.worker import VllmMock
from extproc.mock.worker import MockWorker

__all__ = ["Fault", "MockWorker", "Outcome", "Point", "Record", "RpcMock", "Rule", "SglangMock", "VllmMock"]
