"""Chat Completions, as vLLM's own server answers.

A stream: a chunk with the role, chunks of content, one with the finish, with ``include_usage`` one of usage, [DONE].

Source: vllm 0.32 entrypoints/openai/chat_completion/serving.py (``chat_completion_stream_generator``,
``chat_completion_full_generator``), protocol.py.
"""

from __future__ import annotations

from typing import Final

from extproc.generation.events import PromptLogprobs
from extproc.transcode.logprobs import ChatRows, prompt_logprobs, prompt_rows
from extproc.transcode.output import Output
from extproc.transcode.usage import Tally
from extproc.transcode.vocabulary import Vocabulary
from extproc.transcode.writer import DONE, NULL, Context, ending, integers, string

_GOING_ON: Final = b'"finish_reason":null'


class Chat:
    """See :class:`extproc.transcode.writer.Writer`."""

    def __init__(self, context: Context) -> None:
        asked = context.asked
        self._context = context
        self.rows = (
            None
            if asked.top_logprobs is None
            else ChatRows(context.tokenizer, asked.top_logprobs, context.halves, as_ids=asked.tokens_as_ids)
        )
        self._identity = b'"created":%d,"model":%b' % (context.created, string(context.model))
        self._start = b'data: {"id":%b,"object":"chat.completion.chunk",%b,"choices":[' % (
            string(context.id),
            self._identity,
        )
        self._content = b'%b{"index":%d,"delta":{"content":' % (self._start, context.index)
        # What most requests have behind the content.
        self._rest = b'},"logprobs":null,%b,"token_ids":null}]}\n\n' % _GOING_ON
        self._is_plain = self.rows is None and not asked.return_token_ids and not asked.continuous_usage
        self._prompt_logprobs = NULL
        self._opened = self._finished = False

    def prompt(self, logprobs: PromptLogprobs) -> None:
        """See :class:`extproc.transcode.writer.Writer`."""
        context = self._context
        vocabulary = Vocabulary(context.tokenizer, context.halves)
        rows = prompt_rows(context.tokenizer, logprobs)
        self._prompt_logprobs = prompt_logprobs(vocabulary, rows, context.asked.prompt_logprobs or 0)

    def chunk(self, output: Output, tally: Tally) -> bytes:
        """See :class:`extproc.transcode.writer.Writer`."""
        if self._finished:
            return b""
        opening = b"" if self._opened else self._opening(tally)
        text = output.text()
        ids = output.ids()
        if output.finish is None:
            if self._is_plain:
                return b"%b%b%b%b" % (opening, self._content, string(text), self._rest) if text else opening
            if not ids and not text:
                return opening
        self._finished = output.finish is not None
        return b'%b%b%b},"logprobs":%b,%b,"token_ids":%b}]%b}\n\n' % (
            opening,
            self._content,
            string(text),
            self.rows.take() if self.rows is not None and ids else NULL,
            ending(self._context, output) if self._finished else _GOING_ON,
            integers(ids) if self._context.asked.return_token_ids else NULL,
            self._usage_of(tally, output.count),
        )

    def last(self, output: Output, tally: Tally) -> bytes:
        """See :class:`extproc.transcode.writer.Writer`."""
        if not self._context.asked.include_usage:
            return DONE
        return b'%b],"usage":%b}\n\n%b' % (self._start, tally.counts(output.count).last, DONE)

    def body(self, output: Output, tally: Tally) -> bytes:
        """See :class:`extproc.transcode.writer.Writer`."""
        context, ids = self._context, output.ids()
        shows_ids = context.asked.return_token_ids
        choice = (
            b'{"index":%d,"message":{"role":%b,"content":%b,"refusal":null,"annotations":null,"audio":null,'
            b'"function_call":null,"reasoning":null},"logprobs":%b,%b,"token_ids":%b,"routed_experts":null}'
        ) % (
            context.index,
            string(self._role),
            string(output.text()),
            NULL if self.rows is None else self.rows.take(),
            ending(context, output),
            integers(ids) if shows_ids else NULL,
        )
        return (
            b'{"id":%b,"object":"chat.completion",%b,"choices":[%b],"service_tier":null,"system_fingerprint":null,'
            b'"usage":%b,"prompt_logprobs":%b,"prompt_token_ids":%b,"prompt_text":null,"kv_transfer_params":null,'
            b'"ec_transfer_params":null,"metrics":null}'
        ) % (
            string(context.id),
            self._identity,
            choice,
            tally.counts(output.count).whole,
            self._prompt_logprobs,
            integers(context.prepared.ids) if shows_ids else NULL,
        )

    @property
    def _role(self) -> str:
        """Who speaks: a conversation that is not to get an assistant's turn goes on with its last message."""
        chat = self._context.asked.chat
        if chat is None or chat.add_generation_prompt or not chat.messages:
            return "assistant"
        return str(chat.messages[-1]["role"])

    def _opening(self, tally: Tally) -> bytes:
        self._opened = True
        context = self._context
        return (
            b'%b{"index":%d,"delta":{"role":%b,"content":""},"logprobs":null,"finish_reason":null}]%b,'
            b'"prompt_token_ids":%b,"prompt_text":null}\n\n'
        ) % (
            self._start,
            context.index,
            string(self._role),
            self._usage_of(tally, 0),
            integers(context.prepared.ids) if context.asked.return_token_ids else NULL,
        )

    def _usage_of(self, tally: Tally, completion: int) -> bytes:
        if not self._context.asked.continuous_usage:
            return b""
        return b',"usage":%b,"completion_tokens_details":null}' % tally.counts(completion).so_far[:-1]
