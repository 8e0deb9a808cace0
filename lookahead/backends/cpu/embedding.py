"""Embedding tables of quantized weights. In: an embedding, its matrix in panels. Out: the same layer, which reads them.

An output layer that shares its weight with the embedding multiplies by the same panels: the table is stored once.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from lookahead.backends.cpu.panels import Panels

TRIED = 8  # rows by which `in_panels` finds out whether a layer reads its weight in a way of its own


class TableInPanels(torch.nn.Embedding):
    """An embedding for inference on a CPU: ids [...] to numbers [..., embedding_dim].

    laid_out: its weight [num_embeddings, embedding_dim].
    """

    laid_out: Panels

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """Without numbers: for models that ask for its dtype or shape."""
        return torch.empty(self.num_embeddings, self.embedding_dim, dtype=self.laid_out.dtype, device="meta")

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """See `Panels.rows`."""
        return self.laid_out.rows(ids)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.rows(ids)


def may_be_in_panels(embedding: Any) -> bool:
    """Tell whether to try: for a torch.nn.Embedding, or a layer of a class made of it, that does not scale
    its rows in place.
    """
    return isinstance(embedding, torch.nn.Embedding) and embedding.max_norm is None


@torch.no_grad()
def in_panels(embedding: Any, panels: Panels) -> bool:
    """Let a layer that `may_be_in_panels` look its rows up there and give its weight up.

    False, with nothing changed, for a layer that would then give other numbers than its class does for these rows.
    """
    kind, ids = type(embedding), torch.arange(min(TRIED, embedding.num_embeddings))
    stand_in = copy.copy(embedding)  # with a weight of these rows alone
    stand_in._parameters = {**embedding._parameters, "weight": torch.nn.Parameter(panels.rows(ids), requires_grad=False)}
    tried = copy.copy(embedding)
    tried._parameters = {name: each for name, each in embedding._parameters.items() if name != "weight"}
    tried.__class__ = TableInPanels if kind is torch.nn.Embedding else type(kind.__name__, (kind, TableInPanels), {})
    vars(tried)["laid_out"] = panels
    try:
        if not tried(ids).equal(stand_in(ids)):
            return False
    except Exception:  # of a class that computes with its weight
        return False
    del embedding._parameters["weight"]
    embedding.__class__, vars(embedding)["laid_out"] = tried.__class__, panels
    return True
