"""The first signal is noted, the second ends the run, and the handlers come back."""

from __future__ import annotations

import os
import signal

import pytest

from fuselab.train.interruption import interruptible


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_and_second_signal(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with interruptible() as interruption:
        assert not interruption.asked
        os.kill(os.getpid(), number)
        assert interruption.asked
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before
