"""What lookahead::tree_attention means, in plain torch on any device."""

import torch

from lookahead.forward.tree_meta import FIRST, NODE, PARENT, PAST, SIZE, SLOT, TRUNK


def reference(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, meta: torch.Tensor, scale: float) -> torch.Tensor:
    """See `tree_attention.attention_of_tokens`."""
    tokens, heads, _ = query.shape
    output = query.new_zeros(tokens, heads, value.shape[3])
    grouped, start = heads // key.shape[1], 0
    lines = meta.tolist()
    while start < tokens and lines[start][SLOT] >= 0:
        tree = lines[start : start + lines[start][SIZE]]
        seen = torch.zeros(len(tree), tree[0][PAST] + len(tree), dtype=torch.bool)
        for line in tree:
            node, past = line[NODE], line[PAST]
            row = seen[node]
            if line[PARENT] >= 0:
                row |= seen[line[PARENT]]
            row[: past + line[TRUNK]] = True
            row[past + node] = True
        for line in tree:  # positions of what is behind the trunk are counted back from the token's own
            columns = seen[line[NODE]].nonzero().flatten()
            seen[line[NODE], columns[: line[FIRST]]] = False
        seen = seen.to(query.device)
        length, slot, end = seen.shape[1], tree[0][SLOT], start + len(tree)
        used = seen.any(0)[:, None]
        keys, values = (
            buffer[slot, :, :length].masked_fill(~used, 0).float().repeat_interleave(grouped, 0) for buffer in (key, value)
        )
        scores = query[start:end].float().transpose(0, 1) @ keys.transpose(1, 2) * scale
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        output[start:end] = (weights @ values).transpose(0, 1).to(output.dtype)
        start = end
    return output
