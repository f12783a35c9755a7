"""Texts print and parse back, wrong ones are refused, unrolled schedules keep every dependency."""

from __future__ import annotations

from itertools import combinations_with_replacement, pairwise, product

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dbo_fx.errors import ScheduleError
from dbo_fx.ir import (
    CHAIN,
    Action,
    Half,
    Keepalive,
    Merge,
    Phase,
    Program,
    Record,
    Run,
    Schedule,
    Step,
    Wait,
    bind,
    draw,
    lanes,
    mark,
    parse,
    parse_program,
    parse_schedule,
    unroll,
)

# Examples are drawn action by action: slow on a busy machine, which says nothing about the code.
unhurried = settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])

SEED = (
    "D_1.send A0_0 A1_0 D_1.recv D_0.send MLP_1 D_0.recv C_1.send S_1 MLP_0 C_1.recv C_0.send S_0 "
    "A0_1 A1_1 C_0.recv"
)
ONE = "A0_i A1_i D_i.send D_i.recv MLP_i C_i.send C_i.recv S_i"


def actions(text: str) -> tuple[Action, ...]:
    return tuple(map(Action.parse, text.split()))


def schedule(order: str, lead: str = "lead 1") -> Schedule:
    return parse_schedule(f"schedule 1\nname mine\n{lead}\norder {order}\n")


def program(*steps: str, microbatches: int = 2, layers: int = 2) -> Program:
    header = f"schedule x\nmicrobatches {microbatches}\nlayers {layers}\ntransport gloo\n"
    return parse_program(f"program 1\n{header}" + "\n".join(steps))


# Where S may be inserted into a chain that begins with A0, A1 or D.send: after its layer's A1 and
# before the next layer's A0, cyclically.
SHARED_PLACES = {0: (0, 2, 3, 4, 5, 6, 7), 1: (1, 2, 3, 4, 5, 6), 2: (0, 1, 2, 3, 4, 5, 7)}


@st.composite
def schedules(draw_from: st.DrawFn) -> Schedule:
    labels = draw_from(st.lists(st.integers(0, 12), max_size=3, unique=True))
    names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]*", fullmatch=True)
    rows: dict[int | None, list[Action]] = {}
    for label in labels or [None]:
        start = draw_from(st.sampled_from([0, 1, 2] if labels else [0]))
        row = [Action(phase, label, half) for phase, half in CHAIN[start:] + CHAIN[:start]]
        places = SHARED_PLACES[start] if labels else SHARED_PLACES[start][1:]
        row.insert(draw_from(st.sampled_from(places)), Action(Phase.S, label))
        rows[label] = row
    turns = draw_from(st.permutations([label for label in rows for _ in range(8)]))
    order = tuple(rows[label].pop(0) for label in turns)
    lead = draw_from(st.sampled_from(labels)) if labels else None
    return Schedule(draw_from(names), order, lead)


@st.composite
def programs(draw_from: st.DrawFn) -> Program:
    source = draw_from(schedules())
    layers = draw_from(st.integers(1, 3))
    microbatches = source.num_microbatches or draw_from(st.integers(1, 3))
    streams = st.sampled_from(["comp", "comm"])
    steps: list[Step] = []
    events = 0
    slots = st.none() | st.integers(0, 12)
    for action in bind(source, layers, microbatches):
        slot = None if action.half is None else draw_from(slots)
        steps.append(Run(draw_from(streams), action, slot))
        if action.half is Half.RECV:
            steps.append(Keepalive(draw_from(streams), action.communication))
        if draw_from(st.booleans()):
            steps += [Record(draw_from(streams), events), Wait(draw_from(streams), events)]
            events += 1
    steps.append(Merge("comp"))
    return Program(source.name, microbatches, layers, "gloo", tuple(steps))


