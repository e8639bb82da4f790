"""The files of `examples` that nothing here can start, checked for all that needs no cluster and no GPU."""

import importlib
import importlib.util
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from redis_server import RedisServer, servers
from typer.testing import CliRunner

from lmcache_kvcmas.config import Settings
from lmcache_kvcmas.connectors.cli import app
from lmcache_kvcmas.connectors.lmcache_config import LMCacheConfig, load_lmcache_config
from lmcache_kvcmas.connectors.redis_client import Cause, RedisClient, RedisUnavailable
from lmcache_kvcmas.connectors.redis_settings import LMCACHE_KEYS, PREFIX, Address, RedisSettings

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "lmcache-kvcmas-redis.yaml"
DEPLOY = ROOT / "examples" / "deploy"
EXTERNAL = {"models", "kvcmas-workload"}
"""What kubernetes.yaml says in its first lines that it needs besides."""
GIB = 2**30

COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))
OBJECTS = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text("utf-8")))
WORKLOADS = [o for o in OBJECTS if o["kind"] in ("StatefulSet", "Deployment", "Job")]


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LMCACHE_CONFIG_FILE", "LMCACHE_EXTRA_CONFIG", "LMCACHE_CHUNK_SIZE"):
        monkeypatch.delenv(name, raising=False)


def kubernetes(kind: str, name: str) -> dict[str, Any]:
    [found] = [o for o in OBJECTS if (o["kind"], o["metadata"]["name"]) == (kind, name)]
    return found


