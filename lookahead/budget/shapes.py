"""Numbers of tokens that forwards take where few shapes are wanted. In: tokens. Out: as many or some more."""

from __future__ import annotations

from lookahead.native.kernels import kernel

EVEN = 16  # larger forwards that prefill prompts, too, take a multiple of that many tokens, on CPUs: see `evened`


@kernel
def bucket(size):
    """The smallest of 1, 2, 3, 4, 6, 8, 12, 16, 24, ... that is not below `size`."""
    power = 1
    while power < size:
        power *= 2
    return power // 4 * 3 if power >= 4 and size <= power // 4 * 3 else power


@kernel
def evened(size):
    """The size of a forward on a CPU that prefills prompts, too, and so would have any.

    Kernels are compiled for each size again (2 ms for a model of 15M parameters), and one that is not a multiple of 16 takes as
    long as the next one that is.
    """
    return (size + EVEN - 1) // EVEN * EVEN if size > 4 * EVEN else size


@kernel
def shape_of(tokens, prefill, bucketed):
    """Tokens of a forward, padding included. prefill: those of prompts among them."""
    return bucket(tokens) if bucketed else evened(tokens) if prefill > 0 else tokens
