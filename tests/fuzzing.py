"""What the fuzz tests share: hundreds or thousands of inputs, and values that no honest program would write."""

from hypothesis import given, settings
from hypothesis import strategies as st
from real import THOROUGH

INPUTS = 10_000 if THOROUGH else 300


class Choices:
    """What an input is built from: bytes that hypothesis draws, and makes smaller where a check fails."""

    def __init__(self, drawn):
        self.rest = iter(drawn)

    def below(self, size):
        """A whole number from 0 to size - 1."""
        number = 0
        for _ in range(((size - 1).bit_length() + 7) // 8):
            number = number << 8 | next(self.rest, 0)
        return number % size

    def one(self, options):
        """One of the options."""
        return options[self.below(len(options))]

    def some(self, options, most):
        """At most so many of the options."""
        return [self.one(options) for _ in range(self.below(most + 1))]

    def raw(self, most):
        """At most so many bytes."""
        return bytes(self.some(range(256), most))

    def text(self):
        """A text that makes trouble, or a few odd letters."""
        return self.one(TEXT) if self.below(2) else "".join(self.some(LETTERS, 6))

    def value(self):
        """A value of any type."""
        return [self.one, lambda _: self.text(), lambda _: [self.text()]][self.below(3)](VALUES)

    def damaged(self, content):
        """These bytes, cut, flipped, extended, or others altogether."""
        way = self.below(4)
        if way == 0:
            return content[: self.below(max(1, len(content)))]
        if way == 1 and content:
            return flipped(content, self.below(8 * len(content)))
        return content + self.raw(12) if way == 2 else self.raw(20)


def fuzz(build, check, least=INPUTS):
    """Build so many inputs from choices, and check each; a failure shows the smallest input that breaks it."""
    seen = 0

    @settings(max_examples=min(least, INPUTS), report_multiple_bugs=False)
    @given(st.binary(min_size=40, max_size=40).map(lambda drawn: build(Choices(drawn))))
    def run(value):
        nonlocal seen
        seen += 1
        check(value)

    run()
    assert seen >= min(least, INPUTS), f"only {seen} inputs"


def put(path, content):
    """Have a file of this content, or none. A new one: a disk takes its time to empty one that is there."""
    path.unlink(missing_ok=True)
    if content is not None:
        path.write_bytes(content)


def flipped(content, bit):
    """These bytes with one bit changed."""
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def deep(levels):
    """A list in a list in a list."""
    value = []
    for _ in range(levels):
        value = [value]
    return value


LETTERS = "a0-.:=,+@ \n\r\t\0\x1b\x7f'\"\\$`;#&|<>(){}[]*?~!%/é٣\u2028\x85\udcff"
TEXT = ["$(touch x)", "`touch x`", "a\nb", "a b", "$HOME", "-rf", "", "0", "1", "-1", "1e3", "nan"]
TEXT += ["9" * 30, "9" * 5000, "END", "32G", "--gres=gpu:{n}", "module load a", "{user}", "{array}", "{run_dir}"]
TEXT += ["srun", "%j", "\N{DIGIT FIVE}"]
# Values of every type that JSON and TOML know, and some that only a hostile file would hold.
VALUES = [None, True, False, 0, 1, -1, 3, 2**63, 10**400, 0.5, -0.0, float("nan"), float("inf"), 1e300]
VALUES += [[], [1], ["a"], [None], [[]], {}, {"a": 1}, [{}], [{"chip": 1}], [{"local_rank": []}], {"array": 3}]
VALUES += [deep(400)]
