"""Communication of dispatch and combine. Importing this package registers the `dbo_fx` ops."""

from dbo_fx.comm.ops import InFlight, abandon_in_flight, in_flight
from dbo_fx.comm.plain import plain_ops_over
from dbo_fx.comm.protocol import Transport, register_transport, transport_for
from dbo_fx.contracts import Contract, contract, register_contract
from dbo_fx.packing import Packing

__all__ = [
    "Contract",
    "InFlight",
    "Packing",
    "Transport",
    "abandon_in_flight",
    "contract",
    "in_flight",
    "plain_ops_over",
    "register_contract",
    "register_transport",
    "transport_for",
]
