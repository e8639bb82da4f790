"""Changing single settings in an LMCache file that people wrote: comments, order and everything else stay."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from lmcache_kvcmas.config import PREFIX, Settings
from lmcache_kvcmas.errors import ConfigError


def write_settings(path: Path, values: Mapping[str, Any]) -> Path:
    """Set ``kvcmas.NAME`` under ``extra_config`` for each name in ``values``; returns the backup, ``path`` + ``.bak``.

    The file is replaced in one step, so a reader finds the old one or the new one. Raises ConfigError, and leaves the
    file as it is, when it cannot be read or written, or when its settings would not be valid.
    """
    yaml = YAML()  # round-trip: what is not touched is written as it was read
    yaml.preserve_quotes = True
    yaml.width = 1 << 16
    try:
        text = path.read_text("utf-8")
        data = yaml.load(text)
    except (OSError, UnicodeDecodeError, YAMLError) as error:
        raise ConfigError(f"{path} cannot be read as YAML: {error}") from error
    data = {} if data is None else data
    if not isinstance(data, dict) or not isinstance(data.get("extra_config") or {}, dict):
        raise ConfigError(f"{path} must be a mapping of LMCache's settings, extra_config in it another one")
    if not data.get("extra_config"):
        data["extra_config"] = {}
    for name, value in values.items():
        data["extra_config"][PREFIX + name] = value
    Settings.from_extra_config(dict(data["extra_config"]))
    backup, new = Path(f"{path}.bak"), Path(f"{path}.new")
    try:
        shutil.copy2(path, backup)
        with new.open("w", encoding="utf-8") as file:
            yaml.dump(data, file)
        shutil.copymode(path, new)
        os.replace(new, path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from error
    return backup
