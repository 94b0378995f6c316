"""Training with per-sample gradients: TD(0), REINFORCE with a baseline, actor-critic, natural policy gradients."""

from persample.rl.training.algorithm import Algorithm, Batch
from persample.rl.training.checkpoint import load_checkpoint, save_checkpoint
from persample.rl.training.episodic import A2C, NPG, Reinforce
from persample.rl.training.td0 import TD0
from persample.rl.training.trainer import Trainer, TrainingConfig, evaluate

__all__ = [
    "A2C",
    "NPG",
    "TD0",
    "Algorithm",
    "Batch",
    "Reinforce",
    "Trainer",
    "TrainingConfig",
    "evaluate",
    "load_checkpoint",
    "save_checkpoint",
]
