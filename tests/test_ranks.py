"""The ranks of a plan: one order of all communication, and no circle of waits."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import permutations
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbo_fx.certificates.counterexample import Counterexample
from dbo_fx.certificates.execution import Execution, Kind, Operation
from dbo_fx.certificates.hazards import violations
from dbo_fx.certificates.order import HappensBefore
from dbo_fx.certificates.ranks import prove_plan, prove_ranks
from dbo_fx.certificates.rendezvous import Rendezvous, launches
from dbo_fx.contracts import DEEPEP_LL, GLOO, NCCL
from dbo_fx.errors import VerificationError
from dbo_fx.ir import Action, Half, Phase

Golden = Callable[[str, str], None]
Lines = Sequence[Operation]


def execution(*operations: Operation) -> Execution:
    """A program of these operations."""
    return Execution(operations, (), NCCL)


def send(name: str, over: str = "ep", stream: str = "comm", **fields: object) -> Operation:
    """A launch that travels as `name`."""
    values = {"transfer": f"gather {name}", "flight": name, **fields}
    return Operation(f"{name}.send", Kind.SEND, stream, communicator=over, **values)  # type: ignore[arg-type]


def recv(name: str, over: str = "ep", *, blocks: bool = False) -> Operation:
    """The end of it on the compute stream."""
    return Operation(
        f"{name}.recv",
        Kind.RECV,
        "comp",
        communicator=over,
        transfer=f"gather {name}",
        flight=name,
        blocks_host=blocks,
    )


def reduce(name: str, over: str = "tp", stream: str = "comp") -> Operation:
    """A communication in one piece."""
    return Operation(name, Kind.COLLECTIVE, stream, communicator=over, transfer="all_reduce x1")


def record(event: int, stream: str = "comm") -> Operation:
    return Operation(f"record e{event}", Kind.RECORD, stream, event=event)


def wait(event: int, stream: str = "comp") -> Operation:
    return Operation(f"wait e{event}", Kind.WAIT, stream, event=event)


def compute(name: str) -> Operation:
    return Operation(name, Kind.COMPUTE, "comp")


def refusal(*executions: Execution, **fields: object) -> Counterexample:
    """Why these ranks are refused."""
    with pytest.raises(VerificationError) as caught:
        prove_ranks(executions, **fields)  # type: ignore[arg-type]
    found = caught.value.counterexample
    assert isinstance(found, Counterexample)
    assert str(found) == str(caught.value)
    assert json.loads(json.dumps(found.to_json())) == found.to_json()
    return found


def action(phase: Phase, half: Half | None, microbatch: int, layer: int) -> Action:
    return Action(phase, microbatch, half, layer)


def layered(layers: int, microbatches: int = 2) -> Execution:
    """Dispatches and combines of every microbatch in turn, each with its events."""
    operations: list[Operation] = []
    for layer in range(layers):
        for phase in (Phase.D, Phase.C):
            for m in range(microbatches):
                event = 2 * len(operations)
                name = f"{phase.value}_m{m}@{layer}"
                launch = send(name, action=action(phase, Half.SEND, m, layer))
                operations += [
                    *(compute(f"{name} part {part}") for part in range(8)),
                    record(event, "comp"),
                    wait(event, "comm"),
                    launch,
                    record(event + 1),
                    wait(event + 1),
                    recv(name),
                ]
    return execution(*operations)


A, B = send("a"), send("b")


# What fits.


def test_ranks_of_one_program_fit_and_the_certificate_says_what_was_proven() -> None:
    certificate = prove_ranks([layered(2)], ranks=8)
    assert str(certificate) == (
        "split: 8 ranks, 8 over ep; one order on all ranks, no circle of waits"
    )
    assert certificate.to_json()["launches"] == {"ep": 8}
    assert json.loads(json.dumps(certificate.to_json())) == certificate.to_json()
    assert certificate == prove_ranks([layered(2)] * 8)


def test_events_order_launches_on_two_streams() -> None:
    one = execution(A, record(0), wait(0), reduce("r"), record(1, "comp"), wait(1, "comm"), B)
    assert prove_ranks([one], ranks=2).launches == {"ep": 2, "tp": 1}


def test_a_recv_that_holds_the_host_orders_what_follows() -> None:
    held = [A, record(0), wait(0), recv("a", blocks=True), reduce("r")]
    assert prove_ranks([execution(*held)], ranks=2)
    other_stream = [A, record(0), wait(0), recv("a", blocks=True), send("b", stream="third")]
    assert prove_ranks([execution(*other_stream)], ranks=2)


def test_local_work_may_differ_and_recvs_may_stand_elsewhere() -> None:
    early = execution(A, recv("a"), B, compute("more"), recv("b"))
    late = execution(A, B, recv("b"), recv("a"))
    assert prove_ranks([early, late])


def test_ranks_may_have_communicators_of_their_own() -> None:
    ranks = [
        execution(send("x", "left"), send("y", "all")),
        execution(send("x", "left"), send("y", "all")),
        execution(send("y", "all")),
    ]
    assert prove_ranks(ranks, members={"left": [0, 1]}).launches == {"left": 1, "all": 1}
    found = refusal(*ranks, members={"left": [0]})
    assert found.missing == (
        "rank 1 launches x.send over left, but is no member of it (members: [0])"
    )


def test_a_program_without_communication_is_proven() -> None:
    assert "no communication" in str(prove_ranks([execution(compute("x"))], ranks=2))


def test_the_number_of_executions_must_fit() -> None:
    with pytest.raises(ValueError, match="2 executions for 3 ranks"):
        prove_ranks([execution(A), execution(A)], ranks=3)
    with pytest.raises(ValueError, match="1 executions for 0 ranks"):
        prove_ranks([execution(A)], ranks=0)


# What does not.


def test_launches_on_two_streams_without_order_are_refused() -> None:
    found = refusal(execution(A, reduce("r")), ranks=2)
    assert found.rule == "rank-order"
    assert found.missing == (
        "on rank 0 nothing orders a.send on comm (over ep) and r on comp (over tp): each rank may "
        "start them in another order"
    )
    assert found.picture == "  rank 0  a.send  r\n          ^^^^^^  ^"
    assert "let comp wait for it before r" in found.fix
    one_way = execution(A, record(0), wait(0), reduce("r"), B)
    assert (
        "nothing orders r on comp (over tp) and b.send on comm" in refusal(one_way, ranks=2).missing
    )


def test_a_swapped_collective_on_one_rank_is_named() -> None:
    found = refusal(execution(A, B, send("c")), execution(B, A, send("c")))
    assert found.rule == "rank-order"
    assert found.missing == (
        "launch 1 over ep differs: rank 0 launches a.send (gather a), "
        "rank 1 launches b.send (gather b)"
    )
    assert found.picture.splitlines() == [
        "  rank 0  a.send  b.send  c.send",
        "          ^^^^^^",
        "  rank 1  b.send  a.send  c.send",
        "          ^^^^^^",
    ]
    assert [str(found.first), str(found.second)] == ["a.send on comm", "b.send on comm"]


def test_a_swapped_low_latency_operation_on_one_rank_is_named() -> None:
    """Each rank's program keeps every rule of the slots; together they spin."""

    def rank(*names: str) -> Execution:
        pairs = [
            (send(name, stream="comp", slot=n % 2), replace(recv(name), slot=n % 2))
            for n, name in enumerate(names)
        ]
        return Execution(tuple(op for pair in pairs for op in pair), (), DEEPEP_LL)

    names = ("D_m0", "C_m0", "D_m1", "C_m1")
    assert prove_ranks([rank(*names)] * 2).to_json()["launches"] == {"ep": 4}
    for one in (rank(*names), rank("D_m1", "C_m1", "D_m0", "C_m0")):
        assert not [v for v in violations(one) if "slot" in v.rule]
    found = refusal(rank(*names), rank("D_m1", "C_m1", "D_m0", "C_m0"))
    assert found.rule == "rank-order"
    assert found.missing == (
        "launch 1 over ep differs: rank 0 launches D_m0.send (gather D_m0), "
        "rank 1 launches D_m1.send (gather D_m1)"
    )


