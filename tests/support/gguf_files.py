"""Small GGUF files with weights that are drawn: blocks of any format, which need not stand for numbers that anybody rounded."""

from pathlib import Path

import gguf
import numpy as np

from lookahead.backends.cpu.block_code import FORMATS

VOCAB, WIDTH, INNER, HEADS, KEY_HEADS = 300, 256, 512, 4, 2


def drawn(name: str, outputs: int, inputs: int, seed: int = 0) -> np.ndarray:
    """uint8 [outputs, bytes]: blocks of this format with small scales."""
    form = next(each for each in FORMATS if each.name == name)
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (outputs, inputs // form.inputs, form.bytes_in_file), np.uint8)
    for begin in [208] if name == "Q6_K" else range(0, 2 + 2 * form.offsets, 2):
        scales = random.normal(0, 0.05 if form.name[-1] != "K" else 0.001, blocks.shape[:2]).astype(np.float16)
        blocks[..., begin : begin + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(outputs, -1)


def write_gguf(path: Path, formats: list[str], change=lambda name, blocks: blocks) -> int:
    """A Llama of two layers, whose matrices have these formats in turn; bytes of its matrices. change: of each of them."""
    writer = gguf.GGUFWriter(path, "llama")
    known = {
        "block_count": 2,
        "context_length": 512,
        "embedding_length": WIDTH,
        "feed_forward_length": INNER,
        "vocab_size": VOCAB,
    }
    known |= {"head_count": HEADS, "head_count_kv": KEY_HEADS, "layer_norm_rms_eps": 1e-5}
    for name, value in (known | {"rope_dimension_count": WIDTH // HEADS}).items():
        getattr(writer, f"add_{name}")(value)
    shapes = {"token_embd": (VOCAB, WIDTH)}
    keys = WIDTH // HEADS * KEY_HEADS
    for layer in range(2):
        of_layer = {"attn_q": (WIDTH, WIDTH), "attn_k": (keys, WIDTH), "attn_v": (keys, WIDTH), "attn_output": (WIDTH, WIDTH)}
        of_layer |= {"ffn_gate": (INNER, WIDTH), "ffn_up": (INNER, WIDTH), "ffn_down": (WIDTH, INNER)}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in of_layer.items()}
    size = 0
    for number, (name, shape) in enumerate(shapes.items()):
        kind = formats[number % len(formats)]
        blocks = change(f"{name}.weight", drawn(kind, *shape, number))
        size += blocks.nbytes
        writer.add_tensor(f"{name}.weight", blocks, raw_dtype=gguf.GGMLQuantizationType[kind])
    for name in ("output_norm", *(f"blk.{layer}.{norm}" for layer in range(2) for norm in ("attn_norm", "ffn_norm"))):
        writer.add_tensor(f"{name}.weight", np.ones(WIDTH, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return size