def assert_dependencies_hold(order: tuple[Action, ...], labels: list[int], layers: int) -> None:
    """Every action of the model once, and each after those that it needs."""
    at = {action: step for step, action in enumerate(order)}
    assert len(at) == len(order) == len(labels) * (8 * layers + 1)
    for label in labels:
        previous: list[Action] = []
        for layer in range(layers):
            chain = [Action(phase, label, half, layer) for phase, half in CHAIN]
            shared = Action(Phase.S, label, None, layer)
            assert all(at[needed] < at[chain[0]] for needed in previous)
            assert [at[action] for action in chain] == sorted(at[action] for action in chain)
            assert at[chain[1]] < at[shared]
            previous = [chain[-1], shared]
        assert all(at[needed] < at[Action(Phase.TAIL, label)] for needed in previous)


@pytest.mark.parametrize("text", ["D_1.send", "A0_0@3", "A0_i", "TAIL_1", "C_12.recv@60", "D_i"])
def test_action_prints_its_text(text):
    assert str(Action.parse(text)) == text


@pytest.mark.parametrize("text", ["D_m0.send@3", "TAIL_m1", "D_m0@0", "MLP_m10@2"])
def test_bound_action_prints_its_text(text):
    assert Action.parse_bound(text).bound() == text


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Q3_0", "unknown phase 'Q3'; wanted one of A0 A1 D MLP C S TAIL"),
        ("D_1.sent", "unknown half 'sent'; wanted send or recv"),
        ("A0_0.send", "only D and C have halves, A0 does not"),
        ("TAIL_0@1", "TAIL follows the last layer"),
        ("A0", "'A0' is not an action; write it like D_1.send"),
        ("A0_01", "'01' is no microbatch here"),
        ("A0_m0", "'m0' is no microbatch here"),
        ("A0_0@x", "is not an action"),
        ("", "is not an action"),
    ],
)
def test_wrong_action_text_is_refused(text, reason):
    with pytest.raises(ScheduleError, match=reason.replace(".", r"\.")):
        Action.parse(text)


@pytest.mark.parametrize("text", ["D_0.send@3", "TAIL_i", "A0_mi"])
def test_bound_form_wants_an_index(text):
    with pytest.raises(ScheduleError, match="is no microbatch here; write it like D_m0"):
        Action.parse_bound(text)


def test_label_i_has_no_bound_form():
    with pytest.raises(ScheduleError, match="stands for every microbatch"):
        Action.parse("A0_i").bound()


@pytest.mark.parametrize(("microbatch", "layer"), [(-1, None), (0, -1)])
def test_negative_numbers_are_refused(microbatch, layer):
    with pytest.raises(ScheduleError, match="count from 0"):
        Action(Phase.A0, microbatch, None, layer)


@unhurried
@given(schedules())
def test_schedule_text_parses_back(value):
    assert parse_schedule(str(value)) == value
    assert parse(str(value)) == value


@unhurried
@given(programs())
def test_program_text_parses_back(value):
    assert parse_program(str(value)) == value
    assert parse(str(value)) == value
    assert parse_program(str(value)).digest == value.digest


@unhurried
@given(schedules(), st.integers(1, 4), st.integers(1, 3))
def test_unrolled_schedule_keeps_every_dependency(value, layers, microbatches):
    count = value.num_microbatches or microbatches
    labels = list(value.labels) or list(range(count))
    assert_dependencies_hold(unroll(value, layers, count).actions, labels, layers)
    assert_dependencies_hold(bind(value, layers, count), list(range(count)), layers)


@unhurried
@given(st.permutations(SEED.split()))
def test_any_order_is_refused_or_keeps_every_dependency(order):
    try:
        value = schedule(" ".join(order))
    except ScheduleError:
        return
    assert_dependencies_hold(unroll(value, 3).actions, list(value.labels), 3)


def is_schedulable(row: list[Action]) -> bool:
    """Whether layers can be given to one label's steps so that every dependency holds."""
    at = {(action.phase, action.half): step for step, action in enumerate(row)}
    shared, join = (Phase.S, None), CHAIN[0]
    same_layer = [*pairwise(CHAIN), (CHAIN[1], shared)]
    next_layer = [(CHAIN[-1], join), (shared, join)]
    for early in product((-1, 0, 1), repeat=3):
        offset = dict(zip((join, CHAIN[1], shared), early, strict=True))
        # Layer 0's step runs in period -offset, at its place in the text.
        when = {slot: (-offset.get(slot, 0), at[slot]) for slot in at}
        if all(when[u] < when[v] for u, v in same_layer) and all(
            when[u] < (when[v][0] + 1, when[v][1]) for u, v in next_layer
        ):
            return True
    return False


