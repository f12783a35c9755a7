"""Every graph of the corpus is split only if that changes nothing, or refused for its reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from corpus import CASES, Case
from dbo_fx.backend import compile_captured
from dbo_fx.compiled import CompiledProgram
from dbo_fx.errors import SoundnessError, UnsupportedGraphError
from dbo_fx.options import Options
from dbo_fx.passes.sharding import finding_of
from small_moe import Traced, one_rank, traced

BY_NAME = {c.name: c for c in CASES}
SOUND = [c.name for c in CASES if c.why is None]
UNSOUND = [c.name for c in CASES if c.why is not None]


@pytest.fixture(autouse=True, scope="module")
def group() -> Iterator[None]:
    """A real group of this process alone."""
    with one_rank():
        yield


def trace_of(case: Case) -> Traced:
    return traced(case.model, case.args(), case.dim)


def compiled_of(trace: Traced, verify: str = "static") -> CompiledProgram:
    return compile_captured(trace.fresh(), Options(verify=verify))


def copies(trace: Traced) -> list[Any]:
    return [v.clone() if isinstance(v, Tensor) else v for v in trace.inputs]


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_graph_is_split_and_changes_nothing(name: str) -> None:
    case = BY_NAME[name]
    trace = trace_of(case)
    compiled = compiled_of(trace)
    args, whole = copies(trace), copies(trace)
    torch.testing.assert_close(
        (compiled(*args), args), (trace.captured.module(*whole), whole), rtol=1e-4, atol=1e-5
    )
    verdicts = Counter(f.verdict for n in compiled.captured.graph.nodes if (f := finding_of(n)))
    assert ("slice-with-offset" in verdicts) == case.moves
    assert compiled_of(trace, "numeric")(*copies(trace)) is not None


@pytest.mark.parametrize("name", UNSOUND)
def test_an_unsound_graph_is_refused_with_its_reason(name: str) -> None:
    """Without the numeric differential: what a refusal claims, it finds by itself."""
    case = BY_NAME[name]
    assert case.why is not None
    if case.at == "trace":
        with pytest.raises(Exception, match=case.why) as caught:
            trace_of(case)
        inner = getattr(caught.value, "inner_exception", caught.value)
        assert isinstance(inner, UnsupportedGraphError)
        return
    trace = trace_of(case)
    args, untouched = copies(trace), copies(trace)
    if case.at == "compile":
        with pytest.raises(SoundnessError, match=f"(?i){case.why}") as refused:
            compiled_of(trace)
    else:
        compiled = compiled_of(trace)
        with pytest.raises(SoundnessError, match=f"(?i){case.why}") as refused:
            compiled(*args)
    place = " at File " if case.at == "compile" else ""
    assert place in str(refused.value)
    torch.testing.assert_close(args, untouched, rtol=0, atol=0)


def test_the_corpus_is_large_and_half_of_it_unsound() -> None:
    assert len(CASES) == len(BY_NAME) >= 40
    assert len(UNSOUND) >= 20
    assert len(SOUND) >= 20
