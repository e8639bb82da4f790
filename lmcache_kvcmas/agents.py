"""Which agent is asking? Agents are told apart by the tokens in front of the first shared run, or by a client's hint.

Where that run begins differs by a few tokens from pair to pair, because it grows to the left over whatever the two
prompts happen to share (template tokens, a common last sentence). So a prefix is never compared at its own length: two
are compared over the longer of the two, with the tokens that really stand there.
"""

import string
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from lmcache_kvcmas.fingerprint import Tokens
from lmcache_kvcmas.records import Record

SHORTEST_ROLE = 24
"""Tokens from which on an identical beginning alone says which agent it is: "You are the …" begins many roles."""

_SHARE = 0.9
_APART = 32
"""Shingles that may differ at most: a date, a name, an id. Behind a long common preamble 10% would be a whole role."""
_CAP = 2048
"""Tokens of a prefix that tell agents apart; also what is kept of each."""
_RECENT = 64
"""Agents compared approximately, the latest first: bounds the time of an unknown prefix."""
_NAME_CHARACTERS = frozenset(string.ascii_letters + string.digits + "_.-")
_NAME_LENGTH = 64


class Role(NamedTuple):
    """What is known of who left a record."""

    agent: str
    prefix: int | None
    """Tokens of the agent's role prompt at the start of the record; None when they are not known."""


@dataclass(frozen=True, slots=True)
class _Agent:
    name: str
    hinted: bool
    prefix: int
    tokens: Tokens
    """The first `_CAP` tokens of the prompt that it was first seen with, beyond ``prefix`` too."""


class AgentRegistry:
    """At most ``capacity`` agents for each of at most ``salts`` tenants, and the roles of ``records`` records.

    Bounded by forgetting the least recently used. A forgotten agent gets the same name again from the same prefix.
    """

    def __init__(self, capacity: int = 1024, salts: int = 256, records: int = 8192) -> None:
        self._capacity = capacity
        self._max_salts = salts
        self._max_roles = records
        self._salts: OrderedDict[str, OrderedDict[str, _Agent]] = OrderedDict()
        self._roles: OrderedDict[bytes, Role] = OrderedDict()

    def identify(self, tokens: Tokens, prefix: int, hint: str | None = None, salt: str = "") -> str:
        """The agent whose prompt is ``tokens`` (``[T]`` int32), of which the first ``prefix`` are its own.

        In order: the hint (cleaned); a known agent whose prefix is the same, or `alike`; one whose whole prefix
        stands at the start of this one; else a new agent, named by the hash of the prefix.
        """
        agents = self._of(salt)
        prefix = max(0, min(prefix, len(tokens)))
        if hint is not None:
            name = clean_name(hint)
            if name not in agents:
                self._remember(agents, _Agent(name, True, prefix, tokens[:_CAP].copy()))
            agents.move_to_end(name)
            return name
        known = self._known(agents, tokens, prefix)
        if known is None:
            known = _Agent(_hash(tokens[:prefix]), False, prefix, tokens[:_CAP].copy())
            self._remember(agents, known)
        agents.move_to_end(known.name)
        return known.name

    def role_of(self, record: Record) -> Role | None:
        """Who left ``record``, if that is known: bound earlier, or named by its plan."""
        role = self._roles.get(record.id)
        if role is not None or record.agent is None:
            return role
        name = clean_name(record.agent)
        known = self._of(record.salt).get(name)
        prefix = None
        if known is not None and alike(record.tokens[: known.prefix], known.tokens[: known.prefix]):
            prefix = known.prefix
        role = Role(name, prefix)
        if prefix is not None:
            self.bind(record, role)
        return role

    def resolve(self, record: Record, prefix: int) -> Role:
        """Who left ``record``; if nobody knew, its first ``prefix`` tokens decide, and that is kept."""
        role = self.role_of(record)
        if role is None or role.prefix is None:
            hint = None if role is None else role.agent
            role = Role(self.identify(record.tokens, prefix, hint, record.salt), prefix)
            self.bind(record, role)
        return role

    def bind(self, record: Record, role: Role) -> None:
        """Keep who left ``record``."""
        self._roles[record.id] = role
        self._roles.move_to_end(record.id)
        while len(self._roles) > self._max_roles:
            self._roles.popitem(last=False)

    def _of(self, salt: str) -> OrderedDict[str, _Agent]:
        agents = self._salts.setdefault(salt, OrderedDict())
        self._salts.move_to_end(salt)
        while len(self._salts) > self._max_salts:
            self._salts.popitem(last=False)
        return agents

    def _remember(self, agents: OrderedDict[str, _Agent], agent: _Agent) -> None:
        agents[agent.name] = agent
        while len(agents) > self._capacity:
            agents.popitem(last=False)

    def _known(self, agents: OrderedDict[str, _Agent], tokens: Tokens, prefix: int) -> _Agent | None:
        same: list[_Agent] = []
        within: list[_Agent] = []
        for a in reversed(agents.values()):
            n = min(max(prefix, a.prefix), _CAP)
            if np.array_equal(tokens[:n], a.tokens[:n]):
                same.append(a)
            elif SHORTEST_ROLE <= a.prefix <= prefix and np.array_equal(tokens[: a.prefix], a.tokens[: a.prefix]):
                within.append(a)
        if same:
            return max(same, key=lambda a: (a.hinted, a.prefix))
        for a in list(reversed(agents.values()))[:_RECENT]:
            n = min(max(prefix, a.prefix), _CAP)
            if alike(tokens[:n], a.tokens[:n]):
                return a
        return max(within, key=lambda a: (a.prefix, a.hinted), default=None)

    def check_integrity(self) -> None:
        """Raise AssertionError if a bound or a table is broken; for tests."""
        assert len(self._salts) <= self._max_salts
        assert len(self._roles) <= self._max_roles
        for agents in self._salts.values():
            assert len(agents) <= self._capacity
            assert all(name == a.name and len(a.tokens) <= _CAP for name, a in agents.items())


