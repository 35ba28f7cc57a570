"""For which vectors the kernel copies between processes: the variable, or the processor."""

import pytest

from collectives.memory import other_processes
from collectives.memory.other_processes import FASTER_FROM, VARIABLE, from_environment, processor

X86 = "processor\t: 0\nvendor_id\t: {}\nmodel name\t: any\n\nprocessor\t: 1\n"


@pytest.mark.parametrize(("given", "bytes"), [("0", 0), ("65536", 65536), ("never", None)])
def test_the_variable_says_from_how_many_bytes_on(monkeypatch, given, bytes):
    monkeypatch.setenv(VARIABLE, given)
    assert from_environment() == bytes


@pytest.mark.parametrize("given", ["-1", "64K", "no"])
def test_anything_else_is_named_and_means_never(monkeypatch, given):
    monkeypatch.setenv(VARIABLE, given)
    with pytest.warns(UserWarning, match=f"{VARIABLE} is '{given}', neither a number of bytes nor"):
        assert from_environment() is None


@pytest.mark.parametrize("given", [None, ""])
def test_else_the_processor_decides(monkeypatch, given):
    monkeypatch.delenv(VARIABLE, raising=False)
    if given is not None:
        monkeypatch.setenv(VARIABLE, given)
    assert from_environment() == FASTER_FROM.get(processor())


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (X86.format("GenuineIntel"), "GenuineIntel"),
        (X86.format("AuthenticAMD"), "AuthenticAMD"),
        ("processor\t: 0\nCPU implementer\t: 0x41\n", None),
        ("", None),
        (None, None),
    ],
)
def test_who_made_the_processor(tmp_path, text, found):
    path = tmp_path / "cpuinfo"
    if text is not None:
        path.write_text(text)
    assert other_processes.processor(path) == found
    assert FASTER_FROM.get(found) == (4 << 20 if found == "GenuineIntel" else None)
