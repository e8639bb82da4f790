"""Settings of the Redis tier: the ``remote_storage_plugin.kvcmas.*`` keys under ``extra_config`` of LMCache's file."""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from lmcache_kvcmas.errors import ConfigError
from lmcache_kvcmas.rules import Bytes, Choice, Rule, Switch, Text, Whole, shown

PREFIX = "remote_storage_plugin.kvcmas."
LMCACHE_KEYS = ("module_path", "class_name")
"""Keys below ``PREFIX`` that LMCache itself reads."""
MODES = ("standalone", "cluster", "sentinel")
BREAKER_MAX_MS = 5000
"""Longest pause before the next probe: with a time-out on top, service is back within 10 s."""

_URL = "redis://, rediss:// or unix://, as redis://user:password@host:6379/0 or unix:///run/redis.sock?db=0"


class Address(NamedTuple):
    host: str
    port: int


class _Prefix(NamedTuple):
    allowed: str = "1 to 64 characters, none of them a space, a brace, a quote, a backslash or one of * ? [ ] ^"

    def parse(self, value: Any) -> str | None:
        ok = isinstance(value, str) and re.fullmatch(r"[^\s{}*?\[\]^\\'\"\x00-\x1f\x7f]{1,64}", value)
        return value if ok else None


class _Nodes(NamedTuple):
    allowed: str = 'a list of "host:port", or one text with commas between them'

    def parse(self, value: Any) -> tuple[Address, ...] | None:
        parts = value.split(",") if isinstance(value, str) else value
        if not isinstance(parts, list | tuple):
            return None
        nodes: list[Address] = []
        for part in parts:
            if isinstance(part, Address):
                part = f"[{part.host}]:{part.port}" if ":" in part.host else f"{part.host}:{part.port}"
            if not isinstance(part, str):
                return None
            if not part.strip() and isinstance(value, str):
                continue
            try:
                split = urlsplit(f"//{part.strip()}")
                host, port = split.hostname, split.port
            except ValueError:
                return None
            if not host or not port or split.path or split.query or "@" in part:
                return None
            nodes.append(Address(host, port))
        return tuple(dict.fromkeys(nodes))


class _Secret(NamedTuple):
    allowed: str = "a text of at most 512 characters (in quotes, if it looks like a number)"

    def parse(self, value: Any) -> str | None:
        return value if isinstance(value, str) and len(value) <= 512 else None


class _File(NamedTuple):
    allowed: str = "the path of a file that this process may read"

    def parse(self, value: Any) -> str | None:
        if not isinstance(value, str):
            return None
        try:
            if value:
                with Path(value).expanduser().open("rb"):
                    pass
        except (OSError, ValueError, RuntimeError):
            return None
        return str(Path(value).expanduser()) if value else ""


_RULES: dict[str, Rule | _Prefix | _Nodes | _Secret | _File] = {
    "url": _Secret(),
    "mode": Choice(MODES),
    "sentinel_master": Text(),
    "nodes": _Nodes(),
    "username": _Secret(),
    "password": _Secret(),
    "password_file": _File(),
    "tls_ca": _File(),
    "tls_cert": _File(),
    "tls_key": _File(),
    "tls_verify": Switch(),
    "prefix": _Prefix(),
    "ttl_seconds": Whole(0, 10 * 366 * 86400),
    "timeout_ms": Whole(1, 60_000),
    "connections": Whole(1, 64),
    "max_inflight_bytes": Bytes(1 << 20),
    "max_bytes": Bytes(0),
    "breaker_ms": Whole(10, BREAKER_MAX_MS),
}


