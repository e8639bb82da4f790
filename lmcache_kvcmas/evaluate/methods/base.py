"""What every method is."""

from typing import Protocol, Self

from ..cases import Case, Examples, Outcome


class Method(Protocol):
    """Turns a source agent's cache of a run into the destination agent's."""

    @property
    def name(self) -> str: ...

    def learned(self, examples: Examples) -> "Method":
        """The method as an edge's anchor contexts teach it, offline; itself where there is nothing to learn."""
        ...

    def apply(self, case: Case) -> Outcome:
        """The run's cache behind the destination's prefix, and what it cost."""
        ...


class Untaught:
    """A method that learns nothing from anchor contexts."""

    __slots__ = ()

    def learned(self, examples: Examples) -> Self:
        return self
