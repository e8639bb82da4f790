"""What the data show, in sentences. "Lower" and "higher" are said only where a 95% interval says so."""

from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup

from ..figures import Better, Interval
from .documents import Document
from .kinds import Entry, Kind, predictions
from .numbers import NATS, listed, nats, nats_span, percent, ratio, tick
from .scopes import Scope, scopes

BUDGETS = (0.0, 0.15, 0.25, 0.5, 1.0)
"""Recomputed shares that readers may be ready to spend."""
_FEW = 0.15


class Best(NamedTuple):
    """The lowest KL within a budget."""

    label: str
    entry: Entry


def best_by_budget(entries: Sequence[Entry]) -> list[Best]:
    """Of predictions. A budget that allows nothing better than a smaller one is left out."""
    found: list[Best] = []
    for budget in BUDGETS:
        entry = lowest(entries, budget)
        if entry is not None and (not found or entry.summary.kl < found[-1].entry.summary.kl):
            label = "No recompute" if budget == 0 else f"At most {percent(budget)}" if budget < 1 else "Any recompute"
            found.append(Best(label, entry))
    return found


def lowest(entries: Sequence[Entry], at_most: float) -> Entry | None:
    within = [e for e in predictions(list(entries)) if e.summary.recompute <= at_most + 1e-9]
    return min(within, key=lambda e: e.summary.kl, default=None)


class Said(NamedTuple):
    """Sentences on one scope, or, without a title, on all."""

    title: str
    measured: str
    sentences: list[Markup]


def in_short(document: Document) -> list[Said]:
    measured = scopes(document)
    said = [Said(scope.title, scope.measured, _of_scope(scope, document.better)) for scope in measured]
    rest = _calibrated(document)
    references = [e.method for scope in measured for e in scope.entries if e.kind is Kind.REFERENCE]
    if references:
        names = list(dict.fromkeys(references))
        verbs = ("needs", "is") if len(names) == 1 else ("need", "are")
        rest.append(
            Markup(
                "{} {} a prefill of the same context beyond the source agent's, and {} not compared with the others."
            ).format(_methods(names), *verbs)
        )
    if measured and all(e.summary.accuracy is None for scope in measured for e in scope.entries):
        rest.append(Markup("No task accuracy was measured."))
    return [group for group in (*said, Said("", "", rest)) if group.sentences]


def _of_scope(scope: Scope, better: Sequence[Better]) -> list[Markup]:
    said = []
    none = next((e for e in scope.entries if e.method == "none"), None)
    if none is not None:
        said.append(
            Markup("Caches that are only moved (<code>none</code>) are {} {} from dense prefill.").format(
                nats(none.summary.kl), NATS
            )
        )
    few, ours = lowest(scope.entries, _FEW), lowest([e for e in scope.entries if e.kind is Kind.OURS], 1.0)
    if few is not None and few.method != "none":
        intro = Markup("Of the methods that recompute at most {}, <code>{}</code> has the lowest KL:").format(
            percent(_FEW), few.method
        )
        said.append(_about(intro, few, scope, better))
    if ours is not None and (few is None or ours.method != few.method):
        share = percent(ours.summary.recompute)
        intro = Markup("<code>{}</code> (ours) recomputes {}:").format(ours.method, share)
        said.append(_about(intro, ours, scope, better))
    return [*said, *_accuracy(scope, better)]


def _about(intro: Markup, entry: Entry, scope: Scope, better: Sequence[Better]) -> Markup:
    s = entry.summary
    text = Markup("{} {} {} ({}), {} of rotation only.").format(
        intro, nats(s.kl), NATS, nats_span(s.kl_ci), ratio(s.kl_vs_none)
    )
    others = [e for e in predictions(scope.entries) if e.method != entry.method]
    signs = {e.method: _sign(entry, e, "kl", scope, better) for e in others}
    above, below, unclear = ([m for m, sign in signs.items() if sign == wanted] for wanted in (-1, 1, 0))
    rest = [Markup("{}, lower still").format(_methods(below))] if below else []
    rest += [Markup("{}, from which no interval separates it").format(_methods(unclear))] if unclear else []
    if above and not rest:
        return text + Markup(" That is lower than all others.")
    if len(above) > max(3, len(below) + len(unclear)):
        return text + Markup(" That is lower than all others except {}.").format(Markup(", and ").join(rest))
    if above:
        text += Markup(" That is lower than {}.").format(_methods(above))
    if below:
        text += Markup(" It is higher than {}.").format(_methods(below))
    if unclear:
        text += Markup(" No interval separates it from {}.").format(_methods(unclear))
    return text


def _accuracy(scope: Scope, better: Sequence[Better]) -> list[Markup]:
    """Ours against dense prefill."""
    dense = next((e for e in scope.entries if e.method == "dense" and e.summary.accuracy is not None), None)
    ours = [e for e in scope.entries if e.kind is Kind.OURS and e.summary.accuracy is not None]
    if not ours:
        return []
    shares = sorted(e.summary.accuracy or 0.0 for e in ours)
    span = " to ".join(dict.fromkeys((percent(shares[0]), percent(shares[-1]))))
    names = _methods([ours[0].method]) if len(ours) == 1 else Markup("our {} methods").format(len(ours))
    if dense is None:
        return [Markup("Correct answers: {} with {}.").format(span, names)]
    text = Markup("Correct answers: {} with dense prefill, {} with {}.").format(
        percent(dense.summary.accuracy or 0.0), span, names
    )
    signs = {e.method: _sign(e, dense, "accuracy", scope, better) for e in ours}
    if not any(signs.values()):
        which = "it" if len(ours) == 1 else "any of them"
        return [text + Markup(" No interval separates {} from dense prefill.").format(which)]
    for sign, words in ((-1, " Fewer than dense prefill: {}."), (1, " More than dense prefill: {}.")):
        found = [method for method, s in signs.items() if s == sign]
        if found:
            text += Markup(words).format(_methods(found))
    return [text]


def _sign(entry: Entry, other: Entry, measure: str, scope: Scope, better: Sequence[Better]) -> int:
    """Of the difference; 0 where neither a paired interval excludes 0 nor the two intervals are apart."""
    for b in better:
        if b.workload == scope.workload and b.measure == measure:
            if (b.method, b.than) == (entry.method, other.method):
                return 1 if b.difference > 0 else -1
            if (b.than, b.method) == (entry.method, other.method):
                return -1 if b.difference > 0 else 1
    mine, its = _interval(entry, measure), _interval(other, measure)
    if mine is None or its is None:
        return 0
    return 1 if mine[0] > its[1] else -1 if mine[1] < its[0] else 0


def _interval(entry: Entry, measure: str) -> Interval | None:
    return entry.summary.kl_ci if measure == "kl" else entry.summary.accuracy_ci


def _calibrated(document: Document) -> list[Markup]:
    calibration = document.calibration
    if calibration is None:
        return []
    if calibration.theta is None:
        return [Markup("No threshold meets the budget <code>{}</code>.").format(calibration.budget)]
    text = Markup("For the budget <code>{}</code> the gate's threshold θ is {}.").format(
        calibration.budget, tick(calibration.theta)
    )
    held = calibration.heldout
    if held is not None:
        around = "" if held.kl_ci is None else f" ({nats_span(held.kl_ci)})"
        text += Markup(" On held-out traces it reuses {} of the tokens at {} {}{}: {} the budget.").format(
            percent(held.reuse), nats(held.kl), NATS, around, "within" if held.within_budget else "outside"
        )
    return [text]


def _methods(names: Sequence[str]) -> Markup:
    return Markup(listed([str(Markup("<code>{}</code>").format(name)) for name in names]))
