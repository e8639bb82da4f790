"""A memory object of LMCache's in the caller's hands: to write an entry into, or to read one from."""

from collections.abc import Callable, Mapping
from types import MappingProxyType, TracebackType
from typing import Any

from torch import Tensor

from lmcache_kvcmas.entries import Entry, EntryLayout, Meta


class LMCacheReservation:
    """See ``store.Reservation``."""

    def __init__(self, layout: EntryLayout, obj: Any, commit: Callable[[Any], bool], release: Callable[[Any], None]):
        self._layout, self._obj, self._commit, self._release = layout, obj, commit, release
        self._tensors = layout.views(obj.raw_data)

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        return self._tensors

    def commit(self) -> bool:
        if self._obj is None:
            return False
        self._layout.seal(self._obj.raw_data)
        return self._commit(self._take())

    def abandon(self) -> None:
        if self._obj is not None:
            self._release(self._take())

    def _take(self) -> Any:
        obj, self._obj, self._tensors = self._obj, None, {}
        return obj


class LMCacheLease:
    """See ``store.Lease``."""

    def __init__(self, entry: Entry, obj: Any, release: Callable[[Any], None]):
        self._obj, self._release = obj, release
        self._tensors: Mapping[str, Tensor] = MappingProxyType(dict(entry.tensors))
        self._meta: Meta = MappingProxyType(entry.header.meta)

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        return self._tensors

    @property
    def meta(self) -> Meta:
        return self._meta

    def release(self) -> None:
        obj, self._obj, self._tensors = self._obj, None, {}
        if obj is not None:
            self._release(obj)

    def __enter__(self) -> "LMCacheLease":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
