r"""Parses a formula, in LaTeX or as people type it, into a tree.

Strict: what it does not know is an error. A grader that passes over what it can't read takes `42 \ldots` for 42.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

_DEEPEST: Final = 40
_TOKEN: Final = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d+|\.(?!\d))?|\.\d+)|(?P<name>\\?[A-Za-z]+)|(?P<mark>\\[{}|&\\]|[-+*/^_()\[\]{}|!]))"
)
_FUNCTIONS: Final = frozenset(
    {"sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh"}
    | {"ln", "log", "lg", "exp"}
)
_INVERSES: Final = {"sin": "arcsin", "cos": "arccos", "tan": "arctan"}
_CONSTANTS: Final = frozenset({"e", "i", r"\pi", "pi", r"\infty", r"\imath"})
GREEK: Final = frozenset(
    {"alpha", "beta", "gamma", "delta", "epsilon", "varepsilon", "zeta", "eta", "theta", "vartheta", "iota", "kappa"}
    | {"lambda", "mu", "nu", "xi", "rho", "sigma", "tau", "upsilon", "phi", "varphi", "chi", "psi", "omega", "Gamma"}
    | {"Delta", "Theta", "Lambda", "Xi", "Pi", "Sigma", "Upsilon", "Phi", "Psi", "Omega", "ell"}
)
_CLOSING: Final = {"(": ")", "[": "]", "{": "}", r"\lfloor": r"\rfloor", r"\lceil": r"\rceil", r"\lvert": r"\rvert"}
_WRAPPERS: Final = {r"\lfloor": "floor", r"\lceil": "ceil", r"\lvert": "abs"}
_BAR: Final = "|"
_TIMES: Final = frozenset({"*", r"\cdot", r"\times"})
_OVER: Final = frozenset({"/", r"\div"})
_NO_PRODUCTS: Final = frozenset({"or", "and", "not", "if", "mod"})
_LONGEST_RUN: Final = 3  # letters side by side are a product; more of them are a word


class NotAnExpressionError(ValueError):
    """The text is not one formula, or uses notation that is not known here."""


@dataclass(frozen=True, slots=True)
class Node:
    """A formula.

    Attributes:
        kind: "number", "symbol", "constant", "sum", "product", "quotient", "power", "negative", "degrees", "factorial",
            "root" (radicand, index), "binomial", "log" (argument, perhaps base), or a function's name.
        args: What it is made of.
        value: Of a number.
        name: Of a symbol or constant.
    """

    kind: str
    args: tuple[Node, ...] = ()
    value: Fraction = Fraction(0)
    name: str = ""

    def symbols(self) -> set[str]:
        """The names of all variables in it."""
        own = {self.name} if self.kind == "symbol" else set()
        return own.union(*(arg.symbols() for arg in self.args))

    def has(self, kind: str, name: str = "") -> bool:
        """Whether a part of it is of this kind, and of this name where one is given."""
        return (self.kind == kind and name in ("", self.name)) or any(arg.has(kind, name) for arg in self.args)


_ONE: Final = Node("number", value=Fraction(1))


def parse(text: str) -> Node:
    """The tree of one formula.

    Raises:
        NotAnExpressionError: It is none, or nested too deeply.
    """
    parser = _Parser(_tokens(text))
    node = parser.sum()
    if parser.next:
        raise NotAnExpressionError(f"unexpected {parser.next!r} in {text!r:.200}")
    return node


def _tokens(text: str) -> list[str]:
    tokens: list[str] = []
    position = 0
    text = text.rstrip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise NotAnExpressionError(f"unknown notation {text[position:]!r:.50}")
        position = match.end()
        name = match["name"]
        if name is None or name[0] == "\\" or name in _FUNCTIONS or name in {"pi", "sqrt"}:
            tokens.append(match[0].strip())
        elif len(name) > _LONGEST_RUN or name in _NO_PRODUCTS:
            raise NotAnExpressionError(f"a word: {name!r:.50}")
        else:
            tokens.extend(name)
    return tokens


class _Parser:
    """Recursive descent; `next` is the token to come, "" at the end."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = [*tokens, ""]
        self._at = 0
        self._depth = 0
        self._bars = 0

    @property
    def next(self) -> str:
        return self._tokens[self._at]

    def sum(self) -> Node:
        self._enter()
        terms = [self._product()]
        while self.next in ("+", "-"):
            terms.append(self._product())  # its sign is its first token
        self._depth -= 1
        return terms[0] if len(terms) == 1 else Node("sum", tuple(terms))

    def _enter(self) -> None:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise NotAnExpressionError("nested too deeply")

    def _take(self, expected: str = "") -> str:
        token = self.next
        if not token or (expected and token != expected):
            raise NotAnExpressionError(f"got {token or 'the end'!r}, expected {expected or 'more'!r}")
        self._at += 1
        return token

    def _sign(self) -> bool:
        """Take any signs; whether they make a minus."""
        minus = False
        while self.next in ("+", "-"):
            minus ^= self._take() == "-"
        return minus

    def _product(self) -> Node:
        minus = self._sign()
        factors = [self._power()]
        while self.next in _TIMES | _OVER or self._begins_factor():
            if self.next in _TIMES | _OVER:
                is_divisor = self._take() in _OVER
                minus ^= self._sign()
                factor = self._power()
                factors.append(Node("quotient", (_ONE, factor)) if is_divisor else factor)
            else:
                self._side_by_side(factors)
        product = _product_of(factors)
        return Node("negative", (product,)) if minus else product

    def _begins_factor(self) -> bool:
        """Whether a factor follows without a sign; a number can't: `4 2` and `x2` are not products."""
        if self.next == _BAR:
            return self._bars == 0
        is_end = self.next in _CLOSING.values() or self.next in _TIMES | _OVER
        return not is_end and (self.next in _CLOSING or self.next[-1:].isalpha())

    def _side_by_side(self, factors: list[Node]) -> None:
        """Take one more factor; a whole number and a fraction of two are a mixed number instead."""
        is_fraction = self.next == r"\frac"
        right, left = self._power(), factors[-1]
        is_mixed = is_fraction and right.kind == "quotient" and all(part.kind == "number" for part in right.args)
        if is_mixed and left.kind == "number" and left.value.denominator == 1:
            factors[-1] = Node("sum", (left, right))
        else:
            factors.append(right)

    def _power(self) -> Node:
        base = self._atom()
        while self.next in ("!", "^"):
            if self._take() == "!":
                if self.next == "!":
                    raise NotAnExpressionError("a double factorial")
                base = Node("factorial", (base,))
                continue
            if base.kind != "degrees" and self._take_degrees():
                base = Node("degrees", (base,))
                continue
            base = Node("power", (base, self._exponent()))
            if self.next == "^":
                raise NotAnExpressionError("two exponents of one base")
        return base

    def _exponent(self) -> Node:
        minus = self._sign()
        exponent = self._atom()
        if self.next == "^":  # 2^3^2 is 2^9
            self._take()
            self._enter()
            exponent = Node("power", (exponent, self._exponent()))
            self._depth -= 1
        return Node("negative", (exponent,)) if minus else exponent

    def _take_degrees(self) -> bool:
        for form in ([r"\circ"], ["{", r"\circ", "}"]):
            if self._tokens[self._at : self._at + len(form)] == form:
                self._at += len(form)
                return True
        return False

    def _atom(self) -> Node:
        token = self._take()
        if token[0].isdigit() or token[0] == ".":
            return Node("number", value=Fraction(token.removesuffix(".")))
        if token in _CLOSING:
            inner = self._inside(_CLOSING[token])
            return Node(_WRAPPERS[token], (inner,)) if token in _WRAPPERS else inner
        if token == _BAR:
            self._bars += 1
            inner = self._inside(token)
            self._bars -= 1
            return Node("abs", (inner,))
        name = token.removeprefix("\\")
        if name in _FUNCTIONS:
            return self._function(name)
        if name in ("frac", "binom", "sqrt"):
            return self._construct(name)
        return self._letter(token)

    def _inside(self, closing: str) -> Node:
        bars, self._bars = self._bars, self._bars if closing == _BAR else 0
        inner = self.sum()
        self._take(closing)
        self._bars = bars
        return inner

    def _letter(self, token: str) -> Node:
        if len(token) > 1 and token not in _CONSTANTS and token.removeprefix("\\") not in GREEK:
            raise NotAnExpressionError(f"unknown notation {token!r}")
        if self.next == "_":
            return Node("symbol", name=f"{token}_{self._subscript()}")
        if not token[-1].isalpha():
            raise NotAnExpressionError(f"unexpected {token!r}")
        return Node("constant" if token in _CONSTANTS else "symbol", name=token.removeprefix("\\"))

    def _subscript(self) -> str:
        self._take("_")
        if self.next != "{":
            return self._take()
        self._take()
        taken = []
        while self.next != "}":
            taken.append(self._take())
        self._take("}")
        return "".join(taken)

    def _construct(self, name: str) -> Node:
        if name == "sqrt":
            index = Node("number", value=Fraction(2))
            if self.next == "[":
                self._take()
                index = self._inside("]")
            return Node("root", (self._argument(), index))
        first = self._argument()
        return Node("quotient" if name == "frac" else "binomial", (first, self._argument()))

    def _argument(self) -> Node:
        r"""What a construct applies to: a group, or one token, as in \sqrt2."""
        self._enter()
        node = self._atom()
        self._depth -= 1
        return node

    def _function(self, name: str) -> Node:
        exponent = base = None
        while self.next in ("^", "_"):
            if self._take() == "^":
                minus = self._sign()
                exponent = self._atom()
                exponent = Node("negative", (exponent,)) if minus else exponent
            elif name == "log":
                base = self._atom()
            else:
                raise NotAnExpressionError(f"a subscript of {name}")
        if exponent == Node("negative", (_ONE,)):
            if name not in _INVERSES:
                raise NotAnExpressionError(f"the inverse of {name}")
            name, exponent = _INVERSES[name], None
        argument = self._function_argument()
        result = Node(name, (argument,) if base is None else (argument, base))
        return result if exponent is None else Node("power", (result, exponent))

    def _function_argument(self) -> Node:
        """A group, or the factors side by side up to the next function: sin 2x cos x is sin(2x) cos(x)."""
        self._enter()
        is_group = self.next in ("(", "[", "{")
        minus = self._sign()
        factors = [self._atom() if is_group else self._power()]
        if is_group and self.next == "^" and self._tokens[self._at + 1] in ("{", r"\circ"):
            self._take()
            if not self._take_degrees():
                raise NotAnExpressionError("an exponent that may belong to the function or to its argument")
            factors = [Node("degrees", (factors[0],))]
        if is_group and self.next in ("^", "!"):
            raise NotAnExpressionError("an exponent that may belong to the function or to its argument")
        while not is_group and self._begins_factor() and self.next not in ("(", "[", "{"):
            if self.next.removeprefix("\\") in _FUNCTIONS:
                break
            self._side_by_side(factors)
        self._depth -= 1
        argument = _product_of(factors)
        return Node("negative", (argument,)) if minus else argument


def _product_of(factors: list[Node]) -> Node:
    return factors[0] if len(factors) == 1 else Node("product", tuple(factors))
