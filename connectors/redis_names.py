"""Names of our keys in Redis. ``docs/format.md`` documents them.

::

    PREFIX:MODEL:KIND:RANK-SIZE:TENANT:{GROUP}HASH    an entry (a string); pools (sorted sets) likewise
    PREFIX:MODEL:journal:SALT                         what nodes tell one another (a stream)
    PREFIX:MODEL:edges                                pools by name, for people's tools (a hash)

MODEL are 16 hex digits of the model's fingerprint. TENANT, GROUP and HASH together are the entry's 32-byte key; the
braces keep the entries of a group on one node of a cluster.
"""

import re
from dataclasses import dataclass

from blake3 import blake3

from lmcache_kvcmas.entries import EntryKind, Owner
from lmcache_kvcmas.keys import GROUP, KEY_BYTES, TENANT

_NAME = re.compile(r"(.+):([0-9a-f]{16}):([a-z]+):(\d+)-(\d+):([0-9a-f]{12}):\{([0-9a-f]{8})\}([0-9a-f]{44})")


def model_mark(model: str) -> str:
    """How key names spell a model."""
    return blake3(model.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class EntryName:
    """A key name, taken apart."""

    model: str
    kind: EntryKind
    rank: int
    size: int
    key: bytes

    @classmethod
    def parse(cls, name: bytes) -> "EntryName | None":
        """None for what is no entry's name."""
        match = _NAME.fullmatch(name.decode("utf-8", "replace"))
        if match is None or match[3] not in {kind.value for kind in EntryKind}:
            return None
        key = bytes.fromhex(match[6] + match[7] + match[8])
        return cls(match[2], EntryKind(match[3]), int(match[4]), int(match[5]), key)

    @property
    def tenant(self) -> str:
        return self.key[TENANT].hex()


@dataclass(frozen=True, slots=True)
class Names:
    """The names that one owner uses."""

    prefix: str
    owner: Owner
    salt: str = ""
    """The server's, which keeps the journals of servers that share nothing apart."""

    def entry(self, kind: EntryKind, key: bytes) -> str:
        if len(key) != KEY_BYTES:
            raise ValueError(f"a key has {KEY_BYTES} bytes, not {len(key)}")
        # The scheduler has no rank: it reads records by the first one's name.
        rank, size = (0, 1) if kind is EntryKind.RECORD else (self.owner.tp_rank, self.owner.tp_size)
        hexed = key.hex()
        tenant, group, rest = hexed[: 2 * TENANT.stop], hexed[2 * GROUP.start : 2 * GROUP.stop], hexed[2 * GROUP.stop :]
        return f"{self._model}:{kind.value}:{rank}-{size}:{tenant}:{{{group}}}{rest}"

    @property
    def journal(self) -> str:
        return f"{self._model}:journal:{blake3(self.salt.encode()).hexdigest()[:16]}"

    @property
    def edges(self) -> str:
        return f"{self._model}:edges"

    @property
    def _model(self) -> str:
        return f"{self.prefix}:{model_mark(self.owner.model)}"