def test_lanes_leave_out_what_is_far_away() -> None:
    many = [send(f"a{i}", "one") for i in range(30)]
    last = send("z", "two")
    found = refusal(execution(*many, last), execution(last, *many))
    assert found.missing == (
        "launches in different orders: rank 0 a29.send before z.send, rank 1 z.send before a29.send"
    )
    assert found.picture.splitlines()[:4] == [
        "  rank 0  ...  a27.send  a28.send  a29.send  z.send",
        "                                   ^^^^^^^^  ^^^^^^",
        "  rank 1  z.send  a0.send  a1.send  ...  a27.send  a28.send  a29.send",
        "          ^^^^^^                                             ^^^^^^^^",
    ]


def test_only_the_third_rank_differs() -> None:
    same = execution(A, B)
    found = refusal(same, same, execution(A, send("b", transfer="gather more")))
    assert (
        "rank 0 launches b.send (gather b), rank 2 launches b.send (gather more)" in found.missing
    )


@pytest.mark.parametrize("missing", [0, 1])
def test_a_launch_or_a_recv_that_one_rank_lacks_is_named(missing: int) -> None:
    whole, less = execution(A, recv("a"), B), execution(A, recv("a"))
    ranks = [less, whole] if missing == 0 else [whole, less]
    assert f"rank {missing} launches none" in refusal(*ranks).missing
    kept, lost = execution(A, recv("a")), execution(A)
    ranks = [lost, kept] if missing == 0 else [kept, lost]
    found = refusal(*ranks)
    assert found.rule == "rank-order"
    assert found.missing == (
        f"rank {1 - missing} retires a.recv (gather a) over ep, rank {missing} does not"
    )


