"""The pass: exactly what it changes in the graph of a model, and that it leaves others alone."""

from dbo_fx.pipeline import Pipeline
from dbo_fx.testing import assert_unchanged, capture
from drop_ones import DropOnes
from moe_model import example_tokens, moe_model


def graphs(group: str, scale: float):
    """The captured graph before and behind the pass; captured twice, as passes work in place."""
    before, after = (
        capture(moe_model(group, layers=1, scale=scale), example_tokens()) for _ in range(2)
    )
    Pipeline([DropOnes()]).run(after)
    return before, after


def test_what_it_changes(golden, pretended_ranks):
    golden.diff(*graphs(pretended_ranks, scale=1.0))


def test_other_products_stay(pretended_ranks):
    assert_unchanged(*graphs(pretended_ranks, scale=2.5))
