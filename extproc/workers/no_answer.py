"""That a worker does not answer a question, whatever it is asked by."""

from __future__ import annotations


class NoAnswerError(Exception):
    """The worker did not answer; the message says why."""


class UnreachableError(NoAnswerError):
    """There was no connection: refused, no route, reset before an answer, or TLS failed."""
