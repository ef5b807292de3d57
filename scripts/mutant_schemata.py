"""Mutant schemata: combines many mutations of Rust source files in one build.

Each mutated expression or statement becomes `if cuda_std::mutant(7) { mutated } else { original }`. The environment
variable MUTANT selects the mutation when a test program runs. Mutations in constants, types and patterns cannot be
selected at run time and need a build of their own.
"""

import re
from dataclasses import dataclass, field

# Appended to cuda_std.
RUNTIME = """
extern crate self as cuda_std;

/// Returns whether the environment variable MUTANT selects mutation `id`.
#[doc(hidden)]
pub fn mutant(id: u32) -> bool {
    static SELECTED: std::sync::LazyLock<u32> =
        std::sync::LazyLock::new(|| std::env::var("MUTANT").map_or(0, |id| id.parse().unwrap()));
    *SELECTED == id
}
"""

TOKEN = re.compile(
    r"""(?P<skip> \s+ | //[^\n]* | /\*.*?\*/)
      | "(\\.|[^"\\])*" | '(\\.[^']*|[^'\\])' | '\w+                        # strings, characters, lifetimes
      | \w+ | => | -> | :: | && | \|\| | <<= | >>= | [-+*/%^&|=!<>]= | \.\.=? | .""",
    re.DOTALL | re.VERBOSE,
)
CLOSE = {"(": ")", "[": "]", "{": "}"}
# Tokens between which whole operands stand. A closure's body follows `|` or `||`.
BOUNDARIES = {",", ";", ":", "=>", "&&", "||", "|", "if", "while", "match", "in", "return"}
BOUNDARIES |= {"=", "+=", "-=", "*=", "/=", "%=", "^=", "&=", "|=", "<<=", ">>="}
# Tokens that begin an item, which cannot be selected at run time.
ITEMS = {"#", "pub", "fn", "const", "static", "impl", "mod", "use", "struct", "enum", "trait", "type", "macro_rules"}


@dataclass
class Node:
    """A token, or a delimited group with its tokens and groups."""

    start: int
    end: int
    text: str  # the opening delimiter of a group
    children: list = None


@dataclass
class Mutant:
    """Replaces source[start:end] of a file by `text`."""

    id: int
    start: int
    end: int
    text: str
    # Ranges (start, end, is an expression) of the source that contain the mutation and may be selected at run time, the
    # smallest first. The first one is in use. A range is removed if it does not compile.
    ranges: list = field(default_factory=list)


@dataclass
class Branch:
    """The bytes of one mutated branch in a combined file, and those of its whole `if … else …`."""

    mutant: Mutant
    first: int
    last: int
    whole: tuple = ()


def mutant(id, source, find, replace):
    """Returns the mutant that replaces the only occurrence of `find` in `source`, with its ranges."""
    start = source.index(find)
    end = start + len(find)
    # Without the common prefix and suffix.
    while find and replace and find[0] == replace[0]:
        find, replace, start = find[1:], replace[1:], start + 1
    while find and replace and find[-1] == replace[-1]:
        find, replace, end = find[:-1], replace[:-1], end - 1
    result = Mutant(id, start, end, replace)
    result.ranges = ranges(source, result)
    return result


def parse(source):
    """Returns the group that holds the tokens of a whole file."""
    groups = [Node(0, len(source), "{", [])]
    for match in TOKEN.finditer(source):
        text = match.group()
        if match.lastgroup == "skip":
            continue
        if text in CLOSE:
            groups.append(Node(match.start(), 0, text, []))
        elif text in CLOSE.values():
            group = groups.pop()
            group.end = match.end()
            groups[-1].children.append(group)
        else:
            groups[-1].children.append(Node(match.start(), match.end(), text))
    return groups[0]


def ranges(source, mutant):
    """Returns the ranges around a mutation that may be expressions or statements, the smallest first."""
    group, path = parse(source), []
    while group:
        path.append(group)
        inside = (c for c in group.children if c.children is not None)
        group = next((c for c in inside if c.start < mutant.start and mutant.end < c.end), None)
    result = []
    for group in reversed(path):
        if group.text != "{":
            result += expression(group, mutant)
            continue
        lines = statements(source, group)
        touched = [i for i, nodes in enumerate(lines) if any(touches(node, mutant) for node in nodes)]
        if not touched:
            continue
        first, last = touched[0], touched[-1]
        if lines[first][0].text in ITEMS:
            break
        result += expression(group, mutant)
        # The scope of a variable ends with the block.
        if any(nodes[0].text == "let" for nodes in lines[first : last + 1]) or re.search(r"\blet\b", mutant.text):
            last = len(lines) - 1
        result.append((lines[first][0].start, lines[last][-1].end, False))
        result.append((group.children[0].start, group.children[-1].end, False))
    return list(dict.fromkeys(result))


