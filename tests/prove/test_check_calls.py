"""How results of many calls are compared."""

from __future__ import annotations

import torch

from fuselab.prove.check_calls import _first_difference


def test_the_first_call_that_differs_is_found_in_results_of_any_rank():
    alike = torch.ones(4, 2, 3)
    numbers = torch.tensor([1.0, 1.0, 2.0, 1.0])  # four calls, each with a result of no dimension
    assert _first_difference([alike, None]) is None
    assert _first_difference([alike, numbers]) == 2
    assert _first_difference([torch.full((4,), float("nan"))]) is None
    assert _first_difference([torch.zeros(4, 0)]) is None
