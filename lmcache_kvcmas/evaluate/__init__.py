"""`kvcmas evaluate`: the method on a real model, without an engine, measured against dense prefill.

``workload`` (roles and contexts) and ``dense`` (the model) feed ``runs`` (what dense prefill gives); ``cases`` are
single transitions; ``methods`` turn a source agent's cache into the destination's, some with ``partial``, which
recomputes chosen tokens; ``measures`` compare, ``run`` and ``chain`` drive, ``report`` shows.
"""