@dataclass(frozen=True, slots=True)
class RedisSettings:
    """What a person can set. Valid once it exists; its repr, and no error of it, shows a password.

    Raises:
        ConfigError: a value of the wrong type or out of range, or values that contradict each other.
    """

    url: str
    """The server, the first node of the cluster, or the first sentinel. User and password in it are taken out of it."""
    mode: str = "standalone"
    """``standalone``, ``cluster`` or ``sentinel``."""
    sentinel_master: str = ""
    """Name under which the sentinels know the master."""
    nodes: tuple[Address, ...] = ()
    """Further nodes of the cluster, or further sentinels, that are asked if the first does not answer."""
    username: str = ""
    """ACL user; ``default`` if there is a password only."""
    password: str = field(default="", repr=False)
    password_file: str = ""
    """File with the password alone; read at every connect, so it may change. Goes before ``password``."""
    tls_ca: str = ""
    """PEM file of the authorities that are trusted; the system's if not given."""
    tls_cert: str = ""
    """PEM file of the client's own certificate, with ``tls_key``."""
    tls_key: str = ""
    tls_verify: bool = True
    """Check the server's certificate and host name."""
    prefix: str = "kvcmas"
    """First part of every key."""
    ttl_seconds: int = 604_800
    """Life of a key after its last use; 0: no end."""
    timeout_ms: int = 250
    """For a whole batch, connecting included."""
    connections: int = 4
    """At most, per server; those that wait for news of a stream are not counted."""
    max_inflight_bytes: int = 256 << 20
    """Bytes of values that are on their way at any time, read or written; what is beyond it waits."""
    max_bytes: int = 0
    """Budget of the keys below ``prefix``; 0: the server's ``maxmemory`` decides."""
    breaker_ms: int = 500
    """First pause after a failure; it doubles, with jitter, up to 5 s."""

    def __post_init__(self) -> None:
        for item in fields(self):
            object.__setattr__(self, item.name, _checked(item.name, getattr(self, item.name)))
        url = _split(self.url)
        user, password = unquote(url.username or ""), unquote(url.password or "")
        if (user and self.username) or (password and (self.password or self.password_file)):
            name = "username" if user and self.username else "password_file" if self.password_file else "password"
            raise ConfigError(f"{PREFIX}{name} is given, and so it is in the url. Allowed: one of the two.")
        object.__setattr__(self, "username", self.username or user)
        object.__setattr__(self, "password", self.password or password)
        object.__setattr__(self, "url", _bare(url))
        self._refuse_contradictions()

    @classmethod
    def from_extra_config(cls, extra: Mapping[Any, Any] | None) -> "RedisSettings":
        """The settings in ``extra_config``; keys of others are left to them.

        Raises:
            ConfigError: no url, an unknown key of ours (the nearest known one is named), or a bad value.
        """
        if extra is not None and not isinstance(extra, Mapping):
            raise ConfigError(
                f"extra_config is {shown(extra)}. Allowed: a mapping, such as `{PREFIX}url: redis://...`."
            )
        values: dict[str, Any] = {}
        for key, value in (extra or {}).items():
            if not isinstance(key, str) or not key.startswith(PREFIX):
                continue
            name = key.removeprefix(PREFIX)
            if name in LMCACHE_KEYS:
                continue
            if name not in _RULES:
                plain = name.lower().replace("-", "_")
                begun = [known for known in _RULES if plain and known.startswith(plain)]
                near = (begun or difflib.get_close_matches(plain, _RULES, n=1, cutoff=0.0))[0]
                raise ConfigError(
                    f"{shown(key)} in extra_config is not a setting. Did you mean {PREFIX}{near}? "
                    f"Allowed: {', '.join(PREFIX + known for known in _RULES)}."
                )
            values[name] = value
        if "url" not in values:
            raise ConfigError(f"{PREFIX}url is missing. Allowed: {_URL}.")
        return cls(**values)

    @property
    def tls(self) -> bool:
        return self.url.startswith("rediss:")

    @property
    def unix_path(self) -> str:
        """Path of the socket; empty if the server is reached over TCP."""
        return unquote(urlsplit(self.url).path) if self.url.startswith("unix:") else ""

    @property
    def db(self) -> int:
        url = urlsplit(self.url)
        return int(url.query.removeprefix("db=") or 0) if self.unix_path else int(url.path.strip("/") or 0)

    @property
    def addresses(self) -> tuple[Address, ...]:
        """The url's and the further nodes', in this order, each once."""
        url = urlsplit(self.url)
        first = () if self.unix_path else (Address(url.hostname or "localhost", url.port or 6379),)
        return tuple(dict.fromkeys((*first, *self.nodes)))

    def credentials(self) -> tuple[str | None, str | None]:
        """User and password as of now.

        Raises:
            OSError: the password file is gone.
            ValueError: it is no UTF-8 text.
        """
        password = self.password
        if self.password_file:
            password = Path(self.password_file).read_text(encoding="utf-8").strip("\r\n")
        return self.username or None, password or None

    def _refuse_contradictions(self) -> None:
        clustered, sentinel = self.mode == "cluster", self.mode == "sentinel"
        tls_file = next((name for name in ("tls_ca", "tls_cert", "tls_key") if getattr(self, name)), None)
        wrong = [
            (sentinel and not self.sentinel_master, "sentinel_master is missing", "the master's name"),
            (bool(self.sentinel_master) and not sentinel, "sentinel_master is given", f"with {PREFIX}mode: sentinel"),
            (
                bool(self.nodes) and not (clustered or sentinel),
                "nodes is given",
                f"with {PREFIX}mode: cluster or sentinel",
            ),
            (
                bool(self.unix_path) and (clustered or sentinel),
                f"mode is {self.mode!r}",
                "standalone, for a unix socket",
            ),
            (clustered and self.db != 0, f"url names database {self.db}", "database 0, the only one a cluster has"),
            (bool(tls_file) and not self.tls, f"{tls_file} is given", "with a rediss:// url"),
            (not self.tls_verify and not self.tls, "tls_verify is False", "with a rediss:// url"),
            (not self.tls_verify and bool(self.tls_ca), "tls_verify is False", "without tls_ca, which it would ignore"),
            (bool(self.tls_cert) != bool(self.tls_key), "tls_cert or tls_key is missing", "both, or neither"),
            (
                bool(self.username) and not (self.password or self.password_file),
                "username is given",
                "with a password, or a password_file",
            ),
        ]
        for bad, what, allowed in wrong:
            if bad:
                raise ConfigError(f"{PREFIX}{what} (mode: {self.mode}). Allowed: {allowed}.")


