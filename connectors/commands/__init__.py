"""What the `kvcmas` commands do once their options are parsed: one module a command.

``opened`` finds the server that a file names, ``catalogue`` lists what is ours there, ``shown`` spells figures.
"""