@pytest.mark.parametrize("start", [0, 1, 2])
@pytest.mark.parametrize("place", range(8))
def test_an_order_is_refused_exactly_when_no_layers_fit_it(start, place):
    row = [Action(phase, 1, half) for phase, half in CHAIN[start:] + CHAIN[:start]]
    row.insert(place, Action(Phase.S, 1))
    for first, second in combinations_with_replacement(range(8), 2):
        changed = row.copy()
        changed[first], changed[second] = row[second], row[first]
        try:
            Schedule("mine", tuple(changed), 1)
        except ScheduleError:
            assert not is_schedulable(changed)
        else:
            assert is_schedulable(changed)


def test_broken_dependency_names_step_lanes_and_next_step():
    with pytest.raises(ScheduleError) as caught:
        schedule(SEED.replace("D_1.recv D_0.send MLP_1", "D_0.send MLP_1 D_1.recv"))
    assert str(caught.value) == (
        "mine, step 5 (counted from 1): MLP_1 runs before D_1.recv\n"
        "  comp  A0_0 A1_0 MLP_1   <-- here\n"
        "  comm  D_1.send D_0.send\n"
        "  MLP_1 needs D_1.recv first. See the lanes: dbo-fx show mlp_shared_overlap"
    )


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ("D_1.send A0_0", "D_1.recv A0_0", r"step 4 .*: D_1\.recv runs twice"),
        (
            "D_1.send A0_0 A1_0 D_1.recv",
            "D_1.recv A0_0 A1_0 D_1.send",
            r"D_1\.recv runs before D_1",
        ),
        (
            "C_1.send S_1 MLP_0 C_1.recv",
            "C_1.recv S_1 MLP_0 C_1.send",
            r"C_1\.recv runs before C_1",
        ),
        (
            "MLP_1 D_0.recv C_1.send",
            "C_1.send D_0.recv MLP_1",
            r"step 6 .*: C_1\.send runs before M",
        ),
        (
            "A0_0 A1_0",
            "A1_0 A0_0",
            r"step 3 .*: A0_0 runs before D_0\.send\n(.*\n)*.*keep its order",
        ),
        ("A0_1 A1_1", "A1_1 A0_1", r"A1_1 runs before A0_1"),
        (
            "S_0 A0_1 A1_1",
            "S_0 A0_1",
            r"mine: A1_1 is missing\n.*<-- here\n.*\n.*Every label needs",
        ),
        ("S_0", "", r"S_0 is missing"),
        ("D_0.recv", "D_0", r"step 7 .*: D_0 has no half\n(.*\n)*.*Write D_0\.send or D_0\.recv"),
        ("S_0", "S_0@1", r"S_0@1 does not belong in a steady state\n(.*\n)*.*from unrolling"),
        ("S_0", "TAIL_0 S_0", r"TAIL_0 does not belong in a steady state"),
        ("S_0", "S_i", r"S_i mixes the label i with numbered labels"),
        ("S_0", "Q_0", r"mine, step 13 \(counted from 1\): 'Q_0': unknown phase"),
    ],
)
def test_wrong_order_is_refused(before, after, reason):
    assert before in SEED
    with pytest.raises(ScheduleError, match=reason):
        schedule(SEED.replace(before, after))


def test_shared_expert_between_the_join_and_attention_is_refused():
    order = SEED.replace("S_1 ", "").replace("A0_1 A1_1", "A0_1 S_1 A1_1")
    with pytest.raises(ScheduleError, match="S_1 runs between A0_1 and A1_1"):
        schedule(order)


