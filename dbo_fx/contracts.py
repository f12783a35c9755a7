"""What transports promise; the verifier, the passes and the planner read nothing else of them.

No torch here: `dbo-fx check PROGRAM.dbo` knows a transport by the name in the program's header.
What each field means for a program is told in `docs/transports.md`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from dbo_fx.errors import OptionError
from dbo_fx.sm_sharing import SmSharing


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
        carries: What its kernels can move: "collectives" (all-gather, reduce-scatter, all-to-all),
            "rows" (the dispatch and combine ops as a pair) or "batched" (rows by expert).
        pairs: A combine needs what its dispatch left with the transport; the two find each other by
            their flight, so that a flight has one dispatch and one combine in turn.
        takes_sms: A program may say how many SMs it gets (`sms comm 4` in its header).
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
    carries: tuple[str, ...] = ("collectives",)
    pairs: bool = False
    takes_sms: bool = False

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

    @property
    def sinks(self) -> bool:
        """Whether a recv is nothing but the compute stream's wait, so that it may come later."""
        return self.recv_is == "event" and self.recv_stream == "comp"


GLOO = Contract(
    name="gloo",
    capturable=False,
    blocks_host=True,
    two_halves=True,
    max_in_flight=None,
    recv_is="host",
    carries=("collectives", "batched"),
)
NCCL = Contract(
    name="nccl",
    capturable=True,
    blocks_host=False,
    two_halves=True,
    max_in_flight=None,
    carries=("collectives", "batched"),
    takes_sms=True,
)
# Peer copies, and copies through host memory: SMs do only barriers, sums and copies within a GPU.
COPY_ENGINE = Contract(
    name="copy_engine",
    capturable=True,
    blocks_host=False,
    two_halves=True,
    max_in_flight=None,
    num_sms=0,
)
LOOPBACK = replace(COPY_ENGINE, name="loopback")
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
    carries=("batched",),
)
# The same kernels in one piece, on the communication stream: the next one starts when it is done.
DEEPEP_LL_ASYNC = Contract(
    name="deepep_ll_async",
    capturable=True,
    blocks_host=False,
    two_halves=True,
    max_in_flight=None,
    slots=2,
    parity=2,
    carries=("batched",),
)
DEEPEP_HT = Contract(
    name="deepep_ht",
    capturable=True,
    blocks_host=False,
    two_halves=True,
    max_in_flight=None,
    num_sms=20,
    carries=("rows",),
    pairs=True,
    takes_sms=True,
)
DEEPEP_V2 = replace(DEEPEP_HT, name="deepep_v2")

CONTRACTS: dict[str, Contract] = {
    c.name: c
    for c in (GLOO, NCCL, COPY_ENGINE, LOOPBACK, DEEPEP_LL, DEEPEP_LL_ASYNC, DEEPEP_HT, DEEPEP_V2)
}


def check_sms(carrier: Contract, sharing: SmSharing) -> None:
    """Refuse a limit that the transport would not keep to.

    Args:
        carrier: What the transport promises.
        sharing: What a program says of SMs.

    Raises:
        OptionError: It says what communication gets, and the transport cannot limit itself.
    """
    if sharing.comm is None or carrier.takes_sms:
        return
    able = ", ".join(name for name, c in CONTRACTS.items() if c.takes_sms)
    raise OptionError(
        f"comm_sms={sharing.comm}: transport {carrier.name!r} does not let a program say how many "
        f"SMs it takes. Leave comm_sms out, or use one of: {able}."
    )


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
