"""HTTP/2 options between Envoy and our own service, with no limits that protect against strangers; and to engines."""

from __future__ import annotations

from envoy_data_plane.envoy.config.core.v3 import Http2ProtocolOptions, KeepaliveSettings

from extproc.dataplane.messages import seconds

MAX_STREAMS = 2**31 - 1
_PLENTY = 1_000_000_000
_MEBIBYTE = 1024 * 1024
_ENGINE_STREAM = 64 * 1024
_ANSWER_STREAM = 64 * 1024
_LEG_STREAM = 256 * 1024


def trusted_http2() -> Http2ProtocolOptions:
    """For a connection that carries all requests in flight at once, so that losing it loses them all.

    Envoy closes a connection whose peer resets many streams (1000, then 33 a second), sends many window updates or
    reads so slowly that 10,000 frames wait. Between us that is a burst of clients leaving, or a busy event loop.
    """
    return Http2ProtocolOptions(
        max_concurrent_streams=MAX_STREAMS,
        initial_stream_window_size=16 * _MEBIBYTE,
        initial_connection_window_size=256 * _MEBIBYTE,
        stream_reset_burst=_PLENTY,
        stream_reset_rate=_PLENTY,
        max_outbound_frames=_PLENTY,
        max_outbound_control_frames=_PLENTY,
        max_inbound_window_update_frames_per_data_frame_sent=_PLENTY,
        max_inbound_priority_frames_per_stream=_PLENTY,
        max_consecutive_inbound_frames_with_empty_payload=_PLENTY,
        # One odd header in one message must not cost all the others their connection.
        override_stream_error_on_invalid_http_message=True,
    )


def legs_http2() -> Http2ProtocolOptions:
    """The same for legs: a stream's window is also what Envoy keeps of an answer that the service does not read now."""
    options = trusted_http2()
    options.initial_stream_window_size = _LEG_STREAM
    return options


def with_signs_of_life(options: Http2ProtocolOptions) -> Http2ProtocolOptions:
    """The same to another machine, which may vanish without a word: it is asked for a sign of life.

    The answer may take long, because the service's event loop may be busy, and losing the connection is the worst case.
    """
    options.connection_keepalive = KeepaliveSettings(interval=seconds(15), timeout=seconds(15))
    return options


def to_answers() -> Http2ProtocolOptions:
    """For answers that the service makes and Envoy fetches, on a connection of their own.

    As of engines' answers, only a stream's window of each is under way to a client that does not read, and no number of
    such clients uses up the connection's.
    """
    options = trusted_http2()
    options.initial_stream_window_size = _ANSWER_STREAM
    options.initial_connection_window_size = 1024 * _MEBIBYTE
    return options


def to_engines() -> Http2ProtocolOptions:
    """To gRPC workers. All legs of a worker share a connection for each thread of Envoy's.

    A client that reads slowly has Envoy stop reading its leg: what the engine may send all the same is a stream's
    window, some thousand tokens. It counts against the connection's, which must never be used up by such legs, or all
    others would stand still with them.

    No signs of life are asked for: gRPC servers give up a connection on which pings come more often than every five
    minutes while they have nothing to say (``too_many_pings``), as during a long prefill. A machine that is gone is
    noticed by TCP, as those of HTTP workers are.
    """
    return Http2ProtocolOptions(
        max_concurrent_streams=MAX_STREAMS,
        initial_stream_window_size=_ENGINE_STREAM,
        initial_connection_window_size=1024 * _MEBIBYTE,
        max_outbound_frames=_PLENTY,
        max_outbound_control_frames=_PLENTY,
        max_inbound_priority_frames_per_stream=_PLENTY,
        max_inbound_window_update_frames_per_data_frame_sent=_PLENTY,
        max_consecutive_inbound_frames_with_empty_payload=_PLENTY,
        override_stream_error_on_invalid_http_message=True,
    )
