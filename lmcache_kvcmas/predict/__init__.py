"""Predictors: from an edge's anchors to the delta of a run that was never seen. One file a predictor."""

from collections.abc import Callable

from ..anchors import AnchorPool, PoolState
from .attention import AttentionPredictor
from .base import LayerPrediction, Predictor, ReadLayer
from .mean import MeanPredictor
from .none import NonePredictor
from .paper import PaperPredictor

PREDICTORS: dict[str, Callable[..., Predictor]] = {
    "attention": AttentionPredictor,
    "paper": PaperPredictor,
    "mean": MeanPredictor,
    "none": NonePredictor,
}

__all__ = ["PREDICTORS", "LayerPrediction", "Predictor", "ReadLayer", "build_predictor"]


def build_predictor(name: str, pool: AnchorPool | PoolState, device: str = "cpu") -> Predictor:
    """The predictor ``name`` over what a pool holds now; later changes of the pool do not reach it.

    An empty pool predicts nothing, whatever the name. Raises ValueError for a name that does not exist.
    """
    if name not in PREDICTORS:
        raise ValueError(f"predictor is {name!r}; it must be one of {', '.join(sorted(PREDICTORS))}")
    state = pool.state if isinstance(pool, AnchorPool) else pool
    if not state.anchors:
        return NonePredictor(state, device)
    return PREDICTORS[name](state, device)
