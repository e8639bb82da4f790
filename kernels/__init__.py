"""Tensors only: rotate, correct, factorise. Nothing here knows agents, models or engines.

Shapes use the package's letters: ``T`` tokens, ``L`` layers, ``H`` KV heads, ``D`` head dim, ``C = H·D`` channels,
``r`` rank. A layer's K and V are ``[T, C]``, heads side by side.
"""
