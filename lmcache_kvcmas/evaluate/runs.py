"""What dense prefill gives for each role and context, computed once each."""

from functools import cache, partial

from ..anchors import Caches
from ..errors import ConfigError
from .cases import Case
from .dense import Active, Answer, DenseModel, Prompt
from .workload import Context, Workload

ANSWER_TOKENS = 16


class DenseRuns:
    """Dense caches and answers of a workload, kept in memory."""

    def __init__(self, model: DenseModel, workload: Workload) -> None:
        self.model = model
        self.workload = workload
        self.prompt = cache(self._prompt)
        self.prefix = cache(self._prefix)
        self.run = cache(self._run)
        self.answer = cache(self._answer)
        self.head = cache(self._exact_head)
        self.alone = cache(self._alone)

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

    def _exact_head(self, role: str, context: Context, tokens: int) -> Active:
        """The run's first tokens, recomputed by the model on top of the prefix."""
        return self.model.extend(self.prefix(role), self.prompt(role, context).run[:tokens])[0]

    def _answer(self, role: str, context: Context) -> Answer:
        past = self.prefix(role).then(self.run(role, context))
        return self.model.generate([past], self.prompt(role, context).suffix, ANSWER_TOKENS, stop=False)[0]

    def _alone(self, context: Context) -> Caches:
        run = self.prompt(next(iter(self.workload.roles)), context).run
        return self.model.release(self.model.extend(None, run)[0], 0)

    def free(self, role: str | None, context: Context) -> Caches:
        """Position-free cache of the run behind the role's prefix; with no role, of the run prefilled alone."""
        if role is None:
            return self.alone(context)
        return self.model.release(self.run(role, context), self.prefix(role).tokens)

    def case(self, source: str, destination: str, context: Context) -> Case:
        """The transition between two roles on a context."""
        prompt = self.prompt(destination, context)
        return Case(
            model=self.model,
            source=self.free(source, context),
            prefix=self.prefix(destination),
            run=prompt.run,
            suffix=prompt.suffix,
            dense_of=partial(self.run, destination, context),
            head_of=partial(self.head, destination, context),
            alone_of=partial(self.alone, context),
            answer_of=partial(self.answer, destination, context),
            kind=context.kind,
            source_prefix=self.prefix(source),
        )
