r"""Convert an answer in LaTeX or plain text to a common notation, and parse it as a formula.

The parser is strict: unknown notation is an error. A grader that skipped it would take `42 \ldots` for 42.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from strands_rollout.grading.phrases import LEAD_IN, SENTENCE_END

_MAX_DEPTH: Final = 40
_TOKEN: Final = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d+|\.(?!\d))?|\.\d+)|(?P<name>\\?[A-Za-z]+)|(?P<mark>\\[{}|&\\]|[-+*/^_()\[\]{}|!,]))"
)
_FUNCTIONS: Final = frozenset(
    {"sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh"}
    | {"ln", "log", "lg", "exp"}
)
_INVERSES: Final = {"sin": "arcsin", "cos": "arccos", "tan": "arctan"}
_VARIADIC: Final = frozenset({"gcd", "lcm"})
_OPEN_PAREN: Final = re.compile(r"\s*\(")
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
_NO_PRODUCTS: Final = frozenset({"or", "and", "not", "if", "mod"})  # words, not products of letters
_MAX_LETTER_RUN: Final = 3  # at most this many adjacent letters may be a product; a longer run is a word


class NotAnExpressionError(ValueError):
    """The text is not a formula, or uses unknown notation."""


@dataclass(frozen=True, slots=True)
class Expression:
    """A node of a formula's tree.

    Attributes:
        kind: "number", "symbol", "constant", "sum", "product", "quotient", "power", "negative", "degrees", "factorial",
            "root" (radicand, index), "binomial", "abs", "floor", "ceil", "gcd", "lcm", or a function's name, such as
            "log" (argument, perhaps base).
        args: The parts of the node.
        value: The value of a number.
        name: The name of a symbol or constant.
    """

    kind: str
    args: tuple[Expression, ...] = ()
    value: Fraction = Fraction(0)
    name: str = ""

    def symbols(self) -> set[str]:
        """Return the names of all variables in the formula."""
        names = {self.name} if self.kind == "symbol" else set()
        return names.union(*(arg.symbols() for arg in self.args))

    def has(self, kind: str, name: str = "") -> bool:
        """Return whether a part of the formula is of this kind and, if a name is given, has this name."""
        return (self.kind == kind and name in ("", self.name)) or any(arg.has(kind, name) for arg in self.args)


_ONE: Final = Expression("number", value=Fraction(1))


def parse(text: str) -> Expression:
    """Return the tree of a formula.

    Raises:
        NotAnExpressionError: The text is not a formula, or is nested too deeply.
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
        is_variadic_call = name in _VARIADIC and _OPEN_PAREN.match(text, position)
        if name is None or name[0] == "\\" or name in _FUNCTIONS or name in {"pi", "sqrt"} or is_variadic_call:
            tokens.append(match[0].strip())
        elif len(name) > _MAX_LETTER_RUN or name in _NO_PRODUCTS:
            raise NotAnExpressionError(f"got the word {name!r:.50}")
        else:
            tokens.extend(name)
    return tokens


