"""The engine against `model.generate`: random generation configs x params x architectures x batch 1 and 4 x drafts.

LOOKAHEAD_FUZZ_CASES: how many (default 2,000, half an hour on one core). LOOKAHEAD_FUZZ_FROM: the number of the first.
"""

import collections
import os

from tests.support.generate_cases import case, difference

CASES = int(os.environ.get("LOOKAHEAD_FUZZ_CASES", "2000"))
FIRST = int(os.environ.get("LOOKAHEAD_FUZZ_FROM", "0"))


def test_all_cases_give_the_tokens_of_generate():
    different, seen = [], collections.Counter()
    for number in range(FIRST, FIRST + CASES):
        found = case(number)
        seen[found.architecture, len(found.rows)] += 1
        if line := difference(found):
            different.append(line)
    assert len(seen) == min(CASES, 12)
    assert not different, "\n".join([f"{len(different)} of {CASES} cases differ:", *different[:20]])
