"""Tasks of text: batches by length, the GPT's sequences, and parallel text with its vocabulary."""

import gettext
import itertools
import json
import math
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from training import said, train_several

from wagma.job import UsageError
from wagma.tasks import contract, grammar, language
from wagma.tasks.sequences import IGNORED, LengthBatches, padded

LENGTHS = np.random.default_rng(0).lognormal(2, 0.7, 400).astype(int) + 1


def batches(by_tokens, count=50, shard=None, rank=0):
    shard = np.arange(len(LENGTHS)) if shard is None else shard
    made = [LengthBatches(LENGTHS, shard, 8, by_tokens, rank, seed=3) for _ in range(2)]
    again, drawn = (list(itertools.islice(each, count)) for each in made)
    assert all(map(np.array_equal, again, drawn))
    return drawn


def test_a_pass_over_the_shard_has_each_sequence_once_in_batches_of_about_equal_length():
    shard = np.arange(0, 400, 2)  # 25 batches: fewer than are drawn together
    drawn = batches(by_tokens=False, shard=shard)
    assert [len(batch) for batch in drawn] == [8] * 50
    for one_pass in (drawn[:25], drawn[25:]):
        assert sorted(np.concatenate(one_pass)) == shard.tolist()
    within = np.mean([np.ptp(LENGTHS[batch]) for batch in drawn])
    means = [LENGTHS[batch].mean() for batch in drawn]
    assert within < 0.2 * np.ptp(means)
    assert means[:25] != sorted(means[:25])
    assert not np.array_equal(drawn[0], batches(by_tokens=False, shard=shard, rank=1)[0])


def test_batches_by_tokens_are_full_and_have_sequences_once_in_a_pass():
    most = 8 * LENGTHS.mean()
    drawn = batches(by_tokens=True, count=150)
    sizes = [len(batch) * LENGTHS[batch].max() for batch in drawn]
    alone = [len(batch) == 1 for batch in drawn]
    assert all(size <= most or one for size, one in zip(sizes, alone))
    assert np.median(sizes) > 0.75 * most
    counts = Counter(np.concatenate(drawn).tolist())
    assert max(counts.values()) - min(counts[n] for n in range(400)) <= 2


@pytest.mark.parametrize("by_tokens", [False, True])
def test_batches_go_on_at_a_position(by_tokens):
    made = [LengthBatches(LENGTHS, np.arange(400), 8, by_tokens, 0, seed=3) for _ in range(2)]
    for _ in range(70):  # into the third pool
        next(made[0])
    made[1].load_state_dict(made[0].state_dict())
    assert all(np.array_equal(next(made[0]), next(made[1])) for _ in range(60))


def test_what_is_left_of_a_pass_is_dealt_to_another_number_of_ranks():
    of = partial(LengthBatches, LENGTHS, batch_size=4, by_tokens=False, seed=3)
    before = [of(np.arange(rank, 400, 4), rank=rank) for rank in range(4)]
    drawn = [next(each) for rank, each in enumerate(before) for _ in range(3 + rank)]
    states = [each.state_dict() for each in before]
    after = [of(np.arange(rank, 400, 3), rank=rank) for rank in range(3)]
    for rank, each in enumerate(after):
        each.deal(states, rank, 3)
    rest = [each.state_dict()["pools"]["pending"] for each in after]
    assert sorted(np.concatenate(drawn + rest)) == list(range(400))
    assert max(map(len, rest)) - min(map(len, rest)) <= 1
    for each, left in zip(after, rest):
        pool = np.concatenate([next(each) for _ in range(32)])  # these and the next pass's first
        assert not len(np.setdiff1d(left, pool))


def test_padding_follows_each_sequence():
    rows = padded([np.array([1, 2, 3]), np.array([4])], 9)
    assert rows.dtype == torch.int64
    assert rows.tolist() == [[1, 2, 3], [4, 9, 9]]


# --- language


@pytest.fixture
def files(tmp_path):
    one = tmp_path / "one.txt"
    one.write_text("\n\n".join(f"paragraph {n}" + " so" * (n % 7) for n in range(40)) + "\n")
    other = tmp_path / "other.txt"
    other.write_text("x" * 700)
    return [one, other]


