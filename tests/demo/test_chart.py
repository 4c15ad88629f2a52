"""The loss curve in the terminal and as SVG."""

from __future__ import annotations

from xml.etree import ElementTree

from holdfast.demo import chart

FALLING = {step: 5.0 - step / 10 for step in range(1, 41)}


def test_the_terminal_curve_has_its_size_and_falls_from_left_to_right() -> None:
    """The first column's dots stand in the top row, the last column's in the bottom row."""
    lines = chart.draw(FALLING, {20: "✗"}, columns=30, rows=5)
    body = [line.split("│")[1] for line in lines[:5]]
    assert all(len(line) == 30 for line in body)
    assert body[0][0] != "\u2800" and body[0][-1] == "\u2800"
    assert body[-1][-1] != "\u2800" and body[-1][0] == "\u2800"


def test_a_mark_stands_below_its_step() -> None:
    """Marks are placed along the axis in proportion to their step."""
    lines = chart.draw(FALLING, {1: "a", 40: "b"}, columns=30)
    assert lines[-2].strip() == "a" + " " * 28 + "b"


def test_a_curve_of_one_point_can_be_drawn() -> None:
    """Nothing is divided by an empty range."""
    assert len(chart.draw({7: 1.0}, {}, columns=10, rows=3)) == 6


def test_the_svg_is_well_formed_and_shows_every_series_and_mark() -> None:
    """Titles are escaped, and there is a line for each series with a point for each step."""
    series = [chart.Series("a < b", FALLING, "#123456", 2.0), chart.Series("rest", {30: 2.0, 31: 1.9}, "#654321", 1.0)]
    root = ElementTree.fromstring(chart.svg("Loss & step", series, {25: "killed"}))
    curves = root.findall("{http://www.w3.org/2000/svg}polyline")
    words = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert [len(curve.attrib["points"].split()) for curve in curves] == [40, 2]
    assert {"Loss & step", "a < b", "rest", "killed"} <= set(words)