def pod(workload: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A workload's pod and its one container."""
    spec = workload["spec"]["template"]["spec"]
    [container] = spec["containers"]
    return spec, container


FILES = {
    "compose": COMPOSE["configs"]["lmcache"]["content"],
    "kubernetes": kubernetes("ConfigMap", "kvcmas-lmcache")["data"]["lmcache.yaml"],
}
ACLS = {
    "compose": COMPOSE["configs"]["users"]["content"],
    "kubernetes": kubernetes("Secret", "kvcmas-redis")["stringData"]["users.acl"],
}


def loaded(text: str, folder: Path) -> tuple[LMCacheConfig, str]:
    """The LMCache file, as a node would read it, and where it looks for the password."""
    [secret] = re.findall(r"password_file: (\S+)", text)
    (folder / "password").write_text("secret")
    (folder / "lmcache.yaml").write_text(text.replace(secret, str(folder / "password")))
    return load_lmcache_config(str(folder / "lmcache.yaml")), secret


def option(arguments: list[str], name: str) -> str:
    """The value of ``--name=value`` or ``--name value``."""
    joined = [a.partition("=")[2] for a in arguments if a.startswith(f"{name}=")]
    return joined[0] if joined else arguments[arguments.index(name) + 1]


# the LMCache file with Redis


def test_the_redis_example_names_every_setting_with_its_default(tmp_path: Path) -> None:
    """Commented-out lines are the ones that nobody runs."""
    config = load_lmcache_config(str(EXAMPLE))
    assert config.redis == RedisSettings("redis://127.0.0.1:6379")
    assert config.settings == Settings()
    text = re.sub(rf"^  # ({re.escape(PREFIX)})", r"  \1", EXAMPLE.read_text("utf-8"), flags=re.MULTILINE)
    (tmp_path / "all.yaml").write_text(text)
    assert load_lmcache_config(str(tmp_path / "all.yaml")).redis == config.redis
    extra = yaml.safe_load(text)["extra_config"]
    assert set(extra) == {PREFIX + name for name in (*RedisSettings.__slots__, *LMCACHE_KEYS)}
    module = importlib.import_module(extra[f"{PREFIX}module_path"])
    assert isinstance(getattr(module, extra[f"{PREFIX}class_name"]), type)


# both


@pytest.mark.parametrize("where", FILES)
def test_the_nodes_lmcache_file_loads_and_finds_redis(where: str, tmp_path: Path) -> None:
    """A typo in it would keep every node from starting."""
    config, secret = loaded(FILES[where], tmp_path)
    assert config.redis is not None
    assert config.redis.credentials() == ("kvcmas", "secret")
    assert config.redis.password == "", "no password in the file itself"
    [address] = config.redis.addresses
    if where == "compose":
        redis = COMPOSE["services"][address.host]
        assert int(option(redis["command"], "--port")) == address.port
        assert secret.removeprefix("/run/secrets/") in COMPOSE["secrets"]
    else:
        [port] = kubernetes("Service", address.host)["spec"]["ports"]
        assert port["port"] == address.port


@pytest.mark.parametrize("where", ACLS)
def test_nothing_secret_stands_in_clear(where: str) -> None:
    """What is copied from an example is what ends in a repository."""
    passwords = re.findall(r">(\S+)", ACLS[where].replace(":?letters and digits", ""))
    assert passwords == (["${REDIS_PASSWORD}"] if where == "compose" else ["CHANGE-ME"])
    if where == "kubernetes":
        assert kubernetes("Secret", "kvcmas-redis")["stringData"]["password"] == "CHANGE-ME"
    else:
        assert COMPOSE["secrets"] == {"redis_password": {"environment": "REDIS_PASSWORD"}}


@pytest.fixture(params=ACLS)
def guarded(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RedisServer]:
    """A real redis-server with the file's own users and options."""
    acl = re.sub(r">(\S+|\$\{.*?\})(?= reset)", ">secret", ACLS[request.param])
    (tmp_path / "users.acl").write_text(acl)
    redis = COMPOSE["services"]["redis"]["command"]
    assert redis[:3] == pod(kubernetes("StatefulSet", "kvcmas-redis"))[1]["args"][:3]
    policy, most = option(redis, "--maxmemory-policy"), option(redis, "--maxmemory")
    options = [("aclfile", str(tmp_path / "users.acl")), ("maxmemory", most), ("maxmemory-policy", policy)]
    with servers(tmp_path / "redis") as started:
        yield started.one(*options)


def test_the_acl_allows_what_nodes_do_and_nothing_else(guarded: RedisServer, tmp_path: Path) -> None:
    """Too little would be a cache that silently never shares; too much, an open server."""
    assert guarded.cli("PING") == b"+PONG\r\n", "the health check has no password"
    assert guarded.cli("GET", "kvcmas:x").startswith(b"-NOPERM")
    text = FILES["compose"].replace("redis:6379", f"127.0.0.1:{guarded.port}")
    # The file's is a server's memory, and `doctor` looks whether it is there.
    config, _ = loaded(re.sub(r"max_local_cpu_size: \S+", "max_local_cpu_size: 0.1", text), tmp_path)
    assert config.redis is not None
    assert config.redis.addresses == (Address("127.0.0.1", guarded.port),)
    client = RedisClient(config.redis)
    blob, room = memoryview(b"value"), bytearray(5)
    client.put_many([(b"kvcmas:m:a", blob)])
    assert client.read_into([b"kvcmas:m:a"], lambda _, size: memoryview(room)[:size]) == [True]
    client.set_add(b"kvcmas:m:pool", b"anchor", 1.0, 4)
    client.set_touch(b"kvcmas:m:pool", {b"anchor": 2.0})
    assert client.set_members(b"kvcmas:m:pool") == [(b"anchor", 2.0)]
    client.hash_set(b"kvcmas:m:edges", b"name", b"value")
    client.append(b"kvcmas:m:journal:s", {"node": "n"}, 10)
    assert len(client.latest(b"kvcmas:m:journal:s", 10)) == len(client.tail(b"kvcmas:m:journal:s", "0-0", 8, 10)) == 1
    client.remove_many([b"kvcmas:m:a"])
    with pytest.raises(RedisUnavailable) as refused:
        client.put_many([(b"others:a", blob)])
    assert refused.value.cause is Cause.REFUSED
    client.close()
    for command in (["doctor"], ["inspect", "--json"], ["verify"], ["purge", "--all", "--yes"]):
        result = CliRunner().invoke(app, [*command, "--config", str(tmp_path / "lmcache.yaml")])
        assert result.exit_code == 0, (command, result.output)
    assert guarded.cli("FLUSHALL", user="kvcmas", password="secret").startswith(b"-NOPERM")


def test_images_have_versions_and_vllm_is_the_one_that_we_name() -> None:
    """An image without a tag is another one tomorrow."""
    images = [service["image"] for service in COMPOSE["services"].values()]
    images += [pod(workload)[1]["image"] for workload in WORKLOADS]
    dockerfile = COMPOSE["x-vllm"]["build"]["dockerfile_inline"]
    [base] = re.findall(r"^FROM (\S+)$", dockerfile, re.MULTILINE)
    for image in [*images, base]:
        assert re.search(r":v?\d+\.\d+(\.\d+)?(-\w+)?$", image), image
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert f"vllm=={base.rpartition(':v')[2]}" in project["optional-dependencies"]["cuda"]
    ours = {image.rpartition("/")[2] for image in images if "kvcmas" in image}
    assert ours == {f"{project['name']}:{project['version']}"}
    context = DEPLOY / COMPOSE["x-vllm"]["build"]["context"]
    copied = [name for line in re.findall(r"^COPY (.*) \S+$", dockerfile, re.MULTILINE) for name in line.split()]
    assert all((context / name).exists() for name in copied)
    assert {"pyproject.toml", project["readme"], "lmcache_kvcmas", "connectors", "kernels"} <= set(copied)


def commands() -> list[tuple[str, list[str], list[str]]]:
    """Name, program and arguments of everything that runs our image."""
    found = [(n, s["entrypoint"], s["command"]) for n, s in COMPOSE["services"].items() if "kvcmas" in s["image"]]
    containers = [(workload["metadata"]["name"], pod(workload)[1]) for workload in WORKLOADS]
    return found + [(n, c["command"], c["args"]) for n, c in containers if "lmcache-kvcmas:" in c["image"]]


@pytest.mark.parametrize(("name", "program", "arguments"), commands())
def test_commands_are_ones_that_there_are(name: str, program: list[str], arguments: list[str]) -> None:
    """The connector by its name and module; `kvcmas warmup` by its own options."""
    if program == ["vllm", "serve"]:
        asked = json.loads(option(arguments, "--kv-transfer-config"))
        spec = importlib.util.find_spec(asked["kv_connector_module_path"])
        assert spec is not None
        assert spec.origin is not None
        assert f"class {asked['kv_connector']}(" in Path(spec.origin).read_text("utf-8")
        assert asked["kv_role"] == "kv_both"
        return
    assert program == ["kvcmas", "warmup"]
    parameters = typer.main.get_command(app).commands["warmup"].params  # type: ignore[attr-defined]
    known = {name: p.required for p in parameters for name in p.opts}
    given = {argument.partition("=")[0] for argument in arguments}
    assert given <= set(known)
    assert {name for name, required in known.items() if required} <= given
    roles = json.loads((ROOT / "examples" / "workload" / "roles.json").read_text("utf-8"))["roles"]
    assert set(option(arguments, "--workflow").split(",")) <= set(roles)


# Compose


def mounts(service: dict[str, Any]) -> dict[str, str]:
    """Targets in the container → sources."""
    volumes = [re.sub(r"\$\{.*?\}", "VARIABLE", volume).split(":")[:2] for volume in service.get("volumes", [])]
    configs = {c["target"]: c["source"] for c in service.get("configs", [])}
    secrets = {f"/run/secrets/{name}": name for name in service.get("secrets", [])}
    return {target: source for source, target in volumes} | configs | secrets


@pytest.mark.parametrize("name", COMPOSE["services"])
def test_compose_services_mount_what_they_read(name: str, tmp_path: Path) -> None:
    service = COMPOSE["services"][name]
    there = mounts(service)
    assert {c["source"] for c in service.get("configs", [])} <= set(COMPOSE["configs"])
    assert set(service.get("secrets", [])) <= set(COMPOSE["secrets"])
    assert all((DEPLOY / source).is_dir() for source in there.values() if source.startswith("."))
    read = [a.partition("=")[2] or a for a in service["command"] if re.match(r"(--[a-z-]+=)?/", a)]
    if "environment" in service:
        read += [service["environment"]["LMCACHE_CONFIG_FILE"], loaded(FILES["compose"], tmp_path)[1]]
    assert read, "reads nothing"
    for path in read:
        target = next((t for t in there if path == t or path.startswith(f"{t}/")), None)
        assert target is not None, f"{path} is not mounted"
        source = DEPLOY / there[target]
        assert not source.is_dir() or (source / path.removeprefix(f"{target}/")).is_file()
    assert set(service.get("depends_on", {})) <= set(COMPOSE["services"])


def test_compose_nodes_have_ports_and_gpus_of_their_own() -> None:
    nodes = [COMPOSE["services"][name] for name in ("node1", "node2")]
    pairs = [ports.split(":") for node in nodes for ports in node["ports"]]
    assert len({outside for outside, _ in pairs}) == 2
    for node, (_, inside) in zip(nodes, pairs, strict=True):
        assert inside == option(node["command"], "--port")
        assert f":{inside}/health" in node["healthcheck"]["test"][-1]
    gpus = [
        device["device_ids"]
        for node in nodes
        for device in node["deploy"]["resources"]["reservations"]["devices"]
        if device["capabilities"] == ["gpu"]
    ]
    assert len(gpus) == len({tuple(ids) for ids in gpus}) == 2
    redis = COMPOSE["services"]["redis"]
    assert option(redis["healthcheck"]["test"], "-p") == option(redis["command"], "--port")
    assert COMPOSE["services"]["warmup"]["profiles"] == ["warmup"], "`up` leaves it out"


def test_redis_has_room_for_its_maxmemory_and_writes_nothing() -> None:
    """Killed for its memory, or stopped by a full disk, it would be empty or read-only."""
    container = pod(kubernetes("StatefulSet", "kvcmas-redis"))[1]
    service = COMPOSE["services"]["redis"]
    room = ((service["command"], service["mem_limit"], "g"), (container["args"], _memory(container), "Gi"))
    for command, limit, unit in room:
        assert int(option(command, "--maxmemory").removesuffix("gb")) < int(str(limit).removesuffix(unit))
        assert option(command, "--maxmemory-policy") == "allkeys-lru"
        assert (option(command, "--save"), option(command, "--appendonly")) == ("", "no")


# Kubernetes


def _memory(container: dict[str, Any]) -> str:
    resources = container["resources"]
    assert resources["limits"]["memory"] == resources["requests"]["memory"]
    return str(resources["limits"]["memory"])


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w["kind"])
def test_kubernetes_volumes_and_mounts_match(workload: dict[str, Any], tmp_path: Path) -> None:
    spec, container = pod(workload)
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    paths = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert sorted(volumes) == sorted(paths.values()), "each volume is mounted once"
    files: set[str] = set()
    for path, name in paths.items():
        volume = volumes[name]
        if "configMap" in volume and volume["configMap"]["name"] not in EXTERNAL:
            files |= {f"{path}/{key}" for key in kubernetes("ConfigMap", volume["configMap"]["name"])["data"]}
        if "secret" in volume:
            held = kubernetes("Secret", volume["secret"]["secretName"])["stringData"]
            assert {item["key"] for item in volume["secret"]["items"]} <= set(held)
            files |= {f"{path}/{item['path']}" for item in volume["secret"]["items"]}
        if "persistentVolumeClaim" in volume:
            assert volume["persistentVolumeClaim"]["claimName"] in EXTERNAL
    external = [path for path, name in paths.items() if name in ("models", "workload")]
    read = [a.partition("=")[2] or a for a in container["args"] if re.match(r"(--[a-z-]+=)?/", a)]
    environment = {entry["name"]: entry["value"] for entry in container.get("env", [])}
    if environment:
        read += [environment["LMCACHE_CONFIG_FILE"], loaded(FILES["kubernetes"], tmp_path)[1]]
    for path in read:
        assert path in files or any(path.startswith(f"{mounted}/") for mounted in external), f"{path} is not mounted"


