"""An engine of others that answers the turns of a bench. In: settings. Out: turns, with what the engine counts.

vLLM runs in this process. SGLang keeps its settings in globals of a process, so each contender has a process of its own: it
starts the engine, answers calls that come through a pipe, and ends it when the pipe is closed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol

from lookahead.bench.on_model import answerable
from lookahead.bench.run import Turn
from lookahead.draft.counts import summed
from lookahead.engines.abilities import ABILITIES
from lookahead.engines.foreign import ForeignSettings
from lookahead.errors import LookaheadError, first_line
from lookahead.job.drafting import open_tries
from lookahead.job.engines import InEngine, in_engine
from lookahead.job.events import Events
from lookahead.job.request import Request

CLOSING_SECONDS = 30.0  # that a process may take to end its engine
Prompts = list[list[int]]


@dataclasses.dataclass(frozen=True)
class About:
    """What an engine reports of itself and the model."""

    device: str
    dtype: str
    quantization: str | None
    version: str


class EngineRun(Protocol):
    """One contender's engine. All raise LookaheadError where the engine fails."""

    about: About

    def answerable(self, requests: Sequence[Request], path: str, max_new_tokens: int) -> tuple[Prompts, list[str]]:
        """See `on_model.answerable`."""
        ...

    def answer(self, prompts: Prompts, max_new_tokens: int) -> Turn:
        """All prompts, answered greedily."""
        ...

    def forget(self) -> None:
        """See `ForeignEngine.forget`."""
        ...

    def close(self) -> None:
        """See `ForeignEngine.close`."""
        ...


class Here:
    """An engine that this process holds."""

    def __init__(self, running: InEngine):
        self._running, self._engine = running, running.engine
        engine = self._engine
        self.about = About(engine.device, engine.dtype, engine.quantization, engine.version)

    def answerable(self, requests: Sequence[Request], path: str, max_new_tokens: int) -> tuple[Prompts, list[str]]:
        return answerable(requests, self._running, path, max_new_tokens)

    def answer(self, prompts: Prompts, max_new_tokens: int) -> Turn:
        engine = self._engine
        began, steps = time.perf_counter(), engine.steps
        generations = [engine.request(ids, max_new_tokens) for ids in prompts]
        for ended in engine.run(iter(generations)):
            if ended.error:
                raise ended.error
        seconds = time.perf_counter() - began
        outputs = [generation.token_ids for generation in generations]
        return Turn(outputs, seconds, forwards=engine.steps - steps, **vars(summed(generations)))

    def forget(self) -> None:
        self._engine.forget()

    def close(self) -> None:
        self._engine.close()


class InProcess:
    """An engine in a process of its own. Raises LookaheadError if it does not start."""

    def __init__(self, name: str, settings: ForeignSettings):
        context = multiprocessing.get_context("spawn")
        self._title = ABILITIES[name].title
        self._line, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there, name, settings))
        self._process.start()
        there.close()
        try:
            self.about: About = self._received()
        except BaseException:
            self.close()
            raise

    def answerable(self, requests: Sequence[Request], path: str, max_new_tokens: int) -> tuple[Prompts, list[str]]:
        found: tuple[Prompts, list[str]] = self._call("answerable", requests, path, max_new_tokens)
        return found

    def answer(self, prompts: Prompts, max_new_tokens: int) -> Turn:
        turn: Turn = self._call("answer", prompts, max_new_tokens)
        return turn

    def forget(self) -> None:
        self._call("forget")

    def close(self) -> None:
        self._line.close()
        self._process.join(CLOSING_SECONDS)
        if self._process.is_alive():
            self._process.terminate()

    def _call(self, method: str, *arguments: Any) -> Any:
        with contextlib.suppress(OSError):  # `_received` raises the reason
            self._line.send((method, arguments))
        return self._received()

    def _received(self) -> Any:
        try:
            found = self._line.recv()
        except (EOFError, OSError):
            raise LookaheadError(f"{self._title} has failed: its process has ended, see above.") from None
        if isinstance(found, Exception):
            raise found
        return found


def _serve(line: Connection, name: str, settings: ForeignSettings) -> None:
    """Start an engine and answer calls, until the line is closed. Sends `About` first; errors instead of what was asked for."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the other end's, which closes the line
    os.dup2(2, 1)  # a report may go to stdout
    try:
        run = Here(in_engine(name, settings, open_tries(settings.tries), _Silent()))
    except Exception as error:
        line.send(_sent(error))
        return
    try:
        line.send(run.about)
        while True:
            method, arguments = line.recv()
            try:
                found = getattr(run, method)(*arguments)
            except Exception as error:
                found = _sent(error)
            line.send(found)
    except (EOFError, OSError):
        run.close()


def _sent(error: Exception) -> LookaheadError:
    """An error that can be sent: others may hold anything."""
    return error if isinstance(error, LookaheadError) else LookaheadError(f"{type(error).__name__}: {first_line(error)}.")


class _Silent(Events):
    def notice(self, text: str) -> None:
        """The other end reports what it starts."""
