"""The schedule: what it overlaps, and that it is safe. None of this needs torch or a model."""

from pathlib import Path

from dbo_fx import schedules
from dbo_fx.testing import assert_certified, assert_not_overlaps, assert_overlaps

SCHEDULE = Path(__file__).parent.parent / "shared_with_dispatch.dbo"


def test_text_and_lanes(golden):
    golden(schedules.load(str(SCHEDULE)))
    golden.lanes(SCHEDULE)


def test_what_it_changes(golden):
    golden.diff("mlp_shared_overlap", SCHEDULE)


def test_the_shared_expert_hides_the_dispatch():
    assert_overlaps(SCHEDULE, comm="D m1", compute="S m0")
    assert_overlaps(SCHEDULE, comm="D m1", compute="MLP m0")


def test_the_last_combine_hides_behind_the_next_layer():
    assert_overlaps(SCHEDULE, comm="C m1", compute="A1 m0 @+1")
    assert_not_overlaps(SCHEDULE, comm="C m1", compute="S m1")


def test_no_race_and_no_deadlock_on_any_rank():
    assert_certified(SCHEDULE, ranks=4, captured=True)
