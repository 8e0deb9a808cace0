"""Ray, if it is installed: connecting to a cluster. In: an address. Out: the ray module, connected."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Iterator
from typing import Any

from lookahead.errors import LookaheadError, UsageError, first_line

PATIENCE = 10.0  # seconds


@contextlib.contextmanager
def connected(address: str) -> Iterator[Any]:
    """The ray module, connected for as long as the block runs, or longer if it was before.

    address: HOST:PORT; auto: the cluster that this machine is part of, else Ray on this machine alone; local: the latter.
    Raises UsageError if Ray is not installed, LookaheadError if there is no cluster at this address.
    """
    try:
        import ray
    except ImportError as error:
        raise UsageError("--ray: Ray is not installed. Install it with pip install 'lookahead[ray]'.") from error
    if ray.is_initialized():
        yield ray
        return
    host, _, port = address.rpartition(":")
    if port.isdecimal() and "/" not in host:  # Ray itself would wait a minute and more
        try:
            socket.create_connection((host, int(port)), timeout=PATIENCE).close()
        except OSError as error:
            reason = error.strerror or error
            raise LookaheadError(
                f"--ray {address}: no cluster answers there ({reason}). Start one: ray start --head."
            ) from error
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        try:
            ray.init(address, **quiet, **({"include_dashboard": False} if address == "local" else {}))
        except ConnectionError:
            if address != "auto":
                raise
            ray.init("local", include_dashboard=False, **quiet)
    except Exception as error:  # Ray raises many kinds
        raise LookaheadError(f"--ray {address}: no cluster answers there ({first_line(error)}).") from error
    try:
        yield ray
    finally:
        ray.shutdown()
