"""Every method on the traces of workloads: learn from some, measure on others."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..spans import Edge
from .cases import Examples
from .dense import DenseModel
from .methods import Method
from .serve import TraceRow, TraceServer, examples_of
from .traces import Trace
from .transcripts import Transcriber


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """How traces are served."""

    use: str = "test"
    """Which traces are measured: ``dev`` or ``test``. Those of ``learn`` fill the pools, each workload's its own."""
    anchors: int = 10
    rank: int = 32
    temperature: float = 0.0
    """Of dense prefill's answers and of each method's last one."""
    seeds: int = 1
    """Samples of each measured trace; more than one only where answers are sampled."""


def by_workload(traces: Iterable[Trace]) -> dict[str, list[Trace]]:
    """In the order in which workloads first appear."""
    workloads: dict[str, list[Trace]] = {}
    for trace in traces:
        workloads.setdefault(trace.workload, []).append(trace)
    return workloads


class TraceBench:
    """Learns from traces and measures on others; tells ``progress`` what comes, once a transcript."""

    def __init__(
        self, model: DenseModel, settings: TraceSettings, progress: Callable[[str], None] = lambda what: None
    ) -> None:
        self._model, self._settings, self._progress = model, settings, progress
        self._scribe = Transcriber(model)

    def learn(self, traces: Iterable[Trace]) -> dict[Edge, Examples]:
        """What those for learning teach."""
        transcripts = []
        for trace in (t for t in traces if t.use == "learn"):
            self._progress(f"learn {trace.id}")
            transcripts.append(self._scribe.transcript(trace))
        return examples_of(self._model, transcripts, self._settings.rank, self._settings.anchors)

    def measure(
        self,
        traces: Iterable[Trace],
        methods: Sequence[Method],
        examples: Mapping[Edge, Examples],
        use: str | None = None,
    ) -> list[TraceRow]:
        """Rows of all methods on all calls that take something over; of the traces for ``use``, else the settings'."""
        use = use or self._settings.use
        learned = {edge: tuple(m.learned(some) for m in methods) for edge, some in examples.items()}
        rows = []
        for trace in (t for t in traces if t.use == use):
            for seed in range(self._settings.seeds):
                self._progress(f"{use} {trace.id}")
                transcript = self._scribe.transcript(trace, self._settings.temperature, seed)
                rows += TraceServer(self._model, transcript, methods, learned).rows()
        return rows


def evaluate_traces(
    model: DenseModel,
    traces: Sequence[Trace],
    methods: Sequence[Method],
    settings: TraceSettings,
    progress: Callable[[str], None] = lambda what: None,
) -> list[TraceRow]:
    """Rows of all methods, workload by workload."""
    bench = TraceBench(model, settings, progress)
    rows = []
    for workload in by_workload(traces).values():
        rows += bench.measure(workload, methods, bench.learn(workload))
    return rows


def trace_units(traces: Sequence[Trace], settings: TraceSettings, uses: Sequence[str] | None = None) -> int:
    """How often ``progress`` is called for ``uses``, by default the settings'."""
    measured = sum(t.use in (uses or (settings.use,)) for t in traces)
    return sum(t.use == "learn" for t in traces) + settings.seeds * measured
