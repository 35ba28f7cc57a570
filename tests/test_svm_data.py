"""Samples from files: how they are read and divided, and how what is wrong with them is said."""

import bz2
import gzip

import numpy as np
import pytest
from sklearn.datasets import dump_svmlight_file

from wagma import cli, svm
from wagma.job import UsageError
from wagma.wpsgd import files
from wagma.wpsgd.samples import generate
from wagma.wpsgd.steps import Steps


@pytest.fixture
def write(tmp_path):
    """Return a function that writes a file of these lines, and returns its path."""

    def write(*lines, name="some.svm"):
        text = "".join(f"{line}\n" for line in lines).encode()
        path = tmp_path / name
        path.write_bytes({".gz": gzip.compress, ".bz2": bz2.compress}.get(path.suffix, bytes)(text))
        return path

    return write


LINES = ["# a comment", "1 1:0.5 3:2", "", "0 2:1 4:-1 # and another", "0 3:1"]
MATRIX = [[0.5, 0, 2, 0], [0, 1, 0, -1], [0, 0, 1, 0]]


@pytest.mark.parametrize("name", ["a.svm", "a.svm.gz", "a.svm.bz2"])
@pytest.mark.parametrize("negative", ["0", "-1"])
def test_a_file_s_samples_and_both_kinds_of_labels(write, name, negative):
    lines = [negative + line[1:] if line[:1] == "0" else line for line in LINES]
    read = files.read(write(*lines, name=name))
    assert read.matrix.toarray().tolist() == MATRIX
    assert read.labels.tolist() == [1, -1, -1]
    assert (read.features, read.indptr.dtype, read.indices.dtype) == (4, np.int64, np.int32)


@pytest.mark.parametrize("options", [{}, {"comment": "some\ntext"}, {"query_id": [7, 7, 9]}])
@pytest.mark.parametrize("zero_based", [False, True])
@pytest.mark.parametrize("classes", [(0, 1), (-1, 1)])
def test_what_scikit_learn_writes_is_read(tmp_path, options, zero_based, classes):
    path = tmp_path / "some.svm"
    labels = [classes[1], classes[0], classes[0]]
    dump_svmlight_file(np.array(MATRIX), labels, str(path), zero_based=zero_based, **options)
    read = files.read(path)
    assert read.matrix.toarray().tolist() == MATRIX
    assert read.labels.tolist() == [1, -1, -1]


# As the files of real-sim and KDD Cup 2010 are, and as editors leave them.
@pytest.mark.parametrize(
    "lines",
    [
        ["+1 1:0.5 3:2 ", "-1 2:1 4:-1 ", "-1 3:1 "],
        ["1 1:5e-1 3:2.000", "0 2:1 4:-1", "0 3:1"],
        ["1.0 1:0.5 3:2\r", "\r", "-1.0 2:1\t4:-1\r", "  -1 3:1\r"],
        ["1 qid:1 1:0.5 3:2", "# none", "0 qid:1 2:1 4:-1", "   ", "0 qid:2 3:1 # id:5"],
    ],
)
def test_quirks_of_files_are_read(write, lines):
    read = files.read(write(*lines))
    assert read.matrix.toarray().tolist() == MATRIX
    assert read.labels.tolist() == [1, -1, -1]


def test_a_sample_may_have_no_features(write):
    read = files.read(write("1 2:1", "0", "1 # nothing"))
    assert read.matrix.toarray().tolist() == [[0, 1], [0, 0], [0, 0]]
    steps = Steps(read, np.ones(2), 0.5, 0.0)
    steps.advance(np.array([1, 2]))
    assert steps.model().tolist() == [1, 1] and steps.applied == 2


