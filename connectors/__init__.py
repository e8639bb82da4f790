"""The outside: the vLLM connector, vLLM's paged caches, LMCache's tiers. Translates; holds no mathematics."""
