"""Real game frames: a ViZDoom scenario seen at 64 x 64 with four actions (left, right, forward, hold).

ViZDoom is an optional package: `pip install mediaspec[worlds]`. It renders without a display, thousands of frames a
second.
Turning to and fro does not lead back to exactly the same angle under the game's own acceleration, so the walks set
turn deltas and read the true pose from the game.
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .episode import Episode

__all__ = ["FIELD_DEGREES", "DoomWorld", "doom_palindrome"]

TURN_DEGREES = 15.0
FIELD_DEGREES = 2 * math.degrees(math.atan(0.75))
"""Width of the view: the game shows 90 degrees in 4:3, and `shrink` keeps the middle three quarters (73.7 degrees)."""
UNITS = 64.0
"""Map units of a square: the game's walls stand on such a grid."""
SPEED = 16.0
"""Forward delta per tic of a forward action."""
TICS = 2


def _package() -> Any:
    try:
        import vizdoom
    except ImportError as error:
        raise ImportError("the vizdoom world needs ViZDoom; write: pip install 'mediaspec[worlds]'") from error
    return vizdoom


def shrink(picture: np.ndarray) -> np.ndarray:
    """The middle 120 x 120 of a 120 x 160 picture, averaged to 64 x 64 float32 in 0..1."""
    from PIL import Image

    square = Image.fromarray(picture[:, 20:140]).resize((64, 64), Image.Resampling.BOX)
    return np.asarray(square, dtype=np.float32) / 255


class DoomWorld:
    """A scenario of the package, started anew for every walk.

    Args:
        seed: of the game; equal seeds and actions give equal frames.
        scenario: name of a configuration of the package, without ".cfg".

    Raises:
        ImportError: ViZDoom is missing.
        ValueError: an unknown scenario.
    """

    def __init__(self, seed: int, scenario: str = "my_way_home") -> None:
        self.seed, self.scenario = seed, scenario
        package = _package()
        path = os.path.join(package.scenarios_path, f"{scenario}.cfg")
        if not os.path.isfile(path):
            known = sorted(f[:-4] for f in os.listdir(package.scenarios_path) if f.endswith(".cfg"))
            raise ValueError(f"scenario {scenario!r} is none of {', '.join(known)}")
        self._path = path

    def rollout(self, actions: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Poses [N, 3] float64 (x, y in squares, yaw in radians) and frames [N, 64, 64, 3] float32 of a walk.

        Args:
            actions: 0 left, 1 right, 2 forward, 3 hold; N - 1 of them.

        Raises:
            ValueError: another action.
        """
        package = _package()
        deltas = {0: (-TURN_DEGREES, 0.0), 1: (TURN_DEGREES, 0.0), 2: (0.0, SPEED), 3: (0.0, 0.0)}
        if not set(map(int, actions)) <= set(deltas):
            raise ValueError(f"actions {sorted(set(map(int, actions)))}: write 0 left, 1 right, 2 forward, 3 hold")
        game = package.DoomGame()
        # the engine writes its settings to a file, by default into the working directory, and makes a folder there
        scratch, folder = tempfile.TemporaryDirectory(), Path.cwd() / "_vizdoom"
        ours = not folder.exists()
        try:
            game.set_doom_config_path(os.path.join(scratch.name, "engine.ini"))
            game.load_config(self._path)
            game.set_window_visible(False)
            game.set_screen_resolution(package.ScreenResolution.RES_160X120)
            game.set_screen_format(package.ScreenFormat.RGB24)
            game.set_render_hud(False)
            game.set_render_weapon(False)
            game.set_available_buttons(
                [package.Button.TURN_LEFT_RIGHT_DELTA, package.Button.MOVE_FORWARD_BACKWARD_DELTA]
            )
            variable = package.GameVariable
            game.set_available_game_variables([variable.POSITION_X, variable.POSITION_Y, variable.ANGLE])
            game.set_episode_timeout(1_000_000)
            game.set_seed(self.seed)
            game.init()
            game.new_episode()
            poses, frames = [], []
            for action in [None, *map(int, actions)]:
                if action is not None:
                    turn, forward = deltas[action]
                    game.make_action([turn, forward], 1)
                    if TICS > 1:
                        game.make_action([0.0, forward], TICS - 1)
                if game.is_episode_finished():
                    break
                state = game.get_state()
                x, y, angle = state.game_variables
                # the game's angle grows to the left
                poses.append((x / UNITS, -y / UNITS, -math.radians(angle)))
                frames.append(shrink(state.screen_buffer))
        finally:
            game.close()
            scratch.cleanup()
            if ours:
                with contextlib.suppress(OSError):  # gone already, or not empty: then it is somebody's
                    folder.rmdir()
        return np.array(poses), np.stack(frames)


def doom_palindrome(seed: int, *, frames: int = 20, context: int | None = None) -> Episode:
    """Turn to the right by `frames - 1` actions of 15 degrees and back; the last part of the way back is asked.

    The horizon of a frame counts from the frame with the nearest angle before the way back began.
    """
    if not 2 <= frames <= 24:
        raise ValueError(f"frames={frames}; write 2 to 24, a full turn has 24 headings")
    actions = [1] * (frames - 1) + [0] * (frames - 1)
    poses, pictures = DoomWorld(seed).rollout(actions)
    total = len(pictures)
    horizon = np.array([0] + [1 if t < frames else 2 * (t - frames + 1) for t in range(1, total)], dtype=np.int64)
    fresh = np.array([1.0] + [TURN_DEGREES / FIELD_DEGREES if t < frames else 0.0 for t in range(1, total)])
    given = max(frames, total - 15) if context is None else context
    ids = np.array([3, *actions], dtype=np.int64)[:total]
    return Episode("vizdoom", "palindrome", seed, pictures, ids, poses, given, horizon, fresh)
