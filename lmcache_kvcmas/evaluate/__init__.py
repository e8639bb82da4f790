"""`kvcmas evaluate`, `calibrate`, `ablate` and `report`: the method on a real model, without an engine, against dense.

A method (``methods``, some with ``partial``, which recomputes chosen tokens) turns a source agent's cache into the
destination's; what it is given and returns are ``cases``. Cases come from two places:

- ``workload`` (roles, contexts) → ``runs`` (what dense prefill gives) → ``run`` (single edges), ``chain``, ``ablate``;
- ``tasks`` and ``trace_file`` → ``traces`` → ``transcripts`` (dense, planned as the engine plans) → ``serve`` (every
  method on every call) → ``tracing``, ``calibrate``.

``dense`` is the model, ``measures`` compare, ``summaries`` make ``figures`` of rows, ``report`` shows them in a
terminal, ``document`` writes them down, ``page`` makes a page of what was written.
"""
