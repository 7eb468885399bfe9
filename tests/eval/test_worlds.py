"""Worlds of the memory tests: their exact pixels, memory horizons, baselines, and laws of the walks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mediaspec.eval.memory_metrics.recall import frame_psnr
from mediaspec.eval.worlds import TEST_SEED, PanoRoom, RayMaze, make_episode, memory_horizon, recall_frames
from mediaspec.eval.worlds.protocols import explore, mine_loop, needle_actions, palindrome_actions
from mediaspec.eval.worlds.raymaze import FORWARD, LEFT, RIGHT, heading_angle

CASES: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data" / "world_cases.json").read_text())
ENVIRONMENTS = CASES["environments"]


def test_needle_walk_in_panoroom() -> None:
    want = ENVIRONMENTS["pano_needle"]
    room = PanoRoom(0)
    yaws, frames = room.rollout(0, needle_actions(8, 12, 12, 8))
    horizon, fresh = memory_horizon(yaws.tolist(), room.visible)
    assert len(yaws) == want["frames"] and yaws.tolist() == want["yaws"]
    assert room.needle_x == want["needle_x"]
    assert horizon.tolist() == want["horizon"]
    np.testing.assert_allclose(fresh, want["fresh"], atol=1e-6)
    assert math.isclose(frames.mean(), want["mean"], rel_tol=1e-9)
    np.testing.assert_allclose(frames[0, 30, :4], want["pix"], atol=1e-6)


def test_palindrome_in_panoroom() -> None:
    want = ENVIRONMENTS["pano_palindrome"]
    room = PanoRoom(0, width=1024)
    yaws = room.yaws(0, palindrome_actions(64)).tolist()
    assert len(yaws) == want["frames"]
    assert all(yaws[t] == yaws[126 - t] for t in range(64, 127)) is want["mirror_ok"]
    horizon, _ = memory_horizon(yaws, room.visible)
    assert [[t, int(horizon[t])] for t, _ in want["horizon_at"]] == want["horizon_at"]


def test_scores_of_trivial_predictors() -> None:
    want = ENVIRONMENTS["pano_baselines_psnr"]
    scores: dict[str, list[float]] = {name: [] for name in want}
    first = 8 + 12 + 12 + 1
    for seed in range(50):
        yaws, frames = PanoRoom(seed).rollout(97 * seed, needle_actions(8, 12, 12, 8))
        alike: dict[tuple[int, int], float] = {}  # held views repeat
        for t in range(first + 5, len(frames)):
            scores["last_frame"].append(frame_psnr(frames[first - 1], frames[t]))
            scores["mean_frame"].append(frame_psnr(frames[:first].mean(0), frames[t]))
            for i in range(first):
                if (int(yaws[i]), int(yaws[t])) not in alike:
                    alike[int(yaws[i]), int(yaws[t])] = frame_psnr(frames[i], frames[t])
            each = [alike[int(yaws[i]), int(yaws[t])] for i in range(first)]
            scores["window_copy"].append(max(each[-8:]))
            scores["oracle"].append(max(each))
    for name, value in want.items():
        assert abs(np.mean(scores[name]) - value) < 0.01, name


def test_ray_maze() -> None:
    want = ENVIRONMENTS["ray_maze"]
    maze = RayMaze(0)
    picture = maze.render(1.5, 1.5, 0.3)
    assert int((~maze.wall).sum()) == want["open_cells"]
    assert abs(picture.mean() - want["mean"]) < 1e-6
    np.testing.assert_allclose(picture[32, [0, 31, 63]], want["pix"], atol=1e-5)


def test_walks_in_a_maze_come_back_and_stop_at_walls() -> None:
    maze = RayMaze(3)
    poses, frames = maze.rollout((1.5, 1.5, 5), [RIGHT] * 7 + [LEFT] * 7)
    assert (frames[0] == frames[14]).all() and not (frames[0] == frames[7]).all()
    walk = maze.poses((1.5, 1.5, 0), [FORWARD] * 60)
    assert all(maze.is_free(x, y) for x, y, _ in walk) and (walk[-1] == walk[-2]).all()
    there = maze.poses((1.5, 1.5, 0), [FORWARD] * 4 + [RIGHT] * 12 + [FORWARD] * 4)
    blocked = maze.wall[2, 1]
    assert blocked or there[-1, :2].tolist() == [1.5, 1.5]
    assert poses[:, 2].max() == 12
    with pytest.raises(ValueError, match="in or at a wall"):
        maze.rollout((0.5, 0.5, 0), [])
    with pytest.raises(ValueError, match="is not allowed"):
        maze.step((1.5, 1.5, 0), 7)


@pytest.mark.parametrize(
    ("world", "protocol", "total", "context"),
    [("panoroom", "needle", 53, 33), ("panoroom", "palindrome", 127, 112), ("raymaze", "loop", 64, 48)],
)
def test_episodes(world: str, protocol: str, total: int, context: int) -> None:
    one, again = (make_episode(world, protocol, TEST_SEED + 5) for _ in range(2))
    assert len(one) == total and one.context == context
    assert one.frames.shape == (total, 64, 64, 3) and one.frames.dtype == np.float32
    assert one.frames.min() >= 0 and one.frames.max() <= 1
    assert (one.frames == again.frames).all() and (one.actions == again.actions).all()
    assert len(one.actions) == len(one.poses) == len(one.horizon) == len(one.fresh) == total
    asked = recall_frames(one, 8)
    assert not asked[:context].any()
    assert asked.sum() >= (4 if world == "raymaze" else 10)


def test_turn_back_faces_the_way_it_came() -> None:
    one = make_episode("raymaze", "turn_back", TEST_SEED)
    assert recall_frames(one, 8).sum() >= 3
    blind = make_episode("raymaze", "turn_back", TEST_SEED, look=False)
    new = [episode.fresh[episode.context :].mean() for episode in (one, blind)]
    assert new[0] < 0.01 < new[1], "nearly all of the way back is seen while looking around"
    turned = one.poses[-1, 2] - one.poses[0, 2]
    assert abs(math.cos(turned) + 1) < 1e-9
    np.testing.assert_allclose(one.poses[-1, :2], one.poses[0, :2])
    assert one.wall_colours is not None and one.wall_colours.shape == (len(one), 64)


def test_recalled_needles_were_seen_whole_in_the_context() -> None:
    for seed in range(TEST_SEED, TEST_SEED + 10):
        one = make_episode("panoroom", "needle", seed)
        asked = recall_frames(one, 8)
        assert any(t in one.needles for t in np.flatnonzero(asked))
        for t in np.flatnonzero(asked):
            same = [i for i in range(one.context) if (one.poses[i] == one.poses[t]).all()]
            assert same and (one.frames[same[0]] == one.frames[t]).all()


def test_loops_hold_the_revisited_place_in_their_memory() -> None:
    maze = RayMaze(TEST_SEED)
    found = 0
    for attempt in range(6):
        rng = np.random.default_rng(attempt)
        walk, actions = explore(maze, 300, rng)
        assert len(walk) == len(actions) == 300
        for t in range(1, 300):
            assert maze.step(tuple(walk[t - 1]), actions[t]) == tuple(walk[t])
        start = mine_loop(walk, actions, rng)
        if start is None:
            continue
        found += 1
        memory, asked = walk[start - 48 : start - 8], walk[start : start + 16]
        near = [
            (np.floor(a[:2]) == np.floor(b[:2])).all() and math.cos(heading_angle(int(a[2] - b[2]))) > 0.96
            for a in asked
            for b in memory
        ]
        assert any(near)
    assert found >= 3


def test_names_are_checked() -> None:
    with pytest.raises(ValueError, match="write 'panoroom'"):
        make_episode("panorom", "needle", 0)
    with pytest.raises(ValueError, match="write 'loop'"):
        make_episode("raymaze", "lop", 0)
    with pytest.raises(ValueError, match="multiple of 8"):
        PanoRoom(0, width=500)
    for settings in ({"frames": 1}, {"context": 127}, {"context": 0}):
        with pytest.raises(ValueError, match="frames >= 2"):
            make_episode("panoroom", "palindrome", 0, **settings)
    with pytest.raises(ValueError, match="turn >= 1"):
        make_episode("panoroom", "needle", 0, turn=0)
    with pytest.raises(ValueError, match="-1 .left."):
        PanoRoom(0).rollout(0, [2])


def test_vizdoom_frames_repeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vizdoom")
    monkeypatch.chdir(tmp_path)
    one, again = (make_episode("vizdoom", "palindrome", 7, frames=8) for _ in range(2))
    assert one.frames.shape == (15, 64, 64, 3) and (one.frames == again.frames).all()
    assert one.frames.std() > 0.05
    assert abs(frame_psnr(one.frames[14], one.frames[0])) > abs(frame_psnr(one.frames[7], one.frames[0]))
    assert not list(tmp_path.iterdir()), "the engine leaves nothing in the working directory"


def test_vizdoom_missing_is_said_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "vizdoom", None)
    with pytest.raises(ImportError, match=r"pip install 'mediaspec\[worlds\]'"):
        make_episode("vizdoom", "palindrome", 0)
