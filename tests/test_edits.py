"""Edits of sources: by symbols, whatever the lines around; what is gone says so."""

import pytest
from edits import Begin, Decide, Disregard, Instead, Replace, Return, choices, drop
from planted import OF_MODULES, planted_source, source_of

SOURCE = '''\
cdef class Queue:
    cdef int take(self, const char *x, int count) noexcept nogil:
        """Take what is there."""
        cdef int taken = 0
        while self.lock(
            x,
            count
        ):
            taken += 1
        if taken == 1 or self.error:
            self.put(x, count + taken)
        elif count:
            self.drop(<char *>x)
        return taken

    def close(self):
        self.put(NULL, 0)
'''


@pytest.mark.parametrize(
    ("edit", "gone", "there"),
    [
        (drop("Queue.take", "self.lock"), "taken += 1", "cdef int taken = 0\n        pass\n"),
        (drop("Queue.take", "self.error"), "elif", "pass\n        return taken"),
        (Instead("Queue.take", "self.drop", "return 2"), "<char *>", "            return 2\n"),
        (Return("Queue.take", "1"), "\n\n\n", 'there."""\n        return 1\n'),
        (Return("Queue.close", "None"), "\n\n\n", "return None\n        self.put(NULL"),
        (Replace("Queue.take", "count", "0", "self.put"), "count +", "self.put(x, (0) + taken)"),
        (Replace("Queue.take", "self.lock(x, count)", "1"), "self.lock", "while (1):\n"),
        (Decide("Queue.take", "self.lock(x, count)", "True"), "self.lock", "while True:\n"),
        (Disregard("Queue.take", "self.lock"), "\n\n\n", "        ) or True:\n"),
    ],
)
def test_edits_find_their_places(edit, gone, there):
    edited = edit.apply(SOURCE)
    assert gone not in edited
    assert there in edited


def test_the_first_value_of_a_variable():
    source = "class A:\n    def b(self):\n        c: int = 0\n        c = 1\n"
    assert Begin("A.b", "c", "2").apply(source) == source.replace("0", "2")


@pytest.mark.parametrize(
    "edit",
    [
        drop("Other.take", "self.lock"),
        drop("Queue.give", "self.lock"),
        drop("Queue.close", "self.lock"),
        Replace("Queue.take", "taken", "0"),
        Replace("Queue.take", "1 or self.error", "0"),
        Decide("Queue.take", "self.error", "0"),
        Disregard("Queue.take", "self.put"),
        Begin("Queue.take", "x", "NULL"),
    ],
)
def test_a_place_that_is_gone_or_not_the_only_one_is_named(edit):
    with pytest.raises(ValueError, match=f"(the source|{edit.method}) does not have, once: "):
        edit.apply(SOURCE)


def test_edits_are_chosen_among_at_run_time():
    edits = [drop("Queue.close", "self.put"), Replace("Queue.close", "NULL", "x")]
    edited = choices(SOURCE, edits, "planted")
    assert edited.endswith(
        """
        if planted == 0:
            pass
        elif planted == 1:
            self.put((x), 0)
        else:
            self.put(NULL, 0)
"""
    )


@pytest.mark.parametrize("module", OF_MODULES)
def test_the_planted_bugs_have_their_places(module):
    source = planted_source(source_of(module).read_text(), module)
    assert source.count("if planted == ") == len(OF_MODULES[module])
