"""Initial weights of the mixture, trained offline. In: a small data file. Out: arrays that drafters continue to learn in.

`samples/train_priors.py` trains the priors on text of any kind.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources

import msgpack
import numpy as np

from lookahead.draft.cells import CELLS

STRENGTH = 16.0  # observations that a trained belief stands for, and a ratio of the calibration
UNTRAINED = 0.3  # belief in a cell that the text of training had nothing for


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
        """(lambdas, earned) for a new job; see `mixture.learn`."""
        earned = np.empty((CELLS, 2), np.float32)
        earned[:, 0], earned[:, 1] = self.lambdas * self.strength, self.strength
        return self.lambdas.astype(np.float32), earned


@functools.cache
def load_priors() -> Priors:
    """Load the priors that ship with the package."""
    data = importlib.resources.files("lookahead.draft").joinpath("priors.msgpack").read_bytes()
    arrays = {name: np.frombuffer(values, "<f4") for name, values in msgpack.unpackb(data).items()}
    lambdas = np.full(CELLS, UNTRAINED, np.float32)
    lambdas[: len(arrays["lambdas"])] = arrays["lambdas"]  # logged text, which it was trained on, has nothing to recycle
    return Priors(lambdas, arrays["calibration"])
