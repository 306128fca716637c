"""Patterns for the words around an answer: phrases that introduce it, ends of sentences, and negations.

The phrases are "Answer:" in English and other languages, and "the answer is" in other languages. They include no other
words: a "no" or a second answer, for example, stays part of the answer, which then equals no label.
"""
# ruff: noqa: RUF001 - dashes and stops of other languages

import re
from typing import Final

_WORDS: Final = (
    r"\b(?:answer|(?:respuesta|r[ée]ponse|resposta|risposta)(?: finale?| correct[ae]| corrett?a)?"
    r"|antwort|ответ|antwoord|odpowied[źz]|cevap|jawaban(?: akhir)?)"
    r"|(?:最[终終后後])?答案|答え|解答|정답|đáp án|उत्तर|الإجابة|الجواب"
)
_SO: Final = (
    r"(?:(?:so|thus|hence|therefore|por lo tanto|entonces|así que|donc|ainsi|also|somit|daher|portanto|logo|quindi"
    r"|perciò|итак|значит)[,:]? "
    r"|(?:所以|因此|故|那么|于是|よって|したがって|ゆえに|従って|따라서|그러므로)[,、\uFF0C ]? ?)?"
)
# no English phrases: this package's English prompts ask for a box or "Answer:", and a policy should learn to use them
_IS: Final = (
    r"la (?:respuesta|solución)(?: final| correcta)? es",
    r"la (?:réponse|solution)(?: finale| correcte)? est",
    r"(?:die|meine) (?:endgültige |richtige )?antwort (?:ist|lautet)",
    r"a resposta(?: final| correta)? é",
    r"la risposta(?: finale| corretta)? è",
    r"(?:окончательный |правильный )?ответ(?: равен| [-—–])",
    r"(?:het |het juiste )antwoord is",
    r"(?:最终的?|最后的?|正确的?|最終的?|最後的?|正確的?)?答案(?:是|为|為|等于|等於)",
    r"(?:最終的な|正しい)?(?:答え?|解答)は、?",
    r"(?:최종 |올바른 )?(?:정답|답)은",
)
_MARKUP: Final = r"[\s*_`]"

ANSWER_LABEL: Final = re.compile(rf"(?:{_WORDS}){_MARKUP}{{0,8}}[:\uFF1A]{_MARKUP}*", re.IGNORECASE)
"""A word for "answer" with a colon, and the white space, line ends and Markdown after it."""
ANSWER_SENTENCE: Final = re.compile(
    rf"(?:^|[.!?;。\uFF01\uFF1F\uFF1B]){_MARKUP}*{_SO}(?:{'|'.join(_IS)}){_MARKUP}{{0,8}}[:\uFF1A]?{_MARKUP}*",
    re.IGNORECASE,
)
"""Words that begin a sentence such as "la respuesta es 42", in a language other than English. Match within a line."""
LEAD_IN: Final = re.compile(rf"{_SO}(?:{'|'.join(_IS)}|(?:{_WORDS}) ?:) ?:? ?(?=\S)", re.IGNORECASE)
"""Words that introduce the answer and were extracted with it, as in "la respuesta es 42". Match it on NFKC text."""
SENTENCE_END: Final = re.compile(r" ?(?:です|である|となる|になります|입니다|이다|예요|이에요)?[.。\uFF0E]?$")
"""End of a sentence after the answer: a final verb in Japanese or Korean, and a full stop; each may be missing."""
NEGATION: Final = re.compile(
    r"\b(?:not|never|neither|nor|wrong|incorrect|no(?!\.)|nicht|kein|keine|pas|não|non|не|нет)\b|n't|n’t|不|没|ない|아니",
    re.IGNORECASE,
)
"""A word that negates the text around it."""
