"""Statements of mapping programs: text, one statement a line, in the syntax of Paddle's AOA; docs/programs.md. Errors have
line and column.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from holdfast_formats.errors import InvalidRequest
from holdfast_formats.layout.rules.expressions import Expression, names_in, parse
from holdfast_formats.layout.rules.patterns import NamePattern
from holdfast_formats.programs.names import pattern
from holdfast_formats.programs.regexes import SafeExpression

TEXT_BYTES_MAX = 2**24  # Paddle writes a statement for each expert
STATEMENTS_MAX = 100_000
OPERANDS_MAX = 4096
RANGE_MAX = 4096
INDEX_DIGITS_MAX = 3  # of a dimension's number

WORDS = ("fused_qkv", "fused_qkv_old", "fused_ffn", "stack", "unstack", "same", "optional", "zeros")
NUMBERS = ("axis", "num_heads", "num_key_value_groups", "ranks", "src_ranks", "dst_ranks", "count", "size", "pad_to")
LISTS = ("sizes", "shape")
TEXTS = ("dtype", "src_dtype", "dst_dtype", "rotary")
ATTRIBUTES = (*NUMBERS, *LISTS, *TEXTS, "permute", "slice")
_FORMS = "docs/programs.md#what-statements-do lists every form of a statement"

_TOKEN = re.compile(
    r"\s*(?:(?P<arrow>->)|(?P<comma>,)|(?P<equals>=)|(?P<turn>\^T\b)"
    r"|(?P<text>\"[^\"\n]*\"|'[^'\n]*')|(?P<braces>\{[^{}\n]*\})|(?P<list>\[[^\[\]\n]*\])"
    r"|(?P<regex>/(?:\\.|[^/\\\n])+/)|(?P<name>(?:[\w.$*:@+/]|-(?!>))+))"
)
_RANGE = re.compile(r"\s*([0-9]+)\s*:\s*([0-9]+)\s*")

_Made = TypeVar("_Made")
Number = Expression  # over the sizes that a program names


class Operand(NamedTuple):
    """One name of a statement: a pattern, an expression, a text with its groups, `_` (none of these) or `*` (`rest`)."""

    pattern: NamePattern | None = None
    regex: SafeExpression | None = None
    template: str = ""
    turned: bool = False
    rest: bool = False

    @property
    def nothing(self) -> bool:
        return self.pattern is None and self.regex is None and not self.template and not self.rest


class ProgramStatement(NamedTuple):
    """Tensors on the left become those on the right; `line` and `text` are for messages."""

    left: tuple[Operand, ...]
    right: tuple[Operand, ...]
    words: frozenset[str]
    numbers: dict[str, Number]
    lists: dict[str, tuple[Number, ...]]
    texts: dict[str, str]
    permute: tuple[int, ...] | None
    slices: tuple[tuple[Number | None, Number | None], ...] | None
    line: int
    text: str

    @property
    def plain(self) -> bool:
        held = (self.words - {"optional"}, self.numbers, self.lists, self.texts, self.permute, self.slices)
        turned = any(operand.turned for operand in (*self.left, *self.right))
        return not any(held) and not turned and len(self.left) == len(self.right) == 1

    @property
    def where(self) -> str:
        return f"line {self.line}, `{self.text}`"


class _Token(NamedTuple):
    kind: str
    text: str
    column: int


def parse_statements(text: str, sizes: Sequence[str]) -> tuple[ProgramStatement, ...]:
    """All statements of a text, which may use these sizes in braces; `InvalidRequest` with line, column and a hint."""
    if len(text.encode(errors="surrogatepass")) > TEXT_BYTES_MAX:
        raise InvalidRequest(
            f"the statements have more than {TEXT_BYTES_MAX} bytes", hint="write $LAYER_ID or $EXPERT_ID in place of numbers"
        )
    statements = []
    for number, line in _lines(text):
        statements.append(_Reader(number, line, frozenset(sizes)).statement())
        if len(statements) > STATEMENTS_MAX:
            raise InvalidRequest(
                f"line {number}: there are more than {STATEMENTS_MAX} statements",
                hint="write $LAYER_ID or $EXPERT_ID in place of numbers",
            )
    return tuple(statements)


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Non-empty lines; one that ends with a comma or an arrow continues on the next."""
    held, first = "", 0
    for number, raw in enumerate(text.split("\n"), 1):
        line = _without_comment(raw).rstrip()
        first = first if held else number
        held = f"{held} {line.lstrip()}" if held else line
        if held.strip() and not held.endswith((",", "->")):
            yield first, held
            held = ""
        held = held if held.strip() else ""
    if held:
        yield first, held


