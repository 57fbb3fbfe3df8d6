"""Camera observations, compared with the simulator's own pictures.

The contract that every simulator keeps (``test_simulators.py``) has cases with pictures, too.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.services.env.simulators import describe_simulator, open_simulator
from penstock.services.env.simulators.camera import shrunk
from penstock.shared.errors import ConfigError
from penstock.shared.protocol.embodied.environment import ArraySpec, OpenEnv, Picture
from tests.contract.simulated_envs import FOLDER
from tests.contract.test_simulators import CASES, NO_OPENGL, NOWHERE, REACH, SLOW_TO_START, copied, ids, states, step


@SLOW_TO_START
def test_a_picture_is_what_the_simulator_draws() -> None:
    """Each pixel is the mean of 20 x 20 pixels of CartPole's picture, in grey by BT.601; the newest frame is last."""
    env = gymnasium.make("CartPole-v1", render_mode="rgb_array")
    sizes = {"height": 20, "width": 30}
    pictures = Picture(**sizes), Picture(**sizes, grey=True, frames=3)
    colour, grey = (
        open_simulator(msgspec.structs.replace(CASES["discrete"], picture=one), NOWHERE) for one in pictures
    )
    try:
        env.reset(seed=3)
        drawn = [_small(env.render())]
        assert colour.spec.observations["image"] == ArraySpec((20, 30, 3), "uint8")
        assert grey.spec.observations == {
            "state": ArraySpec((4,), "float32"), "image": ArraySpec((20, 30, 3), "uint8"),
        }  # fmt: skip
        seen = [copied(one.reset(ids(1), states(3)).observations)["image"][0] for one in (colour, grey)]
        assert np.array_equal(seen[0], drawn[0])
        assert np.array_equal(seen[1], np.stack([_grey(drawn[0])] * 3, axis=2)), "the first one stands for those before"
        for _ in range(3):
            env.step(1)
            drawn.append(_small(env.render()))
            chunks = [step(one, ids(1), np.ones((1, 1), np.int64)) for one in (colour, grey)]
        assert np.array_equal(chunks[0].observations["image"][0], drawn[-1])
        frames = np.stack([_grey(one) for one in drawn[-3:]], axis=2)
        assert np.array_equal(chunks[1].observations["image"][0], frames)
        assert not np.array_equal(frames[..., 0], frames[..., 2]), "the cart has moved"
    finally:
        env.close()
        colour.close()
        grey.close()


def _small(picture: Any) -> NDArray[np.uint8]:
    means = picture.astype(np.float64).reshape(20, 20, 30, 20, 3).mean((1, 3))
    return np.floor(means + 0.5).astype(np.uint8)


def _grey(picture: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.floor(picture.astype(np.float64) @ [299, 587, 114] / 1000 + 0.5).astype(np.uint8)


@pytest.mark.parametrize(("height", "width"), [(7, 11), (3, 4), (5, 3)])
def test_a_pixel_is_the_mean_of_those_that_it_covers(height: int, width: int) -> None:
    """The sizes do not divide each other; each pixel of the larger picture still counts once."""
    picture = np.random.default_rng(0).integers(0, 256, (7, 11, 3), np.uint8)
    small = shrunk(picture, height, width)
    for i in range(height):
        for j in range(width):
            rows, columns = (slice(k * n // m, (k + 1) * n // m) for k, n, m in ((i, 7, height), (j, 11, width)))
            block = picture[rows, columns].astype(np.int64)
            area = block.shape[0] * block.shape[1]
            assert small[i, j].tolist() == ((block.sum((0, 1)) + area // 2) // area).tolist()
    with pytest.raises(ValueError, match=r"7 x 11 pixels.*no room for 8 x 11"):
        shrunk(picture, 8, 11)


@SLOW_TO_START
@pytest.mark.long
def test_a_robot_observes_pictures() -> None:
    """Pictures of Meta-World are equal for equal states in two environments, and differ if the arm is elsewhere."""
    if NO_OPENGL:
        pytest.skip("no OpenGL library: apt-get install -y libosmesa6")
    request = msgspec.structs.replace(REACH, num_envs=2, picture=Picture(height=24, width=24))
    simulator = open_simulator(request, NOWHERE)
    try:
        first = copied(simulator.reset(ids(0, 1), states(1, 1)).observations)["image"]
        assert first.shape == (2, 24, 24, 3)
        assert np.array_equal(first[0], first[1])
        assert len(np.unique(first)) > 20, "a scene, not a blank"
        moved = copied(step(simulator, ids(1), np.ones((1, 6, 4), np.float32)).observations)["image"][0]
        still = copied(step(simulator, ids(0), np.zeros((1, 6, 4), np.float32)).observations)["image"][0]
        assert not np.array_equal(moved, still)
    finally:
        simulator.close()


@pytest.mark.parametrize(
    ("env_id", "side", "message"),
    [
        ("simulated_envs:Fragile-v0", 8, "observes an 'image' by itself: leave environment.image out"),
        ("CartPole-v1", 512, "400 x 600 pixels: environment.image has no room for 512 x 512"),
    ],
)
def test_impossible_pictures_are_refused(env_id: str, side: int, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", FOLDER)
    request = OpenEnv(env_id=env_id, num_envs=1, picture=Picture(height=side, width=side))
    with pytest.raises(ConfigError, match=message):
        describe_simulator(request, NOWHERE)
