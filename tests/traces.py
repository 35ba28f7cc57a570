"""What any trace of a timeline must be, for the viewers that open it."""

import gzip
import json
from collections import defaultdict


def read(path):
    """Return the events of a trace, which has no others than Perfetto's importer knows."""
    contents = json.loads(gzip.decompress(path.read_bytes()))
    assert contents.keys() == {"displayTimeUnit", "otherData", "traceEvents"}
    return contents["traceEvents"]


def check(events):
    """Fail unless slices nest, tracks have names, and arrows begin and end in slices."""
    slices, names, flows = defaultdict(list), set(), defaultdict(dict)
    for each in events:
        where = each["pid"], each.get("tid")
        if each["ph"] == "X":
            assert each["dur"] >= 0 and each["name"] and each["cat"], each
            slices[where].append((each["ts"], each["ts"] + each["dur"]))
        elif each["ph"] == "M":
            names |= {where} if each["name"] == "thread_name" else set()
        elif each["ph"] == "C":
            assert isinstance(each["args"]["value"], int), each
        else:
            assert each["ph"] in "sf" and each["ph"] not in flows[each["id"]], each
            flows[each["id"]][each["ph"]] = (*where, each["ts"])
    assert slices and slices.keys() <= names
    for where, spans in slices.items():
        opened = []
        for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while opened and opened[-1] <= begin + 1e-4:
                opened.pop()
            assert not opened or end <= opened[-1] + 1e-4, (where, begin, end, opened)
            opened.append(end)
    for ends in flows.values():
        assert ends.keys() == {"s", "f"}
        for pid, tid, time in ends.values():
            assert any(begin - 1e-3 <= time <= end + 1e-3 for begin, end in slices[pid, tid]), (
                pid,
                tid,
                time,
            )
    return flows