@pytest.mark.parametrize(
    ("order", "reason"),
    [
        ("A1_i D_i.send D_i.recv MLP_i C_i.send C_i.recv S_i A0_i", "A1_i runs before A0_i"),
        ("S_i A0_i A1_i D_i.send D_i.recv MLP_i C_i.send C_i.recv", "S_i runs before A1_i"),
    ],
)
def test_label_i_does_not_rotate(order, reason):
    with pytest.raises(ScheduleError, match=reason):
        schedule(order, lead="")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "schedule text: no text; it begins with the line 'schedule 1'"),
        ("# only a comment", "no text"),
        ("schedule 2", "line 1: 'schedule 2'; wanted 'schedule 1' first"),
        ("\nname x", "line 2: 'name x'; wanted 'schedule 1' first"),
        ("schedule 1\ncolour red", "line 2: unknown line 'colour red'"),
        ("schedule 1\nname a\nname b", "line 3: a second 'name' line"),
        ("schedule 1\norder A0_i", "'' cannot name a schedule; add a line like"),
        ("schedule 1\nname two words", "'two words' cannot name a schedule"),
        ("schedule 1\nname x\nlead one", "lead 'one' is no label; write a number"),
        ("schedule 1\nname x", "x: the order is empty"),
        (
            f"schedule 1\nname x\norder {SEED}",
            "x: lead is None, the labels are 0 1; name the label",
        ),
        (f"schedule 1\nname x\nlead 3\norder {SEED}", "lead is 3, the labels are 0 1"),
        (f"schedule 1\nname x\nlead 0\norder {ONE}", "lead 0 beside the label i"),
        (f"schedule 1\nname x\ncomp A0_i\norder {ONE}", "x: the comp row is not what the order"),
        (f"schedule 1\nname x\ncomm D_i | C_i\norder {ONE}", "x: the comm row is not what the or"),
    ],
)
def test_wrong_schedule_text_is_refused(text, reason):
    with pytest.raises(ScheduleError) as caught:
        parse_schedule(text)
    assert reason in str(caught.value)


def test_wrong_name_is_refused_without_a_text():
    with pytest.raises(ScheduleError, match="'a b' cannot name a schedule"):
        Schedule("a b", actions(ONE), None)


def test_comments_blank_lines_and_rows_are_read():
    text = f"# head\nschedule 1\n\nname mine # tail\nlead 1\ncomm D_1|D_0 | C_1 |C_0\norder {SEED}"
    assert parse_schedule(text) == schedule(SEED)


@pytest.mark.parametrize(
    ("layers", "microbatches", "reason"),
    [(0, None, "0 layers; wanted at least 1"), (2, 3, "of 2 microbatches, not of 3")],
)
def test_numbers_that_do_not_fit_are_refused(layers, microbatches, reason):
    with pytest.raises(ScheduleError, match=reason):
        unroll(schedule(SEED), layers, microbatches)


@pytest.mark.parametrize("microbatches", [None, 0])
def test_label_i_wants_the_number_of_microbatches(microbatches):
    with pytest.raises(ScheduleError, match="say how many"):
        bind(schedule(ONE, lead=""), 1, microbatches)


def test_binding_makes_the_leading_label_index_0():
    assert [a.microbatch for a in bind(schedule(SEED), 1)[:3]] == [0, 0, 0]
    assert bind(schedule(SEED, lead="lead 0"), 1)[0].microbatch == 1


def test_shared_expert_before_its_periods_attention_is_the_last_layers():
    row = "S_0 A0_0 A1_0 D_0.send D_0.recv MLP_0 C_0.send C_0.recv"
    unrolled = unroll(schedule(row, lead="lead 0"), 1)
    assert unrolled.prologue == ()
    assert unrolled.periods == (actions(row.replace(" ", "@0 ") + "@0")[1:],)
    assert unrolled.epilogue == actions("S_0@0 TAIL_0")


def test_lanes_show_several_communications_in_flight_and_bare_ones():
    picture = draw(lanes(actions("A0_0 D_0.send D_1.send A0_1 D_0.recv MLP_0 D_1.recv C_0.send")))
    assert picture == (
        "comp  A0_0 | A0_1    | MLP_0 |\n"
        "comm       | D_0 D_1 | D_1   | C_0"
    )  # fmt: skip


def test_lanes_of_nothing():
    assert lanes(()) == ()
    assert draw(()) == "comp\ncomm"


def test_mark_points_at_a_communication_step():
    assert mark(actions("A0_0"), "D_0.recv", "comm") == "  comp  A0_0\n  comm  D_0.recv   <-- here"


