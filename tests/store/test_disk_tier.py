"""The disk tier: LMCache's own, with real files, and what goes wrong with files."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from small_store import MIB, OpenStore, holds, key, put

from lmcache_kvcmas.connectors.lmcache_store import LMCacheStore
from lmcache_kvcmas.entries import EntryKind
from lmcache_kvcmas.store import MissCause


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("disk/kvcmas-*/*") if path.is_file())


def fill(store: LMCacheStore, first: int, last: int) -> None:
    for n in range(first, last):
        assert put(store, n)
        assert store.flush(5)


def file_of(folder: Path, n: int) -> Path:
    return next(path for path in files(folder) if f"@{n:x}@" in path.name)


def test_what_memory_pushes_out_is_read_back_from_disk(open_small: OpenStore, tmp_path: Path) -> None:
    """The disk tier holds contexts that memory has no room for, and the scheduler must go on planning with them."""
    store = open_small(cpu=8 * MIB, disk=64 * MIB)
    fill(store, 0, 20)
    assert store.stats().evictions == 13
    assert store.take_evicted() == []
    assert all(store.contains(key(n)) for n in range(20))
    assert all(holds(store, n) for n in range(20))
    assert store.stats().bytes_used <= 8 * MIB
    assert len(files(tmp_path)) == 20


def test_the_disk_budget_holds_and_what_leaves_both_tiers_is_reported(open_small: OpenStore, tmp_path: Path) -> None:
    """A full disk takes down more than this server."""
    store = open_small(cpu=4 * MIB, disk=10 * MIB)
    reported: list[bytes] = []
    for n in range(40):
        assert put(store, n)
        assert store.flush(5)
        assert sum(path.stat().st_size for path in files(tmp_path)) <= 10 * MIB
        assert store.stats().disk_bytes <= 10 * MIB
        reported += store.take_evicted()
    gone = {n for n in range(40) if not store.contains(key(n))}
    assert sorted(reported) == [key(n) for n in sorted(gone)]
    assert gone == set(range(31))  # nine entries of 1 MiB and 4 KiB go into 10 MiB


def test_removing_gives_the_disk_budget_back(open_small: OpenStore, tmp_path: Path) -> None:
    """LMCache forgets to count removed files out: the tier would shrink with every damaged entry, to nothing."""
    store = open_small(cpu=4 * MIB, disk=10 * MIB)
    for n in range(30):
        fill(store, n, n + 1)
        store.remove(key(n))
    assert store.stats().disk_bytes == 0
    assert files(tmp_path) == []
    fill(store, 100, 108)
    assert store.stats().disk_entries == 8


def test_what_is_removed_while_it_is_being_written_does_not_come_back(
    open_small: OpenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMCache's writer would list it again a moment later; and until then nobody can say whether the key is gone."""
    store = open_small(cpu=8 * MIB, disk=64 * MIB)
    disk = store._manager.storage_backends["LocalDiskBackend"]
    write = disk.write_file
    monkeypatch.setattr(disk, "write_file", lambda buffer, path: (time.sleep(0.3), write(buffer, path)))
    assert put(store, 1)
    store.remove(key(1))
    assert store.take_evicted() == []
    assert store.flush(5)
    deadline = time.monotonic() + 2  # the writer still has to see that its file is not wanted
    while files(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not store.contains(key(1))
    assert store.take_evicted() == [key(1)]
    assert files(tmp_path) == []
    assert store.stats().disk_bytes == 0


@pytest.mark.parametrize("how", ["flipped", "truncated", "emptied", "deleted", "another"])
def test_a_file_that_is_not_what_was_written_is_a_miss(open_small: OpenStore, tmp_path: Path, how: str) -> None:
    """LMCache reads a short or missing file into recycled memory, silently: that is another prompt's cache."""
    store = open_small(cpu=4 * MIB, disk=64 * MIB)
    fill(store, 0, 10)
    path = file_of(tmp_path, 2)
    data = bytearray(path.read_bytes())
    if how == "flipped":
        data[len(data) // 2] ^= 4
        path.write_bytes(data)
    elif how == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif how == "emptied":
        path.write_bytes(b"")
    elif how == "deleted":
        path.unlink()
    else:
        path.write_bytes(file_of(tmp_path, 3).read_bytes())
    assert not holds(store, 2)
    causes = {MissCause.DAMAGED, MissCause.FAILED, MissCause.FOREIGN}
    assert sum(count for cause, count in store.stats().misses.items() if cause in causes) == 1
    assert all(holds(store, n) for n in range(10) if n != 2)
    assert store.stats().leased == 0
    assert not store.contains(key(2))
    assert put(store, 2)
    assert holds(store, 2)


def test_an_entry_on_disk_with_no_memory_to_read_it_into_is_a_miss_at_once(open_small: OpenStore) -> None:
    """LMCache's disk tier waits, without an end, for memory: the engine's step would stand still."""
    store = open_small(cpu=4 * MIB, disk=64 * MIB)
    fill(store, 0, 6)
    leases = [store.get(key(n), EntryKind.BASE) for n in (3, 4, 5)]
    started = time.monotonic()
    assert store.get(key(0), EntryKind.BASE) is None
    assert time.monotonic() - started < 0.5  # measured: 0.007 s; LMCache would wait, without an end
    assert store.stats().misses == {MissCause.FAILED: 1}
    for lease in leases:
        assert lease is not None
        assert torch.all(lease.tensors["x"] == lease.meta["n"])
        lease.release()
    assert holds(store, 0)


def test_a_disk_that_refuses_writes_costs_the_disk_tier_only(
    open_small: OpenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failed write LMCache keeps the entry's memory for good: a full disk would end up filling the CPU tier."""
    store = open_small(cpu=8 * MIB, disk=64 * MIB)

    def full(buffer: object, path: str) -> None:
        Path(path).write_bytes(b"half of it")
        raise OSError(28, "No space left on device")

    disk = store._manager.storage_backends["LocalDiskBackend"]
    monkeypatch.setattr(disk, "write_file", full)
    reported: list[bytes] = []
    for n in range(20):
        assert put(store, n), n
        assert store.flush(5)
        assert holds(store, n)
        reported += store.take_evicted()
    stats = store.stats()
    assert (stats.disk_failures, stats.disk_entries, stats.disk_bytes) == (20, 0, 0)
    assert files(tmp_path) == []
    assert reported == [key(n) for n in range(13)]
    monkeypatch.undo()
    fill(store, 50, 60)
    assert store.stats().disk_entries == 10


def test_closing_ends_in_time_when_the_disk_is_slow(open_small: OpenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """And does not free the memory that is still being written from."""
    store = open_small(cpu=32 * MIB, disk=64 * MIB)
    disk = store._manager.storage_backends["LocalDiskBackend"]
    write = disk.write_file
    after: list[bool] = []

    def slow(buffer: memoryview, path: str) -> None:
        time.sleep(1.7)
        after.append(len(set(bytes(buffer[-1000:]))) == 1)
        write(buffer, path)

    monkeypatch.setattr(disk, "write_file", slow)
    for n in range(1, 13):
        assert put(store, n)
    started = time.monotonic()
    store.close()
    assert time.monotonic() - started < 5
    deadline = time.monotonic() + 20
    while len(after) < 12 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(after) == 12
    assert all(after), "written from memory that had been given to someone else"


def test_closing_leaves_no_files(open_small: OpenStore, tmp_path: Path) -> None:
    """Nobody would ever read them again: the index is in memory."""
    store = open_small(cpu=8 * MIB, disk=64 * MIB)
    fill(store, 0, 5)
    assert len(files(tmp_path)) == 5
    store.close()
    assert list((tmp_path / "disk").iterdir()) == []


def test_two_servers_on_one_folder_do_not_meet(open_small: OpenStore, tmp_path: Path) -> None:
    """Equal keys are equal file names to LMCache: one would read what the other is just writing, or has removed."""
    one, two = (open_small(cpu=4 * MIB, disk=64 * MIB) for _ in range(2))
    for n in range(8):
        for store, value in ((one, 1), (two, 2)):
            assert put(store, n, value=value)
            assert store.flush(5)
    one.remove(key(0))
    assert all(holds(two, n, value=2) for n in range(8))
    two.close()
    assert all(holds(one, n, value=1) for n in range(1, 8))


_SERVER = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import small_store as c
from lmcache_kvcmas.connectors.lmcache_config import load_lmcache_config
from lmcache_kvcmas.connectors.lmcache_open import open_store
folder = Path(sys.argv[2])
(folder / "s.yaml").write_text(f"max_local_cpu_size: 0.01\\nlocal_disk: {folder}/disk\\nmax_local_disk_size: 0.1\\n")
store = open_store(load_lmcache_config(str(folder / "s.yaml")), c.OWNER, c.SHAPE)
for n in range(5):
    assert c.put(store, n)
assert store.flush(5)
print("ready", flush=True)
if sys.argv[3] == "stay":
    sys.stdin.read()
"""


def serve(folder: Path, then: str) -> subprocess.Popen[str]:
    here = str(Path(__file__).parent)
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVER, here, str(folder), then],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "LMCACHE_LOG_LEVEL": "ERROR"},
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line == "ready\n":
            return process
    raise AssertionError(f"the server ended with {process.wait()}")


def test_a_killed_servers_files_go_at_the_next_start_a_living_ones_stay(open_small: OpenStore, tmp_path: Path) -> None:
    """Else every crash would cost its whole disk budget, for good; or every start another server's entries."""
    process = serve(tmp_path, "stay")
    try:
        assert len(files(tmp_path)) == 5
        open_small(cpu=4 * MIB, disk=16 * MIB)
        assert len(files(tmp_path)) == 5
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert len(files(tmp_path)) == 5
    open_small(cpu=4 * MIB, disk=16 * MIB)
    assert files(tmp_path) == []


def test_a_process_that_forgets_to_close_still_ends(tmp_path: Path) -> None:
    """LMCache's storage thread would keep it, and its memory, alive for ever."""
    process = serve(tmp_path, "go")
    process.communicate(timeout=60)  # measured: 9 to 17 s for the whole test, nearly all of it imports
    assert process.returncode == 0
