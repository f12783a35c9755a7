"""Options: what is accepted; every mistake names the key, the value and what is allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dbo_fx import schedules
from dbo_fx.errors import OptionError, ScheduleError
from dbo_fx.options import Options


def test_defaults() -> None:
    options = Options.parse(None)
    assert options == Options.parse({}) == Options()
    assert options.resolved_schedule().name == "mlp_shared_overlap"
    assert options.microbatches() == 2
    assert (options.verify, options.on_unsupported) == ("numeric", "raise")


def test_every_option_can_be_given() -> None:
    given = {
        "schedule": "sequential",
        "num_microbatches": 3,
        "split_dim": 1,
        "inner_backend": "eager",
        "on_unsupported": "fallback",
        "verify": "static",
        "dump_dir": "somewhere",
        "agree_timeout_s": 5,
        "transport": "deepep_ll",
    }
    options = Options.parse(given)
    assert {key: getattr(options, key) for key in given} == given
    assert options.microbatches() == 3


def test_a_schedule_may_be_a_name_a_file_or_an_object(tmp_path: Path) -> None:
    schedule = schedules.load("mlp_shared_overlap")
    path = tmp_path / "mine.dbo"
    path.write_text(str(schedule), encoding="utf-8")
    for given in ("mlp_shared_overlap", str(path), schedule):
        assert Options(schedule=given).resolved_schedule() == schedule


@pytest.mark.parametrize(
    ("schedule", "count", "expected"),
    [
        ("sequential", None, 2),
        ("sequential", 1, 1),
        ("sequential", 4, 4),
        ("mlp_shared_overlap", None, 2),
        ("mlp_shared_overlap", 2, 2),
    ],
)
def test_the_number_of_microbatches(schedule: str, count: int | None, expected: int) -> None:
    assert Options(schedule=schedule, num_microbatches=count).microbatches() == expected


def test_a_number_of_microbatches_that_the_schedule_does_not_have() -> None:
    with pytest.raises(OptionError, match=r"for 2\..* one of: mlp_shared_overlap_3, seq"):
        Options(num_microbatches=3)


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("num_microbatch", "Did you mean 'num_microbatches'?"),
        ("shedule", "Did you mean 'schedule'?"),
        ("zzz", "Known: schedule, num_microbatches,"),
    ],
)
def test_an_unknown_key(key: str, hint: str) -> None:
    with pytest.raises(OptionError) as refused:
        Options.parse({key: 1})
    assert f"unknown option {key!r}" in str(refused.value)
    assert hint in str(refused.value)


def test_a_key_that_is_no_string() -> None:
    with pytest.raises(OptionError, match="unknown option 3"):
        Options.parse({3: 1})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("schedule", 3, r"a name, a path ending in \.dbo"),
        ("schedule", None, r"a name, a path ending in \.dbo"),
        ("num_microbatches", 0, "an integer >= 1, or None"),
        ("num_microbatches", 2.0, "an integer >= 1, or None"),
        ("num_microbatches", True, "an integer >= 1, or None"),
        ("num_microbatches", "2", "an integer >= 1, or None"),
        ("split_dim", -1, "an integer >= 0, or None"),
        ("inner_backend", "dbo_fx", "the name of another backend"),
        ("inner_backend", None, "the name of another backend"),
        ("on_unsupported", "ignore", "'raise' or 'fallback'"),
        ("on_unsupported", [], "'raise' or 'fallback'"),
        ("verify", "off", "'numeric' or 'static'"),
        ("dump_dir", 3, "a path or None"),
        ("transport", "smoke", "one of gloo, nccl, "),
        ("transport", ["gloo"], "one of gloo, nccl, "),
        ("agree_timeout_s", 0, "a positive number of seconds"),
        ("agree_timeout_s", -1.0, "a positive number of seconds"),
        ("agree_timeout_s", float("nan"), "a positive number of seconds"),
        ("agree_timeout_s", float("inf"), "a positive number of seconds"),
        ("agree_timeout_s", "fast", "a positive number of seconds"),
        ("agree_timeout_s", True, "a positive number of seconds"),
    ],
)
def test_a_value_that_is_not_allowed(key: str, value: Any, wanted: str) -> None:
    with pytest.raises(OptionError, match=rf"option {key}=.* is not allowed: want {wanted}"):
        Options.parse({key: value})


@pytest.mark.parametrize("schedule", ["no_such_schedule", "no_such_file.dbo"])
def test_a_schedule_that_does_not_exist(schedule: str) -> None:
    with pytest.raises(ScheduleError, match=schedule.split(".")[0]):
        Options.parse({"schedule": schedule})


def test_options_cannot_be_changed_and_can_be_compared() -> None:
    assert Options(split_dim=1) == Options(split_dim=1) != Options()
    with pytest.raises(AttributeError):
        Options().split_dim = 1  # type: ignore[misc]
