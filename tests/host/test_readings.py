"""Readings of devices and host, from a fake NVML, a fake libtpu and a fake /proc."""

import sys
import time
import types

import pytest

from jaxtrain.host import readings
from jaxtrain.run.observe.sampling import Sampling
from jaxtrain.run.survive.peer_group import PeerGroup
from tests.waiting import eventually


class FakeNvml(types.SimpleNamespace):
    """Two GPUs, the second of which has no power sensor."""

    class NVMLError(Exception):
        pass

    NVML_TEMPERATURE_GPU = 0
    busy, degrees, watts = {"0": 90, "GPU-b": 30}, {"0": 61, "GPU-b": 83}, {"0": 350_000}

    def nvmlInit(self):
        pass

    def nvmlDeviceGetHandleByIndex(self, index):
        return str(index)

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return uuid

    def nvmlDeviceGetUtilizationRates(self, handle):
        return types.SimpleNamespace(gpu=self.busy[handle], memory=1)

    def nvmlDeviceGetTemperature(self, handle, sensor):
        return self.degrees[handle]

    def nvmlDeviceGetPowerUsage(self, handle):
        if handle not in self.watts:
            raise self.NVMLError("Not Supported")
        return self.watts[handle]


def gpus(*numbers):
    return [types.SimpleNamespace(platform="gpu", local_hardware_id=n) for n in numbers]


