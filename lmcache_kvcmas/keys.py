"""Keys of entries: blake3 over (format, model, tenant salt, kind, content). No part of them is Python's own hash."""

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from lmcache_kvcmas.entries import FORMAT, EntryKind
from lmcache_kvcmas.spans import Edge

KEY_BYTES = 32
"""Of a key: 6 bytes that name model and tenant, 4 that name its group, 22 of the content's hash."""
TENANT = slice(0, 6)
GROUP = slice(6, 10)
"""Keys of one group are worth keeping on one node of a cluster: they are read together."""

_CONTEXT = "lmcache-kvcmas 2026 entry keys"
_CHAIN = "lmcache-kvcmas 2026 token chain"


def _field(data: bytes) -> bytes:
    # The length in front keeps ("ab", "c") and ("a", "bc") apart.
    return len(data).to_bytes(8, "little") + data


def chain_hash(parent: bytes | None, tokens: NDArray[np.int32]) -> bytes:
    """32 bytes that name ``tokens`` and everything in front of them.

    ``parent`` is the hash of what stands in front, None at the start of a prompt. ``tokens`` may be of any integer
    type; they are hashed as little-endian int32. The same split into chunks must be used on both sides of a comparison.
    """
    hasher = blake3(derive_key_context=_CHAIN)
    hasher.update(_field(parent or b""))
    hasher.update(np.ascontiguousarray(tokens, dtype="<i4").tobytes())
    return hasher.digest()


class KeySpace:
    """Makes the 32-byte keys of one model for one tenant.

    A key names content, not a rank's part of it: the scheduler plans with one key, and every tensor-parallel rank's
    store keeps its own heads under it.

    Args:
        model: fingerprint of the model revision, its tokenizer and RoPE.
        salt: the tenant's salt; two salts never produce the same key.
    """

    def __init__(self, model: str, salt: str = "") -> None:
        self.model = model
        self._hasher = blake3(derive_key_context=_CONTEXT)
        for part in (FORMAT.to_bytes(2, "little"), model.encode(), salt.encode()):
            self._hasher.update(_field(part))
        self.tenant = self._hasher.digest(length=TENANT.stop)

    def key(self, kind: EntryKind, content: bytes, group: bytes | None = None) -> bytes:
        """The key of an entry of ``kind`` whose content is named by ``content`` (a hash, or any bytes).

        ``group`` (4 bytes that follow from ``content``) names what the entry is read together with.
        """
        hasher = self._hasher.copy()
        hasher.update(_field(kind.value.encode()))
        hasher.update(_field(content))
        digest = hasher.digest()
        return self.tenant + (group or digest[GROUP]) + digest[GROUP.stop :]

    def base(self, content: bytes, group: bytes | None = None) -> bytes:
        """Full-width chunk."""
        return self.key(EntryKind.BASE, content, group)

    def delta(self, content: bytes, group: bytes | None = None) -> bytes:
        """A run's own delta on an edge."""
        return self.key(EntryKind.DELTA, content, group)

    def anchor(self, content: bytes) -> bytes:
        """One anchor of an edge."""
        return self.key(EntryKind.ANCHOR, content)

    def record(self, content: bytes) -> bytes:
        """The manifest of a request."""
        return self.key(EntryKind.RECORD, content)

    def pool(self, edge: Edge) -> bytes:
        """The list of an edge's anchors. The one kind whose content changes under its key."""
        parts = (edge.source.encode(), edge.destination.encode(), str(edge.slot).encode())
        return self.key(EntryKind.POOL, b"".join(_field(part) for part in parts))
