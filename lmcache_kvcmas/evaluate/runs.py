"""What dense prefill gives for each role and context, computed once each."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..anchors import Anchor, AnchorPool, Caches
from ..errors import ConfigError
from .dense import Active, DenseModel, Prompt
from .workload import Context, Workload

ANSWER_TOKENS = 16


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """The dense, greedy continuation of a prompt."""

    tokens: list[int]
    logp: Tensor
    """fp32 ``[16, V]``: what each token was chosen from."""


class DenseRuns:
    """Dense caches and answers of a workload, kept in memory."""

    def __init__(self, model: DenseModel, workload: Workload, head: int = 32) -> None:
        self.model = model
        self.workload = workload
        self._head = head
        self.prompt = lru_cache(None)(self._prompt)
        self.prefix = lru_cache(None)(self._prefix)
        self.run = lru_cache(None)(self._run)
        self.answer = lru_cache(None)(self._answer)
        self.head = lru_cache(None)(self._exact_head)
        self.alone = lru_cache(None)(self._alone)

    def _prompt(self, role: str, context: Context) -> Prompt:
        if role not in self.workload.roles:
            raise ConfigError(f"role is {role!r}; it must be one of {', '.join(self.workload.roles)}")
        return self.model.prompt(self.workload.roles[role], context.text, self.workload.instructions[role])

    def _prefix(self, role: str) -> Active:
        """Cache of the role's own prefix: the same for all contexts."""
        return self.model.extend(None, self.prompt(role, self.workload.contexts[0]).prefix)[0]

    def _run(self, role: str, context: Context) -> Active:
        """Cache of the context's tokens behind the role's prefix."""
        return self.model.extend(self.prefix(role), self.prompt(role, context).run)[0]

    def _exact_head(self, role: str, context: Context) -> Active:
        """The run's first tokens, recomputed by the model on top of the prefix: all of a run of at most 64 tokens."""
        run = self.prompt(role, context).run
        return self.model.extend(self.prefix(role), run[: len(run) if len(run) <= 64 else self._head])[0]

    def _answer(self, role: str, context: Context) -> Answer:
        past = self.prefix(role).then(self.run(role, context))
        return Answer(*self.model.greedy(past, self.prompt(role, context).suffix, ANSWER_TOKENS))

    def _alone(self, context: Context) -> Caches:
        run = self.prompt(next(iter(self.workload.roles)), context).run
        return self.model.release(self.model.extend(None, run)[0], 0)

    def free(self, role: str | None, context: Context) -> Caches:
        """Position-free cache of the run behind the role's prefix; with no role, of the run prefilled alone."""
        if role is None:
            return self.alone(context)
        return self.model.release(self.run(role, context), self.prefix(role).tokens)

    def pool(
        self,
        source: str | None,
        destination: str,
        contexts: tuple[Context, ...],
        rank: int,
        keep: int = 256,
        dtype: torch.dtype = torch.bfloat16,
    ) -> AnchorPool:
        """An edge's pool, as it learns from dense prefills of both agents: ``keep`` tokens of each, in ``dtype``."""
        pool = AnchorPool(max(1, len(contexts)))
        for context in contexts:
            base, target = self.free(source, context), self.free(destination, context)
            delta = Caches(target.k - base.k, target.v - base.v)
            pool.add(Anchor.learn(base, delta, rank, keep=keep, dtype=dtype))
        return pool
