"""Short and long forms of tests."""

from __future__ import annotations

import hypothesis
import pytest

from tests.helpers.amounts import amount

# As decorators of tests ask for it: where the module is imported.
AT_IMPORT = amount(1, 2)


def test_long_forms_are_those_that_were_asked_for(request: pytest.FixtureRequest) -> None:
    is_long = request.config.getoption("--long")
    assert AT_IMPORT == amount(1, 2) == (2 if is_long else 1)
    assert hypothesis.settings().max_examples == (2000 if is_long else 100)
    # Ranks must draw the same examples, in both forms.
    assert hypothesis.settings().derandomize or request.config.getoption("hypothesis_seed") is not None


@pytest.mark.long
def test_a_long_test_runs_if_asked_for(request: pytest.FixtureRequest) -> None:
    assert request.config.getoption("--long")
    marker = request.node.get_closest_marker("timeout_seconds")
    assert marker.args == (1200.0,)
