"""What one rank's host enqueues, in order: operations on streams, with the storages they touch.

Every certificate is computed from this form, whether it was read off a lowered graph (`of_graph`)
or off a program text (`of_program`). No torch here.

Lifetimes are operations too. `ALLOCATE` stands where the host obtains memory, `FREE` where it lets
go of the last reference; both write the storage on the stream that owns the memory, because the
allocator may hand it to the next operation of that stream at once. So one rule covers hazards
between values and hazards of memory that is used again: conflicting accesses must be ordered.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from dbo_fx.contracts import Contract
from dbo_fx.ir import Action

Storage = Hashable


class Kind(Enum):
    """What an operation is."""

    BEGIN = "begin"  # Inputs and constants exist; on the compute stream.
    ALLOCATE = "allocate"
    COMPUTE = "compute"
    SEND = "send"
    RECV = "recv"
    COLLECTIVE = "collective"  # A communication in one piece, such as a tensor-parallel all-reduce.
    RECORD = "record"
    WAIT = "wait"
    FREE = "free"
    END = "end"  # The caller reads the results and may overwrite the inputs; compute stream.


@dataclass(frozen=True, slots=True)
class Operation:
    """One thing the host enqueues.

    Attributes:
        name: For people: a node's name, an action's text, `free h_m0@3`.
        kind: What it is.
        stream: Where it runs.
        reads: Storages it reads.
        writes: Storages it writes.
        event: For RECORD and WAIT.
        action: The action it belongs to; None for sizes, slices, shared nodes, merges, markers.
        communicator: For SEND, RECV and COLLECTIVE: the process group it goes over.
        transfer: For the same: what travels, equal on all ranks that take part, such as
            "all_gather x3". Halves of one communication have the same `transfer`.
        flight: For SEND and RECV: identity within the communicator; a RECV retires the SEND of
            equal `flight`.
        slot: For transports with slots of their own: the slot that the program says is used.
        blocks_host: The host waits until it is done, so it may not stand under capture.
    """

    name: str
    kind: Kind
    stream: str
    reads: frozenset[Storage] = frozenset()
    writes: frozenset[Storage] = frozenset()
    event: int | None = None
    action: Action | None = None
    communicator: str | None = None
    transfer: str = ""
    flight: Hashable = None
    slot: int | None = None
    blocks_host: bool = False

    def __str__(self) -> str:
        """`D_m0.send@0 on comm`."""
        return f"{self.name} on {self.stream}"

    @property
    def communicates(self) -> bool:
        """Whether other ranks take part."""
        return self.kind in (Kind.SEND, Kind.RECV, Kind.COLLECTIVE)


@dataclass(frozen=True, slots=True)
class Required:
    """`before` must be complete before `after` starts, because the unscheduled model says so.

    Attributes:
        before: Index of an operation.
        after: Index of another one.
        kind: `RAW`, `WAR` or `WAW`, or `data` for a value that one hands to the other.
        storage: What both touch.
    """

    before: int
    after: int
    kind: str
    storage: Storage = None


@dataclass(frozen=True)
class Execution:
    """One rank's operations in host order.

    Attributes:
        operations: In the order in which the host enqueues them.
        required: The order that the microbatched reference needs: derived from it, not from the
            schedule that is being checked.
        contract: The transport's contract.
        source: What it was read off, for messages.
        labels: Readable names of storages.
    """

    operations: tuple[Operation, ...]
    required: tuple[Required, ...]
    contract: Contract
    source: str = "program"
    labels: Mapping[Storage, str] = field(default_factory=dict)

    def label(self, storage: Storage) -> str:
        """A storage's name for people."""
        return self.labels.get(storage, str(storage))