def test_a_recv_that_one_rank_doubles_is_named() -> None:
    once, twice = execution(A, recv("a")), execution(A, recv("a"), recv("a"))
    assert (
        "rank 1 retires a.recv (gather a) over ep, rank 0 does not" in refusal(once, twice).missing
    )


def held(*pairs: tuple[str, str]) -> Execution:
    """Communications that the host waits for, one after the other."""
    operations: list[Operation] = []
    for event, (name, over) in enumerate(pairs):
        operations += [send(name, over), record(event), wait(event), recv(name, over, blocks=True)]
    return execution(*operations)


def test_two_communicators_in_opposite_order_deadlock(golden: Golden) -> None:
    x, y = ("x", "experts"), ("y", "tensor")
    found = refusal(held(x, y), held(y, x), variant="unsplit")
    assert found.rule == "rank-order"
    golden("ranks_opposite_order.txt", f"{found}\n")
    assert prove_ranks([held(x, y), held(x, y)])


def test_three_ranks_in_a_ring_are_refused_although_no_two_disagree() -> None:
    ab, bc, ca = (("x", "ab"), ("y", "bc")), (("y", "bc"), ("z", "ca")), (("z", "ca"), ("x", "ab"))
    members = {"ab": [0, 2], "bc": [0, 1], "ca": [1, 2]}
    found = refusal(*(held(*pairs) for pairs in (ab, bc, ca)), members=members)
    assert found.missing.startswith("launches in different orders: ")
    for said in ("rank 0 x.send before y.send", "rank 1 y.send before z.send"):
        assert said in found.missing
    waits = [
        line for line in found.picture.splitlines() if "waits in" in line and "for rank" in line
    ]
    assert len(waits) == 3
    assert prove_ranks([held(*ab), held(*bc), held(*reversed(ca))], members=members)


def test_a_recv_that_holds_the_host_before_its_send_deadlocks(golden: Golden) -> None:
    stuck = execution(recv("a", blocks=True), A)
    found = refusal(stuck, ranks=2)
    assert found.rule == "deadlock"
    golden("ranks_recv_first.txt", f"{found}\n")
    assert prove_ranks([execution(recv("a"), A)], ranks=2)


def test_a_recv_without_a_send_is_waited_for_forever() -> None:
    found = refusal(execution(A, recv("a"), recv("b", blocks=True)), ranks=2)
    assert found.rule == "deadlock"
    assert (
        found.picture.splitlines()[-1]
        == "  rank 0: comp waits in b.recv for a send that this rank never makes"
    )


