"""Text handed out piece by piece is the text of the whole, whatever the tokenizer and whatever the tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from lookahead.decode.text import LONGEST_TAIL, StopTexts, TextStream, TokenTexts, text_of, without_stop

TEXTS = [
    "the cat 🐈‍⬛ sat, didn't it? naïve café, e\u0301, 👩‍👩‍👧 日本語",
    " two  blanks",
    "it 's . what ' s ! 've",
    "\u200d🏽\n\t x",
]
LETTER_OF_80 = "\u0122"  # stands for the byte 0x80 in byte-level vocabularies
SPECIAL = [AddedToken("<eos>", special=True), AddedToken("<pad>", special=True)]


def fast(backend, **options):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>", **options)
    tokenizer.add_tokens([AddedToken("<note>", special=False)])
    return tokenizer


def byte_level():
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet, show_progress=False))
    backend.add_special_tokens(SPECIAL)
    return fast(backend)


def pieces(*more):
    """Words and characters as sentencepiece has them."""
    return ["<unk>", *more, "▁", "▁the", "▁cat", "s", "▁▁", "日", "本", "é", "\u0301", "\u200d", "🐈", "\ufffd", ",", "x"]


def metaspace():
    backend = Tokenizer(models.Unigram([(piece, -float(n)) for n, piece in enumerate(pieces())], 0))
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(SPECIAL)
    return fast(backend)


def byte_fallback():
    """As Llama 2 decodes."""
    every = pieces(*(f"<0x{byte:02X}>" for byte in range(256)))
    backend = Tokenizer(models.BPE({piece: n for n, piece in enumerate(every)}, [], byte_fallback=True, unk_token="<unk>"))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(parts)
    backend.add_special_tokens(SPECIAL)
    return fast(backend)


def word_piece(cleans):
    words = ["[UNK]", "the", "cat", "##s", ".", ",", "?", "'", "s", "n't", "'ve", "do", "not", "日", "##本", "!", "is", "é"]
    backend = Tokenizer(models.WordPiece({word: n for n, word in enumerate(words)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(cleanup=not cleans)
    backend.add_special_tokens(SPECIAL)
    return fast(backend, clean_up_tokenization_spaces=cleans)


def word_ends():
    """As older BPE tokenizers decode: the end of a word is marked, and becomes a blank unless it is the last."""
    words = ["the</w>", "c", "at</w>", "s</w>", "日", "!</w>"]
    backend = Tokenizer(models.BPE({word: n for n, word in enumerate(words)}, []))
    backend.decoder = decoders.BPEDecoder()
    backend.add_special_tokens(SPECIAL)
    return fast(backend)


TOKENIZERS = {
    "byte-level": byte_level(),
    "metaspace": metaspace(),
    "byte-fallback": byte_fallback(),
    "word-piece": word_piece(cleans=False),
    "word-piece-cleaned": word_piece(cleans=True),
    "word-ends": word_ends(),
}


def streamed(tokenizer, ids, sizes=(1,)):
    """All pieces of the text, `sizes` tokens at a time in turn; and that each is final at once."""
    stream, texts, begin, turn = TextStream(tokenizer), [], 0, 0
    while begin < len(ids):
        size = sizes[turn % len(sizes)]
        texts.append(stream.push(ids[begin : begin + size]))
        begin, turn = begin + size, turn + 1
    return [*texts, stream.finish()]


def random_ids(tokenizer):
    """Ids of all kinds, the ones behind the vocabulary included; bytes of characters often beside each other."""
    vocabulary = len(tokenizer)
    any_id = st.integers(0, vocabulary + 2)
    runs = [tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in text.encode()]) for text in ("é€🐈", "日本")]
    runs += [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (*TEXTS, "\ufffd", "🐈")]
    cut = st.sampled_from([run for run in runs if run and None not in run]).flatmap(
        lambda run: st.tuples(st.integers(0, len(run)), st.integers(0, len(run))).map(lambda ends: run[min(ends) : max(ends)])
    )
    part = st.one_of(st.lists(any_id, max_size=12), cut, st.tuples(any_id, st.integers(1, 70)).map(lambda p: [p[0]] * p[1]))
    return st.lists(part, max_size=8).map(lambda parts: [token for part in parts for token in part])


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_pieces_together_are_the_text_of_the_whole(name, data):
    tokenizer = TOKENIZERS[name]
    ids = data.draw(random_ids(tokenizer))
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    texts = streamed(tokenizer, ids, sizes)
    assert "".join(texts) == text_of(tokenizer, ids)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_stop_text_is_complete_with_the_token_that_completes_it_in_the_text_of_the_answer(name, data):
    tokenizer = TOKENIZERS[name]
    ids = data.draw(random_ids(tokenizer))
    text = text_of(tokenizer, ids)
    cuts = st.tuples(st.integers(0, len(text)), st.integers(1, 9)).map(lambda cut: text[cut[0] : cut[0] + cut[1]] or "x")
    stops = data.draw(st.lists(st.one_of(cuts, st.sampled_from(["<eos>", "\n", " ", "日本"])), min_size=1, max_size=3))
    seen = StopTexts(tokenizer, stops)
    named = ["<eos>"] if "<eos>" in stops else []
    for tokens in range(1, len(ids) + 1):
        complete = any(stop in text_of(tokenizer, ids[:tokens]) for stop in stops)
        complete |= tokenizer.convert_ids_to_tokens(ids[tokens - 1]) in named
        assert seen.accept_token(ids[tokens - 1]) == complete
        if complete:
            before, kept = without_stop(tokenizer, ids[:tokens], stops)
            whole = text_of(tokenizer, ids[:tokens])
            assert before == whole[: min([whole.find(stop) for stop in stops if stop in whole], default=len(whole))]
            assert kept == tokens or len(text_of(tokenizer, ids[:kept])) >= len(before)
            break


@given(st.text(max_size=80))
def test_no_piece_of_text_ends_in_half_a_character(text):
    tokenizer = TOKENIZERS["byte-level"]
    text = text.replace("\ufffd", "")
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    texts = streamed(tokenizer, ids)
    assert "".join(texts) == text
    assert not any("\ufffd" in piece for piece in texts)


@pytest.mark.parametrize("name", [name for name in TOKENIZERS if name != "word-piece-cleaned"])
def test_token_that_is_whole_comes_at_once(name):
    tokenizer = TOKENIZERS[name]
    for token in ("the", "▁the", "the</w>", "c"):
        if token in tokenizer.get_vocab():
            ids = tokenizer.convert_tokens_to_ids([token])
            assert TextStream(tokenizer).push(ids) == text_of(tokenizer, ids) != ""


@pytest.mark.parametrize(
    ("name", "token"),
    [
        *((name, None) for name in TOKENIZERS),
        ("byte-level", LETTER_OF_80),
        ("byte-level", "<eos>"),
        ("byte-fallback", "<0x80>"),
    ],
)
def test_time_grows_with_the_length_of_the_answer_not_with_its_square(name, token, monkeypatch):
    """Tokens decoded, all calls together. token: said again and again; None: all in turn."""
    tokenizer = TOKENIZERS[name]
    ids = [*range(len(tokenizer))] if token is None else [tokenizer.convert_tokens_to_ids(token)]
    ids, decoded = (ids * 4000)[:4000], []
    whole = text_of(tokenizer, ids)
    decode = type(tokenizer).decode

    def counted(self, token_ids, **options):
        decoded.append(len(token_ids))
        return decode(self, token_ids, **options)

    monkeypatch.setattr(type(tokenizer), "decode", counted)
    assert "".join(streamed(tokenizer, ids)) == whole
    assert sum(decoded) < len(ids) * (2 * LONGEST_TAIL + 2)


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("byte-level", {"Ġ": " ", "a": "a", LETTER_OF_80: "\ufffd", "<eos>": "<eos>"}),
        ("metaspace", {"▁the": " the", "▁": " ", "日": "日", "<pad>": "<pad>"}),
        ("byte-fallback", {"▁the": " the", "<0x0A>": "\n", "<0xE2>": "\ufffd"}),
        ("word-piece", {"the": " the", "##s": "s"}),
        ("word-piece-cleaned", {".": " ."}),
    ],
)
def test_text_of_a_token_is_what_it_adds(name, tokens):
    texts, tokenizer = TokenTexts(TOKENIZERS[name]), TOKENIZERS[name]
    for _ in range(2):
        assert {token: texts(tokenizer.convert_tokens_to_ids(token)) for token in tokens} == tokens
    assert texts(len(tokenizer) + 5) == ""
