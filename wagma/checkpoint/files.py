"""Checkpoints as directories: made visible by one rename, and checked by their manifests."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

FORMAT = 2
MANIFEST, MODEL = "manifest.json", "model.safetensors"
UNFINISHED = ".unfinished-"
NAME = re.compile(r"(\d{6,})-step-\d+")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, or there is none to continue from; the message names it."""


class BrokenError(Exception):
    """A checkpoint is damaged or incomplete; the message says where."""


class Written(NamedTuple):
    """A file as it was written.

    Attributes:
        size: bytes.
        sha256: hexadecimal, as `sha256sum` prints it.
    """

    size: int
    sha256: str


def part_name(rank: int) -> str:
    """Return the name of a rank's own part."""
    return f"rank-{rank:04}.pt"


def look_at(path: Path) -> Written:
    """Read a file and return its size and checksum."""
    with path.open("rb") as file:
        total = hashlib.sha256()
        while block := file.read(1 << 20):
            total.update(block)
        return Written(file.tell(), total.hexdigest())


def sync(path: Path) -> None:
    """Have a file or directory written to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a small file that is never partial, with the checksum of what it holds."""
    text = json.dumps(value, sort_keys=True)
    beside = path.with_name(f".{path.name}")
    beside.write_text(json.dumps({"sha256": digest(text), "holds": value}, indent=1) + "\n")
    sync(beside)
    beside.rename(path)


def read_json(path: Path) -> dict[str, Any]:
    """Return what `write_json` has written.

    Raises:
        BrokenError: it is missing or damaged.
    """
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
        value, expected = read["holds"], read["sha256"]
        is_good = digest(json.dumps(value, sort_keys=True)) == expected
    except FileNotFoundError as error:
        raise BrokenError(f"it has no {path.name}") from error
    except OSError as error:
        raise BrokenError(f"{path.name} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise BrokenError(f"{path.name} is damaged") from error
    if not is_good:
        raise BrokenError(f"{path.name} is damaged")
    return dict(value)


def digest(text: str) -> str:
    """Return a text's checksum."""
    return hashlib.sha256(text.encode()).hexdigest()


def begin(directory: Path, step: int) -> Path:
    """Make an unfinished checkpoint's directory and return it; remove what killed jobs left.

    Args:
        directory: of all checkpoints; made if it is missing.
        step: the steps that were made, for its name.

    Raises:
        OSError: it cannot be made.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for left in directory.glob(f"{UNFINISHED}*"):
        shutil.rmtree(left, ignore_errors=True)
    number = 1 + max((number_of(path) for path in found(directory)), default=0)
    # A name of its own: what another one that writes here still looks for is not found in it.
    unfinished = directory / f"{UNFINISHED}{number:06}-step-{step}.{secrets.token_hex(4)}"
    unfinished.mkdir()
    return unfinished


def completed(unfinished: Path) -> Path:
    """Return the path that an unfinished checkpoint has once it is complete."""
    return unfinished.with_name(unfinished.stem.removeprefix(UNFINISHED))


def complete(unfinished: Path, manifest: dict[str, Any]) -> Path:
    """Write the manifest, give the checkpoint its name, and return its directory."""
    manifest = {"format": FORMAT, "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **manifest}
    write_json(unfinished / MANIFEST, manifest)
    sync(unfinished)
    path = completed(unfinished)
    unfinished.rename(path)
    sync(path.parent)
    return path


def found(directory: Path) -> list[Path]:
    """Return the checkpoints in a directory, the newest first."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        paths = [path for path in directory.iterdir() if NAME.fullmatch(path.name)]
        return sorted(paths, key=number_of, reverse=True)
    return []


def number_of(path: Path) -> int:
    """Return a checkpoint's number: that of a newer one is higher."""
    return int(path.name.partition("-")[0])


def keep_newest(directory: Path, keep: int) -> None:
    """Remove what is older than so many checkpoints that are complete."""
    complete = 0
    for path in found(directory):
        if complete >= keep:
            # Hidden first: one that is removed in part is not to be taken for a broken one.
            hidden = path.with_name(UNFINISHED + path.name)
            with contextlib.suppress(OSError):
                path.rename(hidden)
            shutil.rmtree(hidden, ignore_errors=True)
        elif is_complete(path):
            complete += 1


def is_complete(path: Path) -> bool:
    """Return whether the manifest is good and all files have their sizes."""
    try:
        manifest = read_json(path / MANIFEST)
        sizes = {name: entry[0] for name, entry in manifest["files"].items()}
        return all((path / name).stat().st_size == size for name, size in sizes.items())
    except (BrokenError, OSError):
        return False


def check(path: Path, manifest: dict[str, Any], names: Iterable[str]) -> None:
    """Compare some of a checkpoint's files with its manifest.

    Raises:
        BrokenError: one is missing, truncated or changed.
    """
    for name in names:
        size, sha256 = manifest["files"][name]
        try:
            is_there = look_at(path / name)
        except FileNotFoundError as error:
            raise BrokenError(f"{name} is missing") from error
        except OSError as error:
            raise BrokenError(f"{name} cannot be read: {error.strerror}") from error
        if is_there.size != size:
            raise BrokenError(f"{name} has {is_there.size} bytes instead of {size}")
        if is_there.sha256 != sha256:
            raise BrokenError(f"{name} has been changed: its checksum is wrong")
