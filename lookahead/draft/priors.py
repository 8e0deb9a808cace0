"""Initial weights of the mixture, trained offline. In: a small data file. Out: arrays that drafters continue to learn in.

`samples/train_priors.py` trains the priors on text of any kind; without it the formula serves.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources

import msgpack
import numpy as np

from lookahead.draft.arrays import BINS
from lookahead.draft.cells import ALIGNED, CELLS, COUNTS, ORDERS, OWN, RANKS, RECYCLED_CELLS, SHARES

TYPICAL_ORDER = (0, 1, 2, 3, 4.5, 7, 12, 24)  # of each order bucket
STRENGTH = 16.0  # observations that a trained belief stands for, and a ratio of the calibration
FORMULA_STRENGTH = 2.0


@dataclasses.dataclass(frozen=True)
class Priors:
    """Initial state of what a drafter learns.

    lambdas      float32 [CELLS]
    calibration  float32 [BINS], accepted / predicted; None: 1
    strength     observations that each lambda stands for
    """

    lambdas: np.ndarray
    calibration: np.ndarray | None = None
    strength: float = STRENGTH

    def fresh(self) -> tuple[np.ndarray, np.ndarray]:
        """(lambdas, earned) for a new job; see `learning.learn`."""
        earned = np.empty((CELLS, 2), np.float32)
        earned[:, 0], earned[:, 1] = self.lambdas * self.strength, self.strength
        return self.lambdas.astype(np.float32), earned


def formula() -> Priors:
    """Untrained: longer matches, more occurrences and a single successor earn more belief."""
    cells = np.indices((ORDERS, 2, COUNTS, SHARES, RANKS)).reshape(5, -1)
    order = np.array(TYPICAL_ORDER)[cells[0]]
    lambdas = np.minimum(0.95, np.minimum(0.9, 0.25 + 0.08 * order + 0.07 * cells[2]) + 0.05 * (cells[3] == 0))
    lambdas[cells[0] == 0] = 0.95
    few = (cells[0] == 0) & (cells[1] == OWN)  # how common tokens are in a short text tells little
    lambdas[few] = 0.1 + 0.1 * cells[2][few]
    others = np.full(CELLS - ALIGNED, 0.3)
    return Priors(np.concatenate([lambdas, others]).astype(np.float32), None, FORMULA_STRENGTH)


@functools.cache
def load_priors() -> Priors:
    """Load the priors that ship with the package; the formula if they were trained for other cells."""
    file = importlib.resources.files("lookahead.draft").joinpath("priors.msgpack")
    if not file.is_file():
        return formula()
    arrays = {name: np.frombuffer(data, "<f4") for name, data in msgpack.unpackb(file.read_bytes()).items()}
    lambdas, calibration = arrays["lambdas"], arrays["calibration"]
    if len(lambdas) == RECYCLED_CELLS:  # logged text, which it was trained on, has nothing to recycle
        lambdas = np.concatenate([lambdas, formula().lambdas[RECYCLED_CELLS:]])
    return Priors(lambdas, calibration) if (len(lambdas), len(calibration)) == (CELLS, BINS) else formula()
