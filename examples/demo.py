"""Four agents take over one another's corrected cache, inside a real vLLM engine: what it saves, what it costs.

Each edge learns from a few contexts first, prefilled densely. Then unseen contexts are served twice: densely, and with
sharing. Both kinds of request run in the same engine, in turn; the dense ones belong to another tenant, so neither
kind finds what the other left.
"""

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engines import Answer, Engine, engine
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from workflow import TURNS, Roles, contexts

DENSE = {"share": False}
DENSE_TENANT = "dense"
COMPARED = 16  # tokens of the dense answer over which the two are compared


@dataclass(frozen=True)
class Hop:
    """One agent's turn on one context, served both ways."""

    context: str
    edge: str
    shared_tokens: int
    reused_tokens: int
    recomputed_tokens: int
    dense_tokens: int
    decision: str
    ehat: float | None
    ttft_dense_ms: float
    ttft_ms: float
    kl: float
    top1: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument("--out", type=Path, default=Path("out"), help="where demo.json and demo.png go")
    parser.add_argument("--anchors", type=int, default=10, help="contexts that each edge learns from")
    parser.add_argument("--contexts", type=int, default=10, help="unseen contexts that are served")
    parser.add_argument("--said", type=int, default=32, help="tokens that each agent adds to the context")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each time to first token")
    arguments = parser.parse_args()
    console = Console()
    with ExitStack() as running:
        with console.status("starting vLLM (10 to 60 s) …"):
            llm = running.enter_context(engine(arguments.model, dtype="float32"))
        hops, store, full = run(llm, arguments, console)
    report(hops, store, full, arguments, console)


def run(llm: Engine, arguments: argparse.Namespace, console: Console) -> tuple[list[Hop], int, int]:
    """Warm the edges, serve the unseen contexts; the hops, and the store's bytes, real and at full width."""
    roles, tokenizer = Roles.read(), llm.llm.get_tokenizer()
    learned = list(contexts("anchor"))[: arguments.anchors]
    unseen = list(contexts("dev"))[: arguments.contexts]
    hops: list[Hop] = []
    names: dict[str, str] = {}  # what the connector calls each role: it found them by itself
    full_tokens = 0  # each agent's role prompt once: any prefix cache shares that
    for turn in TURNS:
        # So that both kinds of request find their role prompt in the store.
        llm.ask(roles.prompt(tokenizer, turn.agent, learned[0][1]), hints=DENSE, salt=DENSE_TENANT)
    llm.settle()
    before_us = llm.store_bytes
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("learning", total=len(learned) * len(TURNS))
        for _, context in learned:
            said: list[tuple[Any, str]] = []
            for turn in TURNS:
                prompt = roles.prompt(tokenizer, turn.agent, context, said)
                answer = llm.ask(prompt, arguments.said, hints=DENSE)
                said.append((turn, answer.text))
                names[answer.report["agent"]] = turn.agent
                full_tokens += len(prompt) + arguments.said - 1 - answer.report["exact_tokens"]
                progress.advance(bar)
            llm.settle()
        bar = progress.add_task("serving", total=len(unseen) * len(TURNS))
        for name, context in unseen:
            said = []
            for turn in TURNS:
                prompt = roles.prompt(tokenizer, turn.agent, context, said)
                dense, shared, times = serve(llm, prompt, arguments)
                names[shared.report["agent"]] = turn.agent
                if shared.report["shared_tokens"]:
                    hops.append(hop(name, edge(shared, names), dense, shared, times))
                    h = hops[-1]
                    took = f"TTFT {h.ttft_dense_ms:.0f} → {h.ttft_ms:.0f} ms"
                    progress.console.print(f"{name} {h.edge}: {h.reused_tokens} of {h.shared_tokens} reused, {took}")
                said.append((turn, dense.text))
                full_tokens += len(prompt) + arguments.said - 1 - shared.report["exact_tokens"]
                progress.advance(bar)
    return hops, llm.store_bytes - before_us, full_tokens * llm.connector.geometry.bytes_per_token