class _Parser:
    """A recursive descent parser; `next` is the next token, "" at the end."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = [*tokens, ""]
        self._position = 0
        self._depth = 0
        self._bars = 0  # number of open absolute-value bars in the innermost brackets

    @property
    def next(self) -> str:
        return self._tokens[self._position]

    def sum(self) -> Expression:
        self._enter()
        terms = [self._product()]
        while self.next in ("+", "-"):
            terms.append(self._product())  # the sign is the first token of the term
        self._depth -= 1
        return terms[0] if len(terms) == 1 else Expression("sum", tuple(terms))

    def _enter(self) -> None:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise NotAnExpressionError("nested too deeply")

    def _take(self, expected: str = "") -> str:
        token = self.next
        if not token or (expected and token != expected):
            raise NotAnExpressionError(f"got {token or 'the end'!r}, expected {expected or 'another token'!r}")
        self._position += 1
        return token

    def _take_signs(self) -> bool:
        is_negative = False
        while self.next in ("+", "-"):
            is_negative ^= self._take() == "-"
        return is_negative

    def _product(self) -> Expression:
        is_negative = self._take_signs()
        factors = [self._power()]
        while self.next in _TIMES | _OVER or self._begins_factor():
            if self.next in _TIMES | _OVER:
                is_divisor = self._take() in _OVER
                is_negative ^= self._take_signs()
                factor = self._power()
                factors.append(Expression("quotient", (_ONE, factor)) if is_divisor else factor)
            else:
                self._add_adjacent_factor(factors)
        product = _product_of(factors)
        return Expression("negative", (product,)) if is_negative else product

    def _begins_factor(self) -> bool:
        """Return whether a factor other than a number follows without "*" or "/"; `4 2` and `x2` are not products."""
        if self.next == _BAR:
            return self._bars == 0
        is_end = self.next in _CLOSING.values() or self.next in _TIMES | _OVER
        return not is_end and (self.next in _CLOSING or self.next[-1:].isalpha())

    def _add_adjacent_factor(self, factors: list[Expression]) -> None:
        """Append a factor that follows without "*" or "/"; a fraction after a whole number makes a mixed number."""
        is_fraction = self.next == r"\frac"
        right, left = self._power(), factors[-1]
        is_mixed = is_fraction and right.kind == "quotient" and all(part.kind == "number" for part in right.args)
        if is_mixed and left.kind == "number" and left.value.denominator == 1:
            factors[-1] = Expression("sum", (left, right))
        else:
            factors.append(right)

    def _power(self) -> Expression:
        base = self._atom()
        while self.next in ("!", "^"):
            if self._take() == "!":
                if self.next == "!":
                    raise NotAnExpressionError("got a double factorial")
                base = Expression("factorial", (base,))
                continue
            if base.kind != "degrees" and self._take_degrees():
                base = Expression("degrees", (base,))
                continue
            base = Expression("power", (base, self._exponent()))
            if self.next == "^":
                raise NotAnExpressionError("got two exponents of one base")
        return base

    def _exponent(self) -> Expression:
        is_negative = self._take_signs()
        exponent = self._atom()
        if self.next == "^":  # 2^3^2 is 2^9
            self._take()
            self._enter()
            exponent = Expression("power", (exponent, self._exponent()))
            self._depth -= 1
        return Expression("negative", (exponent,)) if is_negative else exponent

    def _take_degrees(self) -> bool:
        for form in ([r"\circ"], ["{", r"\circ", "}"]):
            if self._tokens[self._position : self._position + len(form)] == form:
                self._position += len(form)
                return True
        return False

    def _atom(self) -> Expression:
        token = self._take()
        if token[0].isdigit() or token[0] == ".":
            return Expression("number", value=Fraction(token.removesuffix(".")))
        if token in _CLOSING:
            inner = self._inside(_CLOSING[token])
            return Expression(_WRAPPERS[token], (inner,)) if token in _WRAPPERS else inner
        if token == _BAR:
            self._bars += 1
            inner = self._inside(token)
            self._bars -= 1
            return Expression("abs", (inner,))
        name = token.removeprefix("\\")
        if name in _FUNCTIONS:
            return self._function(name)
        if name in ("frac", "binom", "sqrt"):
            return self._construct(name)
        if name in _VARIADIC and self.next == "(":
            return self._variadic_function(name)
        return self._letter(token)

    def _inside(self, closing: str) -> Expression:
        bars, self._bars = self._bars, self._bars if closing == _BAR else 0
        inner = self.sum()
        self._take(closing)
        self._bars = bars
        return inner

    def _letter(self, token: str) -> Expression:
        if len(token) > 1 and token not in _CONSTANTS and token.removeprefix("\\") not in GREEK:
            raise NotAnExpressionError(f"unknown notation {token!r}")
        if self.next == "_":
            return Expression("symbol", name=f"{token}_{self._subscript()}")
        if not token[-1].isalpha():
            raise NotAnExpressionError(f"unexpected {token!r}")
        return Expression("constant" if token in _CONSTANTS else "symbol", name=token.removeprefix("\\"))

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

    def _construct(self, name: str) -> Expression:
        if name == "sqrt":
            index = Expression("number", value=Fraction(2))
            if self.next == "[":
                self._take()
                index = self._inside("]")
            return Expression("root", (self._argument(), index))
        first = self._argument()
        return Expression("quotient" if name == "frac" else "binomial", (first, self._argument()))

    def _argument(self) -> Expression:
        r"""Parse the argument of a command: a group, or a single token as in \sqrt2."""
        self._enter()
        node = self._atom()
        self._depth -= 1
        return node

    def _variadic_function(self, name: str) -> Expression:
        self._enter()
        self._take("(")
        args = [self.sum()]
        while self.next == ",":
            self._take()
            args.append(self.sum())
        self._take(")")
        self._depth -= 1
        if len(args) < 2:
            raise NotAnExpressionError(f"got {name} of a single value")
        return Expression(name, tuple(args))

    def _function(self, name: str) -> Expression:
        exponent = base = None
        while self.next in ("^", "_"):
            if self._take() == "^":
                is_negative = self._take_signs()
                exponent = self._atom()
                exponent = Expression("negative", (exponent,)) if is_negative else exponent
            elif name == "log":
                base = self._atom()
            else:
                raise NotAnExpressionError(f"got a subscript of {name}")
        if exponent == Expression("negative", (_ONE,)):
            if name not in _INVERSES:
                raise NotAnExpressionError(f"got the inverse of {name}")
            name, exponent = _INVERSES[name], None
        argument = self._function_argument()
        result = Expression(name, (argument,) if base is None else (argument, base))
        return result if exponent is None else Expression("power", (result, exponent))

    def _function_argument(self) -> Expression:
        """Parse a group, or the adjacent factors before a function or bracket: sin 2x cos x is sin(2x) cos(x)."""
        self._enter()
        is_group = self.next in ("(", "[", "{")
        is_negative = self._take_signs()
        factors = [self._atom() if is_group else self._power()]
        if is_group and self.next == "^" and self._tokens[self._position + 1] in ("{", r"\circ"):
            self._take()
            if not self._take_degrees():
                raise NotAnExpressionError("got an exponent that may belong to the function or to its argument")
            factors = [Expression("degrees", (factors[0],))]
        if is_group and self.next in ("^", "!"):
            raise NotAnExpressionError("got an exponent that may belong to the function or to its argument")
        while not is_group and self._begins_factor() and self.next not in ("(", "[", "{"):
            if self.next.removeprefix("\\") in _FUNCTIONS:
                break
            self._add_adjacent_factor(factors)
        self._depth -= 1
        argument = _product_of(factors)
        return Expression("negative", (argument,)) if is_negative else argument


def _product_of(factors: list[Expression]) -> Expression:
    return factors[0] if len(factors) == 1 else Expression("product", tuple(factors))


_UNIT_SYNONYMS: Final = (  # each text has the names of one unit, the canonical name first
    "mm millimeter millimetre",
    "cm centimeter centimetre",
    "m meter metre",
    "km kilometer kilometre",
    "in inch",
    "ft foot feet",
    "yd yard",
    "mi mile",
    "mg milligram",
    "g gm gram",
    "kg kilogram kilo",
    "lb pound £",
    "oz ounce",
    "l liter litre",
    "ml milliliter millilitre",
    "gal gallon",
    "hr h hour",
    "min minute",
    "sec s second",
    "day",
    "week wk",
    "month",
    "year yr",
    "$ dollar usd us$ buck",
    "¢ cent",
    "€ euro eur",
    "¥ yen",
    "° degree deg",
    "rad radian",
    "% percent pct percentage",
    "mph",
    "kph kmph",
    "person people",
    "man men",
    "woman women",
    "child children",
    "die dice",
    "am a.m",
    "pm p.m",
    "°c",
    "°f",
)
_UNIT_NAMES: Final = {name: names.split()[0] for names in _UNIT_SYNONYMS for name in names.split()}
_UNIT_NAMES.update(celsius="c", fahrenheit="f")
_RATE_UNITS: Final = {"mph": "mi / hr", "kph": "km / hr"}
_POWERS: Final = {"sq": "^2", "square": "^2", "squared": "^2", "cu": "^3", "cubic": "^3", "cubed": "^3"}
_ORDINALS: Final = frozenset({"th", "st", "nd", "rd"})
_KNOWN_UNIT_WORDS: Final = frozenset(_UNIT_NAMES) | frozenset(_POWERS) | _ORDINALS | {"per"}
_NOT_UNITS: Final = frozenset(
    re.findall(
        r"\w+",
        "hundred thousand million billion trillion dozen ten one half halve third quarter fourth fifth sixth tenth "
        "hundredth thousandth over times plus minus and or to factorial root sqrt mod base less more than not but "
        "maybe perhaps remainder if when where with without except wrong false incorrect either sin cos tan log exp "
        "infinity choose through approximately about negative theta january february march april may june july august "
        "september october november december",
    )
)
_UNIT_WORD: Final = (
    r"(?:[A-Za-z]+(?:\.[A-Za-z]+)*\.?|[$¢€£¥%]|°\s*[CF]?(?![A-Za-z]))(?:\s*\^\s*(?:\{\s*-?\d\s*\}|-?\d))?"
)
_UNIT: Final = re.compile(
    rf"(?P<rest>.*(?:\d\.?|[)}}]|\\pi))(?P<space>\s*)(?P<unit>(?:/\s*)?{_UNIT_WORD}(?:\s*/\s*{_UNIT_WORD}|\s+{_UNIT_WORD}){{0,5}})",
    re.DOTALL,
)
_DETERMINER: Final = r"(?:the|an?|all|my|his|her|their|its)\b"
_PART_OF: Final = re.compile(
    rf"(?P<part>.*[\d)}}%])\s*\bof\s+(?:{_DETERMINER}\s+)*(?P<whole>(?!{_DETERMINER})[A-Za-z]+(?: [A-Za-z]+)*)",
    re.DOTALL,
)
_MONEY: Final = re.compile(r"(?P<sign>[-+]?)\s*(?P<unit>[$€£¥]|US\$|USD|EUR)\s*(?P<rest>[-\d.\\].*)", re.DOTALL)
_UNIT_PART: Final = re.compile(r"[a-z]+(?:\.[a-z]+)*|\^\s*\{?\s*-?\d|[$¢€£¥%/]|°\s*[cf]?")


def split_unit(text: str) -> tuple[str, str]:
    r"""Split an answer that has no text macros into its text without the unit, and the unit's canonical name or ""."""
    money = _MONEY.fullmatch(text)
    if money:
        rest, per = split_unit(money["rest"])
        name = _UNIT_NAMES[money["unit"].lower()]
        return money["sign"] + rest, name + ("" if per == name else per)
    of = _PART_OF.fullmatch(text)
    if of and split_unit(f"1 {of['whole']}")[0] == "1":  # 1/3 of the pizza is 1/3 pizza, and 30% of them are 30%
        return split_unit(of["part"] if of["part"].endswith("%") else f"{of['part']} {of['whole']}")
    match = _UNIT.fullmatch(text)
    if match is None or not _is_unit(match["unit"].lower(), after_space=bool(match["space"])):
        return text, ""
    return match["rest"].strip(), _unit_name(match["unit"].lower())


