"""From logits to the law that is sampled: temperature, then top-k, then top-p."""

import numpy as np
from numpy.typing import ArrayLike

from theory import check
from theory.check import FloatArray


def sampling_law(logits: ArrayLike, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> FloatArray:
    """Probabilities that a token is drawn from, [..., vocabulary] -> [..., vocabulary]; of target or draft, for acceptance_rate.

    logits: numbers or -inf. temperature 0 is a point mass at the largest logit, the first among equals. top_k keeps the k largest logits
    and all that equal the last of them, 0 keeps all. top_p keeps the fewest best tokens whose mass reaches top_p, at least one. The order
    and the ties are those of transformers and vLLM. ValueError for a negative temperature or top_k, or a top_p outside (0, 1].
    """
    z, T, k = check.scores("logits", logits), float(check.non_negative("temperature", temperature)), check.count("top_k", top_k, 0)
    mass = float(check.positive("top_p", check.probability("top_p", top_p)))
    if T == 0:
        return np.asarray(np.arange(z.shape[-1]) == z.argmax(-1)[..., None], dtype=np.float64)
    if 0 < k < z.shape[-1]:
        z = np.where(z >= np.partition(z, -k, axis=-1)[..., -k, None], z, -np.inf)
    # A tiny temperature sends all but the best to -inf.
    with np.errstate(over="ignore"):
        law = _softmax((z - z.max(-1, keepdims=True)) / T)
    return law if mass == 1 else _nucleus(law, mass)


def _softmax(z: FloatArray) -> FloatArray:
    weights = np.exp(z)
    return np.asarray(weights / weights.sum(-1, keepdims=True))


def _nucleus(law: FloatArray, mass: float) -> FloatArray:
    """Tokens are kept while those before them, best first, have less than this mass."""
    order = np.argsort(-law, axis=-1, kind="stable")
    ranked = np.take_along_axis(law, order, -1)
    before = np.cumsum(ranked, -1) - ranked
    kept = np.zeros_like(law)
    np.put_along_axis(kept, order, np.where(before < mass, ranked, 0.0), -1)
    return np.asarray(kept / kept.sum(-1, keepdims=True))
