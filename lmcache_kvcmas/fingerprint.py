"""Winnowing: few fingerprints of a token sequence that any two sequences with a long common run are bound to share.

Method: Schleimer, Wilkerson, Aiken, "Winnowing: local algorithms for document fingerprinting" (SIGMOD 2003). The hash
of every `GRAM` consecutive tokens is taken, and of each window of `WINDOW` consecutive hashes the least one is kept. A
run of `GUARANTEE` tokens fills a whole window, wherever it stands, so both sequences keep the same hash inside it.
About two in fifty positions are kept.

Hashes are polynomials mod 2^64 over mixed tokens. The salt goes into the mixing, and nothing depends on the process, so
every node computes the same fingerprints and two salts share none. A hash is only ever a hint: who uses it compares
tokens.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from blake3 import blake3

Tokens = npt.NDArray[np.int32]
Hashes = npt.NDArray[np.uint64]
Positions = npt.NDArray[np.int64]

GRAM = 16
"""Tokens in one hash."""
WINDOW = 49
"""Consecutive hashes of which the least is kept."""
GUARANTEE = GRAM + WINDOW - 1
"""Length in tokens from which on a common run always shares a fingerprint: 64."""
SHORTEST_PREFIX = 16
"""Prefixes shorter than this are not looked for: a hit would save less than it costs."""

_POSITION_BITS = 24
_LONGEST = 1 << _POSITION_BITS
_MULTIPLIER = 0x9E3779B97F4A7C15  # odd, so that multiplying loses nothing mod 2^64
_WORD = (1 << 64) - 1


class Fingerprints(NamedTuple):
    """``hashes`` uint64 and the ``positions`` int64 at which their k-grams begin, ascending."""

    hashes: Hashes
    positions: Positions


def fingerprint(tokens: Tokens, salt: str = "") -> Fingerprints:
    """The winnowed fingerprints of int32 ``tokens`` ``[T]``; none when T < `GUARANTEE`.

    Among equal hashes of a window the leftmost is kept. Only the first 2^24 tokens take part.
    """
    mixed = _mixed(tokens[:_LONGEST], salt)
    if len(mixed) < GUARANTEE:
        return Fingerprints(np.empty(0, np.uint64), np.empty(0, np.int64))
    hashes = _finish(_grams(mixed))
    # The position rides in the low bits: one minimum then gives the place as well, and prefers the left one.
    low = np.uint64(_LONGEST - 1)
    keys = (hashes & ~low) | np.arange(len(hashes), dtype=np.uint64)
    chosen = (_window_minimum(keys) & low).astype(np.int64)
    first = np.ones(len(chosen), np.bool_)
    first[1:] = chosen[1:] != chosen[:-1]  # minima of sliding windows only move right
    positions = chosen[first]
    return Fingerprints(hashes[positions], positions)


def prefix_fingerprints(tokens: Tokens, salt: str = "") -> Fingerprints:
    """Hashes of the prefixes of ``tokens`` with 16, 32, 48, 64 and then every further 64 tokens.

    Returns:
        ``hashes`` as above (of another family: a prefix never meets a k-gram) and, as ``positions``, the lengths.
    """
    mixed = _mixed(tokens[:_LONGEST], salt)
    lengths = np.concatenate([np.arange(16, 64, 16), np.arange(64, len(mixed) + 1, 64)]).astype(np.int64)
    lengths = lengths[lengths <= len(mixed)]
    if not len(lengths):
        return Fingerprints(np.empty(0, np.uint64), lengths)
    sums = np.cumsum(mixed * _powers(len(mixed)), dtype=np.uint64)
    return Fingerprints(_finish(sums[lengths - 1] ^ (lengths.astype(np.uint64) << np.uint64(40))), lengths)


def _mixed(tokens: Tokens, salt: str) -> Hashes:
    """A well-spread 64-bit word for each token; splitmix64's finaliser over token and salt."""
    return _finish(tokens.astype(np.uint32).astype(np.uint64) + np.uint64(_salt_word(salt)))


@lru_cache(maxsize=256)
def _salt_word(salt: str) -> int:
    digest = blake3(b"kvcmas fingerprint\0" + salt.encode("utf-8", "surrogatepass")).digest(length=8)
    return int.from_bytes(digest, "little")


def _finish(x: Hashes) -> Hashes:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _grams(mixed: Hashes) -> Hashes:
    """Σ mixed[i + j]·m^(GRAM−1−j) for every i, by doubling the length of what is summed."""
    h, width = mixed, 1
    while width < GRAM:
        power = np.uint64(pow(_MULTIPLIER, width, _WORD + 1))
        h = h[:-width] * power + h[width:]
        width *= 2
    return h


def _window_minimum(keys: Hashes) -> Hashes:
    """The least of every WINDOW consecutive keys: minima over 32 by doubling, then two that overlap."""
    low, width = keys, 1
    while width * 2 <= WINDOW:
        low = np.minimum(low[:-width], low[width:])
        width *= 2
    rest = WINDOW - width
    return np.minimum(low[: len(low) - rest], low[rest:])


_power_table: Hashes = np.ones(1, np.uint64)


def _powers(n: int) -> Hashes:
    """m^0 … m^(n−1) mod 2^64; the table grows by doubling and is kept."""
    global _power_table
    table = _power_table
    while len(table) < n:
        step = np.uint64(pow(_MULTIPLIER, len(table), _WORD + 1))
        table = np.concatenate([table, table * step])
    _power_table = table
    return table[:n]
