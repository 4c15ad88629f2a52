"""Ceph's radosgw for tests: a monitor, one OSD in memory and the gateway, on the loopback, gone with this process."""

from __future__ import annotations

import shutil
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.daemons import free_port
from tests.kit.objects import KEY, PAUSE_S, SECRET, START_TIMEOUT_S, BucketServer, ended_with_us, wait_for_s3

PROGRAMS = ("radosgw", "radosgw-admin", "ceph-mon", "ceph-osd", "ceph", "monmaptool", "setpriv")
PACKAGES = "radosgw ceph-mon ceph-osd ceph-common"
PORTS_OF_OSD = 40

# Without authentication the gateway's default of `secure` would wait for ever. Without the two times of its collector,
# removed objects are kept for two hours: a store in memory fills, and then every request hangs.
SETTINGS = """
[global]
fsid = {fsid}
mon_initial_members = a
mon_host = [v2:127.0.0.1:{mon},v1:127.0.0.1:{mon_v1}]
public_addr = 127.0.0.1
cluster_addr = 127.0.0.1
ms_bind_port_min = {bind}
ms_bind_port_max = {bind_max}
auth_cluster_required = none
auth_service_required = none
auth_client_required = none
ms_mon_client_mode = crc
auth_allow_insecure_global_id_reclaim = false
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 4
osd_pool_default_pgp_num = 4
osd_pool_default_pg_autoscale_mode = off
mon_allow_pool_size_one = true
mon_warn_on_pool_no_redundancy = false
osd_crush_chooseleaf_type = 0
mon_data_avail_crit = 1
mon_data_avail_warn = 2
run_dir = {out}
log_file = {out}/$name.log
admin_socket = {out}/$name.asok
pid_file = {out}/$name.pid
crash_dir = {out}
setuser_match_path = {out}/nothing
[mon.a]
mon_data = {directory}/mon
[osd.0]
osd_data = {directory}/osd
osd_journal = {directory}/osd/journal
osd_objectstore = memstore
memstore_device_bytes = 4G
osd_memory_target = 1G
osd_class_load_list = *
osd_class_default_list = *
[client.rgw]
rgw_frontends = beast endpoint=127.0.0.1:{port}
rgw_data = {directory}/rgw
ms_mon_client_mode = crc
rgw_thread_pool_size = 64
rgw_enable_usage_log = false
rgw_dns_name = localhost
rgw_enable_gc_threads = true
rgw_gc_obj_min_wait = 1
rgw_gc_processor_period = 2
rgw_enable_lc_threads = false
"""


class _Cluster:
    """The processes of one cluster, with all of their files in a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._out = directory, directory / "out"
        self._settings, self._log = directory / "ceph.conf", directory / "out" / "started.log"
        self.processes: list[subprocess.Popen[bytes]] = []
        for name in ("mon", "osd", "rgw", "out"):
            (directory / name).mkdir(exist_ok=True)

    def start(self) -> BucketServer:
        fsid, port, bind = str(uuid.uuid4()), free_port(), free_port()
        mon, mon_v1 = free_port(), free_port()
        ports = {"mon": mon, "mon_v1": mon_v1, "bind": bind, "bind_max": bind + PORTS_OF_OSD, "port": port}
        made = SETTINGS.format(fsid=fsid, out=self._out, directory=self._directory, **ports)
        self._settings.write_text(made)
        addresses = f"[v2:127.0.0.1:{mon},v1:127.0.0.1:{mon_v1}]"
        monmap = str(self._directory / "monmap")
        self._run("monmaptool", "--create", "--clobber", "--addv", "a", addresses, "--fsid", fsid, monmap)
        self._run("ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap)
        self._serve("ceph-mon", "-i", "a", "-f")
        osd = str(uuid.uuid4())  # told twice, or the OSD never boots, and says nothing
        self._run("ceph", "osd", "new", osd)
        self._run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd)
        self._run("ceph", "osd", "crush", "add", "osd.0", "1.0", "host=localhost", "root=default")
        self._serve("ceph-osd", "-i", "0", "-f")
        limit = time.monotonic() + START_TIMEOUT_S
        while b"1 up" not in self._run("ceph", "osd", "stat"):
            assert time.monotonic() < limit, f"the OSD did not come up: {self._said()}"
            time.sleep(PAUSE_S)
        self._make_user("test", KEY, SECRET)
        self._serve("radosgw", "-n", "client.rgw", "-f")
        server = BucketServer("radosgw", f"http://127.0.0.1:{port}", self._make_user)
        assert wait_for_s3(server, self.processes, self._log), f"radosgw has ended: {self._said()}"
        return server

    def stop(self) -> None:
        for process in reversed(self.processes):
            process.kill()
            process.wait()

    def _make_user(self, name: str, key: str, secret: str) -> None:
        words = (f"--uid={name}", f"--display-name={name}", f"--access-key={key}", f"--secret={secret}")
        self._run("radosgw-admin", "user", "create", *words)

    def _run(self, program: str, *words: str) -> bytes:
        command = [program, "-c", str(self._settings), *words] if program != "monmaptool" else [program, *words]
        ran = subprocess.run(command, capture_output=True, timeout=START_TIMEOUT_S, check=False)
        assert ran.returncode == 0, f"{command}: {ran.stderr.decode()[-2000:]}"
        return ran.stdout

    def _serve(self, program: str, *words: str) -> None:
        command = [program, "-c", str(self._settings), *words]
        self.processes.append(ended_with_us(command, self._log))

    def _said(self) -> str:
        return self._log.read_text()[-4000:]


@contextmanager
def running_radosgw(directory: Path) -> Iterator[BucketServer]:
    """radosgw for the length of a block, with all of its files in the directory."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)} (Debian's packages {PACKAGES})")
    cluster = _Cluster(directory)
    try:
        yield cluster.start()
    finally:
        cluster.stop()
