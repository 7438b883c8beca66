"""Every cell of the direct exchange's transition table."""

import pytest

from extproc.exchange.machine import RULES, Event, IllegalTransitionError, Outside, State, rule_of

# What must happen, written down a second time: (state, event) -> (state after, what is done).
EXPECTED = """
READY              ACCEPTED          PARALLEL           send_both
READY              ACCEPTED_IN_TURN  PREFILLING         send_prefill
READY              ACCEPTED_ALONE    DECODING           release
READY              EXPIRED           ENDED              answer_error
READY              CLOSED            OVER               finish
PREFILLING         PREFILL_DONE      DECODING           release
PREFILLING         PREFILL_FAILED    ENDED              answer_error
PREFILLING         PREFILL_REPLACED  PAUSED             pause
PREFILLING         PREFILL_WAIVED    DECODING           release
PREFILLING         EXPIRED           ENDED              drop_prefill answer_error
PREFILLING         CLOSED            OVER               drop_prefill finish
PAUSED             ACCEPTED          PARALLEL           send_both
PAUSED             ACCEPTED_IN_TURN  PREFILLING         send_prefill
PAUSED             ACCEPTED_ALONE    DECODING           release
PAUSED             PREFILL_FAILED    ENDED              answer_error
PAUSED             EXPIRED           ENDED              answer_error
PAUSED             CLOSED            OVER               finish
PARALLEL           PREFILL_DONE      DECODING
PARALLEL           PREFILL_FAILED    ENDED              drop_decode answer_error
PARALLEL           PREFILL_REPLACED  REPLACING          drop_decode await_head
REPLACING          HEADLESS          OVER               relay give_back
REPLACING          DECODE_HEAD       OVER               relay give_back
REPLACING          DECODE_HEAD_EARLY OVER               relay give_back
REPLACING          DECODE_REFUSED    OVER               relay give_back
REPLACING          EXPIRED           ENDED              answer_error
REPLACING          CLOSED            OVER               finish
PARALLEL           DECODE_REPLACED   OVER               relay drop_prefill give_back
PARALLEL           DECODE_HEAD       ANSWERING_PARALLEL pass_head
PARALLEL           DECODE_HEAD_EARLY HELD               hold_head
PARALLEL           DECODE_REFUSED    ANSWERING          drop_prefill pass_head
PARALLEL           DECODE_REFUSED_EARLY REFUSED         hold_refusal
REFUSED            PREFILL_DONE      REFUSED
REFUSED            PREFILL_FAILED    ENDED              answer_error
REFUSED            PREFILL_REPLACED  OVER               relay give_back
REFUSED            DECODE_REFUSED    ANSWERING          drop_prefill pass_head
REFUSED            DECODE_REPLACED   OVER               relay drop_prefill give_back
REFUSED            EXPIRED           ENDED              drop_prefill answer_error
REFUSED            CLOSED            OVER               drop_prefill finish
PARALLEL           EXPIRED           ENDED              drop_prefill drop_decode settle answer_error
PARALLEL           CLOSED            OVER               drop_prefill drop_decode settle finish
DECODING           DECODE_HEAD       ANSWERING          pass_head
DECODING           DECODE_HEAD_EARLY ANSWERING          pass_head
DECODING           DECODE_REFUSED    ANSWERING          pass_head
DECODING           PREFILL_REPLACED  REPLACING          drop_decode await_head
DECODING           PREFILL_FAILED    ENDED              drop_decode answer_error
DECODING           DECODE_REPLACED   OVER               relay give_back
DECODING           EXPIRED           ENDED              drop_decode settle answer_error
DECODING           CLOSED            OVER               drop_decode settle finish
HELD               HELD_ENOUGH       ANSWERING_PARALLEL pass_head
HELD               PREFILL_DONE      ANSWERING          pass_head
HELD               PREFILL_FAILED    ENDED              drop_decode answer_error
HELD               PREFILL_REPLACED  OVER               relay drop_decode give_back
HELD               EXPIRED           ENDED              drop_prefill drop_decode answer_error
HELD               CLOSED            OVER               drop_prefill drop_decode finish
ANSWERING_PARALLEL PREFILL_DONE      ANSWERING
ANSWERING_PARALLEL PREFILL_FAILED    CUT                answer_error
ANSWERING_PARALLEL EXPIRED           CUT                drop_prefill answer_error
ANSWERING_PARALLEL CLOSED            LINGERING          linger
ANSWERING          EXPIRED           CUT                answer_error
ANSWERING          PREFILL_FAILED    CUT                answer_error
ANSWERING          CLOSED            OVER               finish
LINGERING          PREFILL_DONE      OVER               finish
LINGERING          PREFILL_FAILED    OVER               finish
LINGERING          EXPIRED           OVER               drop_prefill finish
LINGERING          LINGERED          OVER               drop_prefill drop_decode finish
ENDED              DECODE_HEAD       ENDED
ENDED              DECODE_HEAD_EARLY ENDED
ENDED              DECODE_REFUSED    ENDED
ENDED              EXPIRED           ENDED
ENDED              CLOSED            OVER               finish
CUT                EXPIRED           CUT
CUT                CLOSED            OVER               drop_decode finish
"""
CELLS = {
    (State[origin], Event[event]): (State[after], tuple(actions))
    for origin, event, after, *actions in (line.split() for line in EXPECTED.strip().splitlines())
}


