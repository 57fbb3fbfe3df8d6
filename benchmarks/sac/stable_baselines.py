"""Soft actor-critic of Stable-Baselines3, the baseline of ``soft_actor_critic.py``, run by an interpreter that has it.

    PYTHON benchmarks/sac/stable_baselines.py --task HalfCheetah-v5 --seed 1 --steps 20000 --every 2000 ...

Its own defaults, which are those of the job: one gradient step for each environment step, batches of 256, networks of
two layers of 256, learning rate 3e-4, discount 0.99, automatic temperature. Writes the mean return of deterministic
episodes after each ``--every`` steps, and the seconds until then without the evaluations.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import gymnasium
import torch
from stable_baselines3 import SAC
from stable_baselines3.common.evaluation import evaluate_policy


def main() -> None:
    """Train, evaluate, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--every", type=int, required=True)
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--episodes", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    held_out = gymnasium.make(args.task)
    held_out.reset(seed=1_000_000 + args.seed)
    model = SAC("MlpPolicy", gymnasium.make(args.task), learning_starts=args.warmup, seed=args.seed, device="cpu")
    steps, returns, seconds = list[int](), list[float](), list[float]()
    spent = 0.0
    while model.num_timesteps < args.steps:
        began = time.perf_counter()
        model.learn(args.every, reset_num_timesteps=False)
        spent += time.perf_counter() - began
        mean, _ = evaluate_policy(model, held_out, n_eval_episodes=args.episodes, deterministic=True)
        steps.append(model.num_timesteps)
        returns.append(float(mean))
        seconds.append(spent)
    args.out.write_text(json.dumps({"steps": steps, "returns": returns, "seconds": seconds}))


if __name__ == "__main__":
    main()
