"""Fixtures that all tests share."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from dbo_fx.golden_files import Golden
    from rank_pool import RankPool

# transformers looks for torchvision, which no test needs and whose build may not fit torch's.
sys.modules["torchvision"] = None  # type: ignore[assignment]

if importlib.util.find_spec("dbo_fx") is None or importlib.util.find_spec("dbo_fx.passes") is None:
    raise pytest.UsageError("dbo_fx.passes is not importable: run 'pip install -e .' first")


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Two gloo ranks: `ranks(fn, *args)` runs `fn(rank, *args)` on both."""
    from rank_pool import RankPool

    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def fake_group() -> Iterator[str]:
    """The name of a default group of two pretended ranks: one process, right shapes, no values."""
    from small_moe import fake_ranks

    with fake_ranks() as name:
        yield name


@pytest.fixture
def golden(golden: Golden) -> Callable[[str, str], None]:
    """`golden(name, text)` compares text with tests/golden/name; `--update-golden` writes it."""
    return lambda name, text: golden.text(text, name=name)


def pytest_runtest_call() -> None:
    """Save the time that torch's structured trace takes (a tenth of a compile)."""
    from dbo_fx.pytest_plugin import without_torch_trace

    without_torch_trace()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what this machine cannot run."""
    pytest_runtest_call()
    needs = {mark.name for mark in item.iter_markers()}
    if needs & {"gpu", "multi_gpu"}:
        import torch

        wanted = 2 if "multi_gpu" in needs else 1
        if torch.cuda.device_count() < wanted:
            pytest.skip(f"needs {wanted} CUDA devices, found {torch.cuda.device_count()}")
    for mark, module in (("vllm", "vllm"), ("deep_ep", "deep_ep")):
        if mark in needs and importlib.util.find_spec(module) is None:
            pytest.skip(f"needs {module}")
