"""Near ties are decided as the reference decides them, whatever runs the row."""

from __future__ import annotations

import near_ties
import numpy as np
import pytest

from nucleate.backends import reference


@pytest.mark.parametrize("kind", near_ties.KINDS)
def test_the_generator_makes_what_it_says(kind: str) -> None:
    first = near_ties.KINDS.index(kind)
    sides = []
    for index in range(first, first + 12 * len(near_ties.KINDS), len(near_ties.KINDS)):
        one, again = near_ties.case(index), near_ties.case(index)
        assert (one.kind, one.stages, one.seed, one.step) == (kind, again.stages, again.seed, again.step)
        assert one.logits.tobytes() == again.logits.tobytes()
        assert one.logits.dtype == np.float32
        wanted = abs(one.gap)
        found = near_ties.measured(one)[kind]
        if kind == "top_k":
            assert found < 1e-5
        else:
            assert found <= 1.6 * wanted + 3e-14
            assert found >= 0.4 * wanted - 3e-14 or kind in ("top_p", "min_p", "typical mass")  # or another is nearer
        assert reference.draw(one.logits, one.stages, one.seed, one.step) >= 0
        sides.append(one.gap > 0)
    assert 0 < sum(sides) < len(sides)
