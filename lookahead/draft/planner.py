"""Which guesses are worth a forward. In: a candidate table. Out: the most probable tree within a budget.

A node holds the candidates whose text runs through it. Its next token is t with probability
    (weight of its candidates that go on with t) / (weight of all its candidates + ESCAPE),
so a node known from one short match promises little and one that many long matches share promises much. The tree grows by
the probability of the whole path, best first: long single branches where text is being copied, bushes where it is not.
"""

from __future__ import annotations

import numpy as np

from lookahead.trie.suffixes import kernel

ESCAPE = 4.0  # weight of "none of these", in units of `candidates.weight_of`
WIDEST = 32  # different tokens considered below one node


@kernel
def grow(
    tokens, lengths, weights, sources, filled,
    root, budget, branch_length, least, single, lists,
    node_tokens, node_parents, node_probabilities, node_sources,
):  # fmt: skip
    """Fill the node arrays with the tree; returns the number of nodes, root included.

    budget: nodes below the root at most. branch_length: depth at most. least: path probability that a node must have.
    single: only the best child of a node may grow.
    lists: int32 array that takes the candidate lists of nodes, one after the other; growth below a node ends when full.
    """
    node_tokens[0] = root
    node_parents[0] = -1
    node_probabilities[0] = 1.0
    node_sources[0] = -1
    if filled == 0 or budget <= 0:
        return 1
    for row in range(filled):
        lists[row] = row
    used = filled
    # Nodes that wait to be taken, and a heap of their numbers by probability.
    most = WIDEST * (budget + 1)
    heap = np.empty(most, np.int32)
    probability = np.empty(most, np.float32)
    token_of = np.empty(most, np.int32)
    parent_of = np.empty(most, np.int32)
    depth_of = np.empty(most, np.int32)
    source_of = np.empty(most, np.int32)
    start_of = np.empty(most, np.int32)
    end_of = np.empty(most, np.int32)
    made = waiting = 0
    # Children of the node being expanded: one slot for each different next token.
    slot_of = np.empty(filled, np.int32)  # of each candidate, -1 where its text has ended
    slot_token = np.empty(WIDEST, np.int32)
    slot_weight = np.empty(WIDEST, np.float32)
    slot_source = np.empty(WIDEST, np.int32)
    slot_heaviest = np.empty(WIDEST, np.float32)
    slot_rows = np.empty(WIDEST, np.int32)
    slot_start = np.empty(WIDEST, np.int32)

    nodes = 1
    node, depth, start, end, reach = 0, 0, 0, filled, np.float32(1.0)
    while True:
        slots = 0
        total = np.float32(ESCAPE)
        for k in range(start, end):
            row = lists[k]
            slot_of[k - start] = -1
            if lengths[row] <= depth:
                continue
            token = tokens[row, depth]
            slot = 0
            while slot < slots and slot_token[slot] != token:
                slot += 1
            if slot == slots:
                if slots == WIDEST:
                    continue
                slots += 1
                slot_token[slot] = token
                slot_weight[slot] = 0.0
                slot_heaviest[slot] = 0.0
                slot_rows[slot] = 0
            slot_of[k - start] = slot
            slot_rows[slot] += 1
            slot_weight[slot] += weights[row]
            total += weights[row]
            if weights[row] > slot_heaviest[slot]:
                slot_heaviest[slot] = weights[row]
                slot_source[slot] = sources[row]
        best = 0
        for slot in range(1, slots):
            if slot_weight[slot] > slot_weight[best]:
                best = slot
        if depth < branch_length and used + (end - start) <= len(lists):
            for slot in range(slots):
                slot_start[slot] = -1
                path_probability = reach * slot_weight[slot] / total
                if path_probability < least or (single and slot != best):
                    continue
                slot_start[slot] = used
                probability[made] = path_probability
                token_of[made] = slot_token[slot]
                parent_of[made] = node
                depth_of[made] = depth + 1
                source_of[made] = slot_source[slot]
                start_of[made] = used
                used += slot_rows[slot]
                end_of[made] = used
                place = waiting
                heap[place] = made
                made += 1
                waiting += 1
                while place > 0 and probability[heap[place]] > probability[heap[(place - 1) >> 1]]:
                    heap[place], heap[(place - 1) >> 1] = heap[(place - 1) >> 1], heap[place]
                    place = (place - 1) >> 1
            for k in range(start, end):
                slot = slot_of[k - start]
                if slot >= 0 and slot_start[slot] >= 0:
                    lists[slot_start[slot]] = lists[k]
                    slot_start[slot] += 1
        if waiting == 0:
            return nodes
        taken = heap[0]
        waiting -= 1
        heap[0] = heap[waiting]
        place = 0
        while 2 * place + 1 < waiting:
            larger = 2 * place + 1
            if larger + 1 < waiting and probability[heap[larger + 1]] > probability[heap[larger]]:
                larger += 1
            if probability[heap[larger]] <= probability[heap[place]]:
                break
            heap[place], heap[larger] = heap[larger], heap[place]
            place = larger
        node_tokens[nodes] = token_of[taken]
        node_parents[nodes] = parent_of[taken]
        node_probabilities[nodes] = probability[taken]
        node_sources[nodes] = source_of[taken]
        node = nodes
        nodes += 1
        if nodes > budget:
            return nodes
        depth, start, end, reach = depth_of[taken], start_of[taken], end_of[taken], probability[taken]
