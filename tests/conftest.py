"""Fixtures that all tests share."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
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


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--update-golden`."""
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write what the tests found into tests/golden/ instead of comparing",
    )


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(name, text)` compares text with tests/golden/name, or writes it there."""
    update = request.config.getoption("--update-golden")

    def check(name: str, text: str) -> None:
        path = Path(__file__).parent / "golden" / name
        if update:
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"no {path.name} yet: run pytest --update-golden"
        assert text == path.read_text(encoding="utf-8")

    return check


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what this machine cannot run."""
    needs = {mark.name for mark in item.iter_markers()}
    if needs & {"gpu", "multi_gpu"}:
        import torch

        wanted = 2 if "multi_gpu" in needs else 1
        if torch.cuda.device_count() < wanted:
            pytest.skip(f"needs {wanted} CUDA devices, found {torch.cuda.device_count()}")
    for mark, module in (("vllm", "vllm"), ("deep_ep", "deep_ep")):
        if mark in needs and importlib.util.find_spec(module) is None:
            pytest.skip(f"needs {module}")