RECEIVED = ("comm  D_m0.send@0", "comp  D_m0.recv@0")


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        (["comp  D_m0.recv@0"], "line 6: D_m0.recv@0 runs before D_m0.send@0"),
        (["comp  A0_m0@0", "", "comp  A0_m0@0"], "line 8: A0_m0@0 runs twice"),
        (["comp  Q_m0@0"], "line 6: 'Q_m0@0': unknown phase 'Q'"),
        (["comm  wait e0", "comp  record e0"], "line 6: e0 is waited for before recorded"),
        (["comp  record e0", "comp  record e0"], "line 7: e0 is recorded twice"),
        (["comp  record 0"], "line 6: '0' is not an event; write it like e0"),
        (["main  A0_m0@0"], "line 6: unknown stream 'main'; wanted one of comp comm"),
        (["comp"], "line 6: unknown step; wanted an action"),
        (["comp  free D_m0@0"], "line 6: unknown step"),
        (["comp  A0_m0@0 slot 0"], "line 6: A0_m0@0 has a slot; only sends and recvs use one"),
        (["comp  D_m0.send@0 slot one"], "line 6: 'one' is not a slot; write it like slot 0"),
        (["comp  D_m0.send@0 slot"], "line 6: unknown step"),
        (["comp  A0_m2@0"], "line 6: A0_m2@0 in a program of 2 microbatches"),
        (["comp  A0_m0@2"], "line 6: A0_m0@2 in a program of 2 layers"),
        (["comp  A0_m0"], "line 6: A0_m0 has no layer; write it like A0_m0@0"),
        (["comm  D_m0@0"], "line 6: D_m0@0 has no half"),
        (["comp  keepalive A0_m0@0"], "line 6: A0_m0@0 is no communication"),
        ([*RECEIVED, "comp  keepalive D_m0.recv@0"], "line 8: D_m0.recv@0 is no communication"),
        (["comp  keepalive D_m0@0"], "line 6: D_m0@0 is released before D_m0.recv@0"),
        (
            [*RECEIVED, "comp  keepalive D_m0@0", "comp  keepalive D_m0@0"],
            "line 9: D_m0@0 is released twice",
        ),
    ],
)
def test_wrong_program_step_is_refused_and_marked(steps, reason):
    with pytest.raises(ScheduleError) as caught:
        program(*steps)
    message = str(caught.value)
    assert message.startswith(f"program text, {reason}")
    assert message.endswith("   <-- here")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "program text: no text; wanted 'program 1' first"),
        ("program 3", "line 1: 'program 3'; wanted 'program 1' first"),
        ("program 1", "found ''; wanted a line like 'schedule NAME'"),
        ("program 1\nschedule x\nlayers 2", "line 3: found 'layers 2'; wanted a line like 'micro"),
        ("program 1\nschedule x\nmicrobatches 0", "wanted a line like 'microbatches 2'"),
        ("program 1\nschedule x y", "wanted a line like 'schedule NAME'"),
    ],
)
def test_wrong_program_header_is_refused(text, reason):
    with pytest.raises(ScheduleError) as caught:
        parse_program(text)
    assert reason in str(caught.value)


def test_halves_print_their_slot():
    steps = ("comp  D_m0.send@0 slot 0", "comp  D_m0.recv@0 slot 0")
    read = program(*steps)
    assert [str(step) for step in read.steps] == list(steps)
    assert [step.slot for step in read.steps] == [0, 0]
    assert read.digest != program(*RECEIVED).digest


def test_digest_names_the_content():
    one = program("comp  A0_m0@0")
    assert one.digest == program("# again", "comp   A0_m0@0").digest
    assert one.digest != program("comp  A0_m1@0").digest
    assert len(one.digest) == 16
    assert one.actions == (Action.parse_bound("A0_m0@0"),)


@unhurried
@given(st.text() | st.from_regex(r"(schedule|program) 1\n(name|order|lead|schedule) .*"))
def test_any_other_text_is_refused_with_our_error(text):
    with pytest.raises(ScheduleError):
        parse(text)
