"""Train the demo model that ships in `samples/demo-model`, and write the sample files beside it.

In:  GSM8K as `train.jsonl` and `test.jsonl` with rows {"question", "answer"} (openai/grade-school-math, MIT).
Out: a small Llama with its own byte-level BPE, `corpus.jsonl` (train answers) and `prompts.jsonl` (held-out questions).

    python samples/train_demo_model.py --data path/to/gsm8k --out samples --tokens 13500000

Every document is `<s>Question: ...\nAnswer: ...</s>`. Loss is taken on question and answer alike: with 7,473 documents the
questions are half of the English that the model ever sees. Hidden matrices are trained with Muon, the rest with AdamW.

Held-out loss is lowest after five epochs, but greedy answers then fall into loops (28 % repeated 8-grams, 14 of 100 never end);
four more epochs cost held-out loss and bring fluency (4 %, all end). For a model that exists to be decoded, that is right.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
PROMPT = "Question: {question}\nAnswer:"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% if tools %}Functions: {{ tools | tojson }}\n"  # of which it has learned nothing
    'A call: <tool_call>\n{"name": NAME, "arguments": OBJECT}\n</tool_call>\n{% endif %}{% for m in messages %}'
    "{% if m.role == 'assistant' %} {{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}{{ eos_token }}"
    "{% else %}Question: {{ m.content }}\nAnswer:{% endif %}"
    "{% endfor %}"
)
LICENCE_NOTE = """\
Demo model of `lookahead`
=========================