def _checked(name: str, value: Any) -> Any:
    rule = _RULES[name]
    parsed = rule.parse(value)
    if parsed is None:
        secret = name in ("url", "password")
        raise ConfigError(f"{PREFIX}{name} is {'not a text' if secret else shown(value)}. Allowed: {rule.allowed}.")
    return parsed


def _split(text: str) -> SplitResult:
    try:
        url = urlsplit(text)
        port = url.port
    except ValueError:
        raise ConfigError(f"{PREFIX}url is no URL that can be read. Allowed: {_URL}.") from None
    unix, query = url.scheme == "unix", parse_qs(url.query, keep_blank_values=True)
    db = query.get("db", ["0"])[0] if unix else url.path.strip("/") or "0"
    good = (
        url.scheme in ("redis", "rediss", "unix")
        and re.fullmatch(r"[0-9]{1,5}", db)
        and not url.fragment
        and (set(query) <= {"db"} and url.path.strip("/") and not url.hostname if unix else url.hostname and not query)
        and port != 0
    )
    if not good:
        plain = shown(_bare(url._replace(query="", fragment="")))
        raise ConfigError(f"{PREFIX}url is {plain}. Allowed: {_URL}; nothing else after a question mark.")
    return url


def _bare(url: SplitResult) -> str:
    """The URL without user and password."""
    return url._replace(netloc=url.netloc.rpartition("@")[2]).geturl()