def alike(a: Tokens, b: Tokens) -> bool:
    """Whether two prefixes are one but for a date, a name or an id: 90% of their token pairs are shared, all but 32.

    Token pairs rather than longer shingles, because a role prompt may be forty tokens long: there one changed number
    breaks two pairs of 39, but four shingles of four out of 37.
    """
    n = min(len(a), len(b))
    total = max(len(a), len(b)) - 1
    if total < 1:
        return n == total + 1 and np.array_equal(a, b)
    # What both begin and end with is common anyway: only the middles are worth sorting.
    front = _common(a[:n], b[:n])
    back = _common(a[::-1][: n - front], b[::-1][: n - front])
    x, y = (_pairs(t[max(0, front - 1) : len(t) - back + 1]) for t in (a, b))
    apart = max(len(x), len(y)) - int(np.isin(x, y, assume_unique=True).sum())
    return apart <= min(_APART, (1 - _SHARE) * total)


def clean_name(hint: str) -> str:
    """A hint as an agent's name: itself if it has at most 64 of ``[A-Za-z0-9_.-]``, else a hash of it."""
    if 0 < len(hint) <= _NAME_LENGTH and _NAME_CHARACTERS.issuperset(hint):
        return hint
    return blake3(hint.encode("utf-8", "surrogatepass")).hexdigest(length=8)


def _common(a: Tokens, b: Tokens) -> int:
    """Leading tokens that two sequences of one length have in common."""
    differs = a != b
    return int(differs.argmax()) if differs.any() else len(a)


def _pairs(tokens: Tokens) -> npt.NDArray[np.int64]:
    """The distinct pairs of neighbouring tokens."""
    wide = tokens.astype(np.int64)
    pairs: npt.NDArray[np.int64] = np.unique((wide[:-1] << 32) | (wide[1:] & 0xFFFFFFFF))
    return pairs


def _hash(tokens: Tokens) -> str:
    return blake3(tokens.astype("<i4").tobytes()).hexdigest(length=8)
