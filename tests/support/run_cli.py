"""The command line as a script, for programs that start scripts: one process of several, whose clocks do not agree.

What a process measures must not lead it to steps that the others do not take.
"""

import os
import time

clock, skew = time.perf_counter, float(os.environ.get("RANK", 0))
time.perf_counter = lambda: (1 + 1000 * skew) * clock()

from lookahead_cli.app import main  # noqa: E402 - it must see this clock

main()