def touches(node, mutant):
    """Returns whether a mutation changes a node. An insertion also touches the nodes beside it."""
    if mutant.start == mutant.end:
        return node.start <= mutant.end and mutant.start <= node.end
    return node.start < mutant.end and mutant.start < node.end


def expression(group, mutant):
    """Returns the range between the boundaries around a mutation, if it can be an expression."""
    nodes = group.children
    before = [i for i, c in enumerate(nodes) if c.end <= mutant.start and c.text in BOUNDARIES | {"{"}]
    after = [i for i, c in enumerate(nodes) if c.start >= mutant.end and c.text in BOUNDARIES | {"{"}]
    nodes = nodes[before[-1] + 1 if before else 0 : after[0] if after else len(nodes)]
    if not nodes or any(c.text in BOUNDARIES | {"{"} for c in nodes) or "let " in mutant.text:
        return []
    start, end = min(nodes[0].start, mutant.start), max(nodes[-1].end, mutant.end)
    return [(start, end, True)] if start < mutant.start or mutant.end < end or mutant.text.strip() else []


def statements(source, group):
    """Returns the statements of a block, each as a list of nodes. The source is formatted by rustfmt."""
    result, current = [], []
    for node, following in zip(group.children, group.children[1:] + [None]):
        current.append(node)
        ends = following is None or node.text == ";"
        if node.text == "{" and following:
            ends = "\n" in source[node.end : following.start] and re.match(r"(?!else\b|as\b)[\w*(#]", following.text)
        if ends:
            result.append(current)
            current = []
    return result


def combine(source, mutants):
    """Returns the source with all mutants that have a range, and the branches of the mutants.

    The original code keeps its line numbers, which the messages of tests contain.
    """
    separate_overlapping(mutants)
    branches, pieces = [], []

    def position():
        return sum(len(piece.encode()) for piece in pieces)

    def emit(start, end, mutants):
        while mutants:
            first, last = min((m.ranges[0][:2] for m in mutants), key=lambda r: (r[0], -r[1]))
            here = [m for m in mutants if m.ranges[0][:2] == (first, last)]
            inside = [m for m in mutants if m not in here and m.ranges[0][0] < last]
            mutants = [m for m in mutants if m not in here and m not in inside]
            is_expression = any(m.ranges[0][2] for m in here)
            pieces.append(source[start:first] + "(" * is_expression)
            begin, added = position(), []
            for m in here:
                pieces.append(f"if cuda_std::mutant({m.id}) {{ ")
                branch = Branch(m, position(), 0)
                pieces.append(one_line(source[first : m.start] + m.text + source[m.end : last]))
                branch.last = position()
                pieces.append(" } else ")
                added.append(branch)
            pieces.append("{ ")
            emit(first, last, inside)
            pieces.append(" }" + ")" * is_expression)
            for branch in added:
                branch.whole = (begin, position())
            branches.extend(added)
            start = last
        pieces.append(source[start:end])

    emit(0, len(source), [m for m in mutants if m.ranges])
    return "".join(pieces), branches


def one_line(source):
    """Returns the tokens of Rust code in one line."""
    tokens = (" " if m.lastgroup == "skip" else m.group() for m in TOKEN.finditer(source))
    return "".join(tokens)


def separate_overlapping(mutants):
    """Enlarges ranges until any two are equal, nested or disjoint."""
    for i, a in enumerate(mutants):
        for b in mutants[:i]:
            while a.ranges and b.ranges and overlap(a.ranges[0], b.ranges[0]):
                a.ranges.pop(0)
    if any(a.ranges and b.ranges and overlap(a.ranges[0], b.ranges[0]) for a in mutants for b in mutants):
        separate_overlapping(mutants)


def overlap(a, b):
    return a[0] < b[0] < a[1] < b[1] or b[0] < a[0] < b[1] < a[1]


def responsible(branches, first, last):
    """Returns the mutants that a compiler error at bytes first..last concerns: those of the smallest branch around it."""
    inside = [b for b in branches if b.first <= first and last <= b.last]
    if inside:
        return [min(inside, key=lambda b: b.last - b.first).mutant]
    around = [b.whole for b in branches if b.whole[0] <= first and last <= b.whole[1]]
    smallest = min(around, key=lambda w: w[1] - w[0], default=None)
    return [b.mutant for b in branches if b.whole == smallest]
