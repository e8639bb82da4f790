"""Prompt-specialised agents take over one another's KV cache, through LMCache, inside vLLM.

Letters used throughout: ``T`` tokens, ``L`` layers, ``H`` KV heads, ``D`` head dim, ``C = H·D`` channels, ``r`` rank,
``A`` anchors of an edge. An *edge* is (source agent, destination agent, slot); a *hop* is one use of an edge.
"""

__version__ = "0.1.0"
