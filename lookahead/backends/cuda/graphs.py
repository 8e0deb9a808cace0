"""Packed steps as captured graphs. In: the trees of a step. Out: its scores, by one launch instead of a thousand.

A step whose attention is lookahead::tree_attention depends on its number of tokens alone: everything else it reads from one
block of numbers (batch.py), which lies at the same address each time, and keys and values do not move either. So there is one
graph for each of the 16 sizes of steps, captured when a step first has that size. It ends with each token's best token and
runner-up tokens, which are copied to this machine at once.

How a graph is captured is defined elsewhere (`Capture`): CUDA does it here, tests emulate it on a CPU. A model that cannot be
captured, as it reads from the device in the middle of a forward, continues without, and a line reports it.
"""

from __future__ import annotations

import functools
import logging
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from lookahead.draft.recycled import BEST
from lookahead.draft.tree import TreeBatch
from lookahead.forward.batch import MOST_TOKENS, block_of, pack_of, step_inputs
from lookahead.forward.kv_cache import SlotCache
from lookahead.forward.scores import Scores
from lookahead.forward.slots import logits_of
from lookahead.forward.target import TargetModel
from lookahead.step.best_tokens import NONE

log = logging.getLogger(__name__)

Outputs = tuple[torch.Tensor, ...]
# Run a function and record what it does on the device: (its outputs, what does that again, from and to the same tensors).
Capture = Callable[[Callable[[], Outputs]], tuple[Outputs, Callable[[], None]]]


class CudaCapture:
    """Captures CUDA graphs on a device, all in one pool of memory."""

    def __init__(self, device: torch.device):
        self._device = device
        self._pool: Any = None

    def __call__(self, run: Callable[[], Outputs]) -> tuple[Outputs, Callable[[], None]]:
        with torch.cuda.device(self._device):
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
            stream.wait_stream(current)
            with torch.cuda.stream(stream):  # kernels are compiled, and libraries take their memory
                run()
            current.wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                outputs = run()
        return outputs, graph.replay


class CapturedScores(Scores):
    """Scores of a replayed graph, until the next replay. outputs: waits for int32 [tokens, 1 + 2 BEST], see `CapturedSteps`."""

    def __init__(self, logits: torch.Tensor, counts: Sequence[int], outputs: Callable[[], np.ndarray]):
        super().__init__(logits, counts)
        self._arriving = outputs

    def native(self) -> tuple[int, int, int]:
        return NONE, 0, 0

    def best_few(self, rows: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
        outputs = self._outputs[rows]
        few = (outputs.shape[1] - 1) // 2
        ids, scores = outputs[:, 1 : 1 + few], outputs[:, 1 + few :].copy().view(np.float32)
        return ids[:, :most], scores[:, :most]

    def wait(self) -> None:
        self._outputs  # noqa: B018

    @functools.cached_property
    def _known(self) -> array[int]:
        return array("q", self._outputs[:, 0].astype(np.int64).tobytes())

    @functools.cached_property
    def _outputs(self) -> np.ndarray:
        return self._arriving()  # the one moment a step waits for the device


class _Step:
    """A captured step. block: what it reads (`batch.block_of`); logits: [tokens, vocab], outputs: what it leaves."""

    def __init__(self, block: torch.Tensor, logits: torch.Tensor, outputs: torch.Tensor, replay: Callable[[], None]):
        self._block, self.logits, self._outputs, self._replay = block, logits, outputs, replay
        pinned = block.device.type == "cuda"
        self._given = torch.empty(block.shape, dtype=block.dtype, pin_memory=pinned)
        self._left = torch.empty(outputs.shape, dtype=outputs.dtype, pin_memory=pinned)
        self._done = torch.cuda.Event() if pinned else None
        self._stream = functools.partial(torch.cuda.current_stream, block.device)

    def replay(self, block: np.ndarray) -> None:
        """Replay with this block. What it left before must have arrived."""
        self._given.numpy()[:] = block
        self._block.copy_(self._given, non_blocking=True)
        self._replay()
        self._left.copy_(self._outputs, non_blocking=True)
        if self._done:
            self._done.record(self._stream())

    def left(self) -> np.ndarray:
        """Return what it has reported about all tokens, once it has arrived."""
        if self._done:
            self._done.synchronize()
        return self._left.numpy().copy()


class CapturedSteps:
    """The graphs of one model's steps over one cache; they are dropped where its buffers move.

    In addition to the scores, a step leaves for each token its best token, its BEST best ones, and the bits of their scores.
    """

    def __init__(self, target: TargetModel, cache: SlotCache, capture: Capture):
        self.target, self.cache, self.capture = target, cache, capture
        self.replays = 0
        self._steps: dict[int, _Step] = {}  # by tokens
        self._last: CapturedScores | None = None
        self._version = -1
        self._failed = False

    def serves(self, trees: TreeBatch) -> bool:
        """Tell whether this is such a step: all scores are wanted, of not too many tokens."""
        small = 0 < len(trees.token_ids) <= MOST_TOKENS
        return small and not self._failed and int(trees.wanted.sum()) == len(trees.token_ids)

    def forward(self, trees: TreeBatch, pasts: Sequence[int]) -> CapturedScores | None:
        """Scores of a step that it serves. None: the model cannot be captured, from now on."""
        inputs, meta = step_inputs(trees, pasts, self.target.mask_plan, self.cache.slots - 1)
        block = block_of(inputs, meta)
        if self._version != self.cache.version:
            self._steps.clear()
            self._version = self.cache.version
        tokens = inputs.shape[1]
        is_new = tokens not in self._steps
        if is_new:
            try:
                there = torch.from_numpy(block).to(self.target.device, copy=True)
                (logits, outputs), replay = self.capture(lambda: self._run(there, tokens, len(meta)))
                self._steps[tokens] = _Step(there, logits, outputs, replay)
            except Exception as error:  # each library fails in its own way
                log.warning("%s: steps are not captured as graphs: %s", self.target.name, str(error).split("\n")[0])
                self._failed = True
                self._steps.clear()
                return None
        if self._last is not None:
            self._last.wait()
        step = self._steps[tokens]
        step.replay(block)
        self.replays += 1
        self._last = CapturedScores(step.logits[: len(trees.token_ids)], trees.sizes.tolist(), step.left)
        self._last.is_first = is_new
        return self._last

    def _run(self, block: torch.Tensor, tokens: int, kinds: int) -> Outputs:
        """The forward of the step that `block` describes, by the model itself."""
        logits = logits_of(self.target, self.cache, pack_of(block, tokens, kinds, tokens))
        few = logits.topk(min(BEST, logits.shape[1]))
        bits = few.values.float().contiguous().view(torch.int32)
        return logits, torch.cat([logits.argmax(-1, keepdim=True).int(), few.indices.int(), bits], 1)