Weights, tokenizer and configuration were trained from scratch by `samples/train_demo_model.py` on the train split of
GSM8K (https://github.com/openai/grade-school-math) and are released under Apache-2.0, as the rest of this project.
`../corpus.jsonl` and `../prompts.jsonl` hold text of GSM8K, which is distributed under this licence:

MIT License. Copyright (c) 2021 OpenAI

Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated documentation
files (the "Software"), to deal in the Software without restriction, including without limitation the rights to use, copy,
modify, merge, publish, distribute, sublicense, and/or sell copies of the Software, and to permit persons to whom the
Software is furnished to do so, subject to the following conditions:

The above copyright notice and this permission notice shall be included in all copies or substantial portions of the
Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE
WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR
COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE,
ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.

"""


def read_rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE; digits stand alone so that arithmetic is spelled the same way everywhere."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=1024,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def new_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        attention_dropout=0.0,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def documents(rows: list[dict[str, str]], tokenizer: PreTrainedTokenizerFast) -> list[tuple[list[int], int]]:
    """(token ids, number of prompt tokens) of each row, end-of-sequence included."""
    prompts = tokenizer([PROMPT.format(**row) for row in rows])["input_ids"]
    answers = tokenizer([" " + row["answer"] for row in rows], add_special_tokens=False)["input_ids"]
    return [(p + a + [tokenizer.eos_token_id], len(p)) for p, a in zip(prompts, answers, strict=True)]


def batches(docs: list[tuple[list[int], int]], tokens_per_batch: int, rng: random.Random):
    """Batches of similar length in random order, every document once; see `width_of` for the padding."""
    order = sorted(range(len(docs)), key=lambda i: len(docs[i][0]) + rng.uniform(-12, 12))
    groups: list[list[tuple[list[int], int]]] = []
    while order:
        rows = max(1, tokens_per_batch // width_of([docs[order[-1]]]))
        groups.append([docs[i] for i in order[-rows:]])
        del order[-rows:]
    rng.shuffle(groups)
    yield from groups


def width_of(batch: list[tuple[list[int], int]]) -> int:
    """Longest document rounded up to 16: few different shapes, so that kernels are built once and found again."""
    return math.ceil(max(len(ids) for ids, _ in batch) / 16) * 16


def padded(batch: list[tuple[list[int], int]], answers_only: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(input_ids, labels), both [rows, width]; padding and, where asked, prompts carry the label -100."""
    width = width_of(batch)
    ids = torch.zeros(len(batch), width, dtype=torch.long)
    labels = torch.full((len(batch), width), -100)
    for row, (tokens, prompt) in enumerate(batch):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        start = prompt if answers_only else 0
        labels[row, start : len(tokens)] = torch.tensor(tokens[start:])
    return ids, labels


def loss_of(model, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Summed cross-entropy over the labelled tokens. Right padding needs no mask: causal attention never looks at it."""
    with torch.autocast("cpu" if ids.device.type == "cpu" else "cuda", dtype=torch.bfloat16):
        logits = model(input_ids=ids, use_cache=False).logits
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].float().reshape(-1, logits.shape[-1]),
        labels[:, 1:].reshape(-1),
        ignore_index=-100,
        reduction="sum",
    )


@torch.no_grad()
def held_out_loss(model, docs, device, answers_only: bool) -> float:
    """Mean nats per token."""
    model.eval()
    total, count = 0.0, 0
    for batch in batches(docs, 8192, random.Random(0)):
        ids, labels = padded(batch, answers_only)
        total += loss_of(model, ids.to(device), labels.to(device)).item()
        count += int((labels[:, 1:] >= 0).sum())
    model.train()
    return total / count


def train(model, docs, held_out, args, device) -> int:
    """Trains in place for about `args.tokens` tokens; returns the number really seen."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n and "lm_head" not in n]
    rest = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n or "lm_head" in n]
    optimizers = [
        torch.optim.Muon(matrices, lr=args.lr, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=args.lr * 2, weight_decay=0.01, betas=(0.9, 0.95)),
    ]
    peaks = [group["lr"] for o in optimizers for group in o.param_groups]
    forward = torch.compile(model, dynamic=True) if args.compile else model
    rng = random.Random(args.seed)
    seen, step, epoch, running, start = 0, 0, 0, 0.0, time.monotonic()
    while seen < args.tokens:
        epoch += 1
        for batch in batches(docs, args.batch_tokens, rng):
            share = seen / args.tokens
            scale = min(1.0, share / 0.02 + 0.02) * (1.0 if share < 0.4 else max(0.02, (1 - share) / 0.6))
            for group, peak in zip((g for o in optimizers for g in o.param_groups), peaks, strict=True):
                group["lr"] = peak * scale
            ids, labels = padded(batch, answers_only=False)
            tokens = int((labels[:, 1:] >= 0).sum())
            loss = loss_of(forward, ids.to(device), labels.to(device)) / tokens
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            seen, step, running = seen + tokens, step + 1, running + loss.item()
            if step % 50 == 0:
                rate = seen / (time.monotonic() - start)
                print(
                    f"epoch {epoch} step {step} tokens {seen:,} loss {running / 50:.3f} {rate:,.0f} tokens/s",
                    flush=True,
                )
                running = 0.0
            if seen >= args.tokens:
                break
        both, answers = (held_out_loss(model, held_out, device, only) for only in (False, True))
        print(f"epoch {epoch}: held-out loss {both:.3f} (answers {answers:.3f}), {seen:,} tokens", flush=True)
        if args.checkpoint:
            model.save_pretrained(args.checkpoint)
    return seen


@torch.no_grad()
def repetition(model, tokenizer, rows, device) -> tuple[float, float, list[str]]:
    """(share of 8-grams seen before in the same answer, share of answers that end by themselves, answers)."""
    model.eval()
    repeated = total = ended = 0
    answers = []
    for row in rows:
        ids = tokenizer(PROMPT.format(**row), return_tensors="pt").input_ids.to(device)
        out = model.generate(ids, max_new_tokens=300, do_sample=False)[0, ids.shape[1] :].tolist()
        ended += out[-1] == tokenizer.eos_token_id
        grams = [tuple(out[i : i + 8]) for i in range(len(out) - 7)]
        repeated += len(grams) - len(set(grams))
        total += len(grams)
        answers.append(tokenizer.decode(out, skip_special_tokens=True))
    return repeated / max(1, total), ended / len(rows), answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with GSM8K train.jsonl and test.jsonl")
    parser.add_argument("--out", type=Path, default=Path("samples"), help="folder for demo-model/, corpus.jsonl, prompts.jsonl")
    parser.add_argument("--tokens", type=int, default=13_500_000, help="training tokens")
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate of the hidden matrices")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action="store_true", help="torch.compile the training forward")
    parser.add_argument("--checkpoint", type=Path, help="folder that gets the weights after every epoch")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_rows, test_rows = read_rows(args.data / "train.jsonl"), read_rows(args.data / "test.jsonl")
    tokenizer = train_tokenizer(
        [PROMPT.format(**r) for r in train_rows] + [" " + r["answer"] for r in train_rows], args.vocab_size
    )
    docs, held_out = documents(train_rows, tokenizer), documents(test_rows, tokenizer)
    model = new_model(tokenizer).to(device)
    print(
        f"{sum(p.numel() for p in model.parameters()):,} parameters, vocabulary {len(tokenizer)}, "
        f"{sum(len(ids) for ids, _ in docs):,} tokens per epoch",
        flush=True,
    )
    seen = train(model, docs, held_out, args, device)

    out = args.out / "demo-model"
    both, answers = (held_out_loss(model, held_out, device, only) for only in (False, True))
    model.half().save_pretrained(out)
    tokenizer.save_pretrained(out)
    ids = {f"{n}_token_id": getattr(tokenizer, f"{n}_token_id") for n in ("bos", "eos", "pad")}
    GenerationConfig(do_sample=False, max_new_tokens=300, **ids).save_pretrained(out)
    (out / "LICENCE.txt").write_text(LICENCE_NOTE, encoding="utf-8")
    with (args.out / "corpus.jsonl").open("w", encoding="utf-8") as f:
        f.writelines(json.dumps({"response": " " + r["answer"]}, ensure_ascii=False) + "\n" for r in train_rows)
    with (args.out / "prompts.jsonl").open("w", encoding="utf-8") as f:
        f.writelines(json.dumps({"prompt": PROMPT.format(**r)}, ensure_ascii=False) + "\n" for r in test_rows[:200])

    repeated, ended, texts = repetition(model.float(), tokenizer, test_rows[:100], device)
    for text in texts[:5]:
        print("-" * 40 + "\n" + text)
    report = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "training_tokens": seen,
        "held_out_loss": round(both, 4),
        "held_out_loss_answers": round(answers, 4),
        "repeated_8grams_share": round(repeated, 4),
        "answers_that_end_share": round(ended, 4),
        "held_out_perplexity_answers": round(math.exp(answers), 3),
    }
    (out / "training.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