def _without_comment(line: str) -> str:
    return re.sub(r"(^|\s)#.*", "", line)


class _Reader:
    def __init__(self, line: int, text: str, sizes: frozenset[str]) -> None:
        self._line, self._text, self._sizes, self._at = line, text, sizes, 0
        self._tokens = list(self._split())

    def statement(self) -> ProgramStatement:
        left = self._operands(right=False)
        self._expect("arrow", "-> followed by the resulting tensors")
        right = self._operands(right=True)
        words: set[str] = set()
        program_statement = ProgramStatement(
            left, right, frozenset(), {}, {}, {}, None, None, self._line, " ".join(self._text.split())
        )
        while self._at < len(self._tokens):
            self._expect("comma", "a comma before the next attribute")
            program_statement = self._attribute(program_statement, words)
        self._check(program_statement, words)
        return program_statement._replace(words=frozenset(words))

    def _split(self) -> Iterator[_Token]:
        at, stop = 0, len(self._text.rstrip())
        while at < stop:
            match = _TOKEN.match(self._text, at)
            if match is None:
                at += len(self._text[at:]) - len(self._text[at:].lstrip())
                raise self._error(at, f"cannot read {self._text[at : at + 12]!r}")
            kind = match.lastgroup or ""
            yield _Token(kind, match[kind], match.start(kind))
            at = match.end()

    def _operands(self, right: bool) -> tuple[Operand, ...]:
        operands = list(self._operand(right))
        while self._peek(0) == "comma" and not (right and self._is_attribute(self._at + 1)):
            self._at += 1
            operands += self._operand(right)
            if len(operands) > OPERANDS_MAX:
                raise self._error(0, f"more than {OPERANDS_MAX} tensors in one statement")
        return tuple(operands)

    def _is_attribute(self, at: int) -> bool:
        if at >= len(self._tokens):
            return False
        token = self._tokens[at]
        following = self._tokens[at + 1].kind if at + 1 < len(self._tokens) else ""
        return token.kind == "text" or token.text in WORDS or following == "equals"

    def _operand(self, right: bool) -> Iterator[Operand]:
        token = self._next("a tensor's name")
        if token.kind == "regex" and not right:
            operands = [Operand(regex=self._in_place(token, lambda: SafeExpression(token.text[1:-1].replace("\\/", "/"))))]
        elif token.kind == "regex":
            operands = [Operand(template=token.text[1:-1].replace("\\/", "/"))]
        elif token.kind != "name":
            raise self._error(token.column, f"a tensor's name was expected, not {token.text!r}")
        elif token.text == "_":
            operands = [Operand()]
        elif token.text == "*":
            operands = [Operand(rest=True)]
        else:
            names = self._ranged(token)
            operands = [
                Operand(pattern=one) for one in self._in_place(token, lambda: [pattern(name, right) for name in names])
            ]
        turned = self._peek(0) == "turn"
        self._at += turned
        for operand in operands:
            if turned and (operand.nothing or operand.rest):
                raise self._error(token.column, f"{token.text!r} cannot be transposed")
            yield operand._replace(turned=turned)

    def _ranged(self, token: _Token) -> list[str]:
        """The names of `name[a:b]`, or the one name."""
        if self._peek(0) != "list":
            return [token.text]
        found = self._tokens[self._at]
        match = _RANGE.fullmatch(found.text[1:-1])
        if match is None or not 0 < int(match[2]) - int(match[1]) <= RANGE_MAX:
            raise self._error(
                found.column, f"{found.text!r} is not a range of 1 to {RANGE_MAX} numbers", hint="as in name[0:8]"
            )
        self._at += 1
        return [f"{token.text}_{number}" for number in range(int(match[1]), int(match[2]))]

    def _attribute(self, program_statement: ProgramStatement, words: set[str]) -> ProgramStatement:
        token = self._next("an attribute")
        if token.kind == "text":
            return self._with_text(program_statement, "dtype", token)
        if token.text in WORDS and self._peek(0) != "equals":
            words.add(token.text)
            return program_statement
        if token.text not in ATTRIBUTES:
            raise self._error(
                token.column, f"there is no attribute {token.text!r}", hint=f"one of {', '.join((*WORDS, *ATTRIBUTES))}"
            )
        self._expect("equals", f"= after {token.text}")
        value = self._next(f"the value of {token.text}")
        if token.text in TEXTS or (token.text == "sizes" and value.kind != "list"):
            return self._with_text(program_statement, token.text, value)
        if token.text in NUMBERS:
            self._once(program_statement.numbers, token)
            return program_statement._replace(numbers={**program_statement.numbers, token.text: self._number(value)})
        items = self._items(value)
        if token.text == "permute":
            if not all(item.isascii() and item.isdigit() and len(item) <= INDEX_DIGITS_MAX for item in items):
                raise self._error(value.column, f"{value.text} is not an order of dimensions", hint='as in permute="[1,0]"')
            return program_statement._replace(permute=tuple(map(int, items)))
        if token.text == "slice":
            return program_statement._replace(slices=tuple(self._slice(value, item) for item in items))
        self._once(program_statement.lists, token)
        return program_statement._replace(
            lists={**program_statement.lists, token.text: tuple(self._value(value, item) for item in items)}
        )

    def _with_text(self, program_statement: ProgramStatement, name: str, token: _Token) -> ProgramStatement:
        if token.kind not in ("text", "name"):
            raise self._error(token.column, f"{name} cannot be {token.text!r}")
        if name in program_statement.texts:
            raise self._error(token.column, f"{name} appears twice")
        return program_statement._replace(texts={**program_statement.texts, name: token.text.strip("\"'")})

    def _once(self, held: Iterable[str], token: _Token) -> None:
        if token.text in held:
            raise self._error(token.column, f"{token.text} appears twice")

    def _items(self, token: _Token) -> list[str]:
        text = token.text.strip("\"'").strip()
        if token.kind not in ("list", "text") or not (text.startswith("[") and text.endswith("]")):
            raise self._error(token.column, f"a list was expected, not {token.text!r}", hint="as in [1, 0]")
        return [item.strip() for item in text[1:-1].split(",")] if text[1:-1].strip() else []

    def _number(self, token: _Token) -> Number:
        text = token.text.strip("\"'")
        if token.kind not in ("name", "braces", "text"):
            raise self._error(token.column, f"a number was expected, not {token.text!r}")
        return self._value(token, text)

    def _value(self, token: _Token, text: str) -> Number:
        inside = text[1:-1] if text.startswith("{") and text.endswith("}") else text
        if inside == text and not (text.isascii() and text.isdigit()):
            raise self._error(token.column, f"{text!r} is not a number", hint="write sizes in braces, as in {heads}")
        expression = self._in_place(token, lambda: parse(inside))
        unknown = sorted(names_in(expression) - self._sizes)
        if unknown:
            raise self._error(token.column, f"{unknown[0]!r} is not in [sizes]", hint="add it to the program's [sizes]")
        return expression

    def _slice(self, token: _Token, item: str) -> tuple[Number | None, Number | None]:
        low, colon, high = item.partition(":")
        if not colon:
            raise self._error(token.column, f"{item!r} is not a part of a dimension", hint="as in slice=[0:32000, :]")
        begin, end = (self._value(token, text.strip()) if text.strip() else None for text in (low, high))
        return begin, end

    def _check(self, program_statement: ProgramStatement, words: set[str]) -> None:
        """Check without tensors that the sides fit together."""
        left, right = program_statement.left, program_statement.right
        if any(operand.rest for operand in (*left, *right)):
            if len(left) != 1 or len(right) != 1 or not left[0].rest or not right[0].rest:
                raise self._error(0, "a lone * means all other names and is allowed only in * -> *")
        elif any(operand.nothing for operand in left) and (len(left) > 1 or len(right) > 1 or right[0].nothing):
            raise self._error(0, "a new tensor is written _ -> name")
        elif any(operand.nothing for operand in right) and len(right) > 1:
            raise self._error(0, "dropped tensors are written name -> _")
        if left[0].nothing and any(slot for slot in (right[0].pattern or pattern("x", True)).variables):
            raise self._error(0, "a new tensor needs a whole name")
        regexes = [operand for operand in left if operand.regex is not None]
        if regexes and len(left) > 1:
            raise self._error(0, "an expression must be alone on its side", hint="use $LAYER_ID where names are joined")
        if not regexes and any(operand.template for operand in right):
            raise self._error(0, "/…/ on the right needs an expression on the left")
        kinds = words & {"fused_qkv", "fused_qkv_old", "fused_ffn", "stack", "unstack", "same"}
        if len(kinds) > 1:
            raise self._error(0, f"{' and '.join(sorted(kinds))} exclude each other")
        for side in (left, right):
            names = [operand.pattern.text for operand in side if operand.pattern is not None]
            twice = next((name for name in names if names.count(name) > 1), None) if len(set(names)) < len(names) else None
            if twice is not None:
                raise self._error(0, f"{twice!r} appears twice")
        if len(left) > 1 and len(right) > 1:
            raise self._error(0, "a statement can join many tensors or split one, but cannot map many to many")
        self._check_attributes(program_statement, words)

    def _check_attributes(self, program_statement: ProgramStatement, words: set[str]) -> None:
        """Refuse attributes without an effect, which are mistakes."""
        fused, fits = words & {"fused_qkv", "fused_qkv_old", "fused_ffn"}, dict[str, bool]()
        one_to_one = len(program_statement.left) == len(program_statement.right) == 1
        outside = program_statement.left[0].nothing or program_statement.right[0].nothing
        fits["num_heads"] = bool(fused - {"fused_ffn"}) or "rotary" in program_statement.texts
        fits["num_key_value_groups"] = bool(fused - {"fused_ffn"})
        fits["ranks"] = bool(fused - {"fused_qkv"}) and not one_to_one
        fits["src_ranks"] = fits["dst_ranks"] = bool(fused - {"fused_qkv"}) and one_to_one
        fits["size"] = "pad_to" in program_statement.numbers
        fits["shape"] = outside
        fits["sizes"] = not fused and not outside and not words & {"stack", "unstack", "same"}
        fits["permute"] = fits["slice"] = fits["rotary"] = fits["pad_to"] = fits["dst_dtype"] = not outside
        given = {*program_statement.numbers, *program_statement.lists, *program_statement.texts}
        given |= {
            name
            for name, held in (("permute", program_statement.permute), ("slice", program_statement.slices))
            if held is not None
        }
        wrong = sorted(name for name in given if not fits.get(name, True))
        if "zeros" in words and not outside:
            wrong.append("zeros")
        if wrong:
            raise self._error(0, f"{wrong[0]} does nothing in this statement")
        if program_statement.texts.get("rotary", "halves") not in ("halves", "interleaved"):
            raise self._error(0, f"rotary={program_statement.texts['rotary']}: it is halves or interleaved")
        if program_statement.texts.get("sizes", "equal") != "equal":
            raise self._error(0, f"sizes={program_statement.texts['sizes']}: it is a list, or equal")

    def _expect(self, kind: str, what: str) -> None:
        token = self._next(what)
        if token.kind != kind:
            raise self._error(token.column, f"{what} was expected, not {token.text!r}")

    def _next(self, what: str) -> _Token:
        if self._at >= len(self._tokens):
            raise self._error(len(self._text), f"{what} is missing")
        self._at += 1
        return self._tokens[self._at - 1]

    def _peek(self, ahead: int) -> str:
        at = self._at + ahead
        return self._tokens[at].kind if at < len(self._tokens) else ""

    def _in_place(self, token: _Token, make: Callable[[], _Made]) -> _Made:
        try:
            return make()
        except InvalidRequest as problem:
            raise self._error(token.column, problem.detail, problem.hint) from None

    def _error(self, column: int, what: str, hint: str = _FORMS) -> InvalidRequest:
        line = f"line {self._line}, column {column + 1}: {what}"
        return InvalidRequest(line, hint=hint, line=self._line, column=column + 1)
