"""Without these, a wrong setting would be met while serving, or a password would stand in a log."""

from pathlib import Path
from typing import Any

import pytest

from lmcache_kvcmas.connectors.redis_settings import PREFIX, Address, RedisSettings
from lmcache_kvcmas.errors import ConfigError


def read(**settings: Any) -> RedisSettings:
    return RedisSettings.from_extra_config({PREFIX + name: value for name, value in settings.items()})


def test_the_file_s_keys_are_read_and_others_are_left_alone() -> None:
    settings = RedisSettings.from_extra_config(
        {
            f"{PREFIX}module_path": "lmcache_kvcmas.connectors.lmcache_remote",
            f"{PREFIX}class_name": "KVCMASRemoteConnector",
            f"{PREFIX}url": "rediss://us%40er:pass%2Fword@host:1234/3",
            f"{PREFIX}max_inflight_bytes": "64MiB",
            "remote_storage_plugin.other.url": "x",
            "kvcmas.rank": 8,
            7: "not a text",
        }
    )
    assert (settings.username, settings.password, settings.db, settings.tls) == ("us@er", "pass/word", 3, True)
    assert settings.addresses == (Address("host", 1234),)
    assert settings.max_inflight_bytes == 64 << 20
    assert (settings.ttl_seconds, settings.timeout_ms, settings.prefix) == (604800, 250, "kvcmas")


def test_nodes_are_a_list_or_a_text() -> None:
    want = (Address("a", 1), Address("b", 2), Address("::1", 3))
    assert read(url="redis://a:1", mode="cluster", nodes="b:2, [::1]:3,").addresses == want
    assert read(url="redis://a:1", mode="cluster", nodes=["b:2", "[::1]:3", "a:1"]).addresses == want


def test_a_unix_socket_has_a_path_and_a_database() -> None:
    settings = read(url="unix:///run/redis.sock?db=2")
    assert (settings.unix_path, settings.db, settings.addresses) == ("/run/redis.sock", 2, ())


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({}, ["url is missing", "redis://"]),
        ({"url": 7}, ["url is not a text"]),
        ({"url": "http://x"}, ["url is 'http://x'", "rediss://"]),
        ({"url": "redis://x:0"}, ["url", "redis://"]),
        ({"url": "redis://x:70000"}, ["url", "redis://"]),
        ({"url": "redis://x/one"}, ["url", "redis://"]),
        ({"url": "redis://x?socket_timeout=3"}, ["url", "question mark"]),
        ({"url": "unix://x"}, ["url", "unix:///"]),
        ({"ttl": 3}, ["'remote_storage_plugin.kvcmas.ttl'", "ttl_seconds?", "timeout_ms"]),
        ({"Timeout-MS": 3}, ["timeout_ms?"]),
        ({"mode": "fast"}, ["mode is 'fast'", "standalone, cluster, sentinel"]),
        ({"prefix": "a b"}, ["prefix is 'a b'", "space"]),
        ({"prefix": "a{b}"}, ["prefix", "brace"]),
        ({"prefix": "a*"}, ["prefix", "*"]),
        ({"prefix": ""}, ["prefix is ''"]),
        ({"ttl_seconds": -1}, ["ttl_seconds is -1", "from 0"]),
        ({"timeout_ms": 0}, ["timeout_ms is 0", "from 1"]),
        ({"timeout_ms": True}, ["timeout_ms is True"]),
        ({"connections": 0}, ["connections is 0"]),
        ({"max_inflight_bytes": "much"}, ["max_inflight_bytes is 'much'", "512MiB"]),
        ({"breaker_ms": 60000}, ["breaker_ms is 60000", "5000"]),
        ({"password_file": "/no/such/file"}, ["password_file is '/no/such/file'", "may read"]),
        ({"nodes": "a"}, ["nodes is 'a'", "host:port"]),
        ({"nodes": "a:1"}, ["nodes is given", "cluster or sentinel"]),
        ({"mode": "sentinel"}, ["sentinel_master is missing"]),
        ({"sentinel_master": "m"}, ["sentinel_master is given", "mode: sentinel"]),
        ({"url": "redis://x/1", "mode": "cluster"}, ["database 1", "database 0"]),
        ({"url": "unix:///x", "mode": "cluster"}, ["mode is 'cluster'", "standalone"]),
        ({"tls_ca": __file__}, ["tls_ca is given", "rediss://"]),
        ({"tls_verify": False}, ["tls_verify is False", "rediss://"]),
        ({"url": "rediss://x", "tls_cert": __file__}, ["tls_cert or tls_key is missing", "both"]),
        ({"url": "rediss://x", "tls_verify": False, "tls_ca": __file__}, ["tls_verify is False", "without tls_ca"]),
        ({"username": "u"}, ["username is given", "password"]),
        ({"url": "redis://:hunter2@x", "password": "b"}, ["password is given", "one of the two"]),
    ],
)
def test_what_cannot_be_is_refused_with_name_value_and_what_is_allowed(settings: Any, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read(**({"url": "redis://x"} | settings if settings else {}))
    for part in [*parts, "Allowed: "]:
        assert part in str(caught.value)


def test_a_password_is_never_shown(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("hunter3\n")
    assert "hunter" not in repr(read(url="redis://user:hunter2@x"))
    both = read(url="redis://x", password="hunter2", password_file=str(file))
    assert "hunter" not in repr(both)
    assert both.credentials() == (None, "hunter3")
    file.write_text("hunter4")
    assert both.credentials() == (None, "hunter4"), "a password that was changed needs a restart"
    for wrong in ("redis://user:hunter2@x?password=hunter2", "nothing://user:hunter2@x", "redis://user:hunter2@x:y"):
        with pytest.raises(ConfigError) as caught:
            read(url=wrong)
        assert "hunter" not in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        read(url="redis://x", password=["hunter2"])
    assert "hunter" not in str(caught.value)
