"""What limits a process from outside: its cgroup's processors, and its GPU's clock."""

import sys
from types import SimpleNamespace

import pytest
import torch

from wagma import throttling
from wagma.throttling import EVERY, REASONS, Cgroup, Gpu, Limited, Throttling

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def own(tmp_path, *lines):
    """Write a process's cgroups, and return those that it is in."""
    file = write(tmp_path / "self", "".join(f"{line}\n" for line in lines))
    return Cgroup(tmp_path / "mounts", file)


V2 = "usage_usec 5\nnr_periods 4\nnr_throttled 2\nthrottled_usec {}\n"
V1 = "nr_periods 4\nnr_throttled 2\nthrottled_time {}\n"


@pytest.mark.parametrize(
    ("line", "place", "text"),
    [
        ("0::/job/step", "job/step", V2.format(1_500_000)),
        ("0::/job/step", "unified/job/step", V2.format(1_500_000)),
        ("0::/", "", V2.format(1_500_000)),
        ("4:cpu,cpuacct:/job", "cpu,cpuacct/job", V1.format(1_500_000_000)),
        ("4:cpuacct,cpu:/job", "cpu/job", V1.format(1_500_000_000)),
        ("4:cpu:/of/the/host", "cpu", V1.format(1_500_000_000)),
    ],
)
def test_the_time_that_a_cgroup_was_stopped_is_read(tmp_path, line, place, text):
    others = "9:memory:/job/step", "1:cpuacct:/job"
    write(tmp_path / "mounts" / place / "cpu.stat", text)
    write(tmp_path / "mounts" / "memory" / "job" / "step" / "cpu.stat", V1.format(10**12))
    assert own(tmp_path, *others, line).throttled() == pytest.approx(1.5)


def test_limits_of_the_cgroups_around_it_count_and_those_beside_it_do_not(tmp_path):
    for place, seconds in (("job", 2), ("job/step", 1), ("job/other", 50), ("other", 50)):
        write(tmp_path / "mounts" / place / "cpu.stat", V2.format(seconds * 1_000_000))
    assert own(tmp_path, "0::/job/step").throttled() == pytest.approx(3.0)


@pytest.mark.parametrize("text", ["", "usage_usec 5\n", "throttled_usec many\n"])
def test_what_a_cgroup_does_not_tell_is_nothing(tmp_path, text):
    write(tmp_path / "mounts" / "cpu.stat", text)
    assert own(tmp_path, "0::/").throttled() == 0
    assert Cgroup(tmp_path / "no", tmp_path / "none").throttled() == 0


class Nvml(SimpleNamespace):
    """NVML's module, with one GPU, whose clock has these reasons."""

    class NVMLError(Exception):
        pass

    def __init__(self, bits):
        super().__init__(bits=bits, asked=[])

    def nvmlInit(self):
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid):
        self.asked.append(uuid)
        return "handle"

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):
        assert handle == "handle"
        if self.bits is None:
            raise self.NVMLError
        return self.bits


@pytest.fixture
def nvml(monkeypatch):
    made = Nvml(0)
    monkeypatch.setitem(sys.modules, "pynvml", made)
    properties = SimpleNamespace(uuid="0123-ab")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return made


def test_a_gpu_tells_why_its_clock_is_lower(nvml):
    gpu = Gpu(CUDA)
    assert nvml.asked == [b"GPU-0123-ab"] and gpu.reasons() == 0
    nvml.bits = 0x01 | 0x02 | 0x20 | 0x04  # of these, idle and clocks that were set do not count
    assert gpu.reasons() == 0x24
    assert [name for bit, name in REASONS.items() if bit & 0x24] == ["power cap", "temperature"]


def test_a_gpu_that_does_not_tell_is_not_asked_again(nvml):
    gpu = Gpu(CUDA)
    nvml.bits = None
    assert gpu.reasons() == 0
    nvml.bits = 0x20
    assert gpu.reasons() == 0


def test_without_nvml_or_a_gpu_nothing_is_known(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)  # its import raises ImportError
    assert Gpu(CUDA).reasons() == 0
    broken = SimpleNamespace()  # another module of this name
    monkeypatch.setitem(sys.modules, "pynvml", broken)
    assert Gpu(CUDA).reasons() == Gpu(CPU).reasons() == 0


def test_it_is_looked_at_now_and_then_and_nothing_is_told_twice():
    clock, stopped, looks = [0.0], [5.0], []

    def throttled():
        looks.append(clock[0])
        return stopped[0]

    gpu = SimpleNamespace(reasons=lambda: 0x20 if clock[0] >= 1 else 0)
    made = Throttling(SimpleNamespace(throttled=throttled), gpu, lambda: clock[0])
    told = []
    for clock[0] in (0.1, 0.9 * EVERY, 1.1 * EVERY, 1.2 * EVERY, 1.0 + EVERY, 1.1 + EVERY):
        stopped[0] += 0.25
        told.append(made.limited())
    assert looks == [0.0, 1.1 * EVERY, 1.0 + EVERY]
    assert told == [Limited(seconds, 0) for seconds in (0, 0, 0.75, 0)] + [
        Limited(0.5, 0x20),
        Limited(0.0, 0x20),
    ]


def test_this_process_can_be_looked_at():
    made = Throttling(throttling.Cgroup(), Gpu(CPU), iter([0.0, 1.0, 1.0]).__next__)
    assert made.limited().throttled >= 0
