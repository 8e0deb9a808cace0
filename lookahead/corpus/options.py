"""Options of a trie of corpora. In: from Python or a command line. Out: a `BuildSpec`, for `corpus_build.CorpusBuild`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from lookahead.options import OptionGroup, option

IO, TEXT = "Input and output", "Text of the corpus"  # panels of --help


@dataclasses.dataclass(frozen=True)
class BuildSpec(OptionGroup):
    """Exactly one of out and append is given. With append neither tokenizer nor vocab_size need be."""

    corpus: Sequence[str] = option(
        dataclasses.MISSING,
        ".jsonl .json .csv .tsv .txt .md .html (also .gz, .zst) and .parquet files, folders, globs, - for stdin.",
        "CORPUS...",
        is_argument=True,
    )
    out: str | None = option(None, "Trie file to write.", "FILE", flags=("--out", "-o"), panel=IO)
    append: str | None = option(
        None, "Add to this trie instead, as a further segment; its existing text is not sorted again.", "TRIE", panel=IO
    )
    tokenizer: str | None = option(
        None,
        "Tokenizer of the model that the drafts are for. Default with --append: the trie's own.",
        "NAME_OR_DIR",
        panel=TEXT,
    )
    vocab_size: int | None = option(
        None, 'Vocabulary of rows {"ids": [...]}, which need no tokenizer.', "N", least=1, panel=TEXT
    )
    text_field: str | None = option(
        None, "Field with the text. Default: text, response, output, completion, answer or messages.", "NAME", panel=TEXT
    )
    split: str = option(
        "file", "What is one document of a .txt, .md or .html file: the file, or each paragraph.", "WHAT", panel=TEXT
    )
    min_count: int = option(1, "Leave out branches seen fewer than N times.", "N", least=1, panel=IO)
    source: str | None = option(
        None,
        "Name of this corpus in reports. Default: the file's name.",
        "NAME",
        flags=("--source", "--source-name"),
        panel=TEXT,
    )
    strict: bool = option(False, "Stop at the first row that cannot be used.", panel=TEXT)
    verify: bool = option(
        True, "With --append: first read the whole trie, and refuse a damaged one.", flags=("--verify/--no-verify",), panel=IO
    )

    @property
    def reading(self) -> tuple[str | None, str | None, bool]:
        """(text_field, source, strict), as `read_documents` takes them."""
        return self.text_field, self.source, self.strict
