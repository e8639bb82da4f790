"""`kvcmas report`: what `kvcmas evaluate`, `calibrate` and `ablate` wrote, as one HTML page that needs no network.

``documents`` reads the JSON, ``merging`` makes one of several; ``kinds`` orders methods, ``numbers`` spells figures.
``words`` says in sentences what the data show, ``tables`` hold every number, ``comparison``, ``tradeoff``, ``curves``
and ``ablations`` are charts, drawn on what ``canvas`` and ``labels`` give. ``sections`` puts them in order, ``command``
writes the page.
"""

from .command import run_report

__all__ = ["run_report"]
