"""Sorting and merging suffixes. In and out: numpy arrays. Knows nothing of files or text.

`tokens` holds documents one after the other, each closed by `separator`, which is larger than every token id. Suffixes are
ordered by their first `depth` tokens, never looking past their own separator, then by position; so the order of any two
suffixes of one document is the same in any file they stand.

Several tokens are packed into one 64-bit key as digits of the separator's width, zeros behind a separator: 4 tokens of a
vocabulary below 65,536, 3 below two million. Keys compare as the text does.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from lookahead.native.kernels import kernel

DEPTH = 32
TASKS_PER_WORKER = 64  # first tokens are handed to threads in this many shares, as some are far more frequent than others
SAMPLE = 256  # a file holds the key of one in that many sorted suffixes
AHEAD = 128  # texts fetched together
FEW = 24  # suffixes sorted by insertion

# Arrays of a mapped file may lie about positions: a kernel that reads one clamps each position before it uses it as an index.


def sort_suffixes(
    tokens: np.ndarray,
    separator: int,
    depth: int = DEPTH,
    workers: int = 1,
    progress: Callable[[str, int, int | None], None] = lambda stage, done, total: None,
) -> np.ndarray:
    """Positions of all suffixes that start with a real token, sorted; uint32 [len(tokens) - documents].

    tokens: below 2^32 entries, the last one a separator. Suffixes are distributed by their first token, then each share is
    radix-sorted by packed keys of the next tokens, and what still ties by those behind (MSD radix sort; Kärkkäinen and
    Rantala 2008 on why keys are packed).
    progress gets ("sorting", suffixes done, of how many).
    Memory: 4 bytes per token for the result, and 24 per suffix of the largest first token, for each worker.
    """
    counts = np.zeros(separator + 1, np.int64)
    add_counts(tokens, counts)
    first = np.concatenate([[0], np.cumsum(counts[:separator])])
    suffixes = np.empty(first[-1], np.uint32)
    distribute(tokens, separator, first[:-1].copy(), suffixes)
    shares = first_token_shares(first, workers)

    def sort_share(begin: int, end: int) -> int:
        bounds = first[np.searchsorted(first, begin) : np.searchsorted(first, end) + 1]
        sort_tokens(tokens, separator, separator.bit_length(), suffixes, bounds, depth)
        return end

    with ThreadPoolExecutor(workers) as pool:
        for done in pool.map(sort_share, shares[:-1], shares[1:]):
            progress("sorting", done, len(suffixes))
    return suffixes


def first_token_shares(first: np.ndarray, workers: int) -> list[int]:
    """Bounds that part sorted suffixes into shares for threads, where the first token changes; `first` is their table."""
    wanted = np.linspace(0, int(first[-1]), TASKS_PER_WORKER * workers + 1)
    return [int(bound) for bound in np.unique(first[np.searchsorted(first, wanted)])]


def first_table(starts: np.ndarray, vocabulary: int) -> np.ndarray:
    """uint32 [vocabulary + 1]: where each token begins among these, sorted."""
    return np.concatenate([[0], np.cumsum(np.bincount(starts, minlength=vocabulary))]).astype(np.uint32)


@kernel
def add_counts(tokens, counts):
    """Add to counts[t] how often token t stands in `tokens`."""
    for p in range(len(tokens)):
        counts[tokens[p]] += 1


@kernel
def add_first_tokens(keys, separator, counts):
    """Add to counts[t] how many of the keys begin with token t."""
    bits = bit_length(separator)
    shift = np.uint64(bits * (key_digits(bits) - 1))
    for k in range(len(keys)):
        counts[min(np.int64(keys[k] >> shift), len(counts) - 1)] += 1


@kernel
def fetch_texts(tokens, positions, begin):
    """Read where the next AHEAD texts begin and end, together: reading them one by one would wait for each.

    Positions may lie. Returns a number that is never negative, for the compiler to keep this.
    """
    n = np.int64(len(tokens))
    touched = np.int64(0)
    for k in range(begin, min(begin + AHEAD, len(positions))):
        start = min(max(np.int64(positions[k]), 0), n - 1)
        touched += np.int64(tokens[start]) + np.int64(tokens[min(start + DEPTH, n) - 1])
    return touched


@kernel
def sample_keys(tokens, separator, suffixes, keys):
    """Keys of the first tokens of suffixes 0, SAMPLE, 2 * SAMPLE, ..., as many tokens as fit into 64 bits; fills `keys`."""
    bits = bit_length(separator)
    for k in range(len(keys)):
        keys[k] = pack(tokens, separator, bits, np.int64(suffixes[k * SAMPLE]), key_digits(bits))
    return keys


@kernel
def key_digits(bits):
    """Tokens of `bits` bits that one key holds."""
    return min(64 // bits, DEPTH)


@kernel
def bit_length(number):
    bits = 0
    while number >> bits:
        bits += 1
    return bits


@kernel
def distribute(tokens, separator, following, suffixes):
    """Positions by first token: those of token t go to suffixes[following[t]] and behind, in order."""
    for p in range(len(tokens)):
        t = tokens[p]
        if t != separator:
            suffixes[following[t]] = p
            following[t] += 1


@kernel
def sort_tokens(tokens, separator, bits, suffixes, first, depth):
    """Sort each range suffixes[first[i]:first[i + 1]]; its suffixes share their first token and stand in order of position."""
    most = np.int64(0)
    for i in range(len(first) - 1):
        most = max(most, first[i + 1] - first[i])
    digits = key_digits(bits)
    keys, spare_keys = np.empty(most, np.uint64), np.empty(most, np.uint64)
    sorted_suffixes, spare_suffixes = np.empty(most, suffixes.dtype), np.empty(most, suffixes.dtype)
    counts = np.empty((8, 256), np.int64)
    touched = np.int64(0)
    stack = np.empty((1024, 3), np.int64)  # ranges still to be sorted: low, high, tokens that all of it shares
    for i in range(len(first) - 1):
        if first[i + 1] - first[i] < 2:
            continue
        stack[0, 0], stack[0, 1], stack[0, 2] = first[i], first[i + 1], 1
        top = 1
        while top:
            top -= 1
            low, high, shared = stack[top, 0], stack[top, 1], stack[top, 2]
            if high - low <= FEW:
                _insertion_sort(tokens, separator, suffixes, low, high, shared, depth)
                continue
            size = high - low
            taken = min(digits, depth - shared)
            for k in range(size):
                if k % AHEAD == 0:  # as in pack_texts
                    for ahead in range(k, min(k + AHEAD, size)):
                        touched += np.int64(tokens[np.int64(suffixes[low + ahead]) + shared])
                sorted_suffixes[k] = suffixes[low + k]
                keys[k] = pack(tokens, separator, bits, np.int64(sorted_suffixes[k]) + shared, taken)
            swapped = _radix_sort(keys, sorted_suffixes, spare_keys, spare_suffixes, size, counts)
            by_key, at = (spare_keys, spare_suffixes) if swapped else (keys, sorted_suffixes)
            shared += taken
            begin = 0
            while begin < size:
                key = by_key[begin]
                end = begin
                while end < size and by_key[end] == key:
                    suffixes[low + end] = at[end]
                    end += 1
                if end - begin > 1 and shared < depth and not _holds(key, separator, bits, taken):
                    if top == len(stack):
                        stack = np.concatenate((stack, stack))
                    stack[top, 0], stack[top, 1], stack[top, 2] = low + begin, low + end, shared
                    top += 1
                begin = end
    return touched


@kernel
def pack(tokens, separator, bits, start, count):
    """`count` tokens from `start` as digits of one key, zeros behind a separator."""
    n = np.int64(len(tokens))
    key = np.uint64(0)
    ended = False
    for j in range(count):
        key <<= np.uint64(bits)
        if not ended:
            token = np.int64(tokens[start + j]) if start + j < n else np.int64(separator)
            key |= np.uint64(token)
            ended = token == separator
    return key


@kernel
def _holds(key, separator, bits, count):
    """True if one of the key's digits is the separator: the document ends inside it."""
    mask = (np.uint64(1) << np.uint64(bits)) - np.uint64(1)
    for j in range(count):  # noqa: SIM110 - kernels have no any()
        if (key >> np.uint64(bits * j)) & mask == np.uint64(separator):
            return True
    return False


