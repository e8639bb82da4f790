"""Connections as redis-py makes them: TCP, TLS or a unix socket, the password told, the database chosen."""

import functools
import os
import socket
import ssl
from typing import Any

from redis.connection import AbstractConnection, Connection, SSLConnection, UnixDomainSocketConnection
from redis.exceptions import AuthenticationError

from lmcache_kvcmas.connectors.redis_settings import Address, RedisSettings
from lmcache_kvcmas.connectors.redis_wire import left


def connect(settings: RedisSettings, address: Address | None, deadline: float, own: bool = True) -> AbstractConnection:
    """A connection of redis-py's, made and authenticated; ``own`` false: to a sentinel, without user and database."""
    seconds = left(deadline)
    user, password = _credentials(settings) if own else (None, None)
    options: dict[str, Any] = {
        "socket_timeout": seconds,
        "socket_connect_timeout": seconds,
        "username": user,
        "password": password,
        "db": settings.db if own else 0,
        "protocol": 2,
        "driver_info": None,
    }
    connection: AbstractConnection
    if address is None:
        connection = UnixDomainSocketConnection(path=settings.unix_path, **options)  # type: ignore[abstract,no-untyped-call]
    elif settings.tls:
        connection = _TLSConnection(_context(settings), host=address.host, port=address.port, **options)
    else:
        connection = Connection(host=address.host, port=address.port, **options)  # type: ignore[no-untyped-call]
    connection.connect()  # type: ignore[no-untyped-call]
    return connection


class _TLSConnection(SSLConnection):
    """redis-py reads all certificates of the system anew at every connect, which takes a good part of a deadline."""

    def __init__(self, context: ssl.SSLContext, **options: Any) -> None:
        super().__init__(**options)
        self._context = context

    def _wrap_socket_with_ssl(self, sock: socket.socket) -> ssl.SSLSocket:
        return self._context.wrap_socket(sock, server_hostname=self.host)


def _context(settings: RedisSettings) -> ssl.SSLContext:
    files = (settings.tls_ca, settings.tls_cert, settings.tls_key)
    stamps = tuple(os.stat(file).st_mtime_ns if file else 0 for file in files)
    return _made_context(*files, settings.tls_verify, stamps)


@functools.lru_cache(maxsize=4)
def _made_context(ca: str, cert: str, key: str, verify: bool, stamps: tuple[int, ...]) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=ca or None)
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if cert:
        context.load_cert_chain(cert, key)
    return context


def _credentials(settings: RedisSettings) -> tuple[str | None, str | None]:
    try:
        return settings.credentials()
    except (OSError, ValueError) as error:
        raise AuthenticationError(f"password_file {settings.password_file} cannot be read: {error}") from error
