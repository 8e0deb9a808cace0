"""What this CPU has kernels for."""

import pytest
import torch

from lookahead.backends.cpu.panels import Panels

# Where bfloat16 is multiplied by a library, a token's scores hang on the others of the forward
HALVES = Panels.takes(torch.zeros(1, 1, dtype=torch.bfloat16))
needs_halves = pytest.mark.skipif(not HALVES, reason="no kernels of ours for bfloat16 on this CPU")
