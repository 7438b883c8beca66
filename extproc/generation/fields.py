"""What becomes of each field of a request that gRPC workers serve: mapped, without effect, or refused by its name.

Listed are OpenAI's fields and those of both engines' servers; one that none of the three knows is overlooked, as the
engines overlook it. docs/grpc-requests.md shows the same as a table (tested).
Source: vllm 0.32 entrypoints/openai/{chat_completion,completion}/protocol.py; sglang 0.5.23
srt/entrypoints/openai/protocol.py, srt/managers/io_struct.py (GenerateReqInput), srt/sampling/sampling_params.py; the
OpenAI API reference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from extproc.apis.request import CONTROL_FIELDS
from extproc.generation import values
from extproc.generation.constraints import NATIVE_FIELDS as NATIVE_CONSTRAINTS
from extproc.generation.constraints import TOP_FIELDS as CONSTRAINTS
from extproc.generation.sampling_fields import NATIVE_FIELDS, OPENAI_FIELDS
from extproc.generation.values import Fields

_NO_FIELD: Final = "the engines' gRPC services have no field for it"
_LATER: Final = "not yet supported over gRPC workers"
_NO_ANSWER: Final = "the engines' gRPC services do not send what it asks for"
_NOTHING: Final[tuple[object, ...]] = (None, False, 0, "", [], {})  # as good as not said


@dataclass(frozen=True, slots=True)
class Rule:
    """What becomes of the fields of one object.

    Attributes:
        mapped: what is read.
        ignored: what changes nothing of the answer, or what is ours to say.
        refused: what is a 400, and why, unless its value says nothing.
        harmless: of ``refused``: values that say nothing besides null, false, 0 and what is empty.
        closed: what is not listed is refused, too.
    """

    mapped: frozenset[str]
    ignored: frozenset[str] = frozenset()
    refused: Mapping[str, str] = field(default_factory=dict)
    harmless: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    closed: bool = False

    def check(self, fields: Fields) -> None:
        """Raise GatewayError for the first field that is refused."""
        for name in fields.members:
            if name in self.mapped or name in self.ignored:
                continue
            why = self.refused.get(name)
            if why is None:
                if self.closed:
                    values.refuse(fields.name(name), "there is no such parameter")
                continue
            value = fields.members[name]
            if not _says_nothing(value, self.harmless.get(name, ())):
                values.refuse(fields.name(name), why)


def _says_nothing(value: Any, harmless: tuple[object, ...]) -> bool:
    return any(type(value) is type(nothing) and value == nothing for nothing in (*_NOTHING, *harmless))


def _names(*texts: str) -> frozenset[str]:
    return frozenset(" ".join(texts).split())


def _because(why: str, *texts: str) -> dict[str, str]:
    return dict.fromkeys(_names(*texts), why)


# fmt: off
_IGNORED: Final = _names(
    # whose request it is, and what providers note down of it
    "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention session_id",
    "prompt_cache_options",
    "request_id custom_labels",
    # how fast, not what
    "prediction stream_interval",
    # of media, which are refused themselves
    "media_io_kwargs mm_processor_kwargs mm_payload return_mm_kwargs images_config video_config use_audio_in_video",
    "max_dynamic_patch min_dynamic_patch",
    # of what is refused, or is not asked for
    "length_penalty routed_experts_start_len routed_experts_prompt_start guided_decoding_backend",
    "return_flat_raw_top_logprobs_b64 return_token_offsets",
) | CONTROL_FIELDS
_REFUSED: Final = {
    **_because(
        _NO_FIELD, "use_beam_search watermarking watermark vllm_xargs bad_words allowed_token_ids logprob_token_ids",
        "repetition_detection thinking_token_budget custom_logit_processor custom_params session_params stop_regex",
        "cache_salt extra_key priority truncate_prompt_tokens truncation_side guided_whitespace_pattern lora_path",
    ),
    **_because(
        _NO_ANSWER,
        "return_hidden_states return_routed_experts return_cached_tokens_details return_spec_tokens_details",
    ),
}
_CHAT_REFUSED: Final = {
    **_REFUSED,
    **_because(
        _LATER, "functions function_call audio web_search_options modalities verbosity separate_reasoning",
        "include_reasoning input_ids task moderation",
    ),
    **_because(
        _NO_ANSWER, "return_prompt_text return_prompt_token_ids return_meta_info return_input_ids_in_sglext",
        "return_output_ids_in_sglext return_sampling_mask sampling_logprobs_mode return_flat_raw_output_top_logprobs",
    ),
    **_because("vLLM's echo of the last message is not made over gRPC workers", "echo"),
}
_CHAT_HARMLESS: Final = {
    "truncation_side": ("left",), "modalities": (["text"],), "verbosity": ("medium",), "include_reasoning": (True,),
}
_BOTH: Final = _names(
    "model stream stream_options n top_logprobs logprobs prompt_logprobs return_token_ids return_tokens_as_token_ids",
    "add_special_tokens rid",
)
CHAT: Final = Rule(
    OPENAI_FIELDS | CONSTRAINTS | _BOTH | _names(
        "messages tools tool_choice max_completion_tokens reasoning_effort reasoning thinking chat_template",
        "chat_template_kwargs add_generation_prompt continue_final_message documents",
    ),
    _IGNORED | _names("parallel_tool_calls stream_reasoning"),
    _CHAT_REFUSED,
    _CHAT_HARMLESS,
)
COMPLETIONS: Final = Rule(
    OPENAI_FIELDS | CONSTRAINTS | (_BOTH - {"top_logprobs"}) | _names("prompt echo best_of"),
    _IGNORED,
    {**_REFUSED, **_because(_LATER, "suffix prompt_embeds")},
    {"truncation_side": ("left",)},
)
GENERATE: Final = Rule(
    _names(
        "model text input_ids sampling_params return_logprob logprob_start_len top_logprobs_num",
        "return_text_in_logprobs stream rid return_prompt_token_ids",
    ),
    _IGNORED | _names(
        "log_metrics no_logs conversation_id routing_key background external_trace_header received_time return_bytes",
        "kv_hints require_reasoning modalities image_max_dynamic_patch video_max_dynamic_patch mm_hashes",
        "mm_content_hashes",
    ),
    {
        **_REFUSED,
        **_because(_LATER, "input_embeds image_data video_data audio_data lora_id positional_embed_overrides"),
        **_because(_NO_FIELD, "max_thinking_tokens multi_item_delimiter_indices token_indices_to_pool"),
        **_because(
            _NO_ANSWER, "token_ids_logprob return_sampling_mask sampling_logprobs_mode return_flat_raw_top_logprobs",
            "return_flat_raw_output_top_logprobs return_indexer_topk return_entropy",
        ),
    },
)
SAMPLING_PARAMS: Final = Rule(
    NATIVE_FIELDS | NATIVE_CONSTRAINTS | {"n"},
    _names("stream_interval"),
    _because(_NO_FIELD, "stop_regex beam_width custom_params watermark"),
    {"beam_width": (1,)},
    closed=True,
)
# fmt: on
