"""What a scripted model says: pure functions of the prompt, the same in every process and attempt.

A model never sees a sample's target, so `good` is right only where the prompt itself decides the answer. The first rule
that applies wins:

1. a grader's prompt (it names `GRADE: $LETTER`): `GRADE: C`;
2. "answer (or reply, respond, say) with exactly X", to the end of the line: X, without quotes and full stop;
3. options in lines `A) …` and so on: the option whose text is the question's answer by rule 4, else the first one;
4. arithmetic: the longest expression of numbers, + - * / // % ^ and brackets in the prompt's last line that has one;
5. nothing else is known: `I don't know.`

Where the prompt asks for `ANSWER: …`, rules 2 to 4 answer in that form.
"""

import ast
import hashlib
import operator
import re
from collections.abc import Callable

REFUSAL = "I can't help with that."
UNKNOWN = "I don't know."

_EXACTLY = re.compile(r"\b(?:answer|reply|respond|say)\s+(?:with\s+)?exactly:?[ \t]+(?P<text>[^\n]+)", re.IGNORECASE)
_OPTION = re.compile(r"^[ \t]*(?P<letter>[A-Z])\)[ \t]*(?P<text>.*?)[ \t]*$", re.MULTILINE)
_EXPRESSION = re.compile(r"(?<![\w.])[-(]*\d[\d.\s()+*/%^-]*")
_LONGEST_EXPRESSION = 200
_LARGEST = 10**50

_BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def digest(text: str) -> str:
    """A hash of any text, lone surrogates too: 16 hex digits."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def right(prompt: str) -> str:
    """The answer of `good`."""
    if "GRADE: $LETTER" in prompt:
        return "GRADE: C"
    answer = _solve(prompt)
    return UNKNOWN if answer is None else _in_form(prompt, answer)


def wrong(prompt: str) -> str:
    """The answer of `wrong`: another grade, option or number than `right` gives, else a text that does not contain it."""
    if "GRADE: $LETTER" in prompt:
        return "GRADE: I"
    answer = _solve(prompt)
    if answer is None:
        return "???"
    return _in_form(prompt, _other_than(answer, _options(prompt)))


def mixed(prompt: str) -> str:
    """The answer of `mixed`: right for about half of all prompts, chosen by a hash of their own (not the faults' one)."""
    return right(prompt) if int(digest(f"mixed\n{prompt}"), 16) % 2 == 0 else wrong(prompt)


def calculate(text: str) -> int | float | None:
    """The value of an arithmetic expression; None if it is none, has no operator, or is too large."""
    try:
        tree = ast.parse(text.strip().replace("^", "**").replace("×", "*").replace("÷", "/"), mode="eval").body
        return None if isinstance(tree, ast.Constant) else _whole(_value(tree))
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return None


def _solve(prompt: str) -> str | None:
    """The bare answer by rules 2 to 4."""
    if found := _EXACTLY.search(prompt):
        return found["text"].strip().rstrip(".").strip("\"'`“”")
    options = _options(prompt)
    value = _last_value(prompt[: next(_OPTION.finditer(prompt)).start()] if options else prompt)
    if not options:
        return value
    return next((letter for letter, text in options.items() if text == value), next(iter(options)))


def _options(prompt: str) -> dict[str, str]:
    found = {match["letter"]: match["text"] for match in _OPTION.finditer(prompt)}
    return found if len(found) > 1 else {}


def _last_value(text: str) -> str | None:
    for line in reversed(text.replace("×", "*").replace("÷", "/").splitlines()):
        candidates = sorted((match[0] for match in _EXPRESSION.finditer(line)), key=len, reverse=True)
        for candidate in candidates:
            # A question's own full stop or an unmatched bracket at the end is no part of it.
            value = calculate(candidate[:_LONGEST_EXPRESSION].rstrip(" .-+*/%^"))
            if value is not None:
                return str(value)
    return None


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        result: float = node.value  # type: ignore[assignment]
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        result = _value(node.operand) * (-1 if isinstance(node.op, ast.USub) else 1)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        base, exponent = _value(node.left), _value(node.right)
        if abs(base) > 10**6 or not 0 <= exponent <= 64:
            raise ValueError("power out of range")
        result = base**exponent
    elif isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        result = _BINARY[type(node.op)](_value(node.left), _value(node.right))
    else:
        raise ValueError("no arithmetic")
    if isinstance(result, complex) or abs(result) > _LARGEST:
        raise ValueError("out of range")
    return result


def _whole(value: float) -> int | float:
    return int(value) if value == int(value) else value


def _other_than(answer: str, options: dict[str, str]) -> str:
    if options:
        return next(letter for letter in options if letter != answer)
    if re.fullmatch(r"-?\d+", answer):
        return str(int(answer) + 1)
    return next(text for text in ("Something else.", "???", "") if answer.casefold() not in text.casefold() or not text)


def _in_form(prompt: str, answer: str) -> str:
    return f"ANSWER: {answer}" if "ANSWER:" in prompt and not answer.startswith("ANSWER:") else answer
