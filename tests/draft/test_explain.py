"""What is shown of a decode step: told by whoever decodes or replays, outlined as data, drawn for people."""

import io
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from lookahead.bench.replay import replay
from lookahead.decode.engine import DecodingEngine
from lookahead.draft.cells import RECYCLED
from lookahead.draft.drafter import Drafter
from lookahead.draft.explain import CONTEXT, OWN, Evidence, Step, evidence, outline
from lookahead.draft.options import DraftOptions
from lookahead.models.probe import probed
from lookahead_cli.explain import Explainer, draw, percent, shown
from tests.support import drafts
from tests.support.tries import append_ids, build_ids, counts_of

NAMES = ("prompt", "output", "session", "trie:faq")


def tree_of(token_ids, parents, probabilities=None, sources=None, matches=None):
    """Node 0 is the root; by default one source, and every node half as probable as its parent."""
    tree = drafts.tree_of(token_ids, parents)
    tree.probabilities[:] = 0.5 ** tree.depths() if probabilities is None else probabilities
    tree.sources[:] = tree.sources if sources is None else sources
    tree.matches[:] = 0 if matches is None else matches
    return tree


# ---- the outline of a tree
@st.composite
def explained_trees(draw):
    """(tree, accepted nodes, own token or None, most)"""
    n = draw(st.integers(1, 30))
    parents = [-1, *(draw(st.integers(max(0, node - 6), node - 1)) for node in range(1, n))]
    probabilities = [1.0]
    for parent in parents[1:]:
        probabilities.append(probabilities[parent] * draw(st.sampled_from([1.0, 0.5, 0.1])))
    sources = [-1, *(draw(st.integers(0, 3)) for _ in range(1, n))]
    accepted, node = [], 0
    while (below := [child for child in range(n) if parents[child] == node]) and draw(st.booleans()):
        node = draw(st.sampled_from(below))
        accepted.append(node)
    tree = tree_of(list(range(100, 100 + n)), parents, probabilities, sources)
    return tree, tuple(accepted), draw(st.sampled_from([None, 7])), draw(st.sampled_from([0, 1, 5, None]))


@given(explained_trees())
def test_every_node_is_drawn_once_or_counted_as_left_out_and_stands_behind_its_parent(explained):
    tree, accepted, own, most = explained
    found = outline(tree, NAMES, accepted, own, most)
    drawn = [node for line in found.lines for node in line.nodes if node != OWN]
    assert len(drawn) == len(set(drawn)) == tree.draft_tokens - found.left_out
    assert {node for line in found.lines for node in line.nodes if line.kind == "accepted"} == set(accepted)
    assert [line.token_ids for line in found.lines if line.kind == "own"] == ([] if own is None else [(own,)])
    ends = {(): 0}  # forks on the way -> the node that the next line at this place follows
    for line in found.lines:
        above = line.forks[:-1] if line.begins else line.forks
        parent = ends[above]
        assert line.before == tree.token_ids[parent]
        if line.kind == "own":
            assert parent == (accepted[-1] if accepted else 0)
            continue
        for node in line.nodes:
            assert tree.parents[node] == parent
            parent = node
        assert line.token_ids == tuple(tree.token_ids[list(line.nodes)])
        assert {NAMES[tree.sources[node]] for node in line.nodes} == {line.source}
        ends[line.forks] = parent
    if most is None:
        assert found.left_out == 0
    else:
        assert len(drawn) <= most + len(accepted)


# ---- steps
def told_adds_up(steps, prompt, output):
    """Each step follows the one before, and all of them say what came after the first token of the output."""
    assert [step.number for step in steps] == list(range(1, len(steps) + 1))
    done = [*prompt, output[0]]
    for step in steps:
        assert step.context == tuple(done[-CONTEXT:])
        assert step.tree.token_ids[0] == done[-1]
        assert [int(step.tree.token_ids[node]) for node in step.accepted] == list(step.emitted[: len(step.accepted)])
        assert len(step.emitted) - len(step.accepted) == (step.own is not None)
        done += step.emitted
    assert done == [*prompt, *output]


def accepted_by_source(steps):
    return Counter(step.source_names[step.tree.sources[node]] for step in steps for node in step.accepted)