def test_packed_sequences_are_the_files_in_order_and_all_equally_long(files):
    train, test = language.read(files, 20, packing=True)
    assert {len(each) for each in (*train.sequences, *test.sequences)} == {20}
    assert len(test.sequences) == (len(train.sequences) + len(test.sequences)) // 10
    assert bytes(train.sequences[0]) == files[0].read_bytes()[:20]
    for sequence, label in zip(train.sequences, train.labels):
        assert bytes(sequence) in files[label].read_bytes()


def test_without_packing_a_sequence_is_a_paragraph_or_a_part_of_a_long_one(files):
    train, test = language.read(files, 30, packing=False)
    sequences = [bytes(each) for each in (*train.sequences, *test.sequences)]
    assert b"paragraph 3 so so so" in sequences
    assert sequences.count(b"x" * 30) == 23
    assert max(map(len, sequences)) == 30
    assert not any(b"\n" in each for each in sequences)


def test_paragraphs_end_in_files_with_carriage_returns_as_well(tmp_path, files):
    windows = tmp_path / "windows.txt"
    windows.write_bytes(files[0].read_bytes().replace(b"\n", b"\r\n"))
    found = [
        [
            bytes(each)
            for part in language.read([file], 30, packing=False)
            for each in part.sequences
        ]
        for file in (files[0], windows)
    ]
    assert found[0] == found[1] and len(found[0]) == 40


def test_text_that_is_missing_or_too_short_is_refused(tmp_path, files):
    missing = tmp_path / "none.txt"
    with pytest.raises(UsageError, match=f"^argument --text: cannot read {missing}: No such file"):
        language.read([files[0], missing], 20, True)
    with pytest.raises(UsageError, match="^argument --text: 7 sequences of 100 bytes are too few"):
        language.read(files[1:], 100, True)
    files[0].write_text("one\n\ntwo")
    with pytest.raises(UsageError, match="^argument --text: 2 sequences of paragraphs are too few"):
        language.read(files[:1], 100, False)


def test_shards_by_label_are_of_different_files(files):
    corpora = language.read(files, 20, packing=True)
    share = np.mean(corpora[0].labels)
    task = language.task(corpora, 20, "label-sorted")
    text = ord("x")
    drawn = [next(iter(task.data(rank, 2, 6, 0)[0]))[1] for rank in range(2)]
    assert 0.4 < share < 0.6
    assert [(batch == text).double().mean().item() > 0.5 for batch in drawn] == [False, True]


@pytest.mark.parametrize("training", [True, False])
def test_the_gpt_predicts_from_what_came_before_only(training):
    torch.manual_seed(0)
    model = language.GPT(12).train(training)
    tokens = torch.randint(256, (2, 12))
    changed = tokens.clone()
    changed[:, 8:] = 7
    with torch.no_grad():
        same = torch.isclose(model(tokens), model(changed), atol=1e-5).all(dim=2)
    assert same.tolist() == 2 * [8 * [True] + 4 * [False]]


def test_a_byte_s_target_is_the_next_one_and_padding_has_no_loss():
    corpus = language.Corpus(
        [np.frombuffer(each, np.uint8) for each in (b"abc", b"d")], np.zeros(2)
    )
    inputs, targets = batch = language.batch_of(corpus)
    end = language.END
    assert inputs.tolist() == [[end, 97, 98], [end, end, end]]
    assert targets.tolist() == [[97, 98, 99], [100, IGNORED, IGNORED]]
    assert language.tokens(batch) == 4


def trained(task, steps, batch_size, lr=3e-3):
    """Return the test results of a task before and after so many steps of one rank."""
    prepared = contract.prepare(task, 0, 1, batch_size, seed=0)
    model = prepared.model
    adam = torch.optim.AdamW(model.parameters(), lr)

    def tested():
        return contract.all_ranks([contract.evaluate(task, model, prepared.test)])

    before = tested()
    for batch in itertools.islice(prepared.batches, steps):
        adam.zero_grad()
        task.loss(model, batch).backward()
        adam.step()
    return before, tested()


def test_the_gpt_learns_which_bytes_are_frequent():
    task = language.task(language.read(None, 32, packing=False), 32, "iid")
    before, after = trained(task, 40, 16)
    assert before["loss"] > math.log(200)
    assert after["loss"] < 3.5
    assert after["perplexity"] == pytest.approx(math.exp(after["loss"]), rel=1e-4)