def _is_unit(unit: str, *, after_space: bool) -> bool:
    r"""Return whether a text after a number is a unit: a known unit or, if long enough, an unknown word.

    An unknown word must have at least three letters after a space, else four; a shorter one is a product, as in 5 ab.
    A single letter must follow a space: 5m is a product. A word of `_NOT_UNITS` is never a unit.
    """
    for word in (part for part in _UNIT_PART.findall(unit) if part[0].isalpha()):
        forms = word, _singular(word)
        is_letter = len(word) == 1 and not after_space
        is_unknown = _KNOWN_UNIT_WORDS.isdisjoint(forms) and len(word) < (3 if after_space else 4)
        if is_letter or is_unknown or not _NOT_UNITS.isdisjoint(forms):
            return False
    return True


def _unit_name(unit: str) -> str:
    """Return the canonical name of a unit: "cm^2" for "sq cm" and "square centimeters"."""
    parts: list[str] = []
    power = ""  # the power of the next unit, as after "square"
    for part in _UNIT_PART.findall(re.sub(r"\bper\b", "/", unit)):
        if part in _POWERS:
            power = _POWERS[part]
            if part.endswith("ed"):
                parts, power = [*parts, power], ""
        elif part[0] == "^":
            parts.append("^" + part.strip("^{ "))
        elif part not in _ORDINALS:
            name = _UNIT_NAMES.get(part) or _UNIT_NAMES.get(_singular(part)) or _singular(part)
            parts += [*_RATE_UNITS.get(name, name).split(), *([power] if power else [])]
            power = ""
    return "".join(f" {part}" if part[0].isalpha() else part for part in parts).strip()