def test_gpus_are_read_that_cuda_shows_and_the_worst_is_told(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,GPU-b")
    watts, ticks = dict(FakeNvml.watts), iter([0.0, 10.0, 40.0, 60.0])
    monkeypatch.setattr(FakeNvml, "watts", watts)
    read = readings.nvidia(gpus(0, 1), clock=lambda: next(ticks))
    assert read() == {
        "device/utilisation": 0.3,
        "device/temperature": 83.0,
        "device/power": 350.0,
    }
    # 10 s from 350 to 450 W, a reading without power, and 30 s from 450 to 150 W.
    for power, joules in ((450, 4000), (None, None), (150, 4000 + 9000)):
        watts |= {"0": power and power * 1000} if power else {}
        if power is None:
            del watts["0"]
        assert read().get("device/energy") == (joules and pytest.approx(joules / 3.6e6))
    assert "device/power" not in readings.nvidia(gpus(1))()

    def absent(self):
        raise self.NVMLError("no library")

    monkeypatch.setattr(FakeNvml, "nvmlInit", absent)
    assert readings.nvidia(gpus(0)) is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert len(readings.sources(gpus(0))) == 1  # the host
    assert "no readings of GPUs: the package nvidia-ml-py is missing; pip ins" in caplog.text


def test_chips_are_read_by_the_library_of_libtpu_where_it_has_one(monkeypatch):
    said = {"duty_cycle_pct": ["99.50", "40.00"], "tensorcore_util": []}

    class Monitoring:
        list_supported_metrics = staticmethod(lambda: list(said))
        get_metric = staticmethod(lambda name: types.SimpleNamespace(data=lambda: said[name]))

    monkeypatch.setitem(sys.modules, "libtpu", types.ModuleType("libtpu"))
    sdk = types.ModuleType("libtpu.sdk")
    monkeypatch.setitem(sys.modules, "libtpu.sdk", sdk)
    assert readings.tpu([]) is None
    sdk.tpumonitoring = Monitoring
    assert readings.tpu([])() == {"device/utilisation": 0.4}


def test_the_host_is_read_as_proc_and_its_control_group_say(tmp_path, monkeypatch):
    proc, group, now = tmp_path / "proc", tmp_path / "cgroup", [0.0]
    (proc / "self").mkdir(parents=True)
    group.mkdir()
    (proc / "meminfo").write_text("MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 700 kB\nX:\n")
    (proc / "self/statm").write_text("900 25 9 1 0 8 0\n")
    (proc / "stat").write_text("cpu  100 0 50 800 50 0 0 0 77 0\ncpu0 1 1\n")
    monkeypatch.setattr(readings, "PROC", proc)
    monkeypatch.setattr(readings, "CGROUP", group)
    monkeypatch.setattr(
        readings.os, "times", lambda: types.SimpleNamespace(user=3 * now[0], system=now[0])
    )
    read = readings.host(clock=lambda: now[0])
    page = readings.os.sysconf("SC_PAGE_SIZE")
    first = {"host/memory_fraction": pytest.approx(0.3), "host/process_memory": 25 * page}
    assert read() == first
    now[0] = 2.0
    (proc / "stat").write_text("cpu  160 0 60 820 60 0 0 0 99 0\n")
    for name, text in (("max", 1000), ("current", 900), ("stat", "anon 5\ninactive_file 100")):
        (group / f"memory.{name}").write_text(f"{text}\n")
    found = read()
    assert found["host/cpu"] == pytest.approx(70 / 100)  # 60 user, 10 system, 20 idle, 10 waiting
    assert found["host/process_cores"] == pytest.approx(4)
    assert found["host/memory_fraction"] == pytest.approx(0.8)  # the control group's


def test_what_disk_network_and_cpus_took_is_counted_once(tmp_path, monkeypatch):
    proc, cap = tmp_path / "proc", tmp_path / "powercap"
    (proc / "self").mkdir(parents=True)
    (proc / "net").mkdir()
    monkeypatch.setattr(readings, "PROC", proc)
    monkeypatch.setattr(readings, "POWERCAP", cap)
    # A bond and its part, of which the bond alone has a route; the loopback.
    (proc / "net/route").write_text("Iface Destination\nbond0 0\nbond0 1\nold0 2\n")
    zeros = " 0" * 7

    def dev(received, sent):
        each = [f"{name}: {received}{zeros} {sent}{zeros}" for name in ("bond0", "eth0", "lo")]
        (proc / "net/dev").write_text("\n".join(["Inter-|", " face |", *each]))

    def rapl(**joules):
        for name, value in joules.items():
            (cap / f"intel-rapl:{name}").mkdir(parents=True, exist_ok=True)
            kind = {"a": "package-0\n", "b": "package-1\n", "c": "core\n", "d": "dram\n"}[name]
            for file, text in (
                ("name", kind),
                ("max_energy_range_uj", 1000_000_000),
                ("energy_uj", int(value * 1e6)),
            ):
                (cap / f"intel-rapl:{name}" / file).write_text(str(text))

    assert readings._energy()() == {}
    (cap / "intel-rapl:hidden").mkdir(parents=True)  # whose counter root alone may read
    (cap / "intel-rapl:hidden/name").write_text("package-2\n")
    (cap / "intel-rapl:hidden/max_energy_range_uj").write_text("1000")
    assert readings._energy()() == {}
    dev(100, 10)
    rapl(a=900, b=10, c=500, d=5)
    network, energy = readings._since(readings._network), readings._energy()
    assert network() == {"host/network_received": 0, "host/network_sent": 0}
    assert energy() == {"host/energy": 0}
    dev(150, 13)
    rapl(a=100, b=20, c=900, d=6)  # the first has begun again
    assert network() == {"host/network_received": 50, "host/network_sent": 3}
    assert energy() == {"host/energy": pytest.approx((200 + 10 + 1) / 3.6e6)}
    assert readings.disk() == {}
    (proc / "self/io").write_text("rchar: 1\nread_bytes: 4096\nwrite_bytes: 8192\n")
    assert readings.disk() == {"host/disk_read": 4096, "host/disk_written": 8192}
    disk_before = readings.disk()
    (proc / "self/io").write_text("rchar: 1\nread_bytes: 4099\nwrite_bytes: 8200\n")
    (proc / "stat").write_text("cpu  1 2 3 4 5 6 7 8\n")
    (proc / "self/statm").write_text("1 2 3\n")
    (proc / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable: 50 kB\n")
    of_run = readings.host(disk_before=disk_before)()
    assert (of_run["host/disk_read"], of_run["host/disk_written"]) == (3, 8)
    each = {0: {"host/energy": 2.0}, 1: {"host/energy": 2.5}, 2: {"host/energy": 7.0}}
    assert readings.of_all(each, {0: "a", 1: "a", 2: "b"}) == {"host/energy": 9.5}


def test_a_sensor_that_hangs_or_fails_holds_nothing_and_the_worst_process_is_named():
    peers, said = PeerGroup(0, 1, {}, {}), []

    def failing():
        said.append(1)
        raise OSError("no such sensor")

    with Sampling(lambda: [failing, lambda: {"a": 1.0}], seconds=0.01, peers=peers) as sampling:
        eventually(lambda: len(said) >= 3)
        assert sampling.report() == {"a": 1.0}
    began = time.monotonic()
    with Sampling(lambda: [lambda: time.sleep(60)], seconds=1, peers=peers) as sampling:
        assert sampling.report() == {}
    assert time.monotonic() - began < 5
    # Process 0 of two, which the other has told.
    first = PeerGroup(0, 2, {}, {})
    sampling = Sampling(list, seconds=0, peers=first)
    sampling._newest = {"device/utilisation": 0.9, "device/power": 100.0}
    first.share(step=1.0)
    first._handle(1, {"share": {"step": 2.0}})
    first._handle(1, {"share": {"readings": {"device/utilisation": 0.2, "device/power": 50.0}}})
    assert sampling.report() == {
        "device/power": 150.0,
        "device/utilisation": 0.2,
        "device/utilisation_process": 1,
    }
    assert first.shared[1]["step"] == 2.0