# --- translation


def test_generated_sentences_repeat_and_their_lengths_are_log_normal():
    pairs = grammar.generated(2000, 1)
    assert pairs == grammar.generated(2000, 1)
    assert len(set(pairs)) == 2000
    assert pairs[:10] != grammar.generated(10, 2)
    lengths = np.log([len(source.split()) for source, _ in pairs])
    assert all(len(a.split()) == len(b.split()) for a, b in pairs)
    assert 0.4 < lengths.std() < 0.7
    assert np.exp(np.median(lengths)) == pytest.approx(grammar.MEDIAN, abs=3)


def test_a_word_has_one_translation_but_for_agreement():
    """Nouns, verbs and others stand for each other; articles and adjectives have two endings."""
    pairs = [[each.split() for each in pair] for pair in grammar.generated(2000, 1)]
    together = {}
    for source, target in pairs:
        for word in source:
            together.setdefault(word, []).append(set(target))
    words = {word: set.intersection(*found) for word, found in together.items()}
    alone = sum(len(found) >= 1 for found in words.values())
    counts = grammar.COUNTS
    assert len(words) == sum(counts.values())
    assert alone == len(words) - counts["adjective"] - counts["article"]


@pytest.fixture(scope="module")
def translation():
    for module in ("sacrebleu", "sentencepiece"):
        pytest.importorskip(module)
    from wagma.tasks import translation

    return translation


@pytest.fixture(scope="module")
def found(translation):
    return translation.read(None)


def test_tokens_are_the_sentences_and_end(translation, found):
    processor = translation.Translation(found, False).processor
    pairs = grammar.generated(translation.PAIRS, translation.PAIRS_SEED)
    assert len(found.train.sources) + len(found.test.sources) == len(pairs)
    for tokens, (source, _) in zip(found.train.sources, pairs[:10]):
        assert processor.decode(tokens[:-1].tolist()) == source
        assert tokens[-1] == translation.END


@pytest.mark.parametrize("by_tokens", [False, True])
def test_translations_in_a_batch_are_equal_in_sentences_or_in_tokens(translation, found, by_tokens):
    task = translation.task(found, by_tokens)
    drawn = list(itertools.islice(task.data(1, 4, 16, 0)[0], 40))
    sentences = [len(source) for source, _, _ in drawn]
    work = [task.work(batch) for batch in drawn]
    assert (set(sentences) == {16}) != by_tokens
    spread = np.std(work) / np.mean(work)
    assert spread < 0.25 if by_tokens else spread > 0.4
    source, inputs, targets = drawn[0]
    assert (inputs[:, 0] == translation.BEGIN).all()
    assert torch.equal(
        inputs[:, 1:][targets[:, 1:] != IGNORED], targets[:, :-1][targets[:, 1:] != IGNORED]
    )
    assert task.work(drawn[0]) == (source > 0).sum() + (targets >= 0).sum()


def test_only_rank_0_has_what_is_held_out(translation, found):
    tests = [translation.task(found, False).data(rank, 4, 8, 0)[1] for rank in range(4)]
    assert list(map(len, tests)) == [1, 0, 0, 0]


def test_padding_changes_no_translation(translation, found):
    torch.manual_seed(0)
    model = translation.Translation(found, False).model().eval()
    source = padded([found.test.sources[0]], translation.PADDING)
    wider = torch.cat([source, torch.zeros_like(source)], dim=1)
    target = torch.tensor([[translation.BEGIN, 5, 6]])
    with torch.no_grad():
        assert torch.allclose(model(source, target), model(wider, target), atol=1e-5)


def test_a_right_translation_has_bleu_100_and_an_untrained_model_about_0(
    translation, found, monkeypatch
):
    its = translation.Translation(found, False)
    batch = its.data(0, 1, 8, 0)[1][0]
    torch.manual_seed(0)
    model = its.model().eval()
    with torch.no_grad():
        assert its.metrics(model, translation.batch_of(found.test.select(range(4))))["bleu"] < 5
        monkeypatch.setattr(translation, "translate", lambda model, source: batch[2])
        assert its.metrics(model, batch)["bleu"] == pytest.approx(100)


