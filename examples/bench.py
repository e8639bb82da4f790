"""What a hop costs against a dense prefill, and what capture and learning cost a dense request.

Ratios between requests of one run, in turn, in one engine: machines are noisy. vLLM's own prefix cache is emptied
before each measurement; both kinds of request find their role prompt in the store. Speed only: the gate is open, and
the shared text is the workload's contexts, one after the other.
"""

import argparse
import json
import statistics
from pathlib import Path

import torch
from engines import Engine, engine
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from workflow import Roles, contexts

DENSE = {"share": False, "capture": False}
DENSE_TENANT = "dense"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument("--out", type=Path, default=Path("out"), help="where bench.json goes")
    parser.add_argument("--dtype", default=native_dtype(), choices=("bfloat16", "float32"), help="default: %(default)s")
    parser.add_argument("--shared", type=int, nargs="+", default=[2048, 4096], help="shared tokens of a hop")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each kind; medians are reported")
    arguments = parser.parse_args()
    console = Console()
    longest = max(arguments.shared) + 1024
    settings = {"theta": 10.0, "min_anchors": 2}
    with engine(
        arguments.model,
        settings,
        dtype=arguments.dtype,
        max_model_len=longest,
        max_num_batched_tokens=longest,
        lmcache={"max_local_cpu_size": 3.0},
    ) as llm:
        with console.status("learning the edge …"):
            learn_edge(llm)
        hops = [measure(llm, n, arguments.repeats, console) for n in arguments.shared]
        overhead = learning_overhead(llm, arguments.shared[0] // 2, arguments.repeats, console)
    result = {"dtype": arguments.dtype, "hop_ttft": hops, "learning_overhead": round(overhead, 4)}
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "bench.json").write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    table = Table(title=f"TTFT of a hop, {arguments.model.name}, {arguments.dtype}, medians of {arguments.repeats}")
    for name in ("shared tokens", "dense ms", "ours ms", "speed-up"):
        table.add_column(name, justify="right")
    for h in hops:
        table.add_row(str(h["shared_tokens"]), f"{h['dense_ms']:.0f}", f"{h['ours_ms']:.0f}", f"{h['speedup']:.2f}×")
    console.print(table)
    console.print(f"capture and learning add {overhead:+.1%} to the latency of dense requests, back to back")


def native_dtype() -> str:
    """bf16 where the processor multiplies it; elsewhere it is emulated, eight times slower than fp32."""
    native = torch.cuda.is_available() or torch.cpu._is_avx512_bf16_supported()
    return "bfloat16" if native else "float32"


def prompts(llm: Engine, shared: int) -> tuple[list[int], list[int]]:
    """The solver's and the critic's prompt with ``shared`` tokens of context between role and instruction."""
    tokenizer, roles = llm.llm.get_tokenizer(), Roles.read()
    text = "\n\n".join(t for use in ("anchor", "dev") for _, t in contexts(use))
    context = tokenizer.encode(text, add_special_tokens=False)
    context = (context * (shared // len(context) + 1))[:shared]
    around = [roles.around(tokenizer, agent) for agent in ("solver", "critic")]
    return tuple([*front, *context, *back] for front, back in around)


def learn_edge(llm: Engine) -> None:
    """Ten anchors for solver→critic, and the role prompts in both tenants' stores."""
    tokenizer, roles = llm.llm.get_tokenizer(), Roles.read()
    for i, (_, context) in enumerate(list(contexts("anchor"))[:10]):
        for agent in ("solver", "critic"):
            prompt = roles.prompt(tokenizer, agent, context)
            llm.ask(prompt, hints={"share": False})
            if i == 0:
                llm.ask(prompt, hints={"share": False}, salt=DENSE_TENANT)
    llm.settle()


def measure(llm: Engine, shared: int, repeats: int, console: Console) -> dict[str, float]:
    """Medians of the critic's TTFT, dense and from the solver's cache, in turn."""
    source, destination = prompts(llm, shared)
    with Progress(console=console) as progress:
        bar = progress.add_task(f"{shared} shared tokens", total=2 * repeats + 1)
        llm.ask(source, hints={"share": False})
        llm.settle()
        progress.advance(bar)
        times: tuple[list[float], list[float]] = ([], [])
        reused = 0
        for _ in range(repeats):
            for to, hints, salt in ((times[0], DENSE, DENSE_TENANT), (times[1], {"capture": False}, None)):
                llm.forget_prefixes()
                answer = llm.ask(destination, hints=hints, salt=salt)
                to.append(answer.seconds)
                progress.advance(bar)
            reused = answer.report["reused_tokens"]
            if reused < 0.9 * (shared - 64):
                raise SystemExit(f"only {reused} of {shared} tokens were taken over: {answer.report}")
    dense, ours = (statistics.median(t) for t in times)
    return {
        "shared_tokens": shared,
        "reused_tokens": reused,
        "dense_ms": round(1e3 * dense, 1),
        "ours_ms": round(1e3 * ours, 1),
        "speedup": round(dense / ours, 2),
    }


def learning_overhead(llm: Engine, shared: int, repeats: int, console: Console) -> float:
    """Relative latency that capture and learning add: pairs of dense requests, back to back, with and without.

    Three requests: a source, one that shares its context, and one that runs while the second's lesson is worked on.
    """
    source, destination = prompts(llm, shared)
    added = []
    with Progress(console=console) as progress:
        bar = progress.add_task("learning overhead", total=2 * repeats)
        for number in range(repeats):
            times = []
            for capture in (False, True):
                hints = {"share": False, "capture": capture}
                # Other tokens in front of each: nothing is found, everything is captured and learned.
                unique = [[100 + number, 200 + capture, *p] for p in (source, destination, destination[::-1])]
                llm.forget_prefixes()
                times.append(sum(llm.ask(p, hints=hints, salt=f"overhead {number}").seconds for p in unique))
                progress.advance(bar)
            llm.settle()
            added.append(times[1] / times[0] - 1)
    return statistics.median(added)


if __name__ == "__main__":
    main()
