"""A slice of the fuzz of tests/deep/test_fuzz_generate.py: every way of verifying, batch 1 and 4."""

import pytest

from tests.support.depth import some_deep
from tests.support.generate_cases import ARCHITECTURES, case, difference, target_of

CASES = 24


def test_architectures_of_the_fuzz_verify_in_every_way():
    assert {name: target_of(name).mode for name in ARCHITECTURES} == ARCHITECTURES


@pytest.mark.parametrize("number", some_deep(range(CASES), range(len(ARCHITECTURES))))
def test_random_config_and_params_give_the_tokens_of_generate(number):
    assert difference(case(number)) == ""
