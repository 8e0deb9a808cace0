"""Counts the cores that a process may use. In: its affinity and its control groups. Out: whole cores, one at least."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def usable_cores() -> int:
    """How many cores this process may use: those that it may run on, no more than its control group's quota pays for."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min([cores, *_quotas()])))


def _quotas(groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> list[float]:
    """Cores that each group pays for which this process is in (Linux, version 2 and 1)."""
    found: list[float] = []
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = own.read_text(encoding="utf-8").splitlines()
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = groups / controllers if controllers else groups
        for folder in (root / name.lstrip("/"), *(root / name.lstrip("/")).parents):
            with contextlib.suppress(OSError, ValueError):
                if controllers:
                    quota, period = ((folder / f"cpu.cfs_{each}_us").read_text() for each in ("quota", "period"))
                else:
                    quota, period = (folder / "cpu.max").read_text().split()
                found += [float(quota) / float(period)] if quota.strip() not in ("max", "-1") else []
            if folder == root:
                break
    return found