@pytest.mark.parametrize("service", [o for o in OBJECTS if o["kind"] == "Service"], ids=lambda s: s["metadata"]["name"])
def test_kubernetes_services_find_their_pods_and_ports(service: dict[str, Any]) -> None:
    [workload] = [w for w in WORKLOADS if w["spec"]["template"]["metadata"]["labels"] == service["spec"]["selector"]]
    assert workload["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]
    assert workload["spec"].get("serviceName", service["metadata"]["name"]) == service["metadata"]["name"]
    container = pod(workload)[1]
    [port], [listens] = service["spec"]["ports"], container["ports"]
    assert port["targetPort"] == listens["name"]
    assert port["port"] == listens["containerPort"] == int(option(container["args"], "--port"))
    probes = [probe for name, probe in container.items() if name.endswith("Probe")]
    assert len(probes) >= 2
    for probe in probes:
        if "exec" in probe:
            assert option(probe["exec"]["command"], "-p") == str(listens["containerPort"])
        else:
            assert (probe.get("httpGet") or probe.get("tcpSocket"))["port"] == listens["name"]
            assert probe.get("httpGet", {"path": "/health"})["path"] == "/health"


@pytest.mark.parametrize("kind", ["Deployment", "Job"])
def test_kubernetes_pods_have_a_gpu_and_memory_for_the_cpu_tier(kind: str, tmp_path: Path) -> None:
    """LMCache takes the whole tier at start-up: a limit below it kills the pod."""
    [workload] = [w for w in WORKLOADS if w["kind"] == kind]
    spec, container = pod(workload)
    resources = container["resources"]
    assert resources["limits"]["nvidia.com/gpu"] == resources["requests"]["nvidia.com/gpu"] == 1
    assert int(_memory(container).removesuffix("Gi")) * GIB > 2 * loaded(FILES["kubernetes"], tmp_path)[0].cpu_bytes
    if kind == "Job":
        assert spec["restartPolicy"] in ("OnFailure", "Never"), "a job takes no other"