@pytest.mark.parametrize("from_zero", [0, 1])
def test_a_feature_0_in_any_file_counts_for_all_of_a_model(write, from_zero):
    """Only one of two files may have the feature 0 that tells."""
    lines = [["1 1:5", "0 2:6"], ["0 1:7", "1 2:8"]]
    lines[from_zero].append("1 0:9")
    paths = [write(*each, name=f"{place}.svm") for place, each in enumerate(lines)]
    first, second = (each.matrix.toarray()[:2] for each in files.read_all(paths))
    assert first.tolist() == [[0, 5, 0], [0, 0, 6]]
    assert second.tolist() == [[0, 7, 0], [0, 0, 8]]


def test_a_file_that_is_cut_off_is_named(write):
    path = write(*LINES, name="a.svm.gz")
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UsageError, match=r"cannot read .*a.svm.gz: "):
        files.read(path)


def test_a_damaged_file_is_named(write):
    path = write(*LINES, name="a.svm.gz")
    contents = bytearray(path.read_bytes())
    for place in range(len(contents) // 2, len(contents) // 2 + 4):
        contents[place] ^= 0xFF
    path.write_bytes(contents)
    with pytest.raises(UsageError, match=r"a.svm.gz"):
        files.read(path)


def test_a_model_may_have_more_features(write):
    read = files.read(write(*LINES), features=7)
    assert read.features == read.matrix.shape[1] == 7
    assert read.matrix.toarray()[:, :4].tolist() == MATRIX


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([*LINES, "1 3"], "line 6 is malformed: '1 3'"),
        ([*LINES, "1 3:1 2:1", "1 1:1"], "line 6 is malformed: '1 3:1 2:1' (features must ascend)"),
        ([*LINES, "1 3:1 3:1"], "line 6 is malformed: '1 3:1 3:1' (features must ascend)"),
        (["1,0 1:1", *LINES], "line 1 is malformed: '1,0 1:1'"),
        (["\ufeff1 1:1", *LINES], "line 1 is malformed: "),
        (["yes 1:1", *LINES], "line 1 is malformed: 'yes 1:1'"),
        (["1 1:1", "0 -1:1"], "line 2 is malformed: '0 -1:1'"),
        (["1 1:1", "0 2:x" + 50 * "y"], f"line 2 is malformed: '0 2:x{35 * 'y'}'"),
        (["1 1:1", "0 99999999999:1"], "line 2 is malformed"),
        ([*LINES, "2 1:1"], "line 6: label 2, but classes are 0 and 1, or -1 and 1"),
        ([*LINES, "-1 1:1"], "line 4: label 0, but"),
        (["1 1:1", "2 1:1"], "line 2: label 2, but"),
        ([*LINES, "0.5 1:1"], "line 6: label 0.5, but"),
        (["1 1:1", "1 2:1"], "has only one class: all labels are 1"),
        ([*LINES, "0 1:1 2:nan"], "line 6: a value is not finite"),
        ([], "has no samples"),
        (["1 # nothing", "0"], "has no features"),
        (["# nothing", ""], "has no samples"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_line(write, lines, says):
    path = write(*lines)
    with pytest.raises(UsageError) as error:
        files.read(path)
    assert str(error.value).startswith(str(path))
    assert says in str(error.value) and "\n" not in str(error.value)


def test_more_features_than_the_model_has_are_refused(write):
    with pytest.raises(UsageError, match=r"line 4: more features than the model's 3$"):
        files.read(write(*LINES), features=3)


def test_a_feature_far_beyond_any_data_set_s_is_one_line(write):
    """A model of as many features would take 16 GiB."""
    path = write("1 1:1", "# a comment", "0 2147483647:1")
    says = (
        "line 3: feature 2147483647 would make a model of 16 GiB; if it is meant, give --features"
    )
    with pytest.raises(UsageError, match=rf"some.svm, {says} 2147483647$"):
        files.read(path)
    assert files.read(path, features=2**31 - 1).features == 2**31 - 1
    with pytest.raises(UsageError, match="line 3: more features than the model's 9"):
        files.read(path, features=9)
    assert files.read(write("1 1:1", "0 54686452:1")).features == 54_686_452  # as KDD Cup 2012


@pytest.mark.parametrize("label", ["1", "0", "-1"])
def test_samples_to_test_with_may_be_of_one_class(write, label):
    other = write(f"{label} 1:1", f"{label} 2:1", name="test.svm")
    test = load(1, "--data", write(*LINES), "--test", other)[1]
    assert test.labels.tolist() == 2 * [1.0 if label == "1" else -1.0]
    with pytest.raises(UsageError, match=f"test.svm has only one class: all labels are {label}"):
        files.read(other)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"cannot read .*gone: No such file"):
        files.read(tmp_path / "gone")


@pytest.mark.parametrize(
    ("count", "tested"), [pytest.param(8000, 1000, marks=pytest.mark.slow), (100, 20), (5, 1)]
)
def test_a_thousand_random_samples_or_a_fifth_are_held_out(count, tested):
    samples = generate(count, 2 * count, 3, seed=0)
    train, test = files.split(samples, seed=1)
    assert (len(train), len(test)) == (count - tested, tested)
    rows = [row.tobytes() for part in (train, test) for row in part.matrix.toarray()[:50]]
    if count == 100:
        assert sorted(rows[:50]) != sorted(row.tobytes() for row in samples.matrix.toarray()[:50])
    again = files.split(samples, seed=1)[1]
    assert (again.indices == test.indices).all()
    assert len(files.split(samples, seed=2)[1]) == tested


def checked(*options):
    settings = cli.make_parser().parse_args(["svm", *map(str, options)])
    settings.check(settings)
    return settings


def load(nodes, *options):
    return svm.load(checked(*options), nodes)


def test_generated_samples_have_the_features_that_are_asked_for():
    assert load(1)[0].features == 20_958
    train, test = load(1, "--features", 300_000)
    assert train.features == test.features == 300_000
    assert train.indices.max() > 290_000 and train.indices.dtype == np.int32


def test_presets_are_means_of_as_many_orders_as_the_paper_s_unless_others_are_asked_for():
    seeds = [checked("--preset", name).seeds for name in ("small", "real-sim", "kdd2010")]
    assert seeds == [1, 20, 20]
    assert checked("--preset", "real-sim", "--seeds", 2).seeds == 2


def test_an_empty_shard_is_refused(write):
    path = write(*LINES, "1 1:1", "0 1:2")
    train, test = load(4, "--data", path)
    assert (len(train), len(test)) == (4, 1)
    with pytest.raises(UsageError, match="4 samples to train on, fewer than the 5 nodes: a shard"):
        load(5, "--data", path)
    with pytest.raises(UsageError, match="3 samples are too few to train on some and to test on"):
        load(1, "--data", write(*LINES))


def test_samples_to_test_with_have_the_model_s_features(write):
    other = write("1 1:1", "0 2:1", name="test.svm")
    train, test = load(3, "--data", write(*LINES), "--test", other)
    assert (len(train), len(test), train.features, test.features) == (3, 2, 4, 4)
    more = write("1 1:1", "0 5:1", name="more.svm")
    with pytest.raises(UsageError, match=r"more.svm, line 2: more features than the model's 4"):
        load(3, "--data", write(*LINES), "--test", more)
    assert load(3, "--data", write(*LINES), "--test", more, "--features", 9)[0].features == 9


def test_conditions_of_the_paper_that_do_not_hold_are_logged(write, caplog):
    path = write("1 1:9 2:9", "0 1:9 2:8", "0 1:1")
    options = ("--data", path, "--test", path, "--method", "delay", "--rate", 0.99999)
    load(1, *options)
    rate, late = (record.message for record in caplog.records)
    assert rate == "r is 0.99999; the paper's bound is 1 - lr * l2 = 0.9999"
    assert late.startswith("late updates may diverge: for samples of norm 12.7, lr * l2 + lr * 1")
    caplog.clear()
    load(1, *options[:-2], "--lr", 0.001)
    load(1, "--data", path, "--test", path, "--method", "wp")
    assert caplog.records == []
