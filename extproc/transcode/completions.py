"""Completions, as vLLM's own server answers.

A stream: chunks of text, the first one with the prompt where it is echoed, the last one with the finish; with
``include_usage`` a chunk of usage; [DONE].

Source: vllm 0.32 entrypoints/openai/completion/serving.py (``completion_stream_generator``,
``request_output_to_completion_response``), protocol.py.
"""

from __future__ import annotations

from typing import Final

from extproc.generation.events import PromptLogprobs
from extproc.transcode.logprobs import CompletionRows, prompt_logprobs, prompt_rows
from extproc.transcode.output import Output
from extproc.transcode.usage import Tally
from extproc.transcode.vocabulary import Vocabulary
from extproc.transcode.writer import DONE, NULL, Context, ending, integers, string

_GOING_ON: Final = b'"finish_reason":null,"stop_reason":null'


class Completions:
    """See :class:`extproc.transcode.writer.Writer`."""

    def __init__(self, context: Context) -> None:
        asked = context.asked
        self._context = context
        self.rows = (
            None
            if asked.top_logprobs is None
            else CompletionRows(context.tokenizer, asked.top_logprobs, context.halves, as_ids=asked.tokens_as_ids)
        )
        self._start = b'{"id":%b,"object":"text_completion","created":%d,"model":%b,"choices":[' % (
            string(context.id),
            context.created,
            string(context.model),
        )
        self._text = b'data: %b{"index":%d,"text":' % (self._start, context.index)
        # What most requests have behind the text.
        self._rest = b',"logprobs":null,%b,"prompt_token_ids":null,"token_ids":null}]}\n\n' % _GOING_ON
        self._is_plain = self.rows is None and not asked.return_token_ids and not asked.continuous_usage
        self._prompt_logprobs = NULL
        self._opened = self._finished = False

    def prompt(self, logprobs: PromptLogprobs) -> None:
        """See :class:`extproc.transcode.writer.Writer`."""
        context, asked = self._context, self._context.asked
        rows = prompt_rows(context.tokenizer, logprobs)
        if asked.echo and self.rows is not None:
            self.rows.echo(context.tokenizer, self._echo, rows)
        if not asked.stream:
            vocabulary = Vocabulary(context.tokenizer, context.halves)
            self._prompt_logprobs = prompt_logprobs(vocabulary, rows, asked.prompt_logprobs or 0)

    def chunk(self, output: Output, tally: Tally) -> bytes:
        """See :class:`extproc.transcode.writer.Writer`."""
        if self._finished:
            return b""
        text = output.text()
        ids = output.ids()
        if output.finish is None and self._opened:
            if self._is_plain:
                return b"%b%b%b" % (self._text, string(text), self._rest) if text else b""
            if not ids and not text:
                return b""
        asked = self._context.asked
        if not self._opened:
            if output.finish is None and not asked.echo and not (text or (ids and not self._is_plain)):
                return b""
            text = self._echo + text
        shows_prompt = not self._opened and (asked.echo or asked.return_token_ids)
        has_rows = self.rows is not None and (ids or (asked.echo and not self._opened))
        self._opened = True
        self._finished = output.finish is not None
        return b'%b%b,"logprobs":%b,%b,"prompt_token_ids":%b,"token_ids":%b}]%b}\n\n' % (
            self._text,
            string(text),
            self.rows.take() if has_rows and self.rows is not None else NULL,
            ending(self._context, output) if self._finished else _GOING_ON,
            integers(self._context.prepared.ids) if shows_prompt else NULL,
            integers(ids) if asked.return_token_ids else NULL,
            b',"usage":%b' % tally.counts(output.count).so_far if asked.continuous_usage else b"",
        )

    def last(self, output: Output, tally: Tally) -> bytes:
        """See :class:`extproc.transcode.writer.Writer`."""
        if not self._context.asked.include_usage:
            return DONE
        return b'data: %b],"usage":%b}\n\n%b' % (self._start, tally.counts(output.count).last, DONE)

    def body(self, output: Output, tally: Tally) -> bytes:
        """See :class:`extproc.transcode.writer.Writer`."""
        context, asked, ids = self._context, self._context.asked, output.ids()
        choice = (
            b'{"index":%d,"text":%b,"logprobs":%b,%b,"token_ids":%b,"prompt_logprobs":%b,"prompt_token_ids":%b,'
            b'"routed_experts":null}'
        ) % (
            context.index,
            string(self._echo + output.text()),
            NULL if self.rows is None else self.rows.take(),
            ending(context, output),
            integers(ids) if asked.return_token_ids else NULL,
            self._prompt_logprobs,
            integers(context.prepared.ids) if asked.return_token_ids else NULL,
        )
        return (
            b'%b%b],"service_tier":null,"system_fingerprint":null,"usage":%b,"kv_transfer_params":null,'
            b'"ec_transfer_params":null,"metrics":null}'
        ) % (self._start, choice, tally.counts(output.count).whole)

    @property
    def _echo(self) -> str:
        """The prompt's text as the answer begins with it; vLLM leaves it out where the prompt's ids are told."""
        context = self._context
        if not context.asked.echo or context.asked.return_token_ids:
            return ""
        return context.prepared.text or context.tokenizer.decode(context.prepared.ids, skip_special=False)
