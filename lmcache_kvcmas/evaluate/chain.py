"""A chain of agents, each taking over the cache that the one before it really had: how errors add up over hops."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ..config import Settings
from .cases import Examples, answers_of
from .methods import Knobs, Method, Predicted, product
from .run import Progress
from .runs import DenseRuns
from .workload import Context

MODES = ("uncorrected", "chained", "context-free", "star", "gated")
_CHAINED = ("uncorrected", "chained", "gated")
_NONE = Predicted("none", "none")
_GATED = product(Settings().predictor, Knobs())
_METHODS: dict[str, Method] = {"uncorrected": _NONE, "gated": _GATED}


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
    modes: Sequence[str] = MODES,
) -> list[ChainRow]:
    """Rows of ``modes``, hop by hop. But for ``gated``, every hop is corrected, so that errors can add up."""
    learned = runs.workload.anchors[:anchors]
    contexts = runs.workload.tests if contexts is None else contexts
    taught: dict[tuple[str, str], list[Method]] = {}
    rows = []
    for source, destination in pairwise(agents):
        for context in learned:
            progress(f"{source}:{destination} anchor {context.id}")
            runs.run(source, context), runs.run(destination, context)
        if (source, destination) not in taught:
            taught[source, destination] = _taught(runs, agents[0], source, destination, learned, rank, modes)
    for context in contexts:
        first, alone = runs.free(agents[0], context), runs.free(None, context)
        held = {mode: alone if mode == "context-free" else first for mode in modes}
        error2 = dict.fromkeys(modes, 0.0)
        for hop, (source, destination) in enumerate(pairwise(agents), 1):
            progress(f"hop {hop} {context.id}")
            case = runs.case(source, destination, context)
            both = list(zip(modes, taught[source, destination], strict=True))
            outcomes = [m.apply(replace(case, source=held[mode], error2=error2[mode])) for mode, m in both]
            for mode, outcome, said in zip(modes, outcomes, answers_of(case, outcomes), strict=True):
                if mode in _CHAINED:
                    held[mode] = runs.model.release(outcome.run, case.prefix.tokens)
                    error2[mode] = error2[mode] + (outcome.ehat or 0.0) ** 2 if outcome.accepted else 0.0
                edge = f"{source}:{destination}"
                rows.append(ChainRow(mode, hop, edge, context.id, said.kl, said.top1, outcome.ehat))
    return rows


def _taught(
    runs: DenseRuns,
    first: str,
    source: str,
    destination: str,
    contexts: Sequence[Context],
    rank: int,
    modes: Sequence[str],
) -> list[Method]:
    """One edge's method in each mode."""
    cases = [runs.case(source, destination, context) for context in contexts]
    of_edge = Examples(tuple(cases), rank)
    methods: list[Method] = []
    for mode in modes:
        examples = of_edge
        if mode == "context-free":
            examples = Examples(tuple(replace(case, source=case.alone()) for case in cases), rank)
        elif mode == "star":
            examples = Examples(tuple(runs.case(first, destination, context) for context in contexts), rank)
        method = _METHODS.get(mode, _GATED.inner)
        methods.append(method.learned(examples))
    return methods
