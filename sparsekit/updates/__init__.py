"""Weight updates without backpropagation: rules, one compiled step for them, and least squares after a prune."""

from .evolution import CMAES, SPSA, Annealing, EvolutionStrategy
from .reconstruction import Reconstruction, forget_dense, reconstruct, remember_dense
from .rules import FunctionRule, NormalNoise, Rule, Shrink, SignFlip, UniformNoise, WeightRule
from .step import Trial, UpdateStep, fit_with_update, fitting, update_step

__all__ = [
    "CMAES",
    "SPSA",
    "Annealing",
    "EvolutionStrategy",
    "FunctionRule",
    "NormalNoise",
    "Reconstruction",
    "Rule",
    "Shrink",
    "SignFlip",
    "Trial",
    "UniformNoise",
    "UpdateStep",
    "WeightRule",
    "fit_with_update",
    "fitting",
    "forget_dense",
    "reconstruct",
    "remember_dense",
    "update_step",
]
