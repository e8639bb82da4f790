"""Keep approximate blocks out of vLLM's exact prefix cache.

vLLM hashes every full block of a request, those a connector filled included, as if it had computed them. Two
requests may share an approximate block only when both would get it from the same sources, so the hashes from the first
approximate block on are chained from a tag that names them; the blocks in front keep their exact hashes.
"""

from collections.abc import Callable
from typing import Any

from blake3 import blake3


def tag_blocks(request: Any, first: int, tag: bytes) -> None:
    """Re-hash ``request`` (a ``vllm.v1.request.Request``) from block ``first`` on, chained from ``tag``.

    Works with every hash algorithm vLLM offers: only the parent of block ``first`` changes (its cache salt when there
    is no parent), and the configured hasher does the rest, also for blocks that decoding completes later.
    """
    base: Callable[[Any], list[bytes]] | None = request._block_hasher
    if base is None:  # prefix caching is off: nothing can be shared
        return

    def tagged(request: Any) -> list[bytes]:
        hashes = request.block_hashes
        done = len(hashes)
        clean = base(request)
        if done > first or done + len(clean) <= first:  # chained from a tagged block already, or none is whole yet
            return clean
        clean = clean[: first - done]
        hashes.extend(clean)
        try:
            return clean + _from_tag(request, base, tag)
        finally:
            del hashes[done:]

    del request.block_hashes[first:]
    request._block_hasher = tagged
    request.update_block_hashes()


def _from_tag(request: Any, base: Callable[[Any], list[bytes]], tag: bytes) -> list[bytes]:
    hashes = request.block_hashes
    if hashes:
        parent = hashes[-1]
        hashes[-1] = type(parent)(blake3(parent + tag).digest(length=len(parent)))
        try:
            return base(request)
        finally:
            hashes[-1] = parent
    salt = request.cache_salt
    request.cache_salt = f"{salt or ''}|{tag.hex()}"
    try:
        return base(request)
    finally:
        request.cache_salt = salt
