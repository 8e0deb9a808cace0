"""Runs Python programs in processes forked from this one, which has imported torch, transformers and lookahead and loaded its
kernels: a program starts in milliseconds and not after seconds of imports. processes.py is the side of a test.

In: connections to a socket, each with a line of JSON {"code", "arguments", "environment", "folder"} and three files
for stdin, stdout and stderr. Out: on each connection a line with the PID, and at the program's end one with its wait status.
The program runs as `python -c CODE ARGUMENTS` does, to the end of its interpreter. This process ends when its stdin does.
"""

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import tempfile
from typing import Any

# What a job on the demo model imports on its way.
MODULES = (
    "transformers.models.llama.modeling_llama",
    "lookahead.job.run",
    "lookahead.job.engines",
    "lookahead.models.load",
    "lookahead_cli.app",
)
Task = dict[str, Any]
MOST_BYTES = 1 << 20  # of a task


def preload() -> None:
    """What jobs on the demo model and edits of tries import and compile. torch must not have computed anything at a fork."""
    import torch

    from tests.support import compiled

    for name in MODULES:
        importlib.import_module(name)
    torch.set_num_threads(1)
    compiled.usual()
    gc.collect()
    gc.freeze()  # nobody looks through half a million objects again, so their pages stay shared


def serve(path: str) -> Task:
    """Until stdin ends. Returns only in a new process, the task that it is for."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    listening.listen()
    print("ready", flush=True)
    keepers: set[int] = set()
    while True:
        ready, _, _ = select.select([listening, sys.stdin], [], [])
        keepers -= {keeper for keeper in keepers if os.waitpid(keeper, os.WNOHANG)[0]}
        if sys.stdin in ready:
            sys.exit()
        connection, _ = listening.accept()
        if keeper := os.fork():
            keepers.add(keeper)
            connection.close()
            continue
        listening.close()
        task, files = received(connection)
        if pid := os.fork():
            keep(pid, connection, files)
        connection.close()
        become(task, files)
        return task


def received(connection: socket.socket) -> tuple[Task, list[int]]:
    """A task, and its files."""
    data, files, _, _ = socket.recv_fds(connection, MOST_BYTES, 3)
    while not data.endswith(b"\n"):
        data += connection.recv(MOST_BYTES)
    return json.loads(data), files


def keep(pid: int, connection: socket.socket, files: list[int]) -> None:
    """Say what becomes of the process, and end."""
    for file in files:
        os.close(file)
    with contextlib.suppress(OSError):  # whoever asked may be gone
        connection.sendall(f"{pid}\n".encode())
        _, status = os.waitpid(pid, 0)
        connection.sendall(f"{status}\n".encode())
    os._exit(0)


def become(task: Task, files: list[int]) -> None:
    """This process is from now on the task's."""
    import torch

    # After a fork torch makes its thread pool anew, where two threads that ask for it at once can both fail.
    torch.set_num_threads(torch.get_num_threads())
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(task["environment"])
    os.chdir(task["folder"])
    tempfile.tempdir = None  # it is asked of the environment again
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["-c", *task["arguments"]]


if __name__ == "__main__":
    preload()
    exec(compile(serve(sys.argv[1])["code"], "<string>", "exec"), {"__name__": "__main__"})
