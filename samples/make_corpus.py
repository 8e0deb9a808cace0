"""A large corpus of token ids for measuring the trie store: Zipf-like tokens, phrases that come again, templates.

    python samples/make_corpus.py 200000000 corpus.jsonl        # tokens, file; one {"ids": [...]} a line

A document is a chain of phrases from a phrase book, the common ones far more often than the rare ones, with single tokens
between them; now and then it repeats the beginning of an earlier document, as reports and generated answers do. The trie
then looks like that of real text: most deep branches are seen once, some thousands of times.
"""

from __future__ import annotations

import sys

import numpy as np


def documents(tokens: int, vocab_size: int = 32_000, seed: int = 0):
    """Yields int32 arrays, together at least `tokens` ids below `vocab_size`; the same for the same arguments."""
    draw = np.random.default_rng(seed)

    def zipf(most: int, size: int, exponent: float) -> np.ndarray:
        """Ranks from 0, probability about 1 / (rank + 1) ** exponent; exponent below 1."""
        return (most * draw.random(size) ** (1 / (1 - exponent))).astype(np.int64)

    phrases = 1000 + tokens // 60
    lengths = 2 + draw.geometric(0.16, phrases).clip(max=40)
    ends = np.cumsum(lengths)
    book = zipf(vocab_size, int(ends[-1]), 0.75).astype(np.int32)
    starts = ends - lengths
    earlier: list[np.ndarray] = []
    made = 0
    while made < tokens:
        size = int(20 + draw.geometric(1 / 180))
        chosen = zipf(phrases, size // 5 + 1, 0.8)
        parts = [book[starts[c] : ends[c]] for c in chosen]
        loose = zipf(vocab_size, len(parts), 0.75).astype(np.int32)
        parts = [piece for pair in zip(parts, loose[:, None], strict=True) for piece in pair]
        if earlier and draw.random() < 0.15:
            model = earlier[int(draw.integers(len(earlier)))]
            parts.insert(0, model[: int(draw.integers(1, len(model) + 1))])
        document = np.concatenate(parts)[: 2 * size]
        if len(earlier) < 20_000:
            earlier.append(document)
        else:
            earlier[int(draw.integers(len(earlier)))] = document
        made += len(document)
        yield document


def main() -> None:
    tokens, path = int(sys.argv[1]), sys.argv[2]
    with open(path, "w", encoding="utf-8") as file:
        for document in documents(tokens):
            file.write(f'{{"ids": {document.tolist()}}}\n')


if __name__ == "__main__":
    main()
