"""A machine on which other processes run is noticed by bench."""

import multiprocessing
import os
import sys
import time

import pytest

from lookahead.bench.compare import core_seconds, share_waited

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell")


def work(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        sum(range(10_000))


def test_waiting_for_a_core_is_noticed() -> None:
    """This thread and another process share one core."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        other = multiprocessing.get_context("fork").Process(target=work, args=(2.0,))
        other.start()
        before = core_seconds()
        work(0.5)
        assert share_waited(before) > 0.25
        other.kill()
        other.join()
    finally:
        os.sched_setaffinity(0, cores)
