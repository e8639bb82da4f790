"""Errors that a person can act on. Failures while serving never reach a user: they end in dense prefill."""


class KVCMASError(Exception):
    """Base of all errors that this package raises on purpose."""


class ConfigError(KVCMASError, ValueError):
    """A setting is unknown or impossible. Names the setting, the value given and what is allowed."""


class UnsupportedModelError(KVCMASError, ValueError):
    """The model, its RoPE or its cache layout is one that corrections are not defined for. Names the cause."""


class UnsupportedEngineError(KVCMASError, RuntimeError):
    """The engine (its version, its options, its paged layout) is one that was not proved to work. Names the cause."""


class EntryError(KVCMASError, ValueError):
    """Bytes from a tier are not a whole, well-formed entry of this model. Readers treat it as a miss."""
