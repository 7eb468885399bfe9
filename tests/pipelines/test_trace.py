"""The trace picture shows what the record says."""

from __future__ import annotations

import PIL.Image
import pytest

from mediaspec.pipelines.trace import KINDS, PANEL, draw_trace

from . import tiny


def test_every_kind_has_its_colour_in_its_cell() -> None:
    kind = [0, 1, 2, 3]
    sheet = draw_trace(PIL.Image.new("RGB", (8, 8), "red"), kind, [0.0, 0.1, 0.0, 0.0], [0, 1, 1, 2], (2, 2), "a cat")
    left, top, cell = 12 + PANEL + 24, 56, PANEL // 2
    for i, number in enumerate(kind):
        row, column = divmod(i, 2)
        at = (left + column * cell + cell // 2, top + row * cell + cell // 2)
        assert sheet.getpixel(at) == KINDS[number][1]
    drift = [sheet.getpixel((left + PANEL + 24 + (i % 2) * cell + 50, top + (i // 2) * cell + 50)) for i in range(4)]
    assert drift[1] != drift[0] == drift[2] == drift[3]
    assert sheet.getpixel((100, 200)) == (255, 0, 0)


def test_a_long_title_is_cut_and_a_short_grid_fits() -> None:
    picture = PIL.Image.new("RGB", (8, 8))
    sheet = draw_trace(picture, [1] * 8, [0.0] * 8, list(range(8)), (2, 4), "word " * 200, decoded=3)
    assert sheet.width == 3 * PANEL + 72


@pytest.mark.parametrize("rule", ["plain", "cool_sd"])
def test_a_pipelines_trace_agrees_with_its_stats(rule: str) -> None:
    output = tiny.text_pipeline()("a cat", seeds=4, rule=rule, return_trace=True)
    kind, spent = output.trace.kind[0], output.trace.drift[0]
    assert int((kind == 1).sum()) == sum(output.stats["accepted_per_position"])
    assert int(output.trace.round[0].max()) == output.stats["rounds"]
    assert (float(spent.sum()) > 0) == (rule == "cool_sd")