@pytest.mark.parametrize("blocks", [True, False])
def test_every_order_of_three_communicators_is_decided_right(blocks: bool) -> None:
    pairs = [("x", "1"), ("y", "2"), ("z", "3")]
    for one in permutations(pairs):
        for other in permutations(pairs):
            ranks = [held(*one), held(*other)]
            if not blocks:
                ranks = [
                    execution(*(o for o in r.operations if o.kind is Kind.SEND)) for r in ranks
                ]
            if one == other:
                assert prove_ranks(ranks)
            else:
                assert refusal(*ranks).rule == "rank-order"


# Against a scheduler that picks at random.


def runs_to_the_end(ranks: Sequence[Execution], pick: Callable[[int], int]) -> bool:
    """Let one thing happen at a time, whichever `pick` chooses, until nothing can."""
    programs = [r.operations for r in ranks]
    reached, done = [0] * len(ranks), [set[int]() for _ in ranks]
    order = [list(launches(operations)) for operations in programs]
    places = [{i: n for n, i in launches(operations).items()} for operations in programs]

    def here(rank: int, instance: tuple[str, int]) -> bool:
        """Whether a rank has come to a launch: nothing of its stream is left before it."""
        index = launches(programs[rank]).get(instance)
        return index is not None and index < reached[rank] and first_left(rank, index) == index

    def first_left(rank: int, index: int) -> int:
        stream = programs[rank][index].stream
        same = (i for i, o in enumerate(programs[rank]) if o.stream == stream)
        return next((i for i in same if i not in done[rank] or i == index), index)

    def can(rank: int, index: int) -> bool:
        operation, earlier = programs[rank][index], range(index)
        if index in done[rank] or index >= reached[rank] or first_left(rank, index) != index:
            return False
        if operation.kind is Kind.WAIT:
            records = [i for i in earlier if programs[rank][i].name == f"record e{operation.event}"]
            return not records or records[-1] in done[rank]
        if operation.kind is Kind.RECV:
            sends = [i for i, o in enumerate(programs[rank]) if o.kind is Kind.SEND]
            mine = [i for i in sends if programs[rank][i].flight == operation.flight]
            return any(i in done[rank] for i in mine)
        if operation.communicates:
            instance = places[rank][index]
            others = [r for r in range(len(ranks)) if instance not in order[r]]
            if others:
                return False
            return all(
                here(r, instance) or launches(programs[r])[instance] in done[r]
                for r in range(len(ranks))
            )
        return True

    while True:
        moves: list[tuple[int, int]] = []
        for rank, operations in enumerate(programs):
            last = reached[rank] - 1
            held = last >= 0 and operations[last].blocks_host and last not in done[rank]
            if reached[rank] < len(operations) and not held:
                moves.append((rank, -1))
            moves += [(rank, i) for i in range(len(operations)) if can(rank, i)]
        if not moves:
            return all(len(d) == len(o) for d, o in zip(done, programs, strict=True))
        rank, index = moves[pick(len(moves))]
        if index < 0:
            reached[rank] += 1
        else:
            done[rank].add(index)


PIECES = [
    lambda n: [send(f"x{n}", "experts")],
    lambda n: [send(f"x{n}", "experts"), record(n), wait(n), recv(f"x{n}", "experts")],
    lambda n: [send(f"x{n}", "experts"), recv(f"x{n}", "experts", blocks=True)],
    lambda n: [send(f"x{n}", "tensor"), recv(f"x{n}", "tensor", blocks=True)],
    lambda n: [record(n), wait(n), reduce(f"y{n}", "tensor")],
    lambda n: [record(n, "comp"), wait(n, "comm"), compute(f"z{n}")],
]


