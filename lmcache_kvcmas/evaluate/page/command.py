"""What `kvcmas report` does once its options are parsed."""

from pathlib import Path

from ...errors import ConfigError
from .documents import read_document
from .merging import Named, merge


def run_report(documents: list[Path], out: Path, plots: Path | None) -> None:
    """Write one page of all ``documents`` to ``out``, and its charts as PNG and SVG files into the folder ``plots``.

    Raises ConfigError for documents that are none or do not fit together, for places that cannot be written, and where
    the libraries that draw are missing.
    """
    if not documents:
        raise ConfigError("nothing to report: give at least one JSON file of kvcmas evaluate, calibrate or ablate")
    merged = merge(Named(file, read_document(file)) for file in documents)
    try:
        from .render import render
        from .sections import charts, sections
        from .svg import write_plots
    except ImportError as error:
        raise ConfigError(f"kvcmas report needs {error.name}: pip install 'lmcache-kvcmas[evaluate]'") from error
    found = sections(merged.document)
    page = render(merged, found)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(page, "utf-8")
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written: {error.strerror or error}") from error
    if plots is not None:
        try:
            plots.mkdir(parents=True, exist_ok=True)
            for chart in charts(found):
                write_plots(chart, plots)
        except OSError as error:
            raise ConfigError(f"--plots {plots}: cannot be written: {error.strerror or error}") from error
