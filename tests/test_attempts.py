"""What is tried again, how often, and after how long."""

import pytest
from fakes import worker
from hypothesis import given
from hypothesis import strategies as st

from extproc.errors import GatewayError
from extproc.exchange.attempts import Attempts, OnPrefillFailure, RetryPolicy, is_transient
from extproc.exchange.failures import failure_of, kv_missing, loss_of
from extproc.transport.interface import Lost
from extproc.workers.worker import Role

PREFILL = worker(Role.PREFILL, 1)
STEADY = RetryPolicy(jitter=0)


def failed(status, *headers, role=Role.PREFILL):
    return failure_of(worker(role, 1), status, headers, b"", answers_client=role is Role.DECODE)


def after(error, policy=STEADY, *, deadline=1e9, workers=(PREFILL,)):
    return Attempts(policy, deadline).after(error, workers, 0.0)


# -- pauses ----------------------------------------------------------------------------------------------------------


@given(
    failures=st.integers(1, 200),
    initial=st.floats(0.001, 10),
    maximum=st.floats(0.001, 60),
    multiplier=st.floats(1, 10),
    jitter=st.floats(0, 1),
)
def test_a_pause_is_the_grown_one_give_or_take_the_jitter(failures, initial, maximum, multiplier, jitter):
    policy = RetryPolicy(initial=initial, maximum=maximum, multiplier=multiplier, jitter=jitter)
    grown = min(initial * multiplier ** (failures - 1), maximum)
    pause = policy.pause(failures)
    assert grown * (1 - jitter) - 1e-9 <= pause <= grown * (1 + jitter) + 1e-9


def test_pauses_grow_up_to_the_longest():
    policy = RetryPolicy(initial=1, maximum=3, multiplier=2, jitter=0)
    assert [policy.pause(failures) for failures in (1, 2, 3, 9)] == [1, 2, 3, 3]


def test_pauses_differ_so_that_not_all_clients_come_back_at_once():
    assert len({RetryPolicy(jitter=0.5).pause(1) for _ in range(20)}) > 10


def test_the_thousandth_pause_is_the_longest():
    """While the egress listener does not answer, nobody is to blame: only a number bounds the attempts."""
    assert RetryPolicy(attempts=2000, maximum=0.1, multiplier=10, jitter=0).pause(1000) == 0.1


# -- what is transient -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [408, 429, 500, 501, 502, 503, 504])
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_the_same_request_may_succeed_elsewhere(status, role):
    assert is_transient(failed(status, role=role))


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422])
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_what_another_worker_would_answer_just_so(status, role):
    assert not is_transient(failed(status, role=role))


@pytest.mark.parametrize("flags", [b"UF", b"UH", b"UC", b"UT", b"UPE"])
def test_envoys_word_is_of_transport(flags):
    assert is_transient(failed(503, (b"x-pd-local-reply", flags)))


@pytest.mark.parametrize("reason", Lost)
def test_losses_are_of_transport(reason):
    assert is_transient(loss_of(PREFILL, reason, ""))


@pytest.mark.parametrize(
    "error",
    [
        kv_missing(PREFILL),
        GatewayError("internal_error", ""),
        GatewayError("decode_bad_reply", ""),
        GatewayError("invalid_json", ""),
    ],
)
def test_our_own_errors_are_not_cured_elsewhere(error):
    assert not is_transient(error)
    assert after(error) is None


# -- what a worker asks for ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "pause"),
    [
        (b"7", 7.0),
        (b"0", 0.05),  # not sooner than we would
        (b"30", 30.0),
        (b"31", None),  # longer than any pause may be: the client hears of it
        (b"9" * 400, None),
        (b"Wed, 21 Oct 2015 07:28:00 GMT", 0.05),
        (b"-1", 0.05),
        (b"soon", 0.05),
        (b"", 0.05),
    ],
)
@pytest.mark.parametrize("status", [429, 503])
def test_a_workers_retry_after(status, value, pause):
    assert after(failed(status, (b"retry-after", value))) == pause


def test_our_own_retry_after_is_for_the_client():
    unreachable = failed(503, (b"x-pd-local-reply", b"UF"))
    assert unreachable.retry_after == 1
    assert after(unreachable) == 0.05


# -- limits ----------------------------------------------------------------------------------------------------------


def test_nothing_is_tried_that_could_not_begin_before_the_deadline():
    assert after(failed(500), deadline=0.06) == 0.05
    assert after(failed(500), deadline=0.05) is None
    assert after(failed(503, (b"retry-after", b"7")), deadline=7) is None


def test_attempts_are_counted_with_the_first_one():
    attempts = Attempts(RetryPolicy(attempts=3, jitter=0, multiplier=2), 1e9)
    pauses = [attempts.after(failed(500), (PREFILL,), 0.0) for _ in range(3)]
    assert pauses == [0.05, 0.1, None]
    assert attempts.number == 3


def test_one_attempt_is_no_retry():
    assert after(failed(500), RetryPolicy(attempts=1)) is None


@pytest.mark.parametrize("policy", [OnPrefillFailure.FAIL, OnPrefillFailure.DECODE_ONLY])
def test_other_policies_try_once(policy):
    assert after(failed(500), RetryPolicy(on_prefill_failure=policy)) is None


def test_who_failed_is_not_chosen_again():
    first, second, third = (worker(Role.PREFILL, port) for port in (1, 2, 3))
    attempts = Attempts(STEADY, 1e9)
    attempts.after(failed(500), (first,), 0.0)
    attempts.after(failed(500), (second, third), 0.0)
    assert attempts.failed == (first, second, third)


def test_trouble_with_the_egress_listener_is_nobodys_fault():
    attempts = Attempts(STEADY, 1e9)
    assert attempts.after(loss_of(PREFILL, Lost.UNREACHABLE, ""), (PREFILL,), 0.0) == 0.05
    assert attempts.failed == ()
