"""Runs one command again and again, each time with another fault of the disk. In: a scenario's name. Out: one JSON object.

Started by test_disk_faults.py with LD_PRELOAD=faults.so, as `python -m tests.deep.faults SCENARIO FOLDER`. This process imports
everything, compiles the kernels and loads the model once; each run is a fork of it, so that a run takes milliseconds.

Of each run: the exit code, one line on stderr, files that are old or new; and after one more run without a fault, the same
files as without any. What does not hold is listed as a violation.
"""

import collections
import ctypes
import dataclasses
import errno
import gc
import json
import os
import re
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MOST = 16384
KINDS = (
    "", "create", "open", "read", "write", "sync", "rename", "unlink", "truncate", "allocate", "map", "close", "mode", "lock",
    "stat",
)  # fmt: skip
COUNT, FAIL, FAIL_AFTER, SHORT, SHORT_FROM_HERE, DEAD, READ_ONLY, FULL, KILL, KILL_AFTER = range(10)
ACTIONS = ["count", "fails", "fails when done", "short", "short from here", "dead", "read-only", "full", "kill", "kill after"]
NO_SPACE, IO, INTERRUPTED, READ_ONLY_DISK, QUOTA = errno.ENOSPC, errno.EIO, errno.EINTR, errno.EROFS, errno.EDQUOT
FAILS = {
    "create": (NO_SPACE, IO, INTERRUPTED, READ_ONLY_DISK, QUOTA),
    "open": (IO, INTERRUPTED),
    "read": (IO, INTERRUPTED),
    "write": (NO_SPACE, IO, INTERRUPTED, READ_ONLY_DISK, QUOTA),
    "sync": (NO_SPACE, IO, INTERRUPTED, QUOTA),
    "rename": (NO_SPACE, IO, INTERRUPTED, READ_ONLY_DISK, QUOTA),
    "unlink": (IO, INTERRUPTED, READ_ONLY_DISK),
    "truncate": (NO_SPACE, IO, INTERRUPTED),
    "allocate": (NO_SPACE, IO, INTERRUPTED, QUOTA),
    "map": (errno.ENOMEM, IO, INTERRUPTED),
    "close": (NO_SPACE, IO, INTERRUPTED, QUOTA),
    "mode": (IO, INTERRUPTED, READ_ONLY_DISK),
    "lock": (errno.ENOLCK, IO, INTERRUPTED),
    "stat": (IO,),
}
FROM_HERE_ON = ((DEAD, IO), (READ_ONLY, READ_ONLY_DISK), (FULL, NO_SPACE))
READING = ("open", "read", "lock", "stat")
LONGEST_RUN = 60.0  # seconds
HARMLESS = {(FAIL, INTERRUPTED), (SHORT, 0), (SHORT_FROM_HERE, 0)}  # to be tried again: the command must succeed


@dataclasses.dataclass(frozen=True)
class Fault:
    """What happens at call number `at`. kind: of the call, as it was counted without a fault."""

    at: int
    action: int
    error: int
    kind: str

    def __str__(self) -> str:
        what = f" {errno.errorcode[self.error]}" if self.error else ""
        return f"{ACTIONS[self.action]}{what} at call {self.at} ({self.kind})"


@dataclasses.dataclass(frozen=True)
class Scenario:
    """prepare: puts files into an empty folder. command: run there. state: what is compared of the folder after a run.

    states: how it may be afterwards are the one before, and those in which runs without a fault leave it.
    whole: raises if a file is there by half, beside what `state` says. one_file: what a message says of an old or new file is
    about the state. notice: of a line that the command may say beside, such as that it goes on without its metrics.
    """

    prepare: Callable[[Path], None]
    command: tuple[str, ...]
    state: Callable[[Path], Any]
    whole: Callable[[Path], None] = lambda folder: None
    one_file: bool = True
    notice: str = "^$"


@dataclasses.dataclass(frozen=True)
class Ended:
    code: int  # negative: the signal; None is a run that took too long
    error: str
    fired: int
    kinds: tuple[str, ...]  # of the calls


class Shim:
    """The shim that this process has been started with."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL(None)
        self.library.faults_share.restype = ctypes.c_void_p
        address = self.library.faults_share()
        self.numbers = (ctypes.c_int * 5).from_address(address)
        self.kinds = (ctypes.c_ubyte * MOST).from_address(address + 20)

    def run(self, scenario: Scenario, folder: Path, fault: Fault, output: Path) -> Ended:
        """The scenario's command in a child of this process, in `folder`, with a fault."""
        self.numbers[3] = self.numbers[4] = 0
        child = os.fork()
        if not child:
            self._be_child(scenario, folder, fault, output)
        end = time.monotonic() + LONGEST_RUN
        while True:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                break
            if time.monotonic() > end:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return Ended(-signal.SIGALRM, "took too long", 0, ())
            time.sleep(0.001)
        code = os.waitstatus_to_exitcode(status)
        kinds = tuple(KINDS[self.kinds[number]] for number in range(1, min(self.numbers[3], MOST - 1) + 1))
        return Ended(code, output.read_text(errors="replace"), self.numbers[4], kinds)

    def _be_child(self, scenario: Scenario, folder: Path, fault: Fault, output: Path) -> None:
        from lookahead_cli.app import run

        code = 99
        try:
            os.chdir(folder)
            written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(written, 2)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            self.library.faults_arm(os.fsencode(folder), fault.at, fault.action, fault.error)
            try:
                code = run(scenario.command)
            except SystemExit as stopped:
                code = stopped.code if isinstance(stopped.code, int) else 1
            except BaseException:
                traceback.print_exc()
                code = 1
            gc.collect()
            sys.stderr.flush()
            self.library.faults_disarm()
        finally:
            os._exit(code)


