"""Sentences of a small made-up language and their translations into another one.

A clause of the first has subject, verb and object, and adjectives before their nouns. In the second
the verb comes last, adjectives follow their nouns, and articles and adjectives agree with these in
gender. Sentences are as long as those of people: their numbers of words are log-normal.
"""

from __future__ import annotations

import itertools

import numpy as np

CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"
COUNTS = {"noun": 30, "verb": 15, "adjective": 12, "adverb": 6, "conjunction": 4, "article": 2}
MEDIAN, SIGMA, MOST = 9.0, 0.6, 40  # words of a sentence
WORDS_SEED = 1846
Pair = tuple[str, str]


class Grammars:
    """Both languages: their words, drawn once, and sentences.

    Args:
        seed: Of the sentences.
    """

    def __init__(self, seed: int) -> None:
        syllables = ["".join(each) for each in itertools.product(CONSONANTS, VOWELS)]
        drawn = np.random.default_rng(WORDS_SEED).permutation(len(syllables) ** 2)
        words = (syllables[n // len(syllables)] + syllables[n % len(syllables)] for n in drawn)
        self._words = {
            kind: [(next(words), next(words)) for _ in range(count)]
            for kind, count in COUNTS.items()
        }
        self._generator = np.random.default_rng(seed)

    def sentence(self) -> Pair:
        """Return a sentence and its translation."""
        wanted = min(self._generator.lognormal(np.log(MEDIAN), SIGMA), MOST)
        one, other = self._clause()
        while len(one) + 3 < wanted:
            (joint, its_translation), (more, translated) = self._draw("conjunction"), self._clause()
            one, other = [*one, joint, *more], [*other, its_translation, *translated]
        return " ".join(one), " ".join(other)

    def _clause(self) -> tuple[list[str], list[str]]:
        subject, its_translation = self._nouns()
        verb, translated = self._draw("verb")
        what, into = self._nouns()
        one, other = [*subject, verb, *what], [*its_translation, *into, translated]
        if self._generator.random() < 0.3:
            adverb, into_adverb = self._draw("adverb")
            one, other = [*one, adverb], [*other, into_adverb]
        return one, other

    def _nouns(self) -> tuple[list[str], list[str]]:
        """Return an article, perhaps an adjective, and a noun, in both languages."""
        number = int(self._generator.integers(COUNTS["noun"]))
        noun, translated = self._words["noun"][number]
        gender = "ns"[number % 2]
        article, its_translation = self._draw("article")
        one, other = [article, noun], [its_translation + gender, translated]
        if self._generator.random() < 0.3:
            adjective, its_translation = self._draw("adjective")
            one, other = [article, adjective, noun], [*other, its_translation + gender]
        return one, other

    def _draw(self, kind: str) -> Pair:
        return self._words[kind][self._generator.integers(COUNTS[kind])]


def generated(count: int, seed: int) -> list[Pair]:
    """Return different sentences with their translations, always the same for a seed."""
    grammars = Grammars(seed)
    found: dict[Pair, None] = {}
    while len(found) < count:
        found[grammars.sentence()] = None
    return list(found)
