"""Real redis-servers for tests: one, a replica, a cluster, sentinels; killed, stopped, started again, or slow."""

import contextlib
import datetime
import ipaddress
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


def binary() -> str:
    found = shutil.which("redis-server") or shutil.which("redis-server", path=str(Path(sys.executable).parent))
    if found is None:
        raise RuntimeError(
            "These tests need a redis-server on the PATH or in .venv/bin: run tests/install_redis.sh, or install it "
            "(Debian: apt-get install redis-server; macOS: brew install redis)."
        )
    return found


def free_port() -> int:
    """One whose cluster bus port (+10000) is a port too."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if port < 55000:
            return port


class RedisServer:
    """One process in ``folder``; ``options`` as in redis.conf, ``name=value`` or pairs for repeated ones."""

    def __init__(self, folder: Path, *options: tuple[str, str], sentinel: bool = False, tls: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.port = folder, free_port()
        self._tls = tls
        ports = [("port", "0"), ("tls-port", str(self.port))] if tls else [("port", str(self.port))]
        fixed = [("bind", "127.0.0.1"), ("dir", str(folder)), ("daemonize", "no"), ("logfile", str(folder / "log"))]
        if not sentinel:
            fixed += [("save", '""'), ("appendonly", "no"), ("repl-diskless-sync-delay", "0")]
        self._config = folder / "redis.conf"
        self._config.write_text("".join(f"{name} {value}\n" for name, value in [*ports, *fixed, *options]))
        self._command = [binary(), str(self._config), *(["--sentinel"] if sentinel else [])]
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"redis{'s' if self._tls else ''}://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Starts it on its port, empty."""
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until = time.monotonic() + 10
        while time.monotonic() < until:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 0.5):
                return
            if self._process.poll() is not None:
                break
            time.sleep(0.02)
        log = self.folder / "log"
        raise RuntimeError(f"{self._command} did not start: {log.read_text() if log.exists() else 'it wrote no log'}")

    def kill(self) -> None:
        if self._process:
            self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        self.kill()
        self.start()

    def stop(self) -> None:
        """Hangs: the kernel still takes connections, nobody answers."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        assert self._process
        os.kill(self._process.pid, number)

    def cli(self, *command: str | bytes | int, user: str = "", password: str = "", timeout: float = 5) -> bytes:
        """The raw start of the reply, by a socket of its own (no TLS)."""
        with socket.create_connection(("127.0.0.1", self.port), timeout) as sock:
            if password:
                sock.sendall(packed("AUTH", *([user] if user else []), password))
                assert sock.recv(100) == b"+OK\r\n"
            sock.sendall(packed(*command))
            return sock.recv(1 << 16)


def packed(*command: str | bytes | int) -> bytes:
    parts = [part if isinstance(part, bytes) else str(part).encode() for part in command]
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts)


class Proxy:
    """Passes bytes on to a port, after ``delay`` seconds for each packet from the client."""

    def __init__(self, port: int, delay: float) -> None:
        self.target, self.delay = port, delay
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listening.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                server = socket.create_connection(("127.0.0.1", self.target))
                threading.Thread(target=self._pass, args=(client, server, True), daemon=True).start()
                threading.Thread(target=self._pass, args=(server, client, False), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, slow: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if slow:
                    time.sleep(self.delay)
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)


class Certificates:
    """An authority, and what it signed for 127.0.0.1; ``other`` is an authority that signed nothing."""

    def __init__(self, folder: Path) -> None:
        self.ca, self.cert, self.key, self.other = (
            folder / name for name in ("ca.pem", "cert.pem", "key.pem", "other.pem")
        )
        folder.mkdir(parents=True, exist_ok=True)
        authority, certificate = _certificate("the authority", None)
        self.ca.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        key, signed = _certificate("127.0.0.1", (authority, certificate))
        self.cert.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        self.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        self.other.write_bytes(_certificate("another", None)[1].public_bytes(serialization.Encoding.PEM))

    @property
    def options(self) -> list[tuple[str, str]]:
        return [
            ("tls-cert-file", str(self.cert)),
            ("tls-key-file", str(self.key)),
            ("tls-ca-cert-file", str(self.ca)),
            ("tls-auth-clients", "yes"),
        ]


_Signer = tuple[ec.EllipticCurvePrivateKey, x509.Certificate]


def _certificate(name: str, signer: _Signer | None) -> _Signer:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(signer[1].subject if signer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=signer is None, path_length=None), critical=True)
    )
    if signer:
        address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        builder = builder.add_extension(x509.SubjectAlternativeName([address]), critical=False)
    return key, builder.sign(signer[0] if signer else key, hashes.SHA256())


class Servers:
    """Starts servers in folders of ``root``; all are killed at the end."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._started: list[RedisServer] = []
        self.proxies: list[Proxy] = []

    def one(self, *options: tuple[str, str], sentinel: bool = False, tls: bool = False) -> RedisServer:
        if tls and b"SSL_CTX_new" not in Path(binary()).read_bytes():
            pytest.skip("this redis-server was built without TLS")
        server = RedisServer(self._root / f"redis{len(self._started)}", *options, sentinel=sentinel, tls=tls)
        self._started.append(server)
        return server

    def replica(self, of: RedisServer) -> RedisServer:
        """A read-only replica, once it has what its master has."""
        replica = self.one(("replicaof", f"127.0.0.1 {of.port}"))
        wait_until(lambda: b"master_link_status:up" in replica.cli("INFO", "replication"), 20)
        return replica

    def cluster(self, size: int = 3) -> list[RedisServer]:
        options = [("cluster-enabled", "yes"), ("cluster-node-timeout", "2000")]
        nodes = [self.one(*options) for _ in range(size)]
        share = 16384 // size
        for place, node in enumerate(nodes):
            last = 16383 if place == size - 1 else (place + 1) * share - 1
            assert b"OK" in node.cli("CLUSTER", "ADDSLOTSRANGE", place * share, last)
            if place:
                assert b"OK" in node.cli("CLUSTER", "MEET", "127.0.0.1", nodes[0].port)
        wait_until(
            lambda: all(
                b"cluster_state:ok" in node.cli("CLUSTER", "INFO")
                and b"cluster_known_nodes:%d" % size in node.cli("CLUSTER", "INFO")
                for node in nodes
            ),
            30,
        )
        return nodes

    def sentinel(self, master: RedisServer, name: str) -> RedisServer:
        return self.one(
            ("sentinel", f"monitor {name} 127.0.0.1 {master.port} 1"),
            ("sentinel", f"down-after-milliseconds {name} 500"),
            ("sentinel", f"failover-timeout {name} 2000"),
            sentinel=True,
        )

    def proxy(self, server: RedisServer, delay: float) -> Proxy:
        self.proxies.append(Proxy(server.port, delay))
        return self.proxies[-1]

    def close(self) -> None:
        for server in self._started:
            server.kill()
        for proxy in self.proxies:
            proxy.close()


@contextlib.contextmanager
def servers(root: Path) -> Iterator[Servers]:
    started = Servers(root)
    try:
        yield started
    finally:
        started.close()


def wait_until(true: Callable[[], bool], seconds: float) -> float:
    """Seconds that it took."""
    begun = time.monotonic()
    while not true():
        assert time.monotonic() - begun < seconds, f"not within {seconds} s"
        time.sleep(0.02)
    return time.monotonic() - begun
