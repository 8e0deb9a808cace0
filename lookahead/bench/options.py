"""Options of looking into a trie and of quantizing a model. In: from Python or a command line. Out: values, passed whole."""

from __future__ import annotations

import dataclasses

from lookahead.options import OptionGroup, option


@dataclasses.dataclass(frozen=True)
class InspectOptions(OptionGroup):
    """Options of inspect-trie. plot: the curve of EDL by size is wanted, which is drawn to this file."""

    trie: str = option(dataclasses.MISSING, "Trie file to read.", "TRIE", is_argument=True)
    query: str | None = option(
        None, "Draw only the draft tree that would be verified after this text. For a trie of ids: ids, such as 5 6 7.", "TEXT"
    )
    decoding_length: int = option(16, "Size of the tree of --query: its last token + draft tokens.", "N", least=2, most=1024)
    coverage: str | None = option(None, "Corpus file: report the EDL to expect on its documents.", "FILE")
    plot: str | None = option(None, "Draw EDL on the --coverage file by size: .png, .pdf or .svg.", "FILE")
    verify: bool = option(False, "Read every byte: checksums, order, tables.")
    tokenizer: str | None = option(None, "Tokenizer to show text with. Default: the one it was built with.", "NAME_OR_DIR")
    top: int = option(10, "Most frequent branches, or documents, to show.", "N", least=0)
    documents: bool = option(False, "List the documents instead; with --query those that contain its text.")
    export: str | None = option(
        None, "With --documents: write them as JSON lines, which build-trie and prune-trie --drop-documents read.", "FILE"
    )


@dataclasses.dataclass(frozen=True)
class QuantizeOptions(OptionGroup):
    """Options of quantize. loss_budget: nats per token that tokens of 4 bits may cost on the calibration texts."""

    out: str = option("", "Folder to write; it must not exist.", "DIR", flags=("--out", "-o"))
    weights: str = option("int8", "int8, or int4 (groups of 64; the output layer int8).", "SCHEME")
    text: str | None = option(None, "Corpus file: report what quantizing costs on its texts.", "FILE")
    activations: str = option(
        "int8", "int8, mixed (4 bits, blocks of channels with outliers 8), or none (weights only).", "SCHEME"
    )
    calibration: str | None = option(None, "Corpus file or trie to round weights on; mixed needs it.", "FILE")
    loss_budget: float = option(0.03, "With mixed: loss per token that 4 bits may add.", "NATS", least=0)
    pack_embedding: bool = option(False, "Write the embedding in 8 or 4 bits, too: our commands alone load the folder.")
    rows: int = option(64, "Texts of --text and --calibration.", "N", least=1)
