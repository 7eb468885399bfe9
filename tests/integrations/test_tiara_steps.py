"""How a `VideoContext` finds the denoising step, on schedules of diffusers' own."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from diffusers import (
    DDIMInverseScheduler,
    DDIMScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    HeunDiscreteScheduler,
    KDPM2DiscreteScheduler,
    PNDMScheduler,
)
from diffusers.hooks.hooks import CacheContext

from mediaspec.attention.tiara import TiARA
from mediaspec.integrations.video_context import VideoContext


def walk(context: VideoContext, times: torch.Tensor, calls: int = 2) -> list[tuple[int, int, bool]]:
    """(run, step, active) of a loop as pipelines write it, with two model calls for guidance."""
    found = []
    for t in times:
        for _ in range(calls):
            context.watch(t.expand(2), None)
        found.append((context.run, context.step, context.active))
    return found


@pytest.mark.parametrize(
    "kind",
    [
        DDIMScheduler,  # falls
        DDIMInverseScheduler,  # rises
        EulerDiscreteScheduler,
        FlowMatchEulerDiscreteScheduler,
        HeunDiscreteScheduler,  # every timestep but the first twice
        KDPM2DiscreteScheduler,
        PNDMScheduler,  # the second timestep twice
    ],
)
def test_every_schedule_counts_its_places(kind):
    """In a pipeline; and a second run, of one step too, is another one."""
    scheduler = kind(skip_prk_steps=True) if kind is PNDMScheduler else kind()
    context = VideoContext(TiARA(steps=(0.5, 1.0)), SimpleNamespace(scheduler=scheduler))
    for run in (1, 2):
        scheduler.set_timesteps(6)
        found, count = walk(context, scheduler.timesteps), len(scheduler.timesteps)
        assert [one[:2] for one in found] == [(run, step) for step in range(count)]
        assert [one[2] for one in found] == [step / (count - 1) >= 0.5 for step in range(count)]
    for run in (3, 4):
        scheduler.set_timesteps(1)
        assert walk(context, scheduler.timesteps)[0][:2] == (run, 0)


def test_a_run_that_starts_inside_of_the_schedule():
    """Video to video, in pipelines that do not say how long the loop is: fractions are of the part that runs."""
    scheduler = DDIMScheduler()
    scheduler.set_timesteps(10)
    context = VideoContext(TiARA(steps=(0.5, 1.0)), SimpleNamespace(scheduler=scheduler))
    context.pipe._num_timesteps = 10  # of an earlier run from noise
    found = walk(context, scheduler.timesteps[5:])
    assert context.total == 5
    assert [one[1:] for one in found] == [(0, False), (1, False), (2, True), (3, True), (4, True)]


def test_another_loop_than_the_pipelines_has_no_known_length():
    context = VideoContext(TiARA(steps=(0.0, 0.5)), SimpleNamespace(scheduler=DDIMScheduler()))
    with pytest.raises(ValueError, match="set_step"):
        context.watch(981.0, None)
    context.pin(0, 50)
    context.watch(981.0, None)
    assert context.active


def test_an_aborted_run_does_not_shift_the_next():
    """Leading timesteps of 20 steps begin below the first one of 50."""
    scheduler = DDIMScheduler()
    context = VideoContext(TiARA(), SimpleNamespace(scheduler=scheduler))
    scheduler.set_timesteps(50)
    walk(context, scheduler.timesteps[:1])
    scheduler.set_timesteps(20)
    assert [one[:2] for one in walk(context, scheduler.timesteps)] == [(2, step) for step in range(20)]


def test_timesteps_that_are_numbers_or_copies():
    for make in (float, lambda t: t.expand(3).clone(), lambda t: t.expand(2, 5).to(torch.float64)):
        context = VideoContext(TiARA())
        found = []
        for value in (900, 600, 600, 300, 900, 600):
            context.watch(make(torch.tensor(value)), None)
            found.append((context.run, context.step))
        assert found == [(1, 0), (1, 1), (1, 1), (1, 2), (2, 0), (2, 1)]


def test_a_cache_context_tells_branch_and_length():
    context = VideoContext(TiARA(steps=(0.5, 1.0)))
    for step, t in enumerate((900.0, 600.0, 300.0)):
        for name in ("cond", "uncond"):
            context.watch(t, CacheContext(name, num_inference_steps=3))
            assert (context.branch, context.step, context.active) == (name, step, step > 0)


def test_told_steps():
    """A lower one is another video; None gives the steps back to the timesteps; none is out of range."""
    context = VideoContext(TiARA(steps=(0.0, 0.5)))
    runs = []
    for step in (0, 1, 2, 0, 1):
        context.pin(step, 3)
        context.watch(500.0, None)
        runs.append((context.run, context.step, context.active))
    assert runs == [(0, 0, True), (0, 1, True), (0, 2, False), (1, 0, True), (1, 1, True)]
    for index, total in ((3, 3), (-1, None)):
        with pytest.raises(ValueError, match="steps count from 0"):
            context.pin(index, total)
    scheduler = DDIMScheduler()
    scheduler.set_timesteps(4)
    context.pipe = SimpleNamespace(scheduler=scheduler)
    context.pin(None, None)
    assert [one[1:] for one in walk(context, scheduler.timesteps)] == [(0, True), (1, True), (2, False), (3, False)]


def test_a_copy_is_not_enabled_and_leaves_the_pipeline():
    pipe = SimpleNamespace(scheduler=DDIMScheduler())
    context = VideoContext(TiARA(), pipe)
    copied = copy.deepcopy(context)
    assert context.active and not copied.active and copied.pipe is None
    copied.watch(500.0, None)
    assert not copied.active