@kernel
def _radix_sort(keys, sorted_suffixes, spare_keys, spare_suffixes, size, counts):
    """Sort keys[:size] with their positions, stably, byte by byte; True if the result lies in the spare arrays."""
    counts[:] = 0
    for k in range(size):
        key = keys[k]
        for r in range(8):
            counts[r, (key >> np.uint64(8 * r)) & np.uint64(255)] += 1
    swapped = False
    for r in range(8):
        shift = np.uint64(8 * r)
        if counts[r, (keys[0] >> shift) & np.uint64(255)] == size:
            continue  # the same byte everywhere
        total = np.int64(0)
        for value in range(256):
            total, counts[r, value] = total + counts[r, value], total
        for k in range(size):
            value = (keys[k] >> shift) & np.uint64(255)
            slot = counts[r, value]
            counts[r, value] = slot + 1
            spare_keys[slot] = keys[k]
            spare_suffixes[slot] = sorted_suffixes[k]
        keys, spare_keys = spare_keys, keys
        sorted_suffixes, spare_suffixes = spare_suffixes, sorted_suffixes
        swapped = not swapped
    return swapped


@kernel
def _insertion_sort(tokens, separator, suffixes, low, high, shared, depth):
    """Sort suffixes[low:high], which share their first `shared` tokens and stand in order of position."""
    for i in range(low + 1, high):
        moved = suffixes[i]
        k = i
        while k > low and compare_suffixes(tokens, separator, np.int64(moved), np.int64(suffixes[k - 1]), shared, depth) < 0:
            suffixes[k] = suffixes[k - 1]
            k -= 1
        suffixes[k] = moved


