"""What transports promise; the verifier, the passes and the planner read nothing else of them.

No torch here: `dbo-fx check PROGRAM.dbo` knows a transport by the name in the program's header.
What each field means for a program is told in `docs/transports.md`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dbo_fx.errors import OptionError


@dataclass(frozen=True, slots=True)
class Contract:
    """What a program may assume about a transport, and what it must keep to.

    Attributes:
        name: Name of the transport, as a program text prints it.
        capturable: Both halves may run under CUDA graph capture.
        blocks_host: `recv` makes the calling CPU thread wait.
        two_halves: `send` returns before the data has arrived.
        max_in_flight: Un-received operations allowed at once over one communicator; None for no
            limit beyond one for each flight of each kind.
        send_stream: Stream that the program must make current for `send`.
        recv_stream: Stream that the program must make current for `recv`.
        recv_is: How `recv` makes the result usable: "event" (the program's own wait does it, so
            the wait may sink to the first use), "kernel" (it stays where the schedule says) or
            "host".
        num_sms: SMs that the transport occupies, None if it does not fix the number.
        keepalive: Until when inputs and outputs must stay alive.
        slots: Buffers of the transport's own that its operations over one communicator use in
            turn; operation n of a region uses slot n modulo this. None: every operation lands in
            buffers of the program's own.
        parity: The number of operations of a region, over one communicator, is a multiple of this,
            so that every region starts at slot 0.
    """

    name: str
    capturable: bool
    blocks_host: bool
    two_halves: bool
    max_in_flight: int | None
    send_stream: str = "comm"
    recv_stream: str = "comp"
    recv_is: Literal["event", "kernel", "host"] = "event"
    num_sms: int | None = None
    keepalive: str = "recv"
    slots: int | None = None
    parity: int = 1

    def __post_init__(self) -> None:
        """Refuse numbers under which no second region could be right.

        Raises:
            OptionError: a number below 1, or regions that would start at different slots.
        """
        for key in ("max_in_flight", "slots", "parity"):
            number = getattr(self, key)
            if number is not None and number < 1:
                raise OptionError(f"contract {self.name!r}: {key}={number}, wanted 1 or more")
        if self.slots is not None and self.parity % self.slots:
            raise OptionError(
                f"contract {self.name!r}: with slots={self.slots} and parity={self.parity} the "
                "second region may start at another slot than the first; make parity a multiple "
                "of slots"
            )


GLOO = Contract(
    name="gloo",
    capturable=False,
    blocks_host=True,
    two_halves=True,
    max_in_flight=None,
    recv_is="host",
)
NCCL = Contract(
    name="nccl",
    capturable=True,
    blocks_host=False,
    two_halves=True,
    max_in_flight=None,
)
DEEPEP_LL = Contract(
    name="deepep_ll",
    capturable=True,
    blocks_host=False,
    two_halves=True,
    max_in_flight=1,
    send_stream="comp",
    recv_stream="comp",
    recv_is="kernel",
    slots=2,
    parity=2,
)

CONTRACTS: dict[str, Contract] = {c.name: c for c in (GLOO, NCCL, DEEPEP_LL)}


def register_contract(contract: Contract) -> None:
    """Make a transport's contract known by its name, for programs that name it.

    Raises:
        OptionError: another contract has this name.
    """
    if CONTRACTS.get(contract.name, contract) != contract:
        raise OptionError(f"another transport is called {contract.name!r}; choose another name")
    CONTRACTS[contract.name] = contract


def contract(name: str) -> Contract:
    """Return a transport's contract by its name.

    Raises:
        OptionError: No transport has this name.
    """
    if name not in CONTRACTS:
        raise OptionError(f"unknown transport {name!r}: use one of {sorted(CONTRACTS)}")
    return CONTRACTS[name]
