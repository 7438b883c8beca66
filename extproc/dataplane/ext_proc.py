"""The two filters by which Envoy asks the service: about every request, and about an answer that comes late."""

from __future__ import annotations

from typing import Final

from betterproto2 import Message
from envoy_data_plane.envoy.config.core.v3 import GrpcService, GrpcServiceEnvoyGrpc
from envoy_data_plane.envoy.extensions.common.matching.v3 import ExtensionWithMatcher
from envoy_data_plane.envoy.extensions.filters.common.matcher.action.v3 import SkipFilter
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import (
    ExternalProcessor,
    MetadataOptions,
    MetadataOptionsMetadataNamespaces,
    ProcessingMode,
    ProcessingModeBodySendMode,
    ProcessingModeHeaderSendMode,
)
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import HttpFilter
from envoy_data_plane.envoy.type.matcher.v3 import HttpResponseHeaderMatchInput
from envoy_data_plane.envoy.type.v3 import HttpStatus, StatusCode
from envoy_data_plane.xds.core.v3 import TypedExtensionConfig
from envoy_data_plane.xds.type.matcher.v3 import (
    Matcher,
    MatcherMatcherList,
    MatcherMatcherListFieldMatcher,
    MatcherMatcherListPredicate,
    MatcherMatcherListPredicateSinglePredicate,
    MatcherOnMatch,
    RegexMatcher,
    RegexMatcherGoogleRe2,
    StringMatcher,
)

from extproc.dataplane.config import DataplaneConfig
from extproc.dataplane.messages import any_of, extension, http_filter, seconds
from extproc.names import LATE, METADATA_NAMESPACE, PROGRESS_NAMESPACE

EXT_PROC_FILTER: Final = "ext_proc"
LATE_FILTER: Final = "late"

# The service may hold an answer's headers for a moment. When it does not reply at all, its process is stuck.
_REPLY_SECONDS: Final = 30.0

_SEND: Final = ProcessingModeHeaderSendMode.SEND
_SKIP: Final = ProcessingModeHeaderSendMode.SKIP


def ext_proc_filter(config: DataplaneConfig) -> HttpFilter:
    """One stream per request, open from its first byte to the answer's last, and no message per chunk of the answer.

    Off but where a route switches it on; see routes.py.
    """
    processor = _processor(config)
    processor.metadata_options = MetadataOptions(
        receiving_namespaces=MetadataOptionsMetadataNamespaces(untyped=[METADATA_NAMESPACE, PROGRESS_NAMESPACE])
    )
    processor.processing_mode = ProcessingMode(
        request_header_mode=_SEND,
        request_body_mode=ProcessingModeBodySendMode.FULL_DUPLEX_STREAMED,
        request_trailer_mode=_SEND,
        response_header_mode=_SEND,
        response_body_mode=ProcessingModeBodySendMode.NONE,
        response_trailer_mode=_SEND,
    )
    return http_filter(EXT_PROC_FILTER, processor, disabled=True)


def late_filter(config: DataplaneConfig) -> HttpFilter:
    """Gives the client an answer of the service's own after its request was released to a worker.

    By then the stream of the first filter can end the answer in one message only. So the service marks that message, or
    an answer's head that it was asked about, with the header LATE. For an answer with that header, and for no other,
    this filter opens a second stream, which begins with the answer's head and body; whatever the service sends in their
    place, as slowly as it likes, is what the client gets; the head leaves with the first piece of the body, be it
    empty. Must stand before the first filter in the list: answers pass the filters from the last to the first.
    """
    processor = _processor(config)
    processor.stat_prefix = LATE_FILTER
    processor.processing_mode = ProcessingMode(
        request_header_mode=_SKIP,
        request_body_mode=ProcessingModeBodySendMode.NONE,
        request_trailer_mode=_SKIP,
        response_header_mode=_SEND,
        response_body_mode=ProcessingModeBodySendMode.FULL_DUPLEX_STREAMED,
        response_trailer_mode=_SEND,
    )
    return http_filter(
        LATE_FILTER,
        ExtensionWithMatcher(extension_config=extension(EXT_PROC_FILTER, processor), xds_matcher=_skip_unless_late()),
    )


def _processor(config: DataplaneConfig) -> ExternalProcessor:
    return ExternalProcessor(
        grpc_service=GrpcService(
            envoy_grpc=GrpcServiceEnvoyGrpc(
                cluster_name=config.extproc_cluster, authority=config.extproc_authority, skip_envoy_headers=True
            ),
            timeout=seconds(0),
        ),
        failure_mode_allow=False,
        status_on_error=HttpStatus(code=StatusCode.ServiceUnavailable),
        # Where the body is in the full-duplex mode nothing has a timer, so this one is for the first filter's answers.
        message_timeout=seconds(min(config.idle_timeout, _REPLY_SECONDS)),
        allow_content_length_header=True,
    )


def _skip_unless_late() -> Matcher:
    has_header = MatcherMatcherListPredicate(
        single_predicate=MatcherMatcherListPredicateSinglePredicate(
            input=_extension("response-header", HttpResponseHeaderMatchInput(header_name=LATE)),
            value_match=StringMatcher(safe_regex=RegexMatcher(google_re2=RegexMatcherGoogleRe2(), regex=".+")),
        )
    )
    skip = MatcherOnMatch(action=_extension("skip", SkipFilter()))
    unless = MatcherMatcherListFieldMatcher(
        predicate=MatcherMatcherListPredicate(not_matcher=has_header), on_match=skip
    )
    return Matcher(matcher_list=MatcherMatcherList(matchers=[unless]))


def _extension(name: str, message: Message) -> TypedExtensionConfig:
    """As messages.extension, of the type that matchers have for it."""
    return TypedExtensionConfig(name=name, typed_config=any_of(message))
