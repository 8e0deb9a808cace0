"""A machine on which other processes run is noticed by bench."""

import multiprocessing
import os
import sys
import time

import pytest

from lookahead.bench.compare import core_seconds, share_waited

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell")


def work(seconds: float) -> None:
    """Takes as much time of a core."""
    until = time.process_time() + seconds
    while time.process_time() < until:
        sum(range(10_000))


def test_waiting_for_a_core_is_noticed():
    """This thread and another process share one core."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        other = multiprocessing.get_context("fork").Process(target=work, args=(600.0,))
        other.start()
        before = core_seconds()
        work(0.3)
        share = share_waited(before)
        other.kill()
        other.join()
        assert share > 0.25
    finally:
        os.sched_setaffinity(0, cores)
