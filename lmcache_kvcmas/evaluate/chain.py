"""A chain of agents, each taking over the cache that the one before it really had: how errors add up over hops."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from .cases import Examples, answers_of
from .methods import Gated, Method, Predicted
from .run import Progress
from .runs import DenseRuns
from .workload import Context

MODES = ("uncorrected", "chained", "context-free", "star", "gated")
_NONE = Predicted("none", "none")
_DEFAULT = Predicted("attention+head+chosen", "attention", 32, 0.05)
_GATED = Gated("gated", _DEFAULT)


@dataclass(frozen=True, slots=True)
class ChainRow:
    """One mode at one hop of one context's chain.

    ``uncorrected`` rotates the first agent's cache from agent to agent; ``chained`` corrects it at every hop;
    ``context-free`` corrects, at every hop and with anchors of its own, the cache of the context prefilled alone;
    ``star`` corrects, likewise, the first agent's, which is exact; ``gated`` is ``chained`` as it is served: what
    the gate refuses, by this hop's ê or by the chain's, is dense, and the chain begins anew.
    """

    mode: str
    hop: int
    edge: str
    context: str
    kl: float
    top1: float
    ehat: float | None


def chain_units(runs: DenseRuns, agents: Sequence[str], anchors: int) -> int:
    """How often ``evaluate_chain`` calls its ``progress`` without ``contexts`` of its own."""
    return (len(agents) - 1) * (min(anchors, len(runs.workload.anchors)) + len(runs.workload.tests))


def evaluate_chain(
    runs: DenseRuns,
    agents: Sequence[str],
    anchors: int = 10,
    rank: int = 32,
    contexts: Sequence[Context] | None = None,
    progress: Progress = lambda what: None,
) -> list[ChainRow]:
    """Rows of all modes, hop by hop. But for ``gated``, every hop is corrected, so that errors can add up."""
    learned = runs.workload.anchors[:anchors]
    contexts = runs.workload.tests if contexts is None else contexts
    taught: dict[tuple[str, str], tuple[Method, ...]] = {}
    rows = []
    for source, destination in pairwise(agents):
        for context in learned:
            progress(f"{source}:{destination} anchor {context.id}")
            runs.run(source, context), runs.run(destination, context)
        if (source, destination) not in taught:
            taught[source, destination] = _taught(runs, agents[0], source, destination, learned, rank)
    for context in contexts:
        raw = held = gated = first = runs.free(agents[0], context)
        error2 = 0.0
        alone = runs.free(None, context)
        for hop, (source, destination) in enumerate(pairwise(agents), 1):
            progress(f"hop {hop} {context.id}")
            case = runs.case(source, destination, context)
            both = zip(taught[source, destination], (raw, held, alone, first, gated), strict=True)
            outcomes = [m.apply(replace(case, source=cache, error2=error2)) for m, cache in both]
            raw, held, gated = (runs.model.release(outcomes[i].run, case.prefix.tokens) for i in (0, 1, 4))
            error2 = error2 + (outcomes[4].ehat or 0.0) ** 2 if outcomes[4].accepted else 0.0
            for mode, outcome, said in zip(MODES, outcomes, answers_of(case, outcomes), strict=True):
                edge = f"{source}:{destination}"
                rows.append(ChainRow(mode, hop, edge, context.id, said.kl, said.top1, outcome.ehat))
    return rows


def _taught(
    runs: DenseRuns, first: str, source: str, destination: str, contexts: Sequence[Context], rank: int
) -> tuple[Method, ...]:
    """One edge's method in each mode."""
    cases = [runs.case(source, destination, context) for context in contexts]
    of_edge = Examples(tuple(cases), rank)
    of_alone = Examples(tuple(replace(case, source=case.alone()) for case in cases), rank)
    of_first = Examples(tuple(runs.case(first, destination, context) for context in contexts), rank)
    ungated = (_DEFAULT.learned(some) for some in (of_edge, of_alone, of_first))
    return (_NONE.learned(of_edge), *ungated, _GATED.learned(of_edge))
