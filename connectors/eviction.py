"""What memory gives up first: LMCache's cache policy interface, with an order that knows what entries are for."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from lmcache_kvcmas.entries import EntryKind

_OFTEN_SHARE = 4  # of five bases, four at most are kept for having been used again


class _Evictable(Protocol):
    @property
    def can_evict(self) -> bool: ...


class EntryPolicy:
    """Own deltas go before bases, bases used once before those used again, pools and anchors last; oldest use first.

    A delta is of no use without its base, and costs one agent's hop; a base serves every agent. The bases' two lists
    are a segmented LRU: a base that is read again moves to the second, whose oldest falls back to the first when the
    second outgrows its share. LMCache calls all of this under its own lock.
    """

    def __init__(self) -> None:
        self._deltas: OrderedDict[Any, None] = OrderedDict()
        self._once: OrderedDict[Any, None] = OrderedDict()
        self._often: OrderedDict[Any, None] = OrderedDict()
        self._others: OrderedDict[Any, None] = OrderedDict()
        self._kinds: dict[Any, EntryKind] = {}

    def expect(self, key: Any, kind: EntryKind) -> None:
        """Say what the entry is that is put under ``key`` next."""
        if len(self._kinds) > 2 * self._held() + 1000:
            self._kinds = {name: kind for name, kind in self._kinds.items() if self._holds(name)}
        self._kinds[key] = kind

    def init_mutable_mapping(self) -> OrderedDict[Any, Any]:
        return OrderedDict()

    def update_on_put(self, key: Any) -> None:
        self._forget(key)
        match self._kinds.get(key):
            case EntryKind.DELTA:
                self._deltas[key] = None
            case EntryKind.BASE:
                self._once[key] = None
            case _:
                self._others[key] = None

    def update_on_hit(self, key: Any, cache_dict: Mapping[Any, Any]) -> None:
        for order in (self._deltas, self._often, self._others):
            if key in order:
                order.move_to_end(key)
                return
        if key in self._once:
            del self._once[key]
            self._often[key] = None
            if len(self._often) > _OFTEN_SHARE * len(self._once):
                oldest, _ = self._often.popitem(last=False)
                self._once[oldest] = None

    def update_on_force_evict(self, key: Any) -> None:
        self._forget(key)
        self._kinds.pop(key, None)

    def get_evict_candidates(self, cache_dict: Mapping[Any, _Evictable], num_candidates: int = 1) -> list[Any]:
        found: list[Any] = []
        gone: list[Any] = []
        for key in self._in_order():
            entry = cache_dict.get(key)
            if entry is None:
                gone.append(key)  # LMCache does not say when it has evicted what it was given here
            elif entry.can_evict:
                found.append(key)
                if len(found) == num_candidates:
                    break
        for key in gone:
            self._forget(key)  # not its kind: it may be about to be put again
        return found

    @property
    def _orders(self) -> tuple[OrderedDict[Any, None], ...]:
        return self._deltas, self._once, self._often, self._others

    def _in_order(self) -> Iterable[Any]:
        for order in self._orders:
            yield from order

    def _held(self) -> int:
        return sum(len(order) for order in self._orders)

    def _holds(self, key: Any) -> bool:
        return any(key in order for order in self._orders)

    def _forget(self, key: Any) -> None:
        for order in self._orders:
            order.pop(key, None)
