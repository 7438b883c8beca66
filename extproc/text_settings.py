"""The settings of prompts and answers as text, which gRPC workers leave to the gateway; :mod:`extproc.settings` has
the others."""

from __future__ import annotations

from typing import Annotated

from extproc.options import Group, Option
from extproc.policy_settings import PolicySettings
from extproc.values import ChatTemplate, Count, Text


class TextSettings(PolicySettings):
    """A part of :class:`extproc.settings.Settings`."""

    # fmt: off
    model_path: Annotated[Text | None, Option(
        Group.TEXT, "the model: a directory, or an id on the hub", "PATH", "as workers say")] = None
    tokenizer_path: Annotated[Text | None, Option(
        Group.TEXT, "its tokenizer, where that is elsewhere", "PATH", "as --model-path")] = None
    chat_template: Annotated[ChatTemplate | None, Option(
        Group.TEXT, "a Jinja file, or the name of one of the model's", "FILE", "the model's first")] = None
    trust_request_chat_template: Annotated[bool, Option(
        Group.TEXT, "take chat templates that requests bring")] = False
    disable_tokenizer_autoload: Annotated[bool, Option(
        Group.TEXT, "only what POST /v1/tokenizers adds")] = False
    tokenizer_cache_enable_l0: Annotated[bool, Option(
        Group.TEXT, "remember the tokens of whole prompts")] = False
    tokenizer_cache_l0_max_entries: Annotated[Count, Option(
        Group.TEXT, "... of so many at most", "COUNT")] = 10000
    tokenizer_cache_l0_max_memory: Annotated[Count, Option(
        Group.TEXT, "... and in so much memory", "BYTES")] = 268435456
    tokenizer_cache_enable_l1: Annotated[bool, Option(
        Group.TEXT, "remember those of prompts' beginnings, too")] = False
    tokenizer_cache_l1_max_memory: Annotated[Count, Option(
        Group.TEXT, "... in so much memory", "BYTES")] = 52428800
    # fmt: on
