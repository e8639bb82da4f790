"""Facts that stand on both sides of the border between an agent's prompt and the text that all agents share.

The shared text says which depot each of five cities has. Each agent's own prompt says where its customers Alice, Robert
and Susan live, and another agent's Alice lives in another city. ``multihop`` asks the last agent for the depot of one
of its customers, so the answer joins a city from its prompt with a depot from the shared text. ``singlehop`` asks for
the depot of a city by its name: the shared text alone is enough. A cache that was computed behind another agent's
prompt carries that agent's customers. Agents keep their prompts from trace to trace; what changes is which cities the
week has besides those of the last agent's customers, which depot each has, and who is asked about.

The examples write both hops out (``Alice lives in Rome. The depot of Rome is moon.``). Two depots are given away by
them, so chance is one in three. Of 24 ``dev`` problems SmolLM2-135M, dense, two agents, answers 18 of ``singlehop`` and
10 of ``multihop`` (it takes the right city 11 times). The second is no better than chance: with a model of that size
compare distributions there, and accuracy only with a larger one. With eight cities a week, ``singlehop`` was 11 of 24,
at a chance of one in six.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ..frameworks import Agent, Task
from .judges import Choice
from .splits import USES, Counts, take

CITIES = ("Leeds", "York", "Oxford", "Bath", "Paris", "Rome", "London", "Boston")
CUSTOMERS = ("Alice", "Robert", "Susan")
DEPOTS = ("apple", "river", "tiger", "moon", "stone", "tree", "gold", "bear", "star", "fish", "cloud", "horse")
_NAMES = ("anna", "ben", "clara", "david", "emma", "frank", "grace", "henry")
_WEEK = 5
"""Cities of a week's list."""
_APART = (0, 2, 5)
"""Steps round the cities from the first customer's to each one's: colleagues' customers of one name never share one."""
_DUTIES = (
    "Keep your notes short.",
    "You have worked at the office for nine years and know its vans. Write plainly, and never repeat the list.",
    "You write for drivers who read on a small screen: short words, no lists, no greetings. When a record looks odd, "
    "say so in a few words and go on. Never guess a number, and never promise a time to anybody.",
    "Your notes are checked every evening by the head of the office. Name the record you rely on. Keep the order of "
    "the list, do not add records, and do not leave out any that you were asked about. If you cannot find a record, "
    "write that it is missing. Do not apologise, and do not explain how you found what you found.",
)


class Row(NamedTuple):
    city: str
    depot: str
    opens: int
    closes: int


def multihop(name: str, counts: Counts, seed: int) -> Sequence[Task]:
    """Both hops."""
    homes = _homes(len(_NAMES) - 1)
    return _tasks(
        name, counts, seed, homes, lambda who, depot: f"{_lives(who, homes[who])} {_depot(homes[who], depot)}"
    )


def singlehop(name: str, counts: Counts, seed: int) -> Sequence[Task]:
    """The control: the second hop alone, about the same cities."""
    cities = {city: city for city in _homes(len(_NAMES) - 1).values()}
    return _tasks(name, counts, seed, cities, _depot)


def team() -> tuple[Agent, ...]:
    """Eight dispatchers; the last one is asked."""
    return tuple(
        Agent(name, _role(i, name), "Greet the next dispatcher in one short sentence.") for i, name in enumerate(_NAMES)
    )


def _homes(agent: int) -> dict[str, str]:
    """City of each customer, in the prompt of one agent."""
    return {who: CITIES[(agent + step) % len(CITIES)] for who, step in zip(CUSTOMERS, _APART, strict=True)}


def _role(agent: int, name: str) -> str:
    customers = "\n".join(_lives(who, city) for who, city in _homes(agent).items())
    duties = _DUTIES[(agent + 1) % len(_DUTIES)]
    return f"You are {name.capitalize()}, a dispatcher at a parcel office. {duties}\nYour customers:\n{customers}"


def _tasks(
    name: str, counts: Counts, seed: int, asked: dict[str, str], answer: Callable[[str, str], str]
) -> list[Task]:
    """``asked``: the city of everybody that can be asked about; ``answer``: in full, from that and a depot."""
    tasks = []
    for use in USES:
        rng = random.Random(f"{seed}/{name}/{use}")
        for i, rows in enumerate(take(name, _weeks(rng), _text, use, counts.of(use))):
            depots = {row.city: row.depot for row in rows}
            *shown, last = rng.sample(sorted(asked), len(asked))
            tasks.append(
                Task(
                    id=f"{name}-{use}-{i:02d}",
                    workload=name,
                    use=use,
                    context=_text(rows),
                    team=team(),
                    question=_question(last),
                    examples=tuple((_question(whose), answer(whose, depots[asked[whose]])) for whose in shown),
                    judge=Choice(depots[asked[last]], DEPOTS),
                    answer_tokens=18,
                )
            )
    return tasks


def _weeks(rng: random.Random) -> Iterator[tuple[Row, ...]]:
    """The last agent's cities are always among them."""
    asked = list(_homes(len(_NAMES) - 1).values())
    others = [city for city in CITIES if city not in asked]
    while True:
        cities = asked + rng.sample(others, _WEEK - len(asked))
        rng.shuffle(cities)
        hours = [rng.choices(range(*span), k=_WEEK) for span in ((1, 6), (6, 10))]
        yield tuple(map(Row._make, zip(cities, rng.sample(DEPOTS, _WEEK), *hours, strict=True)))


def _text(rows: Sequence[Row]) -> str:
    lines = (f"{_depot(row.city, row.depot)} It opens at {row.opens} and closes at {row.closes}." for row in rows)
    return "\n".join(["The depots of this week:", *lines])


def _lives(who: str, city: str) -> str:
    return f"{who} lives in {city}."


def _depot(city: str, depot: str) -> str:
    return f"The depot of {city} is {depot}."


def _question(whose: str) -> str:
    return f"What is the depot of {whose}?"
