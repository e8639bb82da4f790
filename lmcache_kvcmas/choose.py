"""Which tokens of a predicted run are worth a forward of their own: those that its anchors disagree about."""

import torch
from torch import Tensor


def choose(doubts: Tensor, count: int, head: int = 0) -> Tensor:
    """The ``count`` rows with the largest doubts ``[T]`` (`Reliability.doubts`), int64 and rising.

    The first ``head`` rows, which are computed anyway, are not among them.
    """
    count = max(0, min(count, len(doubts) - head))
    rows: Tensor = doubts[head:].topk(count).indices.sort().values + head
    return rows


def except_rows(tokens: int, rows: Tensor | None, device: torch.device | str = "cpu") -> Tensor:
    """bool ``[T]``: all rows but ``rows``."""
    left = torch.ones(tokens, dtype=torch.bool, device=device)
    if rows is not None:
        left[rows.to(device)] = False
    return left
