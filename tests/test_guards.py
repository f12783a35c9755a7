"""What every call is checked for: padding beside written inputs, memory shared later, threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import dbo_fx
from dbo_fx.errors import AgreementError, CommunicationError, OptionError, SoundnessError
from rank_pool import RankPool
from small_moe import CachedMoe, H, PlainMoe, arguments, one_rank, rows

STATIC = {"verify": "static"}


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    torch._dynamo.reset()
    with one_rank():
        yield


def compiled(model: Any, **options: Any) -> Any:
    return torch.compile(model, backend="dbo_fx", fullgraph=True, options=options)


def marked(x: Tensor) -> Tensor:
    torch._dynamo.mark_dynamic(x, 0)
    return x


@torch.no_grad()
def test_padding_beside_a_written_cache_is_refused() -> None:
    model = CachedMoe(1)
    x, counter, caches = arguments(model, 3)
    wrapped = dbo_fx.wrap(compiled(model), token_args=["x"])
    with pytest.raises(SoundnessError, match=r"wrap pads this step .* in place: padded rows would"):
        wrapped(x, counter, caches)
    assert counter.item() == 2
    wrapped(rows(4), counter, caches)
    assert counter.item() == 6


class Slotted(PlainMoe):
    """Rows go to named slots of a cache; slot 15 is nobody's."""

    def forward(self, x: Tensor, slots: Tensor, cache: Tensor) -> Tensor:  # type: ignore[override]
        cache.index_copy_(0, slots, x)
        return self.body(x)


@torch.no_grad()
def test_named_values_make_padding_beside_a_cache_possible() -> None:
    model = Slotted()
    cache = torch.zeros(16, H)
    wrapped = dbo_fx.wrap(compiled(model), token_args=["x", "slots"], pad={"slots": 15})
    x = rows(3)
    torch.testing.assert_close(wrapped(x, torch.tensor([0, 4, 2]), cache), model.body(x))
    assert torch.equal(cache[[0, 4, 2]], x)
    assert cache.any(1).nonzero().flatten().tolist() == [0, 2, 4]


class Ages(PlainMoe):
    """Counts in a token input."""

    def forward(self, x: Tensor, age: Tensor) -> Tensor:  # type: ignore[override]
        age.add_(1)
        return self.body(x + age[:, None])


@torch.no_grad()
def test_a_written_token_input_is_not_padded_even_with_named_values() -> None:
    wrapped = dbo_fx.wrap(compiled(Ages()), token_args=["x", "age"], pad={"age": 0})
    with pytest.raises(SoundnessError, match="would land in the padded copy and be lost"):
        wrapped(rows(3), torch.zeros(3))
    age = torch.zeros(6)
    wrapped(rows(6), age)
    assert age.tolist() == [1.0] * 6


class Reads(PlainMoe):
    """Writes one table, reads another."""

    def forward(  # type: ignore[override]
        self, x: Tensor, slots: Tensor, written: Tensor, read: Tensor
    ) -> Tensor:
        written.index_copy_(0, slots, x)
        return self.body(x + read.sum(0))


@torch.no_grad()
def test_inputs_that_share_memory_only_later_are_refused() -> None:
    call, table = compiled(Reads(), **STATIC), rows(16, seed=7)
    x, slots = marked(rows(8)), marked(torch.arange(8))
    call(x, slots, table.clone(), table[:8].clone())
    both = torch.cat([table, table])
    call(x, slots, both[:16], both[16:24])  # one storage, but apart
    with pytest.raises(SoundnessError, match=r"share memory in this call, and one of them is"):
        call(x, slots, table, table[:8])


@torch.no_grad()
def test_a_second_thread_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    call = compiled(PlainMoe())
    x = marked(rows(6))
    call(x)
    program = dbo_fx.compilations()[-1]
    entered, leave = threading.Event(), threading.Event()
    run = program._run

    def slow(args: Any) -> Any:
        entered.set()
        assert leave.wait(30)
        return run(args)

    monkeypatch.setattr(program, "_run", slow)
    first = threading.Thread(target=torch.no_grad()(call), args=(x,))
    first.start()
    assert entered.wait(30)
    with pytest.raises(CommunicationError, match="running in another thread"):
        call(x)
    leave.set()
    first.join()
    monkeypatch.undo()
    call(x)


@torch.no_grad()
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inner_backend": "nope"}, "torch.compile knows no such backend"),
        ({"dump_dir": "/dev/null/dump"}, "cannot be written"),
    ],
)
def test_options_that_only_the_machine_can_refuse(options: dict[str, Any], message: str) -> None:
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=message) as caught:
        compiled(PlainMoe(), **options)(marked(rows(6)))
    assert isinstance(caught.value.inner_exception, OptionError)


def other_verify(rank: int) -> str:
    """Only one rank would run the unsplit graph, and wait for its peer in there."""
    torch._dynamo.reset()
    call = compiled(PlainMoe(), verify=("static", "numeric")[rank], agree_timeout_s=20.0)
    with torch.no_grad(), pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        call(marked(rows(6)))
    assert isinstance(caught.value.inner_exception, AgreementError)
    return str(caught.value.inner_exception)


def test_ranks_that_verify_differently_are_stopped(ranks: RankPool) -> None:
    for message in ranks(other_verify, timeout_s=60):
        assert "program digest" in message
