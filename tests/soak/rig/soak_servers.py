"""The servers and disks of the soak, which all end with its process."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

from kafka_proxy import KafkaProxy

from exactlyonce.connectors.embedded.broker import EmbeddedBroker
from exactlyonce.testing.cluster import KafkaCluster
from exactlyonce.testing.servers.postgres import PostgresServer

CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x20000, 0x4000, 0x40000
LAKE_BYTES, BROKER_BYTES = 2 << 30, 8 << 30
CLOCK = Path(__file__).with_name("moved_clock.c")


def mounts_are_ours() -> bool:
    """Have what this process mounts vanish with it and its children; False: this user may not mount."""
    libc: Any = ctypes.CDLL(None, use_errno=True)
    return not libc.unshare(CLONE_NEWNS) and not libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None)


def movable_clock(folder: Path) -> Path | None:
    """The library that moves the clock of a process, compiled into *folder*; None: there is no compiler."""
    compiler, library = shutil.which("cc"), folder / "moved_clock.so"
    if compiler is None:
        return None
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(CLOCK), "-ldl"], check=True)
    return library


class Disk:
    """A file system in memory that fills up on demand."""

    def __init__(self, folder: Path, bytes: int) -> None:
        folder.mkdir()
        self.folder, self._bytes = folder, bytes
        self._mount("-t", "tmpfs", "-o", f"size={bytes}", "tmpfs")

    def _mount(self, *options: str) -> None:
        subprocess.run(["mount", *options, str(self.folder)], check=True, capture_output=True)

    def fill(self) -> bool:
        """Make it as large as what it holds; whether nobody can write then."""
        page, probe = os.sysconf("SC_PAGE_SIZE"), self.folder / "probe"
        for _ in range(20):
            used = shutil.disk_usage(self.folder).used
            done = subprocess.run(
                ["mount", "-o", f"remount,size={max(used, page)}", str(self.folder)], capture_output=True
            )
            if done.returncode:  # somebody was faster
                continue
            try:
                probe.write_bytes(bytes(page))
            except OSError:
                return True
            finally:
                probe.unlink(missing_ok=True)
        return False

    def unmount(self) -> None:
        subprocess.run(["umount", "-l", str(self.folder)], check=True)

    def free(self) -> None:
        self._mount("-o", f"remount,size={self._bytes}")


class Servers:
    def __init__(self, folder: Path, *, has_disks: bool) -> None:
        """To be made, and its servers to be started, by the main thread: they end with the thread that starts them."""
        self.lake_disk = self.broker_disk = None
        if has_disks:
            self.lake_disk = Disk(folder / "lake", LAKE_BYTES)
            self.broker_disk = Disk(folder / "kafka", BROKER_BYTES)
        else:
            (folder / "lake").mkdir()
        self.lake = folder / "lake" / "orders"
        self.movable_clock = movable_clock(folder)
        self.broker = EmbeddedBroker(folder / "kafka" / "data", port=0, lifetime="process")
        self.broker.data_dir.parent.mkdir(exist_ok=True)
        self.broker.start()
        self.kafka = KafkaCluster(self.broker.bootstrap_servers)
        self.proxy = KafkaProxy(int(self.broker.bootstrap_servers.rpartition(":")[2]))
        self.postgres = PostgresServer()
        self.postgres.start()

    def signal_broker(self, number: signal.Signals) -> None:
        pid = self.broker.status().pid
        if pid is not None:
            os.kill(pid, number)

    def heal(self) -> None:
        """Everything answers, and has room."""
        self.proxy.heal()
        for disk in (self.lake_disk, self.broker_disk):
            if disk is not None:
                disk.free()
        if not self.broker.status().running:
            self.broker.start()
        self.postgres.kill()  # Ctrl-C in a terminal reaches it, too
        self.postgres.start()

    def keep(self, folder: Path) -> None:
        """Copy the broker's data, the lake and the server's log to *folder*."""
        self.broker.stop()
        for name, source in (("broker", self.broker.data_dir), ("lake", self.lake)):
            if source.is_dir():
                shutil.copytree(source, folder / name, dirs_exist_ok=True, ignore=shutil.ignore_patterns("tmp", "lock"))
        shutil.copy(self.postgres.folder / "log", folder / "postgres.log")

    def remove(self) -> None:
        self.proxy.close()
        self.broker.kill()
        self.postgres.remove()
        for disk in (self.lake_disk, self.broker_disk):
            if disk is not None:
                disk.unmount()
