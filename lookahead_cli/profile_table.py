"""A cost profile on the terminal."""

from __future__ import annotations

from lookahead.budget.profile import CDL_FACTOR, CostProfile, Forward
from lookahead_cli import render

LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
ROWS = (1, 8, 32)
BAR = 20  # characters of the longest bar


def print_profile(profile: CostProfile, context: int) -> None:
    """The curve as a table with bars, and the CDL of several numbers of rows."""
    setting = profile.setting
    threads = f", {setting.threads} threads" if setting.threads else ""
    names = [f"{rows} row{'s' * (rows > 1)}" for rows in ROWS]
    costs = [[profile.forward_seconds(Forward(rows * n, rows, rows * context)) * 1e3 for n in LENGTHS] for rows in ROWS]
    bars = ["#" * round(BAR * each / max(costs[0])) for each in costs[0]]
    render.table(
        f"{setting.model}: {setting.device}{threads}, {setting.dtype}, {setting.attention}, {context} tokens in the cache "
        f"({profile.kind})",
        ["tokens per row", *names, names[0]],
        [
            (str(length), *(f"{each:.2f}" for each in of_length), bar.ljust(BAR))
            for length, bar, *of_length in zip(LENGTHS, bars, *costs, strict=True)
        ],
        above="milliseconds of a forward:",
    )
    cdls = ", ".join(f"{profile.cdl(rows, context)} with {name}" for rows, name in zip(ROWS, names, strict=True))
    render.facts(
        [(f"CDL at {CDL_FACTOR:g}x", cdls), *((name.replace("_", " "), str(value)) for name, value in profile.about.items())]
    )
