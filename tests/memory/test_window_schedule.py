"""The three conditions, every method's levels, the tables of public code, and what a schedule implies."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mediaspec.memory.references import ReferenceRule
from mediaspec.memory.schedule_presets import available_schedules, make_schedule
from mediaspec.memory.schedule_tables import (
    block_lag_table,
    block_lag_updates,
    fifo_init_frames,
    framepack_paddings,
    pyramid_matrix,
    pyramid_window,
    rolling_windows,
)
from mediaspec.memory.window_schedule import WindowSchedule, staircase, warp

from .cases import CASES, assert_like

SCHEDULES = CASES["schedules"]
PRESETS = {
    "figure_example": ("staircase", {"stages": 2, "delta": 2, "steps": 2}),
    "fifo_f16_n4": ("fifo", {"lookahead": False}),
    "rolling_diffusion_w16": ("rolling_diffusion", {}),
    "df_pyramid_S50_u10": ("diffusion_forcing_pyramid", {}),
    "df_autoregressive_S50": ("diffusion_forcing_autoregressive", {}),
    "df_full_sequence_H16_S50": ("diffusion_forcing_full", {}),
    "outpainting_w16_delta8_r8": ("outpainting", {}),
    "repeat_i2v_w16": ("repeated_image_to_video", {}),
    "framepack_f1": ("framepack", {}),
    "helios": ("helios", {}),
    "self_forcing_chunk3": ("self_forcing", {}),
    "longlive_v1": ("longlive", {}),
    "rolling_forcing_b3_5steps": ("rolling_forcing", {}),
    "magi1_w4_chunk6_64steps": ("magi1", {}),
    "skyreels_stream_N30_a6_b5_F25": ("skyreels_streaming", {}),
    "anyflow_far_chunk3": ("anyflow_far", {}),
}


def of_case(case: dict) -> WindowSchedule:
    return WindowSchedule(case["w"], case["delta"], tuple(case["t_in"]), case["m_ar"], tuple(case["t_out"]))


def assert_case(schedule: WindowSchedule, case: dict) -> None:
    assert (schedule.w, schedule.delta, schedule.m_ar) == (case["w"], case["delta"], case["m_ar"])
    assert_like(list(schedule.t_in), case["t_in"], absolute=1e-8)
    assert_like(list(schedule.t_out), case["t_out"], absolute=1e-8)
    assert schedule.is_monotone() == case["monotone"]
    assert schedule.is_circular() == case["circular"]
    assert schedule.has_zero_t_boundary() == case["zero_t"]
    assert schedule.free_levels == case["free_levels"]
    assert schedule.updates_per_frame == case["denoise_updates_per_frame"]


@pytest.mark.parametrize("case", SCHEDULES["instances"], ids=lambda case: case["name"])
def test_methods(case):
    assert_case(of_case(case), case)
    name, numbers = PRESETS[case["name"]]
    schedule = make_schedule(name, **numbers)
    assert_case(schedule, case)
    assert (schedule.net_frames or schedule.w) == case["net_frames"]
    assert schedule.calls_per_step == case["net_calls_per_ar_step"]
    assert WindowSchedule(schedule.w, schedule.delta, schedule.t_in, 1).t_out == schedule.t_out


@pytest.mark.parametrize("case", SCHEDULES["violations"], ids=lambda case: case["name"])
def test_violations(case):
    schedule = of_case(case)
    assert_case(schedule, case)
    broken = {"monotone": "not monotone", "circular": "not circular", "zero_t": "off its boundary"}
    reasons = [reason for name, reason in broken.items() if not case[name]]
    assert len(reasons) == 1
    with pytest.raises(ValueError, match=reasons[0]):
        schedule.validate()


def test_the_first_failing_slot_is_named():
    with pytest.raises(ValueError, match="slot 2 ends at 0.6 and becomes slot 1, which starts at 0.5"):
        WindowSchedule(4, 1, (0.25, 0.5, 0.75, 1), 1, (0.0, 0.25, 0.6, 0.75)).validate()
    with pytest.raises(ValueError, match="slot 1 goes from 1 to 1"):
        WindowSchedule(2, 2, (1.0, 1.0), 1, (0.0, 1.0)).validate()


def test_every_preset_is_valid_and_says_what_it_is():
    assert len(available_schedules()) >= 22
    for name in available_schedules():
        schedule = make_schedule(name)
        assert schedule.name == name and schedule.validate() is schedule
    assert make_schedule("framepack_inverted").references.reverse
    assert make_schedule("longlive").references == ReferenceRule.sink_last(3, 6)
    assert make_schedule("longlive2").references == ReferenceRule.sink_last(8, 16)
    assert make_schedule("rolling_forcing").references == ReferenceRule.sink_last(3, 3)
    assert make_schedule("streaming_t2v").references.frame_ids(range(40)) == [6, *range(33, 40)]
    assert make_schedule("skyreels_long").references.level == 0.02
    assert make_schedule("helios").references.frame_ids(range(50)) == [0, *range(31, 50)]
    assert make_schedule("fifo").calls_per_step == SCHEDULES["fifo"]["calls_lookahead"]


def test_unknown_names_show_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'self_forcing'"):
        make_schedule("self-forcin")
    with pytest.raises(ValueError, match="did you mean 'lookahead'"):
        make_schedule("fifo", lookahed=False)


def test_identities_between_methods():
    fifo, pyramid = make_schedule("fifo"), make_schedule("diffusion_forcing_pyramid", steps=64, slope=1)
    assert fifo.t_in == pyramid.t_in and fifo.t_out == pyramid.t_out and fifo.m_ar == pyramid.m_ar
    one = make_schedule("diffusion_forcing_pyramid", steps=50, slope=50)
    assert (one.w, one.t_in, one.m_ar) == (1, (1.0,), 50)
    chunk, stairs = (
        make_schedule("outpainting", delta=4, steps=7),
        make_schedule("staircase", stages=1, delta=4, steps=7),
    )
    assert (chunk.w, chunk.delta, chunk.t_in, chunk.t_out, chunk.m_ar) == (4, 4, stairs.t_in, stairs.t_out, 7)


def test_few_step_levels():
    for at, wanted in SCHEDULES["warp_shift5"].items():
        assert warp(float(at), 5.0) == pytest.approx(wanted, abs=1e-12)
    forced = make_schedule("self_forcing")
    assert [forced.level(m)[0] for m in range(5)] == pytest.approx([1, 0.9375, 0.8333333333333334, 0.625, 0])
    assert [make_schedule("causvid").level(m)[2] for m in range(4)] == pytest.approx([1, 0.757, 0.522, 0])


def test_pyramid():
    wanted = SCHEDULES["df_pyramid"]
    assert pyramid_matrix(4, 3, 1).tolist() == wanted["h4_s3_u1"]
    assert pyramid_matrix(3, 4, 2).tolist() == wanted["h3_s4_u2"]
    assert pyramid_matrix(3, 3, 3).tolist() == wanted["h3_s3_autoregressive"]
    w, levels = pyramid_window(50, 20)
    assert {"w": w, "t_in_steps": levels} == wanted["steady_s50_u20"]


def test_block_lag():
    wanted = SCHEDULES["block_lag"]
    assert block_lag_table(3, 4, 2).tolist() == wanted["b3_n4_a2"]
    assert block_lag_table(3, 4, 0).tolist() == wanted["b3_n4_a0"]
    assert block_lag_table(3, 4, 9).tolist() == wanted["b3_n4_a9"]
    assert block_lag_table(4, 4, 2, 1).tolist() == wanted["b4_n4_a2_ready1"]
    long = block_lag_table(5, 30, 5)
    assert len(long) == wanted["rows_b5_n30_a5"]
    assert long[5].tolist() == wanted["row6_b5_n30_a5"] and long[49].tolist() == wanted["row50_b5_n30_a5"]


@pytest.mark.parametrize("blocks", [1, 2, 5])
@pytest.mark.parametrize("steps", [1, 4, 30])
def test_block_lag_follows_its_rule_step_by_step(blocks, steps):
    for lag in (0, 1, 2, 5, 40):
        for ready in range(min(blocks, 2)):
            before = [steps + 1 if i < ready else 0 for i in range(blocks)]
            rows: list[list[int]] = []
            while min(before) < steps:
                now: list[int] = []
                for i in range(blocks):
                    starts = i == 0 or before[i - 1] >= steps
                    now.append(before[i] + 1 if starts else now[i - 1] - lag)
                before = [min(max(i, 0), steps + 1) for i in now]
                rows.append(before)
            table = block_lag_table(blocks, steps, lag, ready)
            assert table.tolist() == rows
            assert block_lag_updates(table, steps).sum(0).tolist() == [0] * ready + [steps] * (blocks - ready)


def test_other_tables():
    fifo = SCHEDULES["fifo"]
    assert fifo_init_frames(4, 3) == fifo["init_frames_f4_n3"]
    queue = make_schedule("fifo")
    assert queue.w == fifo["queue_f16_n4"] and queue.w + queue.lookahead == fifo["with_lookahead"]
    assert make_schedule("fifo", lookahead=False).calls_per_step == fifo["calls_plain"]
    assert 100 + queue.w - queue.net_frames == fifo["loops_for_100_new"]
    for sections, wanted in SCHEDULES["framepack_paddings"].items():
        assert framepack_paddings(int(sections)) == wanted
    assert [list(pair) for pair in rolling_windows(4, 3)] == SCHEDULES["rolling_windows_b4_l3"]


@st.composite
def schedules(draw) -> WindowSchedule:
    """Valid schedules: levels that rise by at least 0.01 every delta slots and never fall."""
    delta = draw(st.integers(1, 4))
    w = draw(st.integers(delta, 12))
    steps = -(-w // delta)
    levels, low = [], 0.0
    for j in range(w - delta):
        floor = max(low, (levels[j - delta] if j >= delta else 0.0) + 0.01)
        room = 1.0 - 0.01 * (steps - j // delta)
        low = draw(st.floats(floor, max(floor, min(room, floor + 0.2))))
        levels.append(min(low, 0.99))
    return WindowSchedule(w, delta, (*levels, *[1.0] * delta), draw(st.integers(1, 5)))


@settings(max_examples=60, deadline=None)
@given(schedules())
def test_conditions_and_their_consequences(schedule):
    assert schedule.is_circular() and schedule.has_zero_t_boundary()
    strict = all(a < b - 1e-9 for a, b in zip(schedule.t_in, schedule.t_in[schedule.delta :]))
    assert schedule.is_monotone() == strict
    if not strict:
        return
    schedule.validate()
    for m in range(schedule.m_ar):
        assert all(after < before for before, after in zip(schedule.level(m), schedule.level(m + 1)))
    # a frame that enters in the last slots passes every level on its way down, and meets its own end each time
    slot, level = schedule.w - 1, 1.0
    for _ in range(schedule.steps_per_frame):
        assert abs(schedule.t_in[slot] - level) < 1e-7
        level, slot = schedule.t_out[slot], slot - schedule.delta
    assert slot < 0 and level == 0.0
    covered = [0] * schedule.w
    for start, kept, end in schedule.with_(net_frames=max(1, schedule.w // 2)).pieces():
        assert start <= kept < end
        for j in range(kept, end):
            covered[j] += 1
    assert covered == [1] * schedule.w


@settings(max_examples=40, deadline=None)
@given(schedules(), st.integers(0, 100), st.floats(0.02, 0.5))
def test_any_other_output_level_breaks_a_condition(schedule, where, by):
    slot = where % schedule.w
    out = list(schedule.t_out)
    out[slot] = out[slot] + by if out[slot] + by <= 1 else out[slot] - by
    with pytest.raises(ValueError):
        WindowSchedule(schedule.w, schedule.delta, schedule.t_in, 1, tuple(out)).validate()


def test_bad_numbers_are_refused():
    for bad in (
        {"w": 2, "delta": 3, "t_in": (1.0, 1.0), "m_ar": 1},
        {"w": 2, "delta": 1, "t_in": (1.0,), "m_ar": 1},
        {"w": 2, "delta": 1, "t_in": (0.5, 1.5), "m_ar": 1},
        {"w": 2, "delta": 1, "t_in": (0.5, float("nan")), "m_ar": 1},
        {"w": 2, "delta": 1, "t_in": (0.5, 1.0), "m_ar": 0},
        {"w": 2, "delta": 1, "t_in": (0.5, 1.0), "m_ar": 2, "progress": (0.9, 0.5)},
        {"w": 2, "delta": 1, "t_in": (0.5, 1.0), "m_ar": 1, "lookahead": 2},
    ):
        with pytest.raises(ValueError):
            WindowSchedule(**bad)
    with pytest.raises(ValueError, match="both must be at least 1"):
        staircase(0, 1)


def test_references_choose_frames():
    assert ReferenceRule().frame_ids(range(5)) == []
    assert ReferenceRule.recent(2).frame_ids(range(5)) == [3, 4]
    assert ReferenceRule.all_kv().frame_ids(range(3)) == [0, 1, 2]
    assert ReferenceRule.recent(2).reversed_().frame_ids([9, 8, 7, 6]) == [6, 7]
    with pytest.raises(ValueError, match="packed references need groups"):
        ReferenceRule("packed")
