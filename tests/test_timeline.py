"""The ring that events are recorded in, and how the ranks' events become one timeline."""

import json
import socket
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import traces

from collectives import process, timeline
from collectives.recording import recorder
from wagma.cli import main
from wagma.job import UsageError
from wagma.timeline import clocks, merge, rings, trace
from wagma.timeline.rings import EVENT, Ring

KINDS = {name: code for code, name in enumerate(recorder.KIND_NAMES)}
US, MS, S = 1_000, 1_000_000, 1_000_000_000
ROOM = 64  # events


def about(rank, ranks=2, **changed):
    collective = {"kind": "GroupAllreduce", "identity": 17, "ranks": list(range(ranks))}
    return {
        "ranks": ranks,
        "rank": rank,
        "host": "here",
        "clock": "a",
        "began": [1000.0, 0],
        "collectives": {"0": collective},
        "clocks": [],
        "kinds": recorder.KIND_NAMES,
        "names": ["compute"],
        "operations": {"1": "synchronize()"},
        "process": 1,
        **changed,
    }


def ring(rank, *events, ranks=2, **changed):
    """Return a rank's ring of events: (kind, time, length, numbers, further fields)."""
    made = np.zeros(len(events), EVENT)
    for place, (kind, time, length, numbers, *more) in enumerate(events):
        made[place]["kind"], made[place]["time"], made[place]["length"] = KINDS[kind], time, length
        made[place]["numbers"][: len(numbers)] = numbers
        for name, value in dict(*more).items():
            made[place][name] = value
    return Ring(Path(f"rank-{rank}.ring"), about(rank, ranks, **changed), made, 0, 0)


def version(number, begin, length, members, staleness=0):
    packed = np.zeros(8, "<u2")
    packed[: len(members)] = members
    numbers = [number, staleness, 0, *packed.view("<i8").tolist()]
    return "version", begin, length, numbers, {"count": len(members)}


def call(number, begin, length):
    return "call", begin, length, [merge.CALL, number]


@pytest.fixture
def recording(tmp_path):
    path = tmp_path / "timeline" / "rank-0000.ring"
    path.parent.mkdir()
    recorder.begin(path, ROOM * recorder.EVENT, json.dumps(about(0)))
    yield path
    recorder.end()


# The ring


