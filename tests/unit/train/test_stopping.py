"""The line that a run prints when a signal arrives, and how ranks agree to stop."""

import os
import signal
import time
from types import SimpleNamespace

import pytest

from coordexp.train.stopping import SIGNALS, StopOnSignal, Stopped, exit_code

pytestmark = pytest.mark.timeout(30)


def test_ctrl_c_has_an_exit_code_of_its_own():
    assert [exit_code(number) for number in SIGNALS] == [0, 130]


@pytest.fixture
def stop():
    stop = StopOnSignal()
    before = [signal.getsignal(number) for number in SIGNALS]
    stop.listen()
    yield stop
    stop.close()
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_a_signal_is_heard_told_and_agreed_on_at_the_end_of_the_step(stop, capfd):
    control = SimpleNamespace(should_save=False, should_evaluate=True, should_training_stop=False)
    state = SimpleNamespace(global_step=7)
    stop.on_train_begin(None, state, control)
    stop.on_step_end(None, state, control)
    assert control == SimpleNamespace(should_save=False, should_evaluate=True, should_training_stop=False)
    os.kill(os.getpid(), signal.SIGTERM)
    until = time.monotonic() + 5
    while not (shown := capfd.readouterr().err) and time.monotonic() < until:
        time.sleep(0.01)
    assert "stopping (SIGTERM)" in shown
    assert stop.stopped_by is None
    stop.on_step_end(None, state, control)
    assert control == SimpleNamespace(should_save=True, should_evaluate=False, should_training_stop=True)
    assert stop.stopped_by == signal.SIGTERM


def test_a_run_that_was_asked_to_stop_does_not_begin(stop):
    stop.stopped_by = signal.SIGINT  # another rank heard it
    with pytest.raises(Stopped):
        stop.on_train_begin(None, SimpleNamespace(global_step=0), None)
