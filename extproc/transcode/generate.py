"""``/generate``, as SGLang's own server answers: every chunk of a stream has all of the text and all of the tokens.

Of a list of prompts, or of several samples, the chunks have an index.

What gRPC does not tell of is what a server has that knows none of it: ``weight_version`` is "default", nothing was
retracted, the cached tokens have no details, there is no rank.

Source: sglang 0.5.23 managers/tokenizer_manager.py (``_handle_batch_output``), managers/schedule_batch.py
(``BaseFinishReason``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import orjson

from extproc.generation.events import PromptLogprobs
from extproc.transcode.logprobs import NativeRows
from extproc.transcode.output import Output, Row
from extproc.transcode.usage import Tally
from extproc.transcode.writer import DONE, NULL, Context, string


class Generate:
    """See :class:`extproc.transcode.writer.Writer`.

    Args:
        now: seconds since the epoch; where it is given, the answer tells its times.
    """

    def __init__(self, context: Context, now: Callable[[], float] | None = None) -> None:
        asked = context.asked
        self._begun_meta = b'{"id":%b,"finish_reason":' % string(context.id)
        self._rest = b',"prompt_token_ids":[%b]' % _joined(context.prepared.ids) if asked.return_token_ids else b""
        if asked.stream and (asked.batched or asked.samples > 1):
            self._rest += b',"index":%d' % context.index
        self.rows: NativeRows | None = None
        self._prompt_rows: NativeRows | None = None
        if asked.top_logprobs is not None:
            self.rows, self._prompt_rows = (
                NativeRows(context.tokenizer, asked.top_logprobs, texts=asked.text_in_logprobs) for _ in range(2)
            )
        self._text = bytearray()  # in JSON, without quotes
        self._ids = bytearray()  # in JSON, without brackets
        self._now = now
        self._begun = now() if now else 0.0
        self._answered = False
        self._finished = False

    def prompt(self, logprobs: PromptLogprobs) -> None:
        """See :class:`extproc.transcode.writer.Writer`."""
        if self._prompt_rows is not None:
            tops = logprobs.tops or (((), ()),) * len(logprobs.ids)
            for row in zip(logprobs.ids, logprobs.values, tops, strict=False):
                self._prompt_rows.add(Row(*row), "")

    def chunk(self, output: Output, tally: Tally) -> bytes:
        """See :class:`extproc.transcode.writer.Writer`."""
        if self._finished or not (output.grown or output.finish):
            return b""
        self._finished = output.finish is not None
        return b"data: %b\n\n" % self.body(output, tally)

    def last(self, output: Output, tally: Tally) -> bytes:  # noqa: ARG002 - as other APIs' writers
        """See :class:`extproc.transcode.writer.Writer`."""
        return DONE

    def body(self, output: Output, tally: Tally) -> bytes:
        """See :class:`extproc.transcode.writer.Writer`."""
        self._text += string(output.text())[1:-1]
        ids = _joined(output.ids())
        self._ids += b"," + ids if self._ids and ids else ids
        meta = self._meta(output, tally)
        parts = b'{"text":"', self._text, b'","output_ids":[', self._ids, b'],"meta_info":', meta, self._rest, b"}"
        return b"".join(parts)

    def _meta(self, output: Output, tally: Tally) -> bytes:
        counts = tally.counts(output.count)
        return (
            b'%b%b,"prompt_tokens":%d,"weight_version":"default","num_retractions":0,%b'
            b'"reasoning_tokens":%d,"completion_tokens":%d,"cached_tokens":%d,%b"cached_tokens_details":null,'
            b'"dp_rank":null%b}'
        ) % (
            self._begun_meta,
            _finish(output),
            counts.prompt,
            self._logprobs(output),
            counts.reasoning,
            counts.completion,
            counts.cached,
            b'"weight_versions":[{"version":"default","start":0,"end":%d}],' % output.count if output.finish else b"",
            self._times(output),
        )

    def _logprobs(self, output: Output) -> bytes:
        rows, prompt = self.rows, self._prompt_rows
        if rows is None or prompt is None:
            return b""
        tops = b""
        if rows.most:
            tops = b'"input_top_logprobs":%b,"output_top_logprobs":%b,' % (prompt.tops(), rows.tops(output.unwritten))
        return b'"input_token_logprobs":%b,"output_token_logprobs":%b,"output_token_logprobs_length":%d,%b' % (
            prompt.rows,
            rows.rows,
            rows.count,
            tops,
        )

    def _times(self, output: Output) -> bytes:
        if self._now is None:
            return b""
        now = self._now()
        times = b',"e2e_latency":%b' % orjson.dumps(now - self._begun) if output.finish else b""
        if not self._answered:
            self._answered = True
            times += b',"response_sent_to_client_ts":%b' % orjson.dumps(now)
        return times


def _joined(ids: Iterable[int]) -> bytes:
    return b",".join([b"%d" % one for one in ids])


def _finish(output: Output) -> bytes:
    if output.finish is None:
        return NULL
    if output.finish == "length":
        return b'{"type":"length","length":%d}' % output.count
    matched = output.end if output.matched is None else output.matched
    return b'{"type":%b,"matched":%b}' % (string(output.finish), orjson.dumps(matched))