@pytest.mark.parametrize(
    "options", [DraftOptions(decoding_length=8, adaptive=False), DraftOptions("parallel", adaptive=False), DraftOptions()]
)
def test_engine_tells_every_step_and_says_the_same_tokens_as_unwatched(tiny_model, make_trie, options):
    target = probed(tiny_model("llama"), "tiny")
    prompt = [5, 9, 23, 5, 9]
    alone = DecodingEngine(target, Drafter((), options)).generate(prompt, 40)
    answers = make_trie([alone.token_ids[:15], alone.token_ids[20:]], vocab_size=97)
    steps = []
    watched = DecodingEngine(target, Drafter([answers], options)).generate(prompt, 40, steps.append)
    assert watched.token_ids == alone.token_ids
    assert len(steps) == watched.steps
    told_adds_up(steps, prompt, watched.token_ids)
    assert sum(step.tree.draft_tokens for step in steps) == watched.draft_tokens
    assert accepted_by_source(steps) == watched.accepted_by_source
    assert watched.accepted_tokens > 10 or options.adaptive  # which drafts what pays on this machine


def test_replay_tells_the_steps_of_the_rows_that_are_watched(make_trie):
    random = np.random.default_rng(0)
    pairs = [(random.integers(0, 9, 5).tolist(), random.integers(0, 3, 60).tolist()) for _ in range(4)]
    steps_of = {2: [], 4: []}
    watch = {row: steps.append for row, steps in steps_of.items()}
    tries = [make_trie([pairs[3][1]])]
    found = replay(pairs, tries, DraftOptions(decoding_length=8), observer_of=watch.get)
    for row, steps in steps_of.items():
        told_adds_up(steps, *pairs[row - 1])
    first_rows = replay(pairs[:3], tries, DraftOptions(decoding_length=8))
    assert len(steps_of[4]) == found.steps - first_rows.steps
    assert accepted_by_source(steps_of[4]) == found.accepted_by_source - first_rows.accepted_by_source


# ---- who is credited
def test_tries_whose_files_share_a_name_are_told_apart(tmp_path):
    said = {"a": [1, 2, 3, 4, 5], "b": [6, 7, 8, 9, 0]}
    for folder, ids in said.items():
        (tmp_path / folder).mkdir()
        build_ids(tmp_path / folder / "faq.trie", [ids])
    tries = [build_ids(tmp_path / folder / "faq.trie", [ids]) for folder, ids in said.items()]
    found = replay([([1], said["a"][1:]), ([6], said["b"][1:])], tries, DraftOptions(decoding_length=16))
    assert set(found.accepted_by_source) == {f"trie:{tmp_path / folder / 'faq.trie'}" for folder in said}
    assert Drafter(tries[:1]).source_names[-1] == "trie:faq"