@st.composite
def plans(draw: st.DrawFn) -> list[Execution]:
    """Two ranks of a few pieces; the second one's may stand in another order."""
    pieces = draw(st.lists(st.sampled_from(PIECES), min_size=2, max_size=5))
    parts = [piece(n) for n, piece in enumerate(pieces)]
    other = draw(st.sampled_from([parts, parts[::-1], [*parts[1:], parts[0]]]))
    ranks = [[o for part in order for o in part] for order in (parts, other)]
    if draw(st.booleans()):
        at = draw(st.integers(0, len(ranks[1]) - 1))
        ranks[1].insert(draw(st.integers(0, len(ranks[1]) - 1)), ranks[1].pop(at))
    return [execution(*operations) for operations in ranks]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(plans(), st.integers(0, 2**32 - 1))
def test_what_is_proven_never_gets_stuck_and_what_gets_stuck_is_refused(
    ranks: list[Execution], seed: int
) -> None:
    finished = runs_to_the_end(ranks, Random(seed).randrange)
    try:
        prove_ranks(ranks)
    except VerificationError:
        proven = False
    else:
        proven = True
    assert finished or not proven
    members = {name: frozenset({0, 1}) for name in ("experts", "tensor")}
    run = Rendezvous({r: execution.operations for r, execution in enumerate(ranks)}, members)
    assert run.run() == finished


# Variants.


def unsplit(layers: int) -> Execution:
    """Every dispatch and combine in one piece."""
    names = [f"{phase}@{layer}" for layer in range(layers) for phase in "DC"]
    return execution(*(reduce(name, "ep") for name in names))


def test_two_variants_in_one_step_are_refused() -> None:
    found = refusal(layered(2), unsplit(2))
    assert found.rule == "variant"
    assert found.missing == (
        "rank 0 runs 2 microbatches and rank 1 the unsplit model: two variants in one step"
    )
    assert "agree" in found.fix
    assert refusal(layered(2, 2), layered(2, 3)).rule == "variant"


def test_every_variant_is_proven_by_itself() -> None:
    split, whole = layered(2), unsplit(2)
    plan = prove_plan(
        {"split": split, "empty microbatch": split, "unsplit": [whole, whole]}, ranks=2
    )
    assert [c.variant for c in plan.variants] == ["split", "empty microbatch", "unsplit"]
    assert [c.launches for c in plan.variants] == [{"ep": 8}, {"ep": 8}, {"ep": 4}]
    assert any("all ranks run the same variant" in text for text in plan.assumptions)
    assert str(plan).splitlines()[0] == (
        "split, empty microbatch: 2 ranks, 8 over ep; one order on all ranks, no circle of waits"
    )
    assert str(plan).splitlines()[1].startswith("unsplit: 2 ranks, 4 over ep; ")
    assert json.loads(json.dumps(plan.to_json())) == plan.to_json()


def test_a_variant_that_does_not_fit_refuses_the_plan_by_name() -> None:
    good, bad = layered(1), execution(A, reduce("r"))
    with pytest.raises(VerificationError, match=r"^fallback: on rank 0 nothing orders"):
        prove_plan({"split": good, "fallback": bad}, ranks=2)


def test_an_empty_microbatch_that_leaves_its_communication_out_is_refused() -> None:
    """Programs have no branches; one that skipped an empty microbatch would be this."""
    whole = layered(1)
    skipping = replace(
        whole, operations=tuple(o for o in whole.operations if "m1" not in o.name), contract=GLOO
    )
    found = refusal(whole, skipping)
    assert found.rule == "variant"
    assert "rank 0 runs 2 microbatches and rank 1 1 microbatch" in found.missing


def test_sixty_one_layers_take_linear_work(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0

    def counted(original: Callable[..., bool]) -> Callable[..., bool]:
        def call(*args: object) -> bool:
            nonlocal looks
            looks += 1
            return original(*args)

        return call

    monkeypatch.setattr(Rendezvous, "_is_ready", counted(Rendezvous._is_ready))
    monkeypatch.setattr(HappensBefore, "before", counted(HappensBefore.before))

    def work(layers: int) -> int:
        nonlocal looks
        looks = 0
        program = layered(layers)
        other = execution(compute("more"), *program.operations)
        prove_ranks([other if rank % 2 else program for rank in range(8)])
        return looks

    operations = len(layered(61).operations)
    assert operations == 61 * 4 * 14
    assert operations < work(61) < 6 * operations
    assert work(244) < 4.1 * work(61)
