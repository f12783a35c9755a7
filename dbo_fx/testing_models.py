"""Models in tests: capture and compile them without other ranks, and see what was compiled.

Re-exported by `dbo_fx.testing`. Nothing imports torch before it is called.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, overload

if TYPE_CHECKING:
    from dbo_fx.capture import CapturedGraph
    from dbo_fx.compiled import CompiledProgram
    from dbo_fx.options import Options


@contextmanager
def pretended_ranks(ranks: int = 2) -> Iterator[str]:
    """A default process group whose other ranks are pretended: enough to capture and compile.

    Shapes are right, values that were communicated are not.

    Args:
        ranks: R, how many ranks to pretend.

    Yields:
        The group's name, as the `dbo_fx::dispatch` op takes it.

    Raises:
        OptionError: There is a default group already.
    """
    from dbo_fx.comm import groups
    from dbo_fx.subject_graphs import pretended_ranks as pretended

    with pretended(ranks):
        yield str(groups.name_of(None))


def capture(model: Any, *args: Any, dim: int | None = 0, **kwargs: Any) -> CapturedGraph:
    """Capture a model's graph without running it; needs a process group, such as pretended ranks.

    Args:
        model: A module or function, called as `model(*args, **kwargs)` under no_grad.
        args: Its positional arguments.
        dim: The dim of every tensor argument that is split; None where the arguments are marked.
        kwargs: Its keyword arguments.

    Raises:
        UnsupportedGraphError: The model cannot be captured.
    """
    from dbo_fx.capture import trace

    return trace(model, args, kwargs, mark=dim)


def compile_model(
    model: Any,
    *args: Any,
    dim: int | None = 0,
    options: Options | Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> CompiledProgram:
    """Capture a model and compile it, without running it; needs a process group.

    Args:
        model: As in `capture`.
        args: Likewise.
        dim: Likewise.
        options: How to split and schedule; what `torch.compile(..., options=)` takes.
        kwargs: As in `capture`.

    Raises:
        DboError: The model, or the schedule, is refused.
    """
    from dbo_fx.backend import compile_captured
    from dbo_fx.options import Options

    parsed = options if isinstance(options, Options) else Options.parse(options)
    return compile_captured(capture(model, *args, dim=dim, **kwargs), parsed)


class CompiledPrograms(Sequence["CompiledProgram"]):
    """The programs that this process has compiled since the object was made, oldest first.

    Of more than 64 the last 64 are kept.
    """

    def __init__(self) -> None:
        """Remember what there is already."""
        from dbo_fx.backend import compilations

        self._before = compilations()

    def _all(self) -> list[CompiledProgram]:
        from dbo_fx.backend import compilations

        before = {id(program) for program in self._before}
        return [program for program in compilations() if id(program) not in before]

    def __len__(self) -> int:
        """How many there are by now."""
        return len(self._all())

    @overload
    def __getitem__(self, index: int) -> CompiledProgram: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[CompiledProgram]: ...
    def __getitem__(self, index: int | slice) -> CompiledProgram | Sequence[CompiledProgram]:
        """One of them, or some.

        Raises:
            IndexError: There are not so many.
        """
        found = self._all()
        if isinstance(index, int) and not -len(found) <= index < len(found):
            raise IndexError(
                f"{len(found)} programs were compiled since the test began. A model without "
                "dispatch and combine, or with an unsplit fallback, makes none; torch.compile "
                "compiles at the first call."
            )
        return found[index]
