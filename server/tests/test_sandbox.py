# SPDX-License-Identifier: Apache-2.0
"""The state machine, and that its words are those of the contract."""

from __future__ import annotations

import itertools

import pytest
from world import START, a_sandbox

from opensandbox_server.sandbox import ENDED, End, EndReason, SandboxState
from opensandbox_server.wire import lifecycle as wire

S = SandboxState


def test_the_words_are_those_of_the_contract() -> None:
    assert list(SandboxState) == [state.value for state in wire.SandboxState]
    assert list(EndReason) == [reason.value for reason in wire.EndReason]


@pytest.mark.parametrize(
    ("path", "fine"),
    [
        ((S.PENDING, S.RUNNING, S.STOPPING, S.TERMINATED), True),
        ((S.PENDING, S.STOPPING), True),
        ((S.PENDING, S.FAILED, S.STOPPING), True),
        ((S.RUNNING, S.PAUSING, S.PAUSED, S.RESUMING, S.RUNNING), True),
        ((S.RUNNING, S.PENDING), False),
        ((S.STOPPING, S.RUNNING), False),
        ((S.FAILED, S.RUNNING), False),
        ((S.TERMINATED, S.FAILED), False),
        ((S.PENDING, S.PAUSED), False),
    ],
)
def test_transitions(path: tuple[SandboxState, ...], fine: bool) -> None:
    sandbox = a_sandbox(state=path[0])
    if fine:
        for step, state in enumerate(path[1:], 2):
            sandbox = sandbox.to(state, START)
            assert (sandbox.state, sandbox.version) == (state, step)
    else:
        with pytest.raises(ValueError, match="cannot go from"):
            sandbox.to(path[1], START)


def test_every_state_can_be_stopped_but_the_one_that_stops() -> None:
    for state in SandboxState:
        if state is not S.STOPPING:
            assert a_sandbox(state=state).to(S.STOPPING, START).state is S.STOPPING


@pytest.mark.parametrize(("reason", "code"), list(itertools.product(EndReason, [0, 3, None])))
def test_an_end_is_clean_or_not(reason: EndReason, code: int | None) -> None:
    ended = a_sandbox().ended(End(reason, START, exit_code=code))
    clean = reason in (EndReason.KILLED, EndReason.EXPIRED) or (reason is EndReason.EXITED and code == 0)
    assert ended.state in ENDED
    assert (ended.state is S.TERMINATED) == clean
    assert ended.reason == reason.name
    assert ended.message, "whoever reads the status is told"


@pytest.mark.parametrize(
    ("end", "sentence"),
    [
        (End(EndReason.EXITED, START, exit_code=3), "The entry point exited with code 3."),
        (End(EndReason.EXITED, START, exit_code=0), "The entry point exited with code 0."),
        (End(EndReason.SIGNALLED, START, signal="SIGKILL"), "The entry point was ended by SIGKILL."),
        (End(EndReason.SIGNALLED, START), "The entry point was ended by a signal."),
        (End(EndReason.OUT_OF_MEMORY, START, signal="SIGKILL"), "The sandbox ran out of memory."),
        (End(EndReason.EXPIRED, START), "Its time was over."),
        (End(EndReason.LOST, START, message="As the runtime saw it."), "As the runtime saw it."),
    ],
)
def test_an_end_is_told_in_a_sentence(end: End, sentence: str) -> None:
    assert a_sandbox().ended(end).message == sentence