def test_the_decoder_s_own_words_are_its_next_inputs(translation):
    class Counter:
        """Translates a sentence by 4, 5, … up to its first word, and the end."""

        def encode(self, source):
            return source[:, 0]

        def decode(self, written, memory, blank, last):
            assert last and len(written) == len(memory) == len(blank)
            following = torch.where(written[:, -1] < 4, 4, written[:, -1] + 1)
            following[written[:, -1] == memory] = translation.END
            return torch.nn.functional.one_hot(following, 30)[:, None].float()

    sources = torch.tensor([[6, 1, 1], [5, 1, 1], [29, 1, 0]])
    end = translation.END
    assert translation.translate(Counter(), sources).tolist() == [
        [4, 5, 6, *6 * [end]],
        [4, 5, *7 * [end]],
        [4, 5, 6, 7, 8, 9, 10, 11, end],  # which has no more room
    ]


def test_parallel_files_are_read_line_by_line(translation, tmp_path):
    one, other = tmp_path / "en", tmp_path / "fr"
    pairs = grammar.generated(60, 5)
    pairs[7] = ("naïve café", "Ünïcödé 😀")
    one.write_text("".join(f"{source}\n" for source, _ in pairs) + "\n", encoding="utf-8")
    other.write_text("".join(f"{target}\n" for _, target in pairs) + "alone\n", encoding="utf-8")
    found = translation.read([one, other])
    assert len(found.train.sources) + len(found.test.sources) == 60
    processor = translation.Translation(found, False).processor
    assert processor.decode(found.train.targets[7][:-1].tolist()) == "Ünïcödé 😀"


CATALOGUES = "/usr/share/locale/de/LC_MESSAGES"


def test_the_messages_of_programs_are_parallel_text(translation, tmp_path):
    paths = [path for name in ("bash", "coreutils") for path in Path(CATALOGUES).glob(f"{name}.mo")]
    if not paths:
        pytest.skip("no catalogue of messages is installed")
    with paths[0].open("rb") as file:
        messages = gettext.GNUTranslations(file)._catalog
    pairs = [pair for pair in messages.items() if isinstance(pair[0], str) and all(pair)]
    files = tmp_path / "en", tmp_path / "de"
    for path, side in zip(files, zip(*pairs)):
        path.write_text("\n".join(" ".join(text.split()) for text in side), encoding="utf-8")
    found = translation.read(list(files))
    count = len(found.train.sources) + len(found.test.sources)
    assert 0.8 * len(pairs) < count <= len(pairs)
    used = {token for each in (*found.train.targets, *found.test.targets) for token in each}
    assert translation.UNKNOWN not in used
    task = translation.task(found, by_tokens=True)
    prepared = contract.prepare(task, 0, 2, 4, seed=0)
    assert torch.isfinite(task.loss(prepared.model, next(prepared.batches)))


def test_only_newlines_end_the_lines_of_parallel_text(translation, tmp_path):
    one, other = tmp_path / "en", tmp_path / "fr"
    one.write_bytes("a\u2028b\x0bc\r\n\r\nd\x85\n".encode())
    other.write_bytes(b"eins\nzwei\ndrei\x1cvier")
    assert translation.parallel(one, other) == [
        ("a\u2028b\x0bc", "eins"),
        ("d\x85", "drei\x1cvier"),
    ]


def test_translations_are_compared_with_the_text_as_it_was_read(translation, tmp_path, monkeypatch):
    """Sentencepiece turns a ligature into letters, and wide digits into narrow ones."""
    one, other = tmp_path / "en", tmp_path / "fr"
    one.write_text("".join(f"word {n} and {n}\n" for n in range(200)))
    other.write_text("".join(f"ﬁle {n} et　 {n} de plus\n" for n in range(200)))
    found = translation.read([one, other])
    assert found.references[:2] == ["ﬁle 19 et　 19 de plus", "ﬁle 39 et　 39 de plus"]
    its = translation.Translation(found, False)
    batch = its.data(0, 1, 8, 0)[1][0]
    assert its.words(batch[2])[0] == "file 19 et 19 de plus"
    monkeypatch.setattr(translation, "translate", lambda model, source: batch[2])
    with torch.no_grad():
        assert 20 < its.metrics(its.model().eval(), batch)["bleu"] < 95


