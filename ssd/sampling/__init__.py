"""Sampling without loss: laws, keyed noise, draws, verification. Pure tensor functions on any device; no model."""

from ssd.sampling.drafting import draw, outcome_scores, press
from ssd.sampling.law import Before, log_law, padded, processed
from ssd.sampling.noise import Purpose, extend, gumbel, mix, noise_key, prefix_hash, sample_seed, uniform
from ssd.sampling.parameters import Parameters
from ssd.sampling.verification import Proposed, Verified, coupled, rejection, verify

__all__ = [
    "Before",
    "Parameters",
    "Proposed",
    "Purpose",
    "Verified",
    "coupled",
    "draw",
    "extend",
    "gumbel",
    "log_law",
    "mix",
    "noise_key",
    "outcome_scores",
    "padded",
    "prefix_hash",
    "press",
    "processed",
    "rejection",
    "sample_seed",
    "uniform",
    "verify",
]
