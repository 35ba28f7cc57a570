"""A timeline in the trace-event format, for ui.perfetto.dev and chrome://tracing.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from wagma.timeline.merge import Rank, Slice, Timeline

AT_ONCE = 20_000  # lines written together
COMPRESSION = 3  # of gzip: a higher one takes several times as long
encode = json.JSONEncoder(separators=(",", ":")).encode


def write(timeline: Timeline, path: Path) -> int:
    """Write a timeline as gzipped JSON; return the number of its events."""
    count = 0
    lines = events(timeline)
    about: dict[str, dict[int, Any]] = {
        "clocks": {},
        "dropped events": {},
        "events cut off at the end": {},
    }
    for number, rank in timeline.ranks.items():
        about["clocks"][number] = rank.clock.in_words()
        about["dropped events"][number] = rank.ring.dropped
        about["events cut off at the end"][number] = rank.ring.torn
    head = f'{{"displayTimeUnit":"ns","otherData":{json.dumps(about)},"traceEvents":[\n'
    with gzip.open(path, "wb", COMPRESSION) as file:
        file.write(head.encode())
        while some := list(islice(lines, AT_ONCE)):
            file.write(((",\n" if count else "") + ",\n".join(some)).encode())
            count += len(some)
        file.write(b"\n]}\n")
    return count


def events(timeline: Timeline) -> Iterator[str]:
    """Yield the trace's events, each as JSON."""
    for number, rank in timeline.ranks.items():
        yield from named(number, rank)
        for each in rank.slices:
            yield in_json(number, each)
        for count in rank.counts:
            yield (
                f'{{"ph":"C","pid":{number},"ts":{microseconds(count.time)},'
                f'"name":{text(count.name)},"args":{{"value":{count.value}}}}}'
            )
    for number, arrow in enumerate(timeline.arrows):
        head = f'"id":{number},"cat":"{arrow.name}","name":"{arrow.name}"'
        yield (
            f'{{"ph":"s",{head},"pid":{arrow.rank},"tid":{arrow.track},'
            f'"ts":{microseconds(arrow.time)}}}'
        )
        yield (
            f'{{"ph":"f","bp":"e",{head},"pid":{arrow.to_rank},"tid":{arrow.to_track},'
            f'"ts":{microseconds(arrow.to_time)}}}'
        )


def named(number: int, rank: Rank) -> Iterator[str]:
    """Yield the names of a rank and its tracks, with how exact its clock is."""
    name = f"rank {number} on {rank.ring.about['host']}"
    if not rank.clock.aligned:
        name += " – NOT ALIGNED, so its times cannot be compared with others'"
    yield metadata(number, 0, "process_name", {"name": name})
    yield metadata(number, 0, "process_sort_index", {"sort_index": number})
    dropped = rank.ring.dropped
    labels = f"clock: {rank.clock.in_words()}"
    if dropped:
        labels += f"; {dropped:,} older events dropped"
    yield metadata(number, 0, "process_labels", {"labels": labels})
    for track, name in rank.tracks.items():
        yield metadata(number, track, "thread_name", {"name": name})
        yield metadata(number, track, "thread_sort_index", {"sort_index": track})


def metadata(rank: int, track: int, name: str, about: dict[str, Any]) -> str:
    """Return an event that describes a process or a thread."""
    return json.dumps({"ph": "M", "pid": rank, "tid": track, "name": name, "args": about})


def in_json(rank: int, each: Slice) -> str:
    """Return a slice as JSON."""
    begin, length, track, kind, name, about = each
    more = f',"args":{encode(about)}' if about else ""
    # As `microseconds` writes them, without a call: there are millions.
    return (
        f'{{"ph":"X","pid":{rank},"tid":{track},"ts":{begin / 1000:.3f},'
        f'"dur":{length / 1000:.3f},"cat":"{kind}","name":{text(name)}{more}}}'
    )


def microseconds(nanoseconds: int) -> str:
    """Return nanoseconds in µs, which the format counts in, with three digits after the point."""
    return f"{nanoseconds / 1000:.3f}"


@lru_cache(4096)
def text(name: str) -> str:
    """Return a name in JSON."""
    return json.dumps(name)
