"""Programs in processes of their own that start at once, see preloaded.py. The face is that of subprocess.Popen."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).parents[2]


class Server:
    """The process that has imported everything. It ends with this one, which holds its stdin."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory()  # short: the path of a socket may have 107 bytes
        self.path = os.path.join(self.folder.name, "socket")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.preloaded", self.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
            cwd=ROOT,
            start_new_session=True,  # signals of the terminal are for the tests
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n"


@functools.cache
def server() -> Server:
    """Started for the first program, one for all tests of this process."""
    return Server()


class Program:
    """`python -c code arguments`, with pipes for its stdin, stdout and stderr."""

    def __init__(self, code: str, *arguments: object, environment: Mapping[str, str] | None = None, folder: Path | None = None):
        self.returncode: int | None = None
        task = {
            "code": code,
            "arguments": [str(argument) for argument in arguments],
            "environment": dict(os.environ if environment is None else environment),
            "folder": str(folder or Path.cwd()),
        }
        (theirs_in, ours_in), (ours_out, theirs_out), (ours_err, theirs_err) = os.pipe(), os.pipe(), os.pipe()
        self.connection = socket.socket(socket.AF_UNIX)
        self.connection.connect(server().path)
        theirs = [theirs_in, theirs_out, theirs_err]
        message = json.dumps(task).encode() + b"\n"
        sent = socket.send_fds(self.connection, [message], theirs)
        self.connection.sendall(message[sent:])
        for file in theirs:
            os.close(file)
        self.stdin, self.stdout, self.stderr = os.fdopen(ours_in, "w"), os.fdopen(ours_out), os.fdopen(ours_err)
        self.answers = self.connection.makefile()
        self.pid = int(self.answers.readline())

    def __enter__(self) -> Program:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait for its end; a test that fails does not wait."""
        if kind:
            self.kill()
        self._close_stdin()
        self.wait()
        for file in (self.stdout, self.stderr, self.answers, self.connection):
            file.close()

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, or the signal's number below zero."""
        if self.returncode is None:
            self.connection.settimeout(None)
            if timeout is not None and not _readable(self.connection, timeout):
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            self.returncode = os.waitstatus_to_exitcode(int(self.answers.readline()))
        return self.returncode

    def communicate(self, text: str = "", timeout: float | None = None) -> tuple[str, str]:
        """What it writes on stdout and stderr until it ends, as all who hold them do."""
        said = ["", ""]

        def read(number: int, file: TextIO) -> None:
            said[number] = file.read()

        readers = [threading.Thread(target=read, args=pair, daemon=True) for pair in enumerate((self.stdout, self.stderr))]
        for reader in readers:
            reader.start()
        if text:
            self.stdin.write(text)
        self._close_stdin()
        deadline = None if timeout is None else time.monotonic() + timeout
        for reader in readers:
            reader.join(None if deadline is None else max(0, deadline - time.monotonic()))
            if reader.is_alive():
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        self.wait(None if deadline is None else max(0.1, deadline - time.monotonic()))
        return said[0], said[1]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _close_stdin(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()


def _readable(connection: socket.socket, timeout: float) -> bool:
    return bool(select.select([connection], [], [], timeout)[0])
