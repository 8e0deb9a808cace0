"""Whole numbers and scales that quantized panels hold."""

import torch

from lookahead.backends.cpu.panel_code import PANEL
from lookahead.backends.cpu.panel_kernel import INT8
from lookahead.backends.cpu.quantized import GROUP, Quantized, QuantizedPanels


def held_matrix(panels: QuantizedPanels) -> Quantized:
    """What panels were made of."""
    number, size = len(panels.weight), 2 * PANEL
    if panels.kind == INT8:
        scales = panels.weight[:, : 4 * PANEL].contiguous().view(torch.float32).view(-1, 1)[: panels.outputs]
        lines = panels.weight[:, 4 * PANEL :].reshape(number, panels.lines, GROUP // 4, PANEL, 4) ^ 128
        zeros = None
    else:
        packed = panels.weight[:, :, : GROUP * PANEL // 2].reshape(number, panels.lines, GROUP // 8, PANEL, 4)
        lines = torch.stack([packed & 15, packed >> 4], 3).flatten(2, 3)
        known = panels.weight[:, :, GROUP * PANEL // 2 :]
        scales, zeros = (
            each.transpose(1, 2).reshape(-1, panels.lines)[: panels.outputs].contiguous()
            for each in (known[..., :size].contiguous().view(torch.bfloat16).float(), known[..., size:])
        )
    numbers = lines.permute(0, 3, 1, 2, 4).reshape(number * PANEL, -1)[: panels.outputs, : panels.inner].contiguous()
    return Quantized(numbers.view(torch.int8) if zeros is None else numbers, scales.contiguous(), zeros, panels.order)
