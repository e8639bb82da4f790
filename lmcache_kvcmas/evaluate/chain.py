"""A chain of agents, each taking over the cache that the one before it really had: how errors add up over hops."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from .cases import Examples, answers_of
from .methods import Predicted
from .run import Progress
from .runs import DenseRuns
from .workload import Context

MODES = ("uncorrected", "chained", "context-free")
_NONE = Predicted("none", "none")
_DEFAULT = Predicted("attention+head", "attention", 32)


@dataclass(frozen=True, slots=True)
class ChainRow:
    """One mode at one hop of one context's chain.

    ``uncorrected`` rotates the first agent's cache from agent to agent; ``chained`` corrects it at every hop;
    ``context-free`` corrects, at every hop and with anchors of its own, the cache of the context prefilled alone.
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
    """Rows of all modes, hop by hop. The gate is off: every hop is corrected, so that errors can add up."""
    learned = runs.workload.anchors[:anchors]
    contexts = runs.workload.tests if contexts is None else contexts
    edges: list[tuple[Predicted, Predicted, Predicted]] = []
    for source, destination in pairwise(agents):
        for context in learned:
            progress(f"{source}:{destination} anchor {context.id}")
            runs.run(source, context), runs.run(destination, context)
        cases = tuple(runs.case(source, destination, context) for context in learned)
        of_edge = Examples(cases, rank)
        of_alone = Examples(tuple(replace(case, source=case.alone()) for case in cases), rank)
        edges.append((_NONE.learned(of_edge), _DEFAULT.learned(of_edge), _DEFAULT.learned(of_alone)))
    rows = []
    for context in contexts:
        raw = held = runs.free(agents[0], context)
        alone = runs.free(None, context)
        for hop, ((source, destination), methods) in enumerate(zip(pairwise(agents), edges, strict=True), 1):
            progress(f"hop {hop} {context.id}")
            start = runs.prefix(destination).tokens
            case = runs.case(source, destination, context)
            sources = (raw, held, alone)
            outcomes = [m.apply(replace(case, source=cache)) for m, cache in zip(methods, sources, strict=True)]
            raw, held = (runs.model.release(o.run, start) for o in outcomes[:2])
            for mode, outcome, said in zip(MODES, outcomes, answers_of(case, outcomes), strict=True):
                edge = f"{source}:{destination}"
                rows.append(ChainRow(mode, hop, edge, context.id, said.kl, said.top1, outcome.ehat))
    return rows