def test_files_that_are_no_translations_are_refused(translation, tmp_path, monkeypatch):
    one, other = tmp_path / "en", tmp_path / "fr"
    one.write_text("a\nb\n")
    with pytest.raises(UsageError, match=f"^argument --text: cannot read {other}: No such file"):
        translation.read([one, other])
    other.write_text("a\n")
    with pytest.raises(UsageError, match=f"^argument --text: {one} has 2 lines and {other} 1: "):
        translation.read([one, other])
    one.write_text("a\n")
    with pytest.raises(UsageError, match="^argument --text: 1 pairs are too few: 20 are needed"):
        translation.read([one, other])
    for each in (one, other):
        each.write_text("".join(f"{'a b ' * n}\n" for n in range(1, 101)))
    with pytest.raises(
        UsageError, match="^argument --text: [0-9]+ pairs of at most 5 tokens are to"
    ):
        monkeypatch.setattr(translation, "LONGEST", 5)
        translation.read([one, other])
    other.write_bytes(b"\xff\n")
    with pytest.raises(UsageError, match=f"^argument --text: cannot read {other}: 'utf-8' codec"):
        translation.read([one, other])
    for each in (one, other):
        each.write_text("\n")
    with pytest.raises(UsageError, match="^argument --text: 0 pairs are too few: 20 are needed"):
        translation.read([one, other])


def test_text_of_many_different_characters_is_read(translation, tmp_path):
    """Of 1,500 characters rare ones are spelled by the bytes of UTF-8."""
    one, other = tmp_path / "en", tmp_path / "zh"
    signs = [chr(0x4E00 + n) for n in range(1500)]
    targets = ["".join(signs[n % 1500] for n in range(k * 15, k * 15 + 15)) for k in range(200)]
    one.write_text("".join(f"word {n}\n" for n in range(200)))
    other.write_text("\n".join(targets), encoding="utf-8")
    found = translation.read([one, other])
    assert len(found.train.sources) + len(found.test.sources) == 200
    processor = translation.Translation(found, False).processor
    read = [processor.decode(each[:-1].tolist()) for each in found.train.targets]
    assert read == [each for n, each in enumerate(targets, 1) if n % 20]


def test_a_pair_that_occurs_again_is_not_both_trained_on_and_held_out(translation, tmp_path):
    one, other = tmp_path / "en", tmp_path / "fr"
    words = ["OK" if n % 10 == 9 else f"word {n}" for n in range(60)]
    one.write_text("\n".join(words))
    other.write_text("\n".join(f"le {word}" for word in words))
    found = translation.read([one, other])
    assert len(found.train.sources) + len(found.test.sources) == 55
    trained = {tuple(each) for each in found.train.targets}
    assert not trained & {tuple(each) for each in found.test.targets}


def test_the_transformer_learns(translation, found):
    task = translation.task(found, True)._replace(metrics=None)  # the loss, which is faster
    before, after = trained(task, 30, 16)
    assert before["loss"] > after["loss"] + 1


# --- jobs


@pytest.mark.launch
def test_jobs_learn_from_text(translation, tmp_path, files):
    less = ["--steps", 6, "--batch-size", 4]
    text = ["--text", *files, "--sequence-length", 24]
    sides = tmp_path / "en", tmp_path / "fr"
    for path, side in zip(sides, zip(*grammar.generated(60, 5))):
        path.write_text("\n".join(side))
    runs = {
        "language": ["--task", "language", *less],
        "paragraphs": ["--task", "language", *less, *text, "--no-packing", "--shards", "dirichlet"],
        "translation": ["--task", "translation", "--text", *sides, "--batch-by", "tokens", *less],
    }
    lines = said(train_several(tmp_path, runs, ranks=2).check())
    outcomes = [line for line in lines if line.startswith("test ")]
    for name, outcome in zip(runs, outcomes, strict=True):
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        configuration = json.loads((tmp_path / name / "config.json").read_text())
        metric = "bleu" if name == "translation" else "perplexity"
        assert math.isfinite(summary["loss"]) and metric in summary["metrics"]
        assert 0 < summary["samples_per_s"] < summary["tokens_per_s"]
        assert f" {summary['tokens_per_s']:,.0f} tokens/s, " in outcome
        assert (configuration["optimizer"], configuration["lr"]) == ("adamw", 0.003)
