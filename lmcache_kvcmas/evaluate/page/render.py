"""Sections made into HTML."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from .canvas import DARK, LIGHT, Theme
from .kinds import Kind
from .merging import Merged, Named
from .numbers import NATS, duration, nats, percent, ratio, ratios
from .parts import Section
from .scopes import scopes
from .svg import inline_svg
from .words import best_by_budget, in_short


def render(merged: Merged, sections: Sequence[Section]) -> str:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        nats=nats, percent=percent, ratio=ratio, ratios=ratios, duration=duration, setting=_setting
    )
    measured = scopes(merged.document)
    return environment.get_template("page.html.j2").render(
        model=Path(merged.document.model).name or merged.document.model,
        css=_css(),
        merged=merged,
        facts=_facts(merged.sources),
        short=in_short(merged.document),
        best=best_by_budget(measured[0].entries) if measured else [],
        nats_unit=NATS,
        best_on=measured[0].title if measured else "",
        sections=sections,
        svg=inline_svg,
        Kind=Kind,
    )


def _css() -> Markup:
    """The sheet, with both themes' colours as variables: the one place that knows them is Python's."""
    sheet = (Path(__file__).parent / "page.css").read_text("utf-8")
    return Markup(sheet.replace("/* light */", _variables(LIGHT)).replace("/* dark */", _variables(DARK)))


def _variables(theme: Theme) -> str:
    return " ".join(f"--{name.replace('_', '-')}: {colour};" for name, colour in asdict(theme).items())


def _facts(sources: Sequence[Named]) -> list[tuple[str, str]]:
    """The page's head: when, how long, on what, with which versions. Several files' differing values side by side."""
    documents = [named.document for named in sources]
    dates = sorted({d.run.date[:16].replace("T", " ") for d in documents if d.run.date})
    seconds = [d.run.seconds for d in documents if d.run.seconds is not None]
    versions = dict.fromkeys(name for d in documents for name in d.versions)
    facts = [
        ("Run", " to ".join(dates[:: max(1, len(dates) - 1)])),
        ("Took", duration(sum(seconds)) if seconds else ""),
        ("CPUs", ", ".join(dict.fromkeys(str(d.run.cpus) for d in documents if d.run.cpus is not None))),
        *(
            (name, ", ".join(dict.fromkeys(d.versions[name] for d in documents if name in d.versions)))
            for name in versions
        ),
    ]
    return [(name, value) for name, value in facts if value]


def _setting(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(":".join(map(str, v)) if isinstance(v, list) else _setting(v) for v in value)
    if isinstance(value, dict):
        return "; ".join(f"{name} {_setting(v)}" for name, v in value.items())
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
