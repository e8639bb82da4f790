"""A small world of agents: what a scheduler does with prompts, without an engine."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from lmcache_kvcmas.agents import AgentRegistry
from lmcache_kvcmas.hints import Hints
from lmcache_kvcmas.index import RecordIndex
from lmcache_kvcmas.layout import CaptureLayout, ChunkWrite, lay_out
from lmcache_kvcmas.planner import Planner
from lmcache_kvcmas.plans import LabelledPlan, plan_tag
from lmcache_kvcmas.records import Record
from lmcache_kvcmas.spans import Edge, Plan, SpanKind

SYSTEM, USER, ASSISTANT = [1, 9690, 198], [2, 198, 1, 4093, 198], [2, 198, 1, 520, 9531, 198]
"""Template tokens as a chat template puts them around the parts of a prompt."""


def words(seed: int, n: int, vocabulary: int = 49152) -> list[int]:
    """``n`` tokens of a text that occurs nowhere else."""
    return np.random.default_rng(seed).integers(100, vocabulary, n).tolist()


class Stored(NamedTuple):
    """What a chunk or a difference in the world's store is the cache of."""

    tokens: np.ndarray
    front: bytes
    exact: bool


class Served(NamedTuple):
    """One request as the world served it."""

    tokens: np.ndarray
    plan: LabelledPlan
    layout: CaptureLayout
    record: Record
    output: list[int]


@dataclass
class World:
    """Matches, plans, lays out and remembers requests, and checks that no plan takes anything for what it is not."""

    planner: Planner = field(default_factory=Planner)
    index: RecordIndex = field(default_factory=RecordIndex)
    registry: AgentRegistry = field(default_factory=AgentRegistry)
    anchors: Counter[Edge] = field(default_factory=Counter)
    store: dict[bytes, Stored] = field(default_factory=dict)
    roles: dict[str, list[int]] = field(
        default_factory=lambda: {
            "planner": words(1, 50),
            "solver": words(2, 120),
            "critic": words(3, 230),
            "reflector": words(4, 340),
        }
    )
    served: int = 0

    def prompt(self, role: str, *context: Sequence[int]) -> np.ndarray:
        """[system role][user context … instruction][assistant]."""
        user = [t for part in context for t in part]
        instruction = words(sum(map(ord, role)), 9)
        return np.array(SYSTEM + self.roles[role] + USER + user + instruction + ASSISTANT, np.int32)

    def plan(self, tokens: np.ndarray, hints: Hints = Hints(), salt: str = "") -> LabelledPlan:  # noqa: B008
        """Match and plan ``tokens``, and check the plan against what is really stored."""
        matches = self.index.match(tokens, salt)
        plan = self.planner.plan(tokens, matches, hints, self.registry, lambda e: self.anchors[e], None, salt)
        check_plan(plan, tokens, self.store)
        return plan

    def serve(
        self,
        tokens: np.ndarray,
        generate: int = 120,
        hints: Hints = Hints(),  # noqa: B008
        salt: str = "",
        ehat2: float = 0.0004,
    ) -> Served:
        """Plan, 'compute', and keep the record of a request; dense requests teach their edges."""
        plan = self.plan(tokens, hints, salt)
        self.served += 1
        output = words(10_000 + self.served, generate)
        every = np.concatenate([tokens, np.array(output[:-1], np.int32)])  # the last sampled token has no cache
        accepted = plan.first_approximate is not None
        layout = lay_out(
            plan,
            every,
            prompt_tokens=len(tokens),
            accepted=accepted,
            tag=plan_tag(plan, lambda e: self.anchors[e]),
            ehat2=dict.fromkeys(range(len(plan.lessons)), ehat2),
            base_key=lambda content, group: b"b" + salt.encode() + content,
            delta_key=lambda content, group: b"d" + salt.encode() + content,
        )
        for w in layout.writes:
            exact = isinstance(w, ChunkWrite) and all(p.exact for p in layout.pieces if p.chunk == w.key)
            self.store[w.key] = Stored(every[w.start : w.end], every[: w.start].tobytes(), exact)
        if not accepted:
            for edge in {x.edge for x in plan.lessons if x.edge.source != x.edge.destination}:
                self.anchors[edge] += 1
        record = Record(
            b"r%d" % self.served,
            every,
            len(tokens),
            layout.pieces,
            layout.segments,
            plan.agent,
            hints.workflow,
            salt,
            self.served,
        )
        self.index.add(record)
        self.index.check_integrity()
        self.registry.check_integrity()
        return Served(tokens, plan, layout, record, output)

    def with_planner(self, **changes: object) -> "World":
        """The same world with another planner."""
        self.planner = replace(self.planner, **changes)
        return self

    def workflow(self, seed: int, length: int = 400) -> list[Served]:
        """Planner, solver, critic, reflector over a new context that grows by each one's output."""
        parts: list[Sequence[int]] = [words(seed, length)]
        done = []
        for role in self.roles:
            done.append(self.serve(self.prompt(role, *parts)))
            parts += [words(seed + 1_000_000 + len(parts), 6), done[-1].output]  # "\n\nThe solver said:"
        return done


def check_plan(plan: Plan, tokens: np.ndarray, store: dict[bytes, Stored]) -> None:
    """Everything that has to hold of any plan for ``tokens``."""
    at = 0
    for s in plan.spans:
        assert s.start == at < s.end, "spans are contiguous from 0 and not empty"
        at = s.end
        assert (s.kind is SpanKind.COMPUTE) == (not s.pieces)
        assert (s.kind is SpanKind.PREDICTED) == (s.edge is not None)
    assert at <= max(0, len(tokens) - 1), "one token stays for the engine"
    assert not plan.spans or plan.spans[-1].kind is not SpanKind.COMPUTE
    kinds = [s.kind for s in plan.spans]
    assert SpanKind.EXACT not in kinds[kinds.count(SpanKind.EXACT) :], "exact spans lead"
    last = 0
    for x in plan.lessons:
        assert last <= x.start < x.end < len(tokens)
        assert 0 <= x.head <= x.end - x.start
        last = x.end
    for s in (*plan.spans, *plan.lessons):
        if getattr(s, "kind", None) is SpanKind.COMPUTE:
            continue
        at = s.start
        for p in s.pieces:
            assert p.start == at < p.end, "pieces are contiguous"
            at = p.end
            for key, row in ((p.chunk, p.row), (p.delta, p.delta_row)):
                if key is not None:
                    held = store[key]
                    assert np.array_equal(held.tokens[row : row + p.end - p.start], tokens[p.start : p.end])
            if getattr(s, "kind", None) is SpanKind.EXACT:
                held = store[p.chunk]
                assert p.exact
                assert p.delta is None
                assert held.exact
                front = held.front + held.tokens[: p.row].tobytes()
                assert front == tokens[: p.start].tobytes(), "exact means: the very same tokens in front"
        assert at == s.end, "pieces cover the stretch"