def _singular(word: str) -> str:
    if word.endswith("ies") and len(word) > 4:
        return word[:-3] + "y"
    if word.endswith(("sses", "xes", "ches", "shes")):
        return word[:-2]
    return word[:-1] if word.endswith("s") and not word.endswith("ss") and len(word) > 2 else word


_SIGNS_OF_COMMANDS: Final = zip(
    "\u222a\u221e\u2205\u2208\u2216π√±≤≥≠θ",
    ("cup", "infty", "emptyset", "in", "setminus", "pi", "sqrt", "pm", "le", "ge", "ne", "theta"),
    strict=True,
)
_UNICODE: Final = str.maketrans(
    {
        **dict.fromkeys("\u2212\u2013\u2014\u2012\ufe63\uff0d\u207b", "-"),  # minus signs and dashes
        **dict.fromkeys("\u00d7\u22c5\u2219\u00b7\u2715", r"\cdot "),
        **dict.fromkeys("\u00f7\u2044\u2215", "/"),
        **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff\u00ad", ""),
        **dict.fromkeys("\u201c\u201d", '"'),
        **{sign: rf"\{name} " for sign, name in _SIGNS_OF_COMMANDS},
        "°": r"^\circ ",
        "\u211d": r"\mathbb{R}",
        "\u2223": "|",
    }
)
_UNICODE_ROOT: Final = re.compile(r"√\s*(\d+|[A-Za-z])")
_UNICODE_FRACTION: Final = re.compile("[\u00bc-\u00be\u2150-\u215e]")
_SUPERSCRIPT_DIGITS: Final = "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079"
_SUPERSCRIPTS: Final = str.maketrans(f"{_SUPERSCRIPT_DIGITS}\u207b", "0123456789-")
_UNICODE_POWER: Final = re.compile(f"\u207b?[{_SUPERSCRIPT_DIGITS}]+")
_DELIMITERS: Final = re.compile(
    r"(?<!\\)\\[()\[\]]|\\(?:left|right|middle|[bB]igg?[lrm]?|displaystyle|textstyle|scriptstyle|limits|rm|bf|it|sf|tt"
    r"|(?:tiny|small|normalsize|[lL]arge|LARGE|huge|Huge)|strut|mathstrut|noindent|nonumber|hfill|bfseries|itshape)"
    r"(?![A-Za-z])(?:(?<=left|ight)\.)?"
)
_COLOR: Final = re.compile(r"\\(?:textcolor|color|colorbox)\s*(?:\[[^\[\]{}]*\])?\s*\{[^{}]*\}")
_REMOVED_COMMAND: Final = re.compile(r"\\(?:tag|label|hspace|vspace)\*?\s*\{[^{}]*\}")
_DECORATION: Final = re.compile(
    r"\\(?:underline|underbrace|overbrace|boxed|fbox|framebox|math(?:bf|it|sf|tt|normal)|boldsymbol|bm|pmb|emph|ensuremath|mathop)(?![A-Za-z])"
)
_MARKDOWN: Final = re.compile(r"(?P<mark>\*{1,3}|_{1,3}|`{1,3}|[\"'])(?P<inner>[^*_`\"'].*?)(?P=mark)", re.DOTALL)
_GROUP_SPACE: Final = re.compile(
    r"(?<=\d)(?:\\[,!;: ]|(?:\\(?:text|mbox|mathrm|mathord))?\{[,']\}|,\\!|~|['\u2019])+(?=\d{3}(?!\d))"
)
_SPACE: Final = re.compile(r"(?<!\\)\\[,!;:> ]|\\q?quad(?![A-Za-z])|(?<!~)~(?!~)|\s+")
_TEXT_NAME: Final = r"\\(?:text(?:bf|it|rm|sf|tt|normal|up|md|sc)?|mathrm|mbox|hbox|operatorname)\*?\s*"
_TEXT_MACRO: Final = re.compile(_TEXT_NAME + r"\{([^{}]*)\}")
_FRAC_NAME: Final = re.compile(r"\\[dtc]frac(?![A-Za-z])")
_SHORT_FRAC: Final = re.compile(r"\\frac\s*(\{[^{}]*\}|\d)\s*(\{[^{}]*\}|\d)")
_BRACED_FRAC: Final = re.compile(r"(?<=\d)\s*\{\s*(\\frac\s*\{[^{}]*\}\s*\{[^{}]*\})\s*\}")  # 3{\frac{1}{2}}
_INFIX: Final = re.compile(r"\{([^{}]*)\\(over|choose)(?![A-Za-z])([^{}]*)\}")
_PREFIX_NAMES: Final = {"over": "frac", "choose": "binom"}
_ENGLISH_LEAD_IN: Final = re.compile(
    r"(?:(?:so|thus|hence|therefore),? )?(?:the |my )?(?:final |correct )?(?:answer|result|solution)"
    r" ?(?:is:?|equals|[:=]) ?(?=\S)",
    re.IGNORECASE,
)
_SHORT_SQRT: Final = re.compile(r"\\sqrt\s*([0-9A-Za-z])")
_CALLED_SQRT: Final = re.compile(r"\\?\bsqrt\s*\(([^()]*)\)")
_SHORT_SCRIPT: Final = re.compile(r"([\^_])\s*\{\s*([0-9A-Za-z])\s*\}")
_DEGREES: Final = re.compile(r"\^?\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z])|\\degrees?(?![A-Za-z]))\s*")
_TRIGONOMETRIC: Final = re.compile(r"(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
_ORDINAL: Final = re.compile(r"\^\s*\{?\s*(?:th|st|nd|rd)\s*\}?$")
_COMMAND: Final = re.compile(r"\\([A-Za-z]+)\s*")
_COMMAND_SYNONYMS: Final = (
    ("leq leqslant leqq", r"\le "),
    ("geq geqslant geqq", r"\ge "),
    ("neq", r"\ne "),
    ("lt", "<"),
    ("gt", ">"),
    ("times ast", r"\cdot "),
    ("varnothing O", r"\emptyset "),
    ("dbinom tbinom", r"\binom"),
    ("R", r"\mathbb{R}"),
    ("langle", "("),
    ("rangle", ")"),
    ("lbrace", r"\{"),
    ("rbrace", r"\}"),
    ("lbrack", "["),
    ("rbrack", "]"),
    ("lvert rvert vert mid", "|"),
    ("wedge land", " and "),
    ("vee lor", " or "),
    ("smallsetminus backslash", r"\setminus "),
)
_COMMANDS_BY_SYNONYM: Final = {name: plain for names, plain in _COMMAND_SYNONYMS for name in names.split()}
_SIGNS: Final = (
    ("**", "^"),
    ("*", r"\cdot "),
    ("<=", r"\le "),
    (">=", r"\ge "),
    ("!=", r"\ne "),
    (r"\%", "%"),
    (r"\mathbb R", r"\mathbb{R}"),
    (r"\{\}", r"\emptyset "),
)
_REVERSED_INTERVAL: Final = re.compile(
    r"(?P<before>^|\\(?:in|cup|setminus)(?![A-Za-z])|=|\bor )\s*(?P<open>[\[\]])(?P<ends>[^\[\],;]+[,;][^\[\],;]+)"
    r"(?P<close>[\[\]])(?=\s*(?:$|\\(?:cup|setminus)(?![A-Za-z])|or ))"
)
_INFINITY: Final = re.compile(r"(?<![A-Za-z\\])(?:infinity|infty|inf)(?![A-Za-z])", re.IGNORECASE)
_EMPTY_BRACES: Final = re.compile(r"\\\{\s+\\\}")
_BETWEEN_DIGITS: Final = re.compile(r"(?<=\d) (?=[\d.])")
_TRAILING_MARKS: Final = " \t.,;:"


@dataclass(frozen=True, slots=True)
class Notation:
    r"""An answer in the common notation.

    Attributes:
        text: The answer without delimiters, decoration, unit and final punctuation.
        unit: The canonical name of the number's unit; "%" for a percentage, "" for none.
        is_text: True if something around the words was removed, such as a text macro or a phrase before the answer.
            Then words in `text` are not taken for products of letters.
    """

    text: str
    unit: str = ""
    is_text: bool = False


def notation_of(answer: str) -> Notation:
    """Return an answer in the common notation; the caller must bound the length of the answer."""
    plain = to_plain_latex(answer)
    text = " ".join(_TEXT_MACRO.sub(r" \1 ", plain).split()).rstrip(_TRAILING_MARKS).lstrip()
    text = _ORDINAL.sub("", text)
    if lead_in := _ENGLISH_LEAD_IN.match(text):
        text = text[lead_in.end() :]
    elif lead_in := LEAD_IN.match(text):
        text = SENTENCE_END.sub("", text[lead_in.end() :])
    if _TRIGONOMETRIC.search(text):  # sin 30° is the sine of an angle in degrees; 30° alone is 30 with a unit
        return Notation(_DEGREES.sub(r"^\\circ ", text).strip(), is_text=text != plain)
    bare, unit = split_unit(_DEGREES.sub("°", text).strip())
    bare = bare.replace("°", "").strip()
    return Notation(bare.rstrip(_TRAILING_MARKS).lstrip() or text, unit, is_text=text != plain)


def to_plain_latex(answer: str) -> str:
    r"""Return the answer as mostly ASCII LaTeX, without delimiters, decoration and spacing commands."""
    text = _UNICODE_ROOT.sub(r"\\sqrt{\1}", answer)
    text = _UNICODE_FRACTION.sub(_fraction_to_latex, text)
    text = _UNICODE_POWER.sub(lambda m: f"^{{{m[0].translate(_SUPERSCRIPTS)}}}", text).translate(_UNICODE)
    text = unicodedata.normalize("NFKC", text).translate(_UNICODE)
    if text.replace(r"\$", "").count("$") != 1:  # dollars around formulas; money has a single dollar, or `\$5`
        text = re.sub(r"(?<!\\)\$", "", text)
    text = _REMOVED_COMMAND.sub(" ", text.replace(r"\$", "$"))
    text = _INFIX.sub(lambda m: rf"\{_PREFIX_NAMES[m[2]]}{{{m[1]}}}{{{m[3]}}}", text)
    for decoration in (_COLOR, _DELIMITERS, _DECORATION):
        text = decoration.sub("", text)
    text = _GROUP_SPACE.sub("", text).replace("{,}", ",").replace("{:}", ":")
    text = _strip_wrapping(_SPACE.sub(" ", text))
    text = _COMMAND.sub(lambda command: _COMMANDS_BY_SYNONYM.get(command[1], command[0]), text)
    text = _EMPTY_BRACES.sub(r"\{\}", text)
    for sign, plain in _SIGNS:
        text = text.replace(sign, plain)
    text = _INFINITY.sub(r"\\infty ", text)
    text = _FRAC_NAME.sub(r"\\frac", text)
    text = _SHORT_FRAC.sub(lambda m: rf"\frac{_add_braces(m[1])}{_add_braces(m[2])}", text)
    text = _BRACED_FRAC.sub(r"\1", text)
    text = _CALLED_SQRT.sub(r"\\sqrt{\1}", text)
    text = _SHORT_SQRT.sub(r"\\sqrt{\1}", text)
    text = _REVERSED_INTERVAL.sub(_to_usual_brackets, text)
    return text.rstrip(_TRAILING_MARKS).lstrip()


def canonical_key(text: str) -> str:
    """Return a key that ignores parentheses or braces around one word or number, the case of a word, and most spaces.

    A space between digits counts, and so does the case of a single letter.
    """
    text = _SHORT_SCRIPT.sub(r"\1\2", " ".join(text.split()))
    key = _BETWEEN_DIGITS.sub("\0", text).replace(" ", "").replace("\0", " ")  # 4 2 is not 42
    while len(key) > 2 and key[0] + key[-1] in ("()", "{}") and key[1:-1].isalnum():
        key = key[1:-1]
    return key.lower() if len(key) > 1 and key.isalpha() else key


def _to_usual_brackets(interval: re.Match[str]) -> str:
    """Write ]0,1] as (0,1], and ]0,1[ as the union of (0,1) with itself, which can't be mistaken for a pair."""
    opening, closing = ("(" if interval["open"] == "]" else "["), (")" if interval["close"] == "[" else "]")
    usual = f"{opening}{interval['ends']}{closing}"
    return interval["before"] + (rf"{usual}\cup {usual}" if opening + closing == "()" else usual)


def _strip_wrapping(text: str) -> str:
    """Remove Markdown, quotes and braces around the whole text."""
    while True:
        text = text.rstrip(_TRAILING_MARKS).lstrip()
        match = _MARKDOWN.fullmatch(text)
        if match and match["mark"] not in match["inner"]:
            text = match["inner"]
        elif text.startswith("{") and _closing_brace(text) == len(text) - 1 > 0:
            text = text[1:-1]
        else:
            return text


def _closing_brace(text: str) -> int:
    depth = 0
    for mark in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        depth += (mark[0] == "{") - (mark[0] == "}")
        if depth == 0 and mark[0] == "}":
            return mark.start()
    return -1


def _fraction_to_latex(fraction: re.Match[str]) -> str:
    value = Fraction(unicodedata.numeric(fraction[0])).limit_denominator(10)
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def _add_braces(part: str) -> str:
    return part if part.startswith("{") else f"{{{part}}}"