def test_events_are_read_as_they_were_recorded(recording):
    recorder.told("compute", 1.0, 1.5)
    (event,) = rings.read(recording).events
    assert (event["time"], event["length"], event["thread"]) == (S, S // 2, 0)
    assert rings.read(recording).about["rank"] == 0


@pytest.mark.parametrize("count", [0, 1, ROOM - 1, ROOM, ROOM + 1, 5 * ROOM + 3])
def test_the_newest_events_are_kept_and_the_others_counted(recording, count):
    for number in range(count):
        recorder.told("compute", float(number), number + 0.5)
    found = rings.read(recording)
    assert found.events["time"].tolist() == [i * S for i in range(max(0, count - ROOM), count)]
    assert (found.dropped, found.torn) == (max(0, count - ROOM), 0)


def test_an_event_that_was_cut_off_is_left_out_and_counted(recording):
    for number in range(3):
        recorder.told("compute", float(number), number + 0.5)
    contents = bytearray(recording.read_bytes())
    events = np.frombuffer(contents, EVENT, offset=recorder.PAGE + 2 * recorder.DESCRIPTION)
    events["sequence"][1] = 0
    recording.write_bytes(contents)
    found = rings.read(recording)
    assert found.events["time"].tolist() == [0, 2 * S] and found.torn == 1


def test_nothing_is_recorded_after_the_end(recording):
    recorder.end()
    recorder.told("compute", 1.0, 2.0)
    with recorder.span("compute"):
        pass
    assert len(rings.read(recording).events) == 0


def test_a_span_lasts_as_long_as_its_block(recording):
    with recorder.span("outer"), recorder.span("inner"):
        pass
    inner, outer = rings.read(recording).events
    assert outer["time"] <= inner["time"]
    assert inner["time"] + inner["length"] <= outer["time"] + outer["length"]


def test_a_description_is_replaced_as_a_whole(recording):
    for count in (1, 1000, 1):
        recorder.describe(json.dumps(about(0, names=["x" * count])))
        assert rings.read(recording).about["names"] == ["x" * count]
    recorder.describe("x" * recorder.DESCRIPTION)  # which has no place
    assert rings.read(recording).about["names"] == ["x"]


def test_names_beyond_the_most_are_one(recording, monkeypatch):
    monkeypatch.setattr(recorder, "_names", {})
    for number in range(recorder.MOST_NAMES + 5):
        with recorder.span(f"batch {number} {'x' * 200}"):
            pass
    assert len(recorder.names()) == recorder.MOST_NAMES + 1
    assert recorder.names()[-1] == recorder.OTHER_NAMES
    assert {len(name) for name in recorder.names()[:-1]} == {recorder.LONGEST_NAME}
    newest = [int(event["numbers"][0]) for event in rings.read(recording).events[-6:]]
    assert newest == [recorder.MOST_NAMES - 1] + [recorder.MOST_NAMES] * 5


def test_a_description_that_has_no_place_is_thinned_or_the_last_one_stays(
    recording, monkeypatch, caplog
):
    made = timeline.Recording(recording, 2, 1)
    monkeypatch.setattr(timeline, "_recording", made)
    made.clocks = [[of, time, 0, 0] for time in range(20_000) for of in (0, 1)]
    timeline.describe_again()
    ends = [[0, 0, 0, 0], [1, 0, 0, 0], [0, 19_999, 0, 0], [1, 19_999, 0, 0]]
    assert rings.read(recording).about["clocks"] == ends
    made.host = "x" * recorder.DESCRIPTION
    made.clocks.append([0, 20_000, 0, 0])
    timeline.describe_again()
    assert rings.read(recording).about["clocks"] == ends
    assert caplog.text.count("is full") == 1


def test_only_the_last_two_files_stay_mapped(recording):
    for _ in range(4):
        recorder.begin(recording, recorder.EVENT, json.dumps(about(0)))
    recorder.told("compute", 1.0, 2.0)
    assert len(recorder._mapped) == 2 and len(rings.read(recording).events) == 1


def test_a_clock_is_identified_by_the_host_where_proc_tells_nothing(monkeypatch):
    def refused(*_):
        raise PermissionError

    monkeypatch.setattr("os.readlink", refused)
    monkeypatch.setattr(Path, "read_text", refused)
    assert timeline.clock_identity().strip() == socket.gethostname()


class Interrupted:
    """A collective's native part: an exception ends a wait."""

    paused = None

    def pause(self, paused):
        self.paused = paused

    def meet(self):
        raise KeyboardInterrupt


def test_an_interrupted_wait_for_all_resumes():
    native = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        timeline.wait_for_all(SimpleNamespace(native=native))
    assert native.paused is False


def test_a_block_is_refused_where_only_one_thread_may_be_in_mpi(tmp_path, monkeypatch):
    from mpi4py import MPI

    monkeypatch.setattr(MPI, "Query_thread", lambda: MPI.THREAD_SERIALIZED)
    timeline.check_thread_level()
    monkeypatch.setattr(process, "_open", {1: SimpleNamespace(engine="adaptive")})
    with (
        pytest.raises(RuntimeError, match="SERIALIZED, with which no timeline can begin"),
        timeline.begun(tmp_path, None),
    ):
        pass
    assert not timeline.is_recording()


def test_a_new_recording_leaves_the_mapped_file_of_the_former_one(recording):
    recorder.told("compute", 1.0, 2.0)
    with recording.open("rb") as former:
        recorder.begin(recording, recorder.EVENT, json.dumps(about(0)))
        assert (
            len(former.read()) == recorder.PAGE + 2 * recorder.DESCRIPTION + ROOM * EVENT.itemsize
        )
    assert len(rings.read(recording).events) == 0


def test_files_of_processes_that_were_ended_as_they_began_are_skipped(recording, caplog):
    recorder.told("compute", 1.0, 2.0)
    begun = recording.read_bytes()
    empty = {
        1: b"",
        2: bytes(len(begun)),
        3: begun[:24] + bytes(8) + begun[32 : recorder.PAGE] + bytes(2 * recorder.DESCRIPTION),
    }
    for rank, contents in empty.items():
        recording.with_name(f"rank-{rank:04}.ring").write_bytes(contents)
    (found,), former = rings.read_all(recording.parents[1])
    assert found.path == recording and former == []
    assert all(f"rank-{rank:04}.ring" in caplog.text for rank in empty)


def test_another_file_is_refused(tmp_path):
    path = tmp_path / "rank-0000.ring"
    path.write_bytes(b"text" * 2000)
    with pytest.raises(UsageError, match="is no recorded timeline"):
        rings.read(path)


def test_a_file_from_a_machine_with_larger_pages_is_read(recording):
    """Its descriptions begin where a page of its writer's ends."""
    recorder.told("compute", 1.0, 1.5)
    there = bytearray(recording.read_bytes())
    here = rings.read(recording)
    _, _, place, *_ = rings.HEADER.unpack_from(there)
    more = 1 << 16
    values = list(rings.HEADER.unpack_from(there))
    values[2] += more
    rings.HEADER.pack_into(there, 0, *values)
    begin = place - 2 * values[4]
    recording.write_bytes(there[:begin] + bytes(more) + there[begin:])
    found = rings.read(recording)
    assert found.about == here.about and found.events.tobytes() == here.events.tobytes()


def test_a_damaged_file_is_refused(recording):
    contents = bytearray(recording.read_bytes())
    recording.write_bytes(contents[: len(contents) // 2])
    with pytest.raises(UsageError, match="is damaged"):
        rings.read(recording)


# Clocks


def test_clocks_are_compared_at_both_ends_and_interpolated_between():
    drifting = [[0, 10 * S, 5 * S, 200], [0, 110 * S, 5 * S + 2 * MS, 300]]
    found = clocks.align([ring(0, clocks=[[0, 0, 0, 0]]), ring(1, clock="b", clocks=drifting)])
    times = np.array([10 * S, 60 * S, 110 * S])
    assert (found[1].to_reference(times) - times - 5 * S).tolist() == [0, MS, 2 * MS]
    assert found[1].error == 300 and found[1].drift == pytest.approx(20)
    assert "±0.3 µs, drift +20.00 ppm" in found[1].in_words()


def test_processes_of_one_machine_have_one_clock_where_comparisons_agree():
    agrees = ring(1, clocks=[[0, S, 150, 200]])
    differs = ring(1, clocks=[[0, S, 900, 200]])
    times = np.array([S])
    for other, offset in ((agrees, 0), (differs, 900)):
        found = clocks.align([ring(0, clocks=[[0, 0, 0, 0]]), other])[1]
        assert (found.to_reference(times) - times).tolist() == [offset]


def test_a_rank_that_was_not_compared_is_aligned_by_its_machine_or_marked():
    compared = [ring(0, clocks=[[0, 0, 0, 0]]), ring(1, clock="b", clocks=[[0, S, 7, 1]])]
    found = clocks.align([*compared, ring(2, clock="b"), ring(3, clock="c")])
    assert found[2].aligned and found[2].offsets == (7,)
    assert not found[3].aligned and "NOT ALIGNED" in found[3].in_words()


def test_a_rank_that_is_not_aligned_aligns_no_other():
    """Neither one on its machine nor one that was compared with it; in any order of ranks."""
    compared = [ring(0, clocks=[[0, 0, 0, 0]]), ring(1, clock="b", clocks=[[0, S, 7, 1]])]
    compared += [ring(rank, clock="b", clocks=[[0, S, 7, 1]]) for rank in (7, 8)]
    apart = [
        ring(2, clock="c", clocks=[[2, 0, 0, 0]]),
        ring(3, clock="c", clocks=[[2, S, 5, 1]]),
        ring(4, clock="d", clocks=[[2, S, 5, 1]]),
    ]
    found = clocks.align([*compared, *apart, ring(5, clock="e", clocks=[[6, S, 1, 1]])])
    assert [found[rank].aligned for rank in range(6)] == [True, True, False, False, False, False]
    chain = ring(5, clock="e", clocks=[[6, S, 1, 1]]), ring(6, clock="f", clocks=[[1, S, 2, 1]])
    found = clocks.align([*compared, *chain])
    assert found[5].aligned and found[5].offsets == (10,)


def test_clocks_are_compared_by_way_of_another_rank():
    found = clocks.align(
        [
            ring(0, clocks=[[0, 0, 0, 0]]),
            ring(1, clock="b", clocks=[[0, S, 100, 10]]),
            ring(2, clock="c", clocks=[[1, S, 20, 5]]),
        ]
    )
    assert found[2].offsets == (120,) and found[2].error == 15


# Merging


def test_spans_whose_names_were_not_described_are_others():
    timeline = merge.merge([ring(0, ("span", 0, US, [7]), ranks=1)])
    assert timeline.ranks[0].slices[0].name == recorder.OTHER_NAMES


def test_ranks_are_put_on_one_clock_from_the_first_call_on():
    timeline = merge.merge(
        [
            ring(0, call(0, 50 * US, 10 * US), clocks=[[0, 0, 0, 0]]),
            ring(1, call(0, 3 * US, 9 * US), clock="b", clocks=[[0, 0, 70 * US, 10]]),
        ]
    )
    begins = {number: rank.slices[0].begin for number, rank in timeline.ranks.items()}
    assert begins == {0: 0, 1: 23 * US}


def test_a_wait_names_the_members_that_came_later():
    wait = ("wait", 10 * US, 90 * US, [0, 0])
    early = version(4, 5 * US, 94 * US, (0, 1, 2))
    present = version(4, 6 * US, 93 * US, (0, 1, 2))
    late = version(4, 80 * US, 18 * US, (0, 1, 2))
    others = {"ranks": 3, "clocks": [[0, 0, 0, 0]]}
    timeline = merge.merge(
        [ring(0, wait, early, **others), ring(1, present, **others), ring(2, late, **others)]
    )
    (waiting,) = (each for each in timeline.ranks[0].slices if each.kind == "wait")
    assert waiting.about["for rank: how late (µs)"] == {"2": 70}


def test_a_wait_in_an_operation_names_who_entered_it_later():
    def entered(time):
        return "operation", time, 100 * US - time, [1, 3]

    wait = ("wait", 10 * US, 90 * US, [0, 0])
    both = {"clocks": [[0, 0, 0, 0]]}
    timeline = merge.merge(
        [ring(0, wait, entered(5 * US), **both), ring(1, entered(60 * US), **both)]
    )
    (waiting,) = (each for each in timeline.ranks[0].slices if each.kind == "wait")
    assert waiting.about["for rank: how late (µs)"] == {"1": 50}


def test_a_wait_in_which_the_process_ended_is_shown():
    timeline = merge.merge([ring(0, call(0, 0, US), ("waiting", 5 * US, 100 * MS, []), ranks=1)])
    last = timeline.ranks[0].slices[-1]
    assert (last.kind, last.begin, last.length) == ("wait", 5 * US, 100 * MS)
    assert "until the process ended" in last.name


def test_arrows_lead_from_the_call_that_started_a_version_to_those_that_executed_it():
    ranks = {"ranks": 3, "clocks": [[0, 0, 0, 0]]}
    timeline = merge.merge(
        [
            ring(0, call(2, 10 * US, 50 * US), version(2, 11 * US, 40 * US, (0, 1, 2)), **ranks),
            ring(1, ("learned", 20 * US, 0, [2, 0]), version(2, 22 * US, 20 * US, (0, 1, 2)),
                 **ranks),
            ring(2, ("learned", 25 * US, 0, [2, 1]), version(2, 26 * US, 20 * US, (0, 1, 2), 1),
                 **ranks),
        ]
    )  # fmt: skip
    found = {(each.rank, each.to_rank): each for each in timeline.arrows}
    assert found.keys() == {(0, 1), (1, 1), (1, 2), (2, 2)}
    assert found[0, 1].track == merge.APPLICATION
    assert found[2, 2].to_track == merge.VERSIONS
    names = {number: [each.name for each in rank.slices] for number, rank in timeline.ranks.items()}
    assert "forwards version 2" in names[1] and "learns of version 2" in names[2]
    assert "version 2, passive" in names[2]
    (started,) = (each for each in timeline.ranks[0].slices if each.kind == "version")
    assert started.about["started by"] == "this rank"


def test_a_version_that_others_executed_is_shown_when_they_did():
    packed = np.array([0, 1, 0, 0], "<u2").view("<i8").tolist()
    noticed = ("executed", 500 * US, 0, [7, 2, 1, *packed], {"count": 0})
    both = {"clocks": [[0, 0, 0, 0]]}
    timeline = merge.merge(
        [ring(0, version(7, 10 * US, 30 * US, (0, 1)), **both), ring(1, noticed, **both)]
    )
    (shown,) = (each for each in timeline.ranks[1].slices if each.kind == "version")
    assert (shown.begin, shown.length) == (0, 30 * US)
    assert shown.about["executed by rank"] == 0 and shown.about["staleness"] == 2


def peer_message(kind, time, peer, number, what=2, vector=True, awaited=False):
    return kind, time, 0, [peer, number, 4 * what + 2 * awaited + vector]


def test_messages_between_peers_are_marks_with_arrows_and_waits_are_for_the_last(tmp_path):
    ranks = {"ranks": 3, "clocks": [[0, 0, 0, 0]]}
    ranks["collectives"] = {
        "4": {"kind": "NeighborAverage", "identity": 17, "ranks": [2, 1, 0]}  # of the job
    }
    sends = [peer_message("sent", at * US, 0, 7 + n) for n, at in enumerate((10, 80))]
    receives = [
        peer_message("received", 20 * US, 2, 7, awaited=True),
        peer_message("received", 30 * US, 1, 7, awaited=True),
        peer_message("received", 40 * US, 1, 7, 3, vector=False),
        peer_message("received", 85 * US, 2, 8),
        ("wait", 15 * US, 20 * US, [0, 0]),
        ("wait", 50 * US, 9 * US, [0, 0]),
        call(7, 0, 60 * US),
    ]
    made = []
    for rank, events in ((0, sends), (1, [peer_message("sent", 25 * US, 0, 7)]), (2, receives)):
        made.append(ring(rank, *[(*each[:4], {"collective": 4}) for each in events], **ranks))
    timeline = merge.merge(made)
    names = [each.name for each in timeline.ranks[2].slices if each.track >= merge.MESSAGES]
    assert names == [
        "receives model 7 from rank 0",
        "receives model 7 from rank 1",
        "receives clock 7 from rank 1",
        "receives model 8 from rank 0",
    ]
    assert timeline.ranks[0].tracks[merge.MESSAGES + 4] == "messages of NeighborAverage 4"
    arrows = [(each.rank, each.time // US, each.to_time // US) for each in timeline.arrows]
    assert sorted(arrows) == [(0, 10, 20), (0, 80, 85), (1, 25, 30)]
    assert {each.to_rank for each in timeline.arrows} == {2}
    waits = [each.about for each in timeline.ranks[2].slices if each.kind == "wait"]
    late = [each.get("for rank: how late (µs)") for each in waits]
    assert late == [{"1": 15.0, "0": 5.0}, None]
    trace.write(timeline, tmp_path / "trace.json.gz")
    traces.check(traces.read(tmp_path / "trace.json.gz"))


def test_large_groups_take_several_events():
    members = list(range(30))
    first = version(1, 0, US, members[:8])
    packed = np.zeros(40, "<u2")
    packed[:22] = members[8:]
    rest = [
        ("members", 0, 0, packed[at : at + 20].view("<i8").tolist(), {"count": count})
        for at, count in ((0, 20), (20, 2))
    ]
    timeline = merge.merge([ring(0, first, *rest, ranks=30)])
    (shown,) = (each for each in timeline.ranks[0].slices if each.kind == "version")
    assert shown.about["members"] == members


def test_a_rank_without_a_common_clock_is_marked_and_has_no_arrows():
    other = [("learned", 20 * US, 0, [2, 0]), version(2, 22 * US, 20 * US, (0, 1))]
    timeline = merge.merge(
        [
            ring(0, call(2, 10 * US, 50 * US), clocks=[[0, 0, 0, 0]]),
            ring(1, *other, clock="b"),
        ]
    )
    assert [(each.rank, each.to_rank) for each in timeline.arrows] == [(1, 1)]
    assert any("NOT ALIGNED" in line for line in trace.events(timeline))


def test_exchanges_are_cut_where_a_wait_begins_so_that_slices_nest(tmp_path):
    events = [
        call(0, 0, 100 * US),
        ("exchange", 10 * US, 30 * US, []),
        ("wait", 20 * US, 70 * US, [0, 0]),
        ("span", 150 * US, 10 * US, [0]),
    ]
    timeline = merge.merge([ring(0, *events, ranks=1)])
    kinds = [(each.kind, each.begin // US, each.length // US) for each in timeline.ranks[0].slices]
    assert kinds == [
        ("call", 0, 100), ("exchange", 10, 10), ("wait", 20, 70), ("exchange", 20, 20),
        ("own", 100, 50), ("span", 150, 10),
    ]  # fmt: skip
    count = trace.write(timeline, tmp_path / "trace.json.gz")
    events = traces.read(tmp_path / "trace.json.gz")
    assert len(events) == count and traces.check(events) == {}


def test_laps_are_cut_where_a_span_that_they_cross_begins_or_ends():
    laps = [("span", 0, 30 * US, [0, 1]), ("span", 30 * US, 50 * US, [0, 1])]
    spans = [("span", 20 * US, 40 * US, [0, 0]), ("span", 35 * US, 5 * US, [0, 0])]
    timeline = merge.merge([ring(0, *laps, *spans, ranks=1)])
    kinds = [(each.kind, each.begin // US, each.length // US) for each in timeline.ranks[0].slices]
    assert kinds == [
        ("lap", 0, 20), ("span", 20, 40), ("lap", 20, 10), ("lap", 30, 30), ("span", 35, 5),
        ("lap", 60, 20),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "time, shown", [(0, "0.000"), (1, "0.001"), (123456, "123.456"), (-1500, "-1.500")]
)
def test_times_are_written_to_the_nanosecond(time, shown):
    assert trace.microseconds(time) == shown


# The command


def save(directory, *made):
    """Write rings as files."""
    (directory / "timeline").mkdir(parents=True)
    for each in made:
        path = directory / "timeline" / f"rank-{each.rank:04}.ring"
        recorder.begin(path, 16 * recorder.EVENT, json.dumps(each.about))
        recorder.end()
        contents = bytearray(path.read_bytes())
        events = each.events.copy()
        events["sequence"] = np.arange(1, len(events) + 1)
        place = recorder.PAGE + 2 * recorder.DESCRIPTION
        contents[place : place + events.nbytes] = events.tobytes()
        contents[64:72] = len(events).to_bytes(8, "little")
        path.write_bytes(contents)


def test_the_command_writes_a_trace_and_a_picture_and_says_what_is_missing(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    run, picture = tmp_path / "mine", tmp_path / "mine.png"
    spans = [("span", 0, MS, [0]), call(0, MS, MS), ("wait", MS + US, MS // 2, [0, 0])]
    other = {"0": {"kind": "GroupAllreduce", "identity": 5}}
    former = ring(2, ("span", 0, MS, [0]), ranks=5, began=[900.0, 0], collectives=other)
    rings_of_job = [ring(r, *spans, ranks=4, clocks=[[0, 0, 0, 0]]) for r in (0, 1)]
    save(run, *rings_of_job, former)
    assert main(["timeline", str(run), "--png", str(picture), "--to", "0.01"]) == 0
    said = capsys.readouterr().out
    assert "rank-0002.ring is of a former job, and left out" in said
    assert "there is no file of ranks 2, 3" in said
    events = traces.read(run / "timeline.json.gz")
    assert {each["pid"] for each in events} == {0, 1}
    traces.check(events)
    assert picture.stat().st_size > 5000


def test_a_directory_without_a_timeline_is_an_error_of_usage(tmp_path, capsys):
    assert main(["timeline", str(tmp_path)]) == 2
    assert f"no timeline in {tmp_path}" in capsys.readouterr().err


def test_ranks_with_a_common_collective_are_of_one_job_whatever_their_clocks_say(tmp_path):
    """The clock of the machine of rank 1 is behind, and ranks 0 and 1 are in none together."""
    of = [{str(n): {"kind": "Peers", "identity": n} for n in each} for each in ((7,), (8,), (7, 8))]
    began = [1000.0, 900.0, 1000.0]
    save(tmp_path, *(ring(n, ranks=3, began=[began[n], 0], collectives=of[n]) for n in range(3)))
    found, former = rings.read_all(tmp_path)
    assert [each.rank for each in found] == [0, 1, 2] and former == []


@pytest.mark.parametrize(
    "name, error",
    [
        ("mine.picture", "no picture is written as .picture"),
        ("missing/mine.png", "there is no directory"),
        ("folder.png", "cannot write"),
    ],
)
def test_a_picture_that_cannot_be_written_is_an_error_of_usage(tmp_path, capsys, name, error):
    pytest.importorskip("matplotlib")
    save(tmp_path / "mine", ring(0, ("span", 0, MS, [0]), ranks=1))
    (tmp_path / "folder.png").mkdir()
    assert main(["timeline", str(tmp_path / "mine"), "--png", str(tmp_path / name)]) == 2
    assert error in capsys.readouterr().err


def test_a_file_that_cannot_be_read_is_an_error_of_usage(tmp_path, capsys):
    (tmp_path / "timeline" / "rank-0000.ring").mkdir(parents=True)
    assert main(["timeline", str(tmp_path)]) == 2
    assert "rank-0000.ring: Is a directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options, error",
    [
        (["--png", "a.png", "--from", "2", "--to", "1"], "1 s is not after --from, 2 s"),
        (["--to", "1"], "not allowed without argument --png"),
    ],
)
def test_windows_that_make_no_sense_are_refused(capsys, options, error):
    with pytest.raises(SystemExit) as ended:
        main(["timeline", "runs/mine", *options])
    assert ended.value.code == 2 and error in capsys.readouterr().err
