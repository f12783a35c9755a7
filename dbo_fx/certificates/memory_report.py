"""What the memory certificate says for one size of the batch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property

from dbo_fx.errors import VerificationError

_TOP = 5


@dataclass(frozen=True, slots=True)
class Alive:
    """A value that is held at the peak.

    Attributes:
        name: The node that holds it first; `inside CALL` for all that the peak's call makes itself.
        bytes: Its storage.
        born: The call that creates it.
        dies: The last call that names it (keepalives count with the call before them); None for a
            result.
    """

    name: str
    bytes: int
    born: str
    dies: str | None

    def __str__(self) -> str:
        """`add_m0 12.0 KiB (A_m0_l0 to A_m0_l1)`."""
        until = "the end" if self.dies is None else self.dies
        span = "" if self.born == self.dies else f" ({self.born} to {until})"
        return f"{self.name} {readable(self.bytes)}{span}"


@dataclass(frozen=True, slots=True)
class Moment:
    """One call.

    Attributes:
        name: The call's node.
        layer: Its MoE layer, if it belongs to one.
        held_bytes: Program-level values alive once it has run, before anything is dropped.
        during_bytes: The most while it runs, what lives inside its segment included.
    """

    name: str
    layer: int | None
    held_bytes: int
    during_bytes: int

    def __str__(self) -> str:
        """`MLP_m0_l3 (layer 3)`."""
        return self.name if self.layer is None else f"{self.name} (layer {self.layer})"


@dataclass(frozen=True)
class MemoryReport:
    """Memory for one size of the batch.

    Attributes:
        tokens: Size of the whole batch along the dim that is split.
        microbatches: The same of every microbatch.
        curve: Every call, in order.
        unsplit_peak_bytes: The most that the unsplit graph holds, op by op.
        alive: What is held at the peak, largest first.
        uncounted: Values whose size depends on data, so that nothing counts them.
    """

    tokens: int
    microbatches: tuple[int, ...]
    curve: tuple[Moment, ...]
    unsplit_peak_bytes: int
    alive: tuple[Alive, ...]
    uncounted: tuple[str, ...] = ()

    @cached_property
    def held(self) -> Moment:
        """Where program-level values peak."""
        return max(self.curve, key=lambda m: m.held_bytes)

    @cached_property
    def during(self) -> Moment:
        """Where all values peak, those inside segments included."""
        return max(self.curve, key=lambda m: m.during_bytes)

    @property
    def held_peak_bytes(self) -> int:
        """The most that program-level values and landing buffers take."""
        return self.held.held_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that all values take, those inside segments included."""
        return self.during.during_bytes

    @property
    def ratio(self) -> float:
        """The program's peak over the unsplit graph's."""
        return self.peak_bytes / max(self.unsplit_peak_bytes, 1)

    def check(self, largest: float | None) -> None:
        """Refuse a program that needs too much.

        Args:
            largest: The option `max_memory_ratio`; None allows anything.

        Raises:
            VerificationError: the ratio is above; the message names who is alive at the peak.
        """
        if largest is None or self.ratio <= largest:
            return
        top = "\n".join(f"  {value}" for value in self.alive[:_TOP])
        raise VerificationError(
            f"memory at {self.tokens} rows: {self.ratio:.2f} times the unsplit graph's, "
            f"max_memory_ratio={largest} allows less: {readable(self.peak_bytes)} in "
            f"{self.during}, unsplit {readable(self.unsplit_peak_bytes)}. Alive then, the largest "
            f"first:\n{top}\n"
            "Choose a schedule with fewer communications in flight, fewer microbatches, or a "
            "larger max_memory_ratio."
        )

    def __str__(self) -> str:
        """A few lines."""
        top = "; ".join(map(str, self.alive[:_TOP]))
        lines = [
            f"memory at {self.tokens} rows: peak {readable(self.peak_bytes)} in {self.during}, "
            f"{self.ratio:.2f} times the unsplit graph's {readable(self.unsplit_peak_bytes)}",
            f"  alive then: {top}",
            f"  between segments at most {readable(self.held_peak_bytes)}, at {self.held}",
        ]
        if self.uncounted:
            lines.append(f"  not counted, their size depends on data: {', '.join(self.uncounted)}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, object]:
        """Plain values."""
        return {
            "tokens": self.tokens,
            "microbatches": list(self.microbatches),
            "peak_bytes": self.peak_bytes,
            "peak_at": self.during.name,
            "peak_layer": self.during.layer,
            "held_peak_bytes": self.held_peak_bytes,
            "held_peak_at": self.held.name,
            "held_peak_layer": self.held.layer,
            "unsplit_peak_bytes": self.unsplit_peak_bytes,
            "ratio": self.ratio,
            "alive": [asdict(value) for value in self.alive],
            "curve": [asdict(moment) for moment in self.curve],
            "uncounted": list(self.uncounted),
        }


def readable(count: int) -> str:
    """Bytes with a unit: `12.0 KiB`."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{int(size)} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