def faults_of(kinds: tuple[str, ...], stride: int) -> Iterator[Fault]:
    """Every fault at every call that writes; at every `stride`-th of those that only read, where they are many."""
    seen: collections.Counter[str] = collections.Counter()
    for at, kind in enumerate(kinds, 1):
        seen[kind] += 1
        if kind in READING and kinds.count(kind) > 4 * stride and seen[kind] % stride:
            continue
        for error in FAILS[kind]:
            yield Fault(at, FAIL, error, kind)
        if kind == "rename":
            yield Fault(at, FAIL_AFTER, IO, kind)
        if kind == "write":
            yield Fault(at, SHORT, 0, kind)
            yield Fault(at, SHORT_FROM_HERE, 0, kind)
        for action, error in FROM_HERE_ON:
            yield Fault(at, action, error, kind)
        yield Fault(at, KILL, 0, kind)
        if kind in ("create", "write", "rename", "unlink"):
            yield Fault(at, KILL_AFTER, 0, kind)


def check(shim: Shim, scenario: Scenario, scratch: Path, stride: int = 1) -> dict[str, Any]:
    """Run all faults of a scenario; what was found."""
    none = Fault(0, COUNT, 0, "")
    output = scratch / "stderr"
    folder = scratch / "folder"

    def afresh() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        scenario.prepare(folder)

    afresh()
    states = [scenario.state(folder)]
    names: list[set[str]] = []
    kinds: tuple[str, ...] = ()
    for _ in range(3):  # the old state, the new one, and that of one run more
        ended = shim.run(scenario, folder, none, output)
        if ended.code:
            raise AssertionError(f"{scenario.command} fails without a fault: {ended.error}")
        kinds = kinds or ended.kinds
        states.append(scenario.state(folder))
        names.append({path.name for path in folder.iterdir()})
    found: dict[str, Any] = {"calls": collections.Counter(kinds), "cases": 0, "fired": 0, "codes": collections.Counter()}
    violations: collections.Counter[str] = collections.Counter()
    examples: dict[str, str] = {}

    def violated(what: str, fault: Fault, ended: Ended) -> None:
        violations[what] += 1
        examples.setdefault(what, f"{fault}: exit code {ended.code}, {ended.error.strip()[-600:]!r}")

    for fault in faults_of(kinds, stride):
        afresh()
        ended = shim.run(scenario, folder, fault, output)
        found["cases"] += 1
        found["fired"] += bool(ended.fired)
        found["codes"][ended.code] += 1
        killed = fault.action in (KILL, KILL_AFTER)
        lines = [line for line in ended.error.splitlines() if line.strip() and not re.search(scenario.notice, line)]
        try:
            state = scenario.state(folder)
            scenario.whole(folder)
        except Exception as error:
            violated(f"files cannot be read after the fault: {type(error).__name__}", fault, ended)
            continue
        which = next((number for number in (0, 1) if state == states[number]), None)
        if which is None:
            violated("neither old nor new", fault, ended)
            continue
        if "Traceback" in ended.error:
            violated("a traceback", fault, ended)
        elif killed and ended.fired:
            if ended.code != -signal.SIGKILL:
                violated("exit code after a kill", fault, ended)
        elif ended.code == 0:
            if state != states[1]:
                violated("exit code 0 without the new file", fault, ended)
            if lines:
                violated("exit code 0 with something on stderr", fault, ended)
        elif ended.code != 1:
            violated(f"exit code {ended.code}", fault, ended)
        elif (fault.action, fault.error) in HARMLESS:
            violated("what should be tried again fails", fault, ended)
        else:
            if len(lines) != 1 or not lines[0].startswith("error: "):
                violated("not one line", fault, ended)
            says_old = "unchanged" in ended.error or "No file was written" in ended.error
            says_new = "new file is there" in ended.error
            if scenario.one_file and ((says_old and state != states[0]) or (says_new and state != states[1])):
                violated("a line that is not true", fault, ended)
        again = shim.run(scenario, folder, none, output)
        if again.code or again.error.strip():
            violated("the next run fails or says something", fault, again)
        elif scenario.state(folder) != states[which + 1]:
            violated("the next run gives something else", fault, again)
        elif left := {path.name for path in folder.iterdir()} - names[which]:
            violated(f"left after the next run: {len(left)} files", fault, dataclasses.replace(again, error=str(left)))
    return {**found, "violations": violations, "examples": examples}


def main(name: str, scratch: Path, stride: int) -> None:
    from tests.deep import fault_scenarios

    scenario = fault_scenarios.prepared(name, scratch / "prepared")
    gc.collect()
    gc.freeze()
    began = time.perf_counter()
    found = check(Shim(), scenario, scratch, stride)
    print(json.dumps({"scenario": name, **found, "seconds": round(time.perf_counter() - began, 1)}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 1)