def serve(
    llm: Engine, prompt: Sequence[int], arguments: argparse.Namespace
) -> tuple[Answer, Answer, tuple[float, float]]:
    """Answer a prompt densely and with sharing, the same tokens both times; and the medians of the two TTFTs."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(arguments.repeats):
        for to, hints, salt in ((times[0], DENSE, DENSE_TENANT), (times[1], {}, None)):
            llm.forget_prefixes()
            to.append(llm.ask(prompt, hints=hints | {"capture": False}, salt=salt).seconds)
    dense = llm.ask(prompt, arguments.said, hints=DENSE | {"capture": False}, salt=DENSE_TENANT)
    llm.forget_prefixes()
    shared = llm.ask(prompt, arguments.said, forced=dense.tokens)
    llm.settle()
    return dense, shared, (statistics.median(times[0]), statistics.median(times[1]))


def edge(shared: Answer, names: Mapping[str, str]) -> str:
    """source→destination, as the connector found them; several sources where a prompt drew on several records."""
    sources = dict.fromkeys(names.get(source, source) for source, _, _ in shared.report["edges"])
    return f"{'+'.join(sources)}→{names[shared.report['agent']]}"


def hop(context: str, edge: str, dense: Answer, shared: Answer, times: tuple[float, float]) -> Hop:
    told = shared.report
    ours, theirs = (a.logits[:COMPARED].log_softmax(-1) for a in (shared, dense))
    kl = (theirs.exp() * (theirs - ours)).sum(-1).mean()
    top1 = (ours.argmax(-1) == theirs.argmax(-1)).float().mean()
    return Hop(
        context,
        edge,
        told["shared_tokens"],
        told["reused_tokens"],
        told["recomputed_tokens"],
        told["dense_tokens"],
        told["decision"],
        told["ehat"],
        round(1e3 * times[0], 1),
        round(1e3 * times[1], 1),
        float(kl),
        float(top1),
    )


def report(hops: Sequence[Hop], store: int, full: int, arguments: argparse.Namespace, console: Console) -> None:
    shared, reused = sum(h.shared_tokens for h in hops), sum(h.reused_tokens for h in hops)
    rate = reused / shared if shared else 0.0
    table = Table(
        title=f"{arguments.model.name}: each agent's turn, dense → shared",
        box=None,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for name in ("", "edge", "shared", "reused", "recomp", "dense", "gate", "ê", "TTFT ms", "KL", "top1"):
        table.add_column(name, justify="left" if name in ("", "edge", "gate") else "right", no_wrap=True)
    for h in hops:
        gate, _, _ = h.decision.partition(":")
        gate = "refused" if gate in ("unreliable", "chain") else gate
        table.add_row(
            h.context,
            h.edge.replace("planner", "plan.").replace("reflector", "refl."),
            str(h.shared_tokens),
            str(h.reused_tokens),
            str(h.recomputed_tokens),
            str(h.dense_tokens),
            f"[{'green' if h.reused_tokens else 'yellow'}]{gate}",
            "–" if h.ehat is None else f"{h.ehat:.3f}".lstrip("0"),
            f"{h.ttft_dense_ms:.0f}→{h.ttft_ms:.0f}",
            f"{max(h.kl, 0):.4f}".lstrip("0"),
            f"{h.top1:.2f}".lstrip("0"),
        )
    console.print(table)
    taken = [h for h in hops if h.reused_tokens]
    faster = statistics.median([h.ttft_dense_ms / h.ttft_ms for h in taken]) if taken else 1.0
    console.print(f"reuse rate   {rate:.2f} of {shared} shared tokens ({len(taken)} of {len(hops)} hops accepted)")
    console.print(f"TTFT         {faster:.2f}× faster than dense (median of the accepted hops)")
    console.print(
        f"store        {store / 2**20:.0f} MiB; every agent's cache at full width: {full / 2**20:.0f} MiB "
        f"({store / full:.2f}×)"
    )
    arguments.out.mkdir(parents=True, exist_ok=True)
    result = {
        "model": arguments.model.name,
        "hops": [asdict(h) for h in hops],
        "reuse_rate": rate,
        "store_bytes": store,
        "full_width_bytes": full,
    }
    (arguments.out / "demo.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", "utf-8")
    draw(hops, arguments.out / "demo.png", arguments.model.name)
    console.print(f"written      {arguments.out / 'demo.json'}, {arguments.out / 'demo.png'}")


def draw(hops: Sequence[Hop], file: Path, model: str) -> None:
    """Where each hop's tokens came from, its time to first token, and its distance from dense."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    labels = [f"{h.context} {h.edge}" for h in hops]
    at = range(len(hops))
    figure, (tokens, times, kls) = plt.subplots(
        1, 3, figsize=(13, 1.5 + 0.34 * len(hops)), sharey=True, layout="constrained"
    )
    left = [0] * len(hops)
    for name, colour in (("reused", "#2a9d8f"), ("recomputed", "#e9c46a"), ("dense", "#adb5bd")):
        values = [getattr(h, f"{name}_tokens") for h in hops]
        tokens.barh(at, values, left=left, color=colour, label=name)
        left = [a + b for a, b in zip(left, values, strict=True)]
    tokens.set_yticks(at, labels, fontsize=8)
    tokens.invert_yaxis()
    tokens.set_xlabel("tokens of the prompt")
    tokens.legend(fontsize=8)
    times.barh([y - 0.2 for y in at], [h.ttft_dense_ms for h in hops], 0.4, color="#adb5bd", label="dense")
    times.barh([y + 0.2 for y in at], [h.ttft_ms for h in hops], 0.4, color="#2a9d8f", label="shared")
    times.set_xlabel("time to first token, ms")
    times.legend(fontsize=8)
    colours = ["#2a9d8f" if h.reused_tokens else "#adb5bd" for h in hops]
    kls.barh(at, [max(h.kl, 1e-7) for h in hops], color=colours)
    kls.set_xscale("log")
    kls.set_xlabel("KL to dense over 16 tokens, nats")
    figure.suptitle(f"{model}: agents that take over one another's cache")
    figure.savefig(file, dpi=140)


if __name__ == "__main__":
    main()