@kernel
def compare_suffixes(tokens, separator, a, b, shared, depth):
    """-1, 0, 1 as the text at `a` sorts before, equals, sorts after that at `b`; their first `shared` tokens are equal."""
    n = np.int64(len(tokens))
    for d in range(shared, depth):
        x = np.int64(tokens[a + d]) if a + d < n else np.int64(separator)
        y = np.int64(tokens[b + d]) if b + d < n else np.int64(separator)
        if x != y:
            return -1 if x < y else 1
        if x == separator:
            break
    return 0


@kernel
def count_before(tokens, separator, positions, splitter, equal_too, depth):
    """Count the sorted `positions` whose text sorts before that at `splitter`, or equals it if `equal_too`."""
    low, high = 0, len(positions)
    while low < high:
        middle = (low + high) >> 1
        order = compare_suffixes(tokens, separator, positions[middle], splitter, 0, depth)
        if order < 0 or (order == 0 and equal_too):
            low = middle + 1
        else:
            high = middle
    return low


@kernel
def pack_texts(tokens, separator, bits, positions, order, texts):
    """texts[k]: the text at positions[k] as keys, for each k in `order`; as many tokens as its words hold, up to DEPTH."""
    digits = key_digits(bits)
    n = np.int64(len(tokens))
    touched = np.int64(0)
    for i in range(len(order)):
        if i % AHEAD == 0:  # fetch the next texts together: reading them one by one would wait for each
            for ahead in range(i, min(i + AHEAD, len(order))):
                start = positions[order[ahead]]
                touched += np.int64(tokens[start]) + np.int64(tokens[min(start + DEPTH, n) - 1])
        k = order[i]
        texts[k] = 0
        for w in range(texts.shape[1]):
            start = positions[k] + w * digits
            taken = min(digits, DEPTH - w * digits)
            key = np.uint64(0)
            ended = start + taken > n
            if not ended:
                for position in range(start, start + taken):  # without a branch, as most words hold no separator
                    token = np.uint64(tokens[position])
                    key = (key << np.uint64(bits)) | token
                    ended |= token == np.uint64(separator)
            if ended:
                key = pack(tokens, separator, bits, start, taken)
            texts[k, w] = key << np.uint64(bits * (digits - taken))
            if ended:
                break
    return touched


@kernel
def merge_block(texts, positions, bounds, merged, keys, whole):
    """Merge the sorted parts positions[bounds[i]:bounds[i + 1]] into `merged`; equal texts keep the order of the parts.

    texts: uint64 [positions, words], see pack_texts. keys: uint64 [positions], gets the first word of each merged text.
    Returns False if the texts, and where they are whole the positions of equal ones, are not in order: then a part was not.
    """
    size = len(positions)
    order, spare = np.arange(size), np.empty(size, np.int64)
    bounds = bounds.copy()
    parts = len(bounds) - 1
    while parts > 1:
        for i in range(0, parts - 1, 2):
            a, b = bounds[i], bounds[i + 1]
            for k in range(bounds[i], bounds[i + 2]):
                left = a < bounds[i + 1]
                if left and b < bounds[i + 2]:
                    left = _compare_texts(texts, order[a], order[b]) <= 0
                if left:
                    spare[k] = order[a]
                    a += 1
                else:
                    spare[k] = order[b]
                    b += 1
        if parts % 2:
            for k in range(bounds[parts - 1], bounds[parts]):
                spare[k] = order[k]
        order, spare = spare, order
        for i in range(0, parts, 2):
            bounds[i // 2] = bounds[i]
        bounds[(parts + 1) // 2] = bounds[parts]
        parts = (parts + 1) // 2
    for k in range(size):
        merged[k] = positions[order[k]]
        keys[k] = texts[order[k], 0]
        if k:
            compared = _compare_texts(texts, order[k - 1], order[k])
            if compared > 0 or (whole and compared == 0 and merged[k - 1] >= merged[k]):
                return False
    return True


@kernel
def ties_in_order(tokens, separator, bits, positions, keys):
    """True if texts of equal keys are sorted by the tokens behind, then by position. keys: of `positions`, see `pack_texts`."""
    digits = key_digits(bits)
    touched = np.int64(0)
    for k in range(1, len(positions)):
        if k % AHEAD == 1:
            touched += fetch_texts(tokens, positions, k - 1)
        if keys[k] != keys[k - 1]:
            continue
        order = 0
        if not _holds(keys[k], separator, bits, digits):
            order = compare_suffixes(tokens, separator, positions[k - 1], positions[k], digits, DEPTH)
        if order > 0 or (order == 0 and positions[k - 1] >= positions[k]):
            return False
    return touched >= 0  # always


@kernel
def _compare_texts(texts, a, b):
    for w in range(texts.shape[1]):
        if texts[a, w] != texts[b, w]:
            return -1 if texts[a, w] < texts[b, w] else 1
    return 0


# The compiler's runtime starts with the first kernel that is called (0.1 s, 40 MiB): here, so that no query pays for it.
compare_suffixes(np.frombuffer(bytes(2), np.uint16), 0, 0, 0, 0, 1)
