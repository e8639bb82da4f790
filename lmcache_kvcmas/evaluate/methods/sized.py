"""A method that is taught by a pool of its own."""

from dataclasses import dataclass, replace

import torch

from ..cases import Case, Examples, Outcome
from .base import Method


@dataclass(frozen=True, slots=True)
class Sized:
    """``inner``, learning at most ``anchors`` examples, at a rank, tokens kept and dtype that are not the others'."""

    name: str
    inner: Method
    anchors: int = 10
    rank: int = 32
    keep: int = 256
    dtype: torch.dtype = torch.bfloat16

    def learned(self, examples: Examples) -> "Sized":
        own = Examples(examples.cases[: self.anchors], self.rank, self.keep, self.dtype)
        return replace(self, inner=self.inner.learned(own))

    def apply(self, case: Case) -> Outcome:
        return self.inner.apply(case)
