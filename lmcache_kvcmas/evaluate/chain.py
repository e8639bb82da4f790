"""A chain of agents, each taking over the cache that the one before it really had: how errors add up over hops."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..predict import Predictor, build_predictor
from .cases import answers_of, case_of
from .methods import Predicted
from .run import Progress
from .runs import DenseRuns
from .workload import Context

MODES = ("uncorrected", "chained", "context-free")
_NONE = Predicted("none", "none", False)
_DEFAULT = Predicted("attention+head", "attention", True)


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
    edges: list[tuple[dict[str, Predictor], dict[str, Predictor]]] = []
    for source, destination in pairwise(agents):
        for context in learned:
            progress(f"{source}:{destination} anchor {context.id}")
            runs.run(source, context), runs.run(destination, context)
        pools = (runs.pool(s, destination, learned, rank) for s in (source, None))
        of_edge, of_alone = ({n: build_predictor(n, p) for n in ("none", "attention")} for p in pools)
        edges.append((of_edge, of_alone))
    rows = []
    for context in contexts:
        raw = held = runs.free(agents[0], context)
        alone = runs.free(None, context)
        for hop, ((source, destination), (of_edge, of_alone)) in enumerate(
            zip(pairwise(agents), edges, strict=True), 1
        ):
            progress(f"hop {hop} {context.id}")
            start = runs.prefix(destination).tokens
            outcomes = [
                method.apply(case_of(runs, destination, context, cache, predictors))
                for method, cache, predictors in (
                    (_NONE, raw, of_edge),
                    (_DEFAULT, held, of_edge),
                    (_DEFAULT, alone, of_alone),
                )
            ]
            raw, held = (runs.model.release(o.run, start) for o in outcomes[:2])
            for mode, outcome, said in zip(
                MODES, outcomes, answers_of(runs, destination, context, outcomes), strict=True
            ):
                edge = f"{source}:{destination}"
                rows.append(ChainRow(mode, hop, edge, context.id, said.kl, said.top1, outcome.ehat))
    return rows
