"""A job's line to our drafter in SGLang's scheduler process. In: calls by name. Out: what the drafter answers.

SGLang's own calls between its processes return nothing to a job. So the job listens at a local socket, which the scheduler
process inherits by an environment variable, with a key that both check (multiprocessing.connection).
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Client, Connection, Listener
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lookahead.engines.requests import Requests

log = logging.getLogger(__name__)

LINK = "LOOKAHEAD_LINK"
PATIENCE = 10.0  # seconds that a job waits for the drafter


class Link:
    """The job's end. Calls return nothing where no drafter is there, or does not answer."""

    def __init__(self) -> None:
        key = secrets.token_bytes(32)
        self._listener = Listener(authkey=key)
        self._line: Any = None
        self._there = threading.Event()
        os.environ[LINK] = json.dumps([self._listener.address, key.hex()])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        try:
            self._line = self._listener.accept()
            self._there.set()
        except OSError:  # closed before a drafter came
            log.debug("no drafter has come", exc_info=True)

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """[what `answer` returns], or nothing."""
        try:
            if not self._there.wait(PATIENCE):
                return []
            self._line.send((method, arguments))
            return [self._line.recv()] if self._line.poll(PATIENCE) else []
        except (OSError, EOFError):
            log.debug("%s has failed", method, exc_info=True)
            return []

    def close(self) -> None:
        os.environ.pop(LINK, None)
        self._listener.close()
        if self._line is not None:
            self._line.close()


def serve(requests: Requests, lock: threading.Lock, environment: Mapping[str, str] = os.environ) -> None:
    """The drafter's end: answer the job, if one listens, in a thread. lock: held while `requests` is used."""
    if LINK not in environment:
        return
    address, key = json.loads(environment[LINK])
    line = Client(address, authkey=bytes.fromhex(key))
    threading.Thread(target=_answer_all, args=(line, requests, lock), daemon=True).start()


def _answer_all(line: Connection, requests: Requests, lock: threading.Lock) -> None:
    try:
        while True:
            method, arguments = line.recv()
            with lock:
                answered = answer(requests, method, arguments)
            line.send(answered)
    except (OSError, EOFError):  # the job has ended
        line.close()


def answer(requests: Requests, method: str, arguments: Sequence[Any]) -> Any:
    """count_accepted: True. accepted: of each text its counts, see `Requests.accepted_of_each`. forget: None."""
    if method == "count_accepted":
        requests.count_accepted()
        return True
    return requests.accepted_of_each(*arguments) if method == "accepted" else requests.forget()