@pytest.mark.parametrize("event", Event, ids=lambda event: event.name)
@pytest.mark.parametrize("state", State, ids=lambda state: state.name)
def test_every_cell(state, event):
    if (state, event) in CELLS:
        assert rule_of(state, event) == CELLS[state, event]
    else:
        with pytest.raises(IllegalTransitionError, match=f"{event.name} cannot happen in {state.name}"):
            rule_of(state, event)


def test_every_action_exists():
    assert {action for _, actions in RULES.values() for action in actions} <= set(vars(Outside))


def paths(state, seen=()):
    """Every way through the table from ``state`` to its end, visiting no state twice."""
    if state is State.OVER:
        yield ()
        return
    for (origin, _), (after, actions) in RULES.items():
        if origin is state and after not in seen and after is not state:
            for rest in paths(after, (*seen, state)):
                yield (actions, *rest)


ALL_PATHS = [sum(steps, ()) for steps in paths(State.READY)]


def test_every_way_gives_everything_back_and_only_once():
    assert len(ALL_PATHS) > 20
    for actions in ALL_PATHS:
        assert actions.count("finish") + actions.count("relay") == 1
        assert actions[-1] == ("give_back" if "relay" in actions else "finish")


def test_who_hands_the_request_on_says_nothing_to_the_client_and_gives_all_back():
    for actions in ALL_PATHS:
        if "relay" in actions:
            assert not {"answer_error", "pass_head"} & set(actions)


def test_no_way_answers_the_client_twice():
    for actions in ALL_PATHS:
        assert actions.count("answer_error") <= 1
        assert actions.count("pass_head") <= 1
        assert actions.count("drop_prefill") <= 1


def test_a_decode_whose_answer_flows_is_ended_only_once_the_client_is_cut_off():
    for (origin, event), (_, actions) in RULES.items():
        if origin in (State.ANSWERING, State.ANSWERING_PARALLEL, State.CUT) and event is not Event.CLOSED:
            assert "drop_decode" not in actions


def test_every_state_before_the_end_can_be_closed():
    """Envoy may end the stream at any moment."""
    for state in State:
        if state not in (State.OVER, State.LINGERING):  # LINGERING is after the close
            assert (state, Event.CLOSED) in RULES


def test_every_state_before_the_end_survives_its_deadline():
    for state in State:
        if state is not State.OVER:
            assert (state, Event.EXPIRED) in RULES


def test_no_state_is_a_dead_end():
    for state in State:
        if state is not State.OVER:
            assert any(True for _ in paths(state))