# ---- what the trie holds for a draft
@pytest.mark.parametrize("segments", [1, 2])
def test_evidence_counts_how_often_the_match_goes_on_like_this(tmp_path, segments):
    random = np.random.default_rng(1)
    documents = [random.integers(0, 3, 60).tolist() for _ in range(4)]
    trie = build_ids(tmp_path / "x.trie", documents[: 4 // segments])
    if segments == 2:
        trie = append_ids(tmp_path / "x.trie", documents[2:])
    counts, _ = counts_of(documents)
    context = documents[0][10:16]
    tree = Drafter([trie], DraftOptions(decoding_length=32)).start(context).draft()
    found = evidence(trie, RECYCLED + 1, context, tree)
    assert len(found) == len(tree)
    paths, exact = [tuple(context)], 0
    for node in range(1, len(tree)):
        above = paths[tree.parents[node]]
        paths.append((*above, int(tree.token_ids[node])))
        if found[node] is None:
            continue
        match = min(int(tree.matches[node]), trie.header.depth - 1)
        assert found[node] == Evidence(counts[paths[node][-match - 1 :]], counts[above[-match:]] if match else 240)
        exact += match > 2
    assert exact > 5
    assert all(found[node] is None for node in range(len(tree)) if tree.sources[node] != RECYCLED + 1)


# ---- drawn
class Words:
    """A tokenizer of the words below; the blank before a word is lost at the beginning, as with SentencePiece."""

    words = ("<s>", "the", "cat", "sat", "on", "mat", "\n", "中文字", "[red]", "supercalifragilistic")

    def decode(self, token_ids):
        return " ".join(self.words[token] for token in token_ids)


def drawn(width, do):
    out = io.StringIO()
    do(Console(file=out, width=width, highlight=False, soft_wrap=True))
    return out.getvalue()


def test_steps_are_drawn_with_signs_that_need_no_colour():
    tree = tree_of([1, 2, 3, 5, 4], [-1, 0, 1, 2, 2], [1, 0.9, 0.7, 0.004, 0.5], [-1, 3, 3, 2, 3], [0, 2, 3, 4, 5])
    step = Step.of(1, [1], [2, 3, 1], tree, [0, 1, 2], [2, 3, 1], NAMES)
    explainer = Explainer(Console(file=(out := io.StringIO()), width=80, highlight=False, soft_wrap=True), Words(), rows=1)
    watcher = explainer.observer_of(1)
    watcher(step)
    assert explainer.observer_of(2) is None
    _, picture = out.getvalue().split("\n\nrow 1\n\n")
    assert picture.splitlines() == [
        "step 1  'the'",
        "✓ ' cat sat'  90-70%  match 2  trie:faq",
        "→ ├ ' the'                     the model",
        "  ├ ' on'        50%  match 5  trie:faq",
        "  └ ' mat'      0.4%  match 4  session",
        "accepted 2 of 4 drafted",
    ]


def test_output_that_knows_ascii_only_gets_plain_signs():
    raw = io.BytesIO()
    with io.TextIOWrapper(raw, "ascii") as out:
        explainer = Explainer(Console(file=out, width=80, soft_wrap=True), Words(), rows=1)
        tree = tree_of([1, 2, 3, 7], [-1, 0, 1, 1])
        explainer.show(1, Step.of(1, [1], [2, 6], tree, [0, 1], [2, 6], NAMES))
        out.flush()
        lines = raw.getvalue().decode().splitlines()
    assert lines[-5].startswith("+ ' cat'")
    assert lines[-4].startswith("> | ' \\n'")
    assert lines[-3].startswith("  | ' sat'")
    assert lines[-2].startswith("  ` ' ???'")


def test_replay_of_ids_is_drawn_as_ids_and_says_how_many_are_not_shown():
    explainer = Explainer(Console(file=(out := io.StringIO()), width=80, soft_wrap=True), None, rows=2)
    tree = tree_of([1, *range(30, 60)], [-1] + [0] * 30)
    for row in (1, 2):
        explainer.show(row, Step.of(1, [8], [9, 4], tree, [0], [4], NAMES))
    text = out.getvalue()
    assert text.count("match 6:") == 1  # the legend
    assert text.count("step 1  8 9\n→ ├ 4") == 2
    assert text.count("accepted 0 of 30 drafted, 10 less probable ones not shown\n") == 2


@given(explained_trees(), st.sampled_from([30, 80, 100]), st.randoms())
def test_drawing_fits_its_width_and_holds_all_of_the_text(explained, width, random):
    tree, accepted, own, most = explained
    tree.token_ids[:] = [random.randrange(len(Words.words)) for _ in range(len(tree))]
    found = outline(tree, NAMES, accepted, own, most)
    text = drawn(width, lambda console: draw(console, found, Words()))
    for kind, sign in (("accepted", "✓"), ("own", "→")):
        assert [line.lstrip(sign)[0] for line in text.splitlines() if line.startswith(sign)] == [" "] * sum(
            line.kind == kind for line in found.lines
        )
    squeezed = "".join(text.split())
    for line in found.lines:
        first_word = Words.words[line.token_ids[0] if line.kind != "own" else own].strip() or "\\n"
        assert first_word[:4] in squeezed
    if width >= 80:
        console = Console(width=width)
        assert all(console.render_str(line.replace("[", "\\[")).cell_len <= width for line in text.splitlines())


def test_blank_that_a_token_has_only_behind_another_is_shown():
    assert shown(Words(), [2], before=1) == "' cat'"
    assert shown(Words(), [2]) == "'cat'"
    assert shown(None, [2, 3]) == "2 3"


def test_small_probabilities_keep_a_digit():
    assert [percent(p) for p in (1.0, 0.126, 0.0096, 0.004, 0.0001)] == ["100%", "13%", "1%", "0.4%", "<0.1%"]
