"""The thread that decodes answers whatever it is asked."""

from __future__ import annotations

import threading

from ssd.engine.worker import Worker
from tests.engine.test_processes import wait_for


def test_what_is_asked_beside_what_fails_is_still_answered():
    worker, gate, told = Worker(8), threading.Event(), []
    asking = threading.Thread(target=lambda: told.append(worker.call(lambda: 7)), daemon=True)
    # One turn of the worker's takes all that has come while it was at something else.
    with worker._condition:
        worker._post(lambda: gate.wait(20))
    assert wait_for(lambda: not worker._inbox)
    with worker._condition:
        worker._post(lambda: 1 / 0)
    asking.start()
    assert wait_for(lambda: len(worker._inbox) == 2)
    gate.set()
    asking.join(20)
    assert told == [7]
    assert isinstance(worker.failed, ZeroDivisionError)
    worker.close(lambda: None)
