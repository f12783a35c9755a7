"""Random valid MoE-shaped programs, and programs bound to a named schedule, without a model.

Everything is drawn from a `random.Random`, so that a failing case can be made again from its seed.
A program is valid by construction: actions in a random order that the reference allows, slots and
in-flight limits kept, an event for every order between streams that does not hold yet, values kept
alive until their readers on other streams are done.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from random import Random

from damage_order import Shape, needed
from dbo_fx import schedules
from dbo_fx.contracts import CONTRACTS, NCCL, Contract
from dbo_fx.ir import COMP, Action, Half, Merge, Phase, Program, Run, bind
from generated_binding import Flights, Slack, is_allowed, program_of

# Kinds of transports that may come: slots without a receiving kernel, and one operation at a time
# with events.
OTHERS = (
    *(
        Contract(f"slots_{n}", True, False, True, max_in_flight=n, slots=n, num_sms=0, parity=n)
        for n in (2, 3, 4)
    ),
    Contract("one_event", True, False, True, max_in_flight=1),
)


def contracts() -> list[Contract]:
    """Every registered contract, and those of the tests."""
    return [*CONTRACTS.values(), *OTHERS]


def shape_fits(shape: Shape, contract: Contract) -> bool:
    """Whether the region's number of communications is one that the transport allows."""
    return 2 * shape.layers * shape.microbatches % contract.parity == 0


def complete(shape: Shape) -> list[Action]:
    """All actions of a shape, microbatch by microbatch."""
    found = []
    for m in range(shape.microbatches):
        for layer in range(shape.layers):
            for phase in (Phase.A0, Phase.A1, Phase.D, Phase.MLP, Phase.C, Phase.S):
                halves = (Half.SEND, Half.RECV) if phase.is_communication else (None,)
                if phase is not Phase.S or (m, layer) in shape.shared:
                    found += [Action(phase, m, half, layer) for half in halves]
        if shape.tail:
            found.append(Action(Phase.TAIL, m))
    return found


def random_shape(rng: Random, contract: Contract) -> Shape:
    """1 to 4 layers, 1 to 3 microbatches, S and TAIL or not."""
    while True:
        layers, microbatches = rng.randint(1, 4), rng.randint(1, 3)
        with_s = {layer for layer in range(layers) if rng.random() < 0.7}
        shared = frozenset((m, layer) for m in range(microbatches) for layer in with_s)
        shape = Shape(layers, microbatches, shared, rng.random() < 0.7)
        if shape_fits(shape, contract):
            return shape


def random_order(
    rng: Random, shape: Shape, contract: Contract, swapped: int | None = None
) -> list[Action]:
    """A random order that the reference allows and that keeps slots and in-flight limits.

    Args:
        rng: Draws.
        shape: Which actions there are.
        contract: Gives the limits.
        swapped: A layer whose attention runs the microbatches in the opposite order, which no
            cache allows.
    """
    actions = complete(shape)
    before = _requirements(shape)
    if swapped is not None:
        before = _swapped(before, swapped)
    number = {action: i for i, action in enumerate(actions)}
    missing = [{number[b] for b in before[a]} for a in actions]
    todo = list(range(len(actions)))
    order: list[Action] = []
    flights = Flights(contract)
    eager = rng.random()  # How much sends are preferred: it decides how many are in flight.
    while todo:
        ready = [i for i in todo if not missing[i] and flights.allows(actions[i])]
        sends = [i for i in ready if actions[i].half is Half.SEND]
        chosen = rng.choice(sends if sends and rng.random() < eager else ready)
        flights.run(actions[chosen])
        order.append(actions[chosen])
        todo.remove(chosen)
        for needs in missing:
            needs.discard(chosen)
    return order


@lru_cache(maxsize=512)
def _requirements(shape: Shape) -> dict[Action, frozenset[Action]]:
    steps = tuple(Run(COMP, action) for action in complete(shape))
    runs = Program("any", shape.microbatches, shape.layers, "any", (*steps, Merge(COMP)))
    found: dict[Action, set[Action]] = {a: set() for a in runs.actions}
    for one, other in needed(runs):
        if one[0] == other[0] == "run":
            assert isinstance(one[1], Action)
            assert isinstance(other[1], Action)
            found[other[1]].add(one[1])
    return {action: frozenset(needs) for action, needs in found.items()}


def _swapped(
    before: dict[Action, frozenset[Action]], layer: int
) -> dict[Action, frozenset[Action]]:
    """The requirements with the cache's order of a layer turned round."""
    attention = {a for a in before if a.layer == layer and a.phase in (Phase.A0, Phase.A1)}
    found = dict(before)
    for action in attention:
        others = {a for a in attention if a.microbatch != action.microbatch}
        later = {a for a in others if (a.microbatch or 0) > (action.microbatch or 0)}
        found[action] = before[action] - others | later
    return found


@dataclass(frozen=True, slots=True)
class Case:
    """A valid program and the contract it keeps."""

    program: Program
    contract: Contract


def case(seed: int, contract: Contract | None = None) -> Case:
    """The random valid program of a seed.

    Args:
        seed: Any number.
        contract: The transport's; drawn from `contracts()` by default.
    """
    rng = Random(seed)
    chosen = contract or rng.choice(contracts())
    shape = random_shape(rng, chosen)
    actions = random_order(rng, shape, chosen)
    slack = Slack(rng, rng.randint(0, 3)) if rng.random() < 0.8 else Slack()
    return Case(program_of(actions, shape, chosen, slack=slack), chosen)


def scheduled(name: str, layers: int, contract: Contract, microbatches: int = 2) -> Case | None:
    """A named schedule over some layers, tightly bound; None where the contract forbids it."""
    schedule = schedules.load(name)
    count = schedule.num_microbatches or microbatches
    shared = frozenset((m, layer) for m in range(count) for layer in range(layers))
    shape = Shape(layers, count, shared, tail=True)
    actions = bind(schedule, layers, count)
    if not shape_fits(shape, contract) or not is_allowed(actions, contract):
        return None
    return Case(program_of(actions, shape, contract, name), contract)


def unsplit(program: Program, contract: Contract = NCCL) -> Program:
    """The program of one microbatch that a rank runs which did not split."""
    shape = Shape.of(program)
    shared = frozenset((0, layer) for _, layer in shape.shared)
    one = Shape(shape.layers, 1, shared, shape.tail)
    return program_of(complete(one), one, contract, "sequential")
