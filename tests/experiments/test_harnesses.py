"""A sample of JAX's own harnesses computes under a budget what it does under jit."""

import pytest

from experiments.benchmarks.harnesses import check, harnesses

SAMPLE = harnesses(every=40)
PARTS = 4  # that may run at once


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(PARTS))
def test_operations_compute_what_they_do_under_jit(part):
    answers = [check(harness) for harness in SAMPLE[part::PARTS]]
    assert len(answers) >= 30
    wrong = [x for x in answers if x.outcome not in ("bit", "rounding")]
    assert not wrong
