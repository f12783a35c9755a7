"""The timeline page in a real browser: it draws, zooms, answers the mouse, and needs no network."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("plotly", reason="the html extra is not installed")
import browser as browsers
from browser import Browser
from dbo_fx.backend import compile_captured
from dbo_fx.contracts import NCCL
from dbo_fx.inspect.timeline import Timeline, timeline_of_compiled, timeline_of_program
from dbo_fx.inspect.timeline_html import timeline_html
from dbo_fx.ir_bind import bound_program
from dbo_fx.options import Options
from dbo_fx.schedules import load
from small_moe import CachedMoe, one_rank, traced_model

if reason := browsers.missing():
    pytest.skip(reason, allow_module_level=True)

TIMES = {"A0": 60, "A1": 140, "D": 90, "MLP": 180, "C": 150, "S": 50, "TAIL": 30, "merge": 5}
BARS = "return plot.querySelectorAll('.barlayer .point').length"
RANGES = "return [plot._fullLayout.xaxis.range, plot._fullLayout.xaxis2.range]"
HOVER = "return Array.from(plot.querySelectorAll('.hovertext'), e => e.textContent).join('|')"
LABELS = "return Array.from(plot.querySelectorAll('.bartext'), e => e.textContent)"


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with browsers.browser() as found:
        yield found


@pytest.fixture(scope="module")
def small() -> Timeline:
    with one_rank():
        captured = traced_model(CachedMoe, 3, 1).fresh()
        compiled = compile_captured(captured, Options())
    return timeline_of_compiled(compiled, TIMES, tokens=4096)


@pytest.fixture(scope="module")
def page(small: Timeline, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pages") / "small.html"
    path.write_text(timeline_html(small), encoding="utf-8")
    return path


@pytest.fixture
def opened(window: Browser, page: Path) -> Browser:
    """The small page, showing everything."""
    if not window.shows(page):
        window.open(page)
    window.run("document.getElementById('all').click()")
    window.until("return plot._fullLayout.xaxis.range[0] === 0")
    return window


def item_at(timeline: Timeline, name: str) -> tuple[float, float]:
    """The middle of an item: its time, and its lane's height."""
    item = next(item for item in timeline.items if item.name == name)
    height = len(timeline.streams) - 1 - timeline.streams.index(item.stream)
    return (item.start_us + item.end_us) / 2, height


def test_every_item_is_drawn_and_nothing_is_loaded(opened: Browser, small: Timeline, page: Path):
    opened.open(page)
    assert opened.run(BARS) == len(small.items)
    console, loaded = opened.logs()
    assert console == []
    assert [url for url in loaded if not url.startswith("data:")] == [page.as_uri()]


def test_layers_and_items_are_labelled(opened: Browser):
    labels = opened.run(
        "return Array.from(plot.querySelectorAll('.annotation'), e => e.textContent)"
    )
    assert labels == ["layer 0", "layer 1", "layer 2"]
    assert "MLP_m0@1" in opened.run(LABELS)


def test_the_wheel_zooms_lanes_and_memory_together(opened: Browser, small: Timeline):
    x, y = item_at(small, "MLP_m0@1")
    before = opened.run(RANGES)
    assert before[0] == before[1] == [0, small.end_us]
    opened.run("window.zooms = 0; plot.on('plotly_relayout', () => { window.zooms += 1; })")
    for turn in range(5):
        opened.scroll(x, y, -120)
        opened.until("return window.zooms > arguments[0]", turn)
    lanes, memory = opened.run(RANGES)
    assert lanes == memory
    assert 0.05 * small.end_us < lanes[0] < x < lanes[1] < 0.95 * small.end_us


def test_a_chosen_layer_fills_the_page(opened: Browser, small: Timeline):
    opened.run(
        "const s = document.getElementById('layer'); s.value = '1';"
        "s.dispatchEvent(new Event('change'));"
    )
    opened.until("return plot._fullLayout.xaxis.range[0] > 1")
    (low, high), memory = opened.run(RANGES)
    assert [low, high] == memory
    layer = small.layers[1]
    assert low < layer.start_us < layer.end_us < high
    assert high - low < 1.5 * (layer.end_us - layer.start_us)
    # There is room for longer labels then, and for those of small items.
    opened.until(f"{LABELS}.includes('A0_m0@1')")
    labels = opened.run(LABELS)
    assert "A0_m0@0" not in labels


def test_hover_shows_nodes_shapes_bytes_and_time(opened: Browser, small: Timeline):
    opened.move_to(*item_at(small, "A1_m1@1"))
    text = opened.until(HOVER)
    item = next(item for item in small.items if item.name == "A1_m1@1")
    assert "A1_m1@1" in text
    assert f"({item.duration_us:g} us, predicted)" in text
    for node in item.nodes:
        assert node.name in text
        assert node.shape in text
    assert "[2048, 16] f32" in text
    assert "128.0 KiB" in text


def test_a_click_lists_the_nodes(opened: Browser, small: Timeline):
    opened.click(*item_at(small, "MLP_m0@2"))
    opened.until("return !document.getElementById('inside').hidden")
    names = opened.run(
        "return Array.from(document.querySelectorAll('#inside td:first-child'), e => e.textContent)"
    )
    item = next(item for item in small.items if item.name == "MLP_m0@2")
    assert names == [node.name for node in item.nodes]


def test_events_can_be_hidden(opened: Browser):
    count = "return plot.querySelectorAll('.js-line').length"
    before = opened.run(count)
    opened.run("document.getElementById('events').click()")
    opened.until(f"{count} < arguments[0]", before)
    opened.run("document.getElementById('events').click()")
    opened.until(f"{count} == arguments[0]", before)
    assert opened.logs()[0] == []


def test_text_below_the_plot(opened: Browser, small: Timeline):
    text = opened.run("return document.body.innerText")
    assert "dependencies hold" in text
    assert "communications have compute beside them" in text
    assert small.memory is not None
    assert small.memory.report.alive[0].name in text


def test_61_layers(window: Browser, tmp_path: Path):
    program = bound_program(load("mlp_shared_overlap"), 61, NCCL)
    found = timeline_of_program(program)
    path = tmp_path / "large.html"
    path.write_text(timeline_html(found), encoding="utf-8")
    assert path.stat().st_size < 20e6
    window.open(path)
    assert window.run(BARS) == len(found.items) > 900
    assert "one unit per action" in window.run("return document.body.innerText")
    # Too many to be told apart: no heads on arrows and no text in bars until one zooms in.
    assert window.run(LABELS) == []
    window.run("Plotly.relayout(plot, {'xaxis.range': [100, 112]})")
    window.until("return plot.querySelectorAll('.bartext').length")
    assert "MLP_m0@13" in window.run(LABELS)
    assert window.logs()[0] == []
