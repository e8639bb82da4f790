"""Long texts: a register of many records, and a question about one of them.

``long`` has contexts of about 2,000 tokens, ``long:6000`` of about 6,000, as SmolLM2 counts. 500 to 7,500 are allowed:
with what else stands in a prompt, that fits a model of 8,192 positions. Not judged: SmolLM2-135M (Q4_1) finds 2 of 6
among 20 such records and 1 of 6 among 60, so that among 100 a right answer would mostly be luck (one in twelve).
"""

import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ...errors import ConfigError
from ..frameworks import Task
from .splits import USES, Counts, take
from .teams import read_team

DEFAULT_TOKENS = 2_000
SMALLEST, LARGEST = 500, 7_500
_RECORD_TOKENS = 20
_OBJECTS = (
    *("violin", "ladder", "kettle", "blanket", "hammer", "mirror", "clock", "carpet", "bucket", "helmet", "basket"),
    *("candle", "piano", "table", "chair", "lamp", "shirt", "sword", "drum", "boat", "coat", "box", "bag", "bell"),
)
_COLOURS = ("red", "green", "blue", "black", "white", "yellow", "brown", "grey", "pink", "silver", "purple", "orange")
_STATES = ("old", "new")
_SHELVES = ("apple", "river", "tiger", "moon", "stone", "tree", "gold", "bear", "star", "fish", "cloud", "horse")
_PLACES = ("station", "library", "market", "harbour", "theatre", "museum", "school", "airport")
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


class Record(NamedTuple):
    thing: str
    answer: str
    rest: str


def long(name: str, counts: Counts, seed: int, tokens: int = DEFAULT_TOKENS) -> Sequence[Task]:
    """Registers of about ``tokens`` tokens. Raises ConfigError when that is out of bounds."""
    if not SMALLEST <= tokens <= LARGEST:
        raise ConfigError(f"task set {name!r}: contexts of {tokens} tokens; {SMALLEST} to {LARGEST} are allowed")
    return [
        _task(f"{name}-{use}-{i:02d}", name, use, register, random.Random(f"{seed}/{name}/{use}/{i}"))
        for use in USES
        for i, register in enumerate(
            take(name, _registers(random.Random(f"{seed}/{name}/{use}"), tokens), _text, use, counts.of(use))
        )
    ]


def _registers(rng: random.Random, tokens: int) -> Iterator[tuple[Record, ...]]:
    things = [f"{state} {colour} {thing}" for state in _STATES for colour in _COLOURS for thing in _OBJECTS]
    while True:
        yield tuple(_record(rng, thing) for thing in rng.sample(things, tokens // _RECORD_TOKENS))


def _record(rng: random.Random, thing: str) -> Record:
    shelf, place, day = (rng.choice(words) for words in (_SHELVES, _PLACES, _DAYS))
    return Record(thing, f"The {thing} is on the {shelf} shelf.", f"It was found at the {place} on {day}.")


def _text(register: Sequence[Record]) -> str:
    return "\n".join(["Lost property:", *(f"{record.answer} {record.rest}" for record in register)])


def _task(id: str, name: str, use: str, register: Sequence[Record], rng: random.Random) -> Task:
    *shown, asked = rng.sample(register, 3)
    return Task(
        id=id,
        workload=name,
        use=use,
        context=_text(register),
        team=read_team("team"),
        question=_question(asked),
        examples=tuple((_question(record), record.answer) for record in shown),
        answer_tokens=16,
    )


def _question(record: Record) -> str:
    return f"Where is the {record.thing}?"
