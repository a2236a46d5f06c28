"""What the `calculate` tool may be asked: τ² evaluates it in this process, where `9**9**9` never returns."""

import ast

MAX_LENGTH = 500  # characters
MAX_BITS = 4096  # of any number on the way


def problem(expression: str) -> str | None:
    """Why τ² may not evaluate an expression, or None. What τ² itself refuses, or fails at, is left to it."""
    if len(expression) > MAX_LENGTH:
        return f"the expression is longer than {MAX_LENGTH} characters"
    try:
        tree = ast.parse(expression.strip(), mode="eval")
        _value(tree.body)
    except _TooLarge:
        return "the expression is too large to be calculated"
    except (SyntaxError, ValueError, ArithmeticError, TypeError, RecursionError, MemoryError):
        return None
    return None


class _TooLarge(Exception):
    pass


def _value(node: ast.expr) -> int | float:
    """The value, from the leaves up; each step is checked before it is made."""
    match node:
        case ast.Constant(value=int() | float() as value):
            return value
        case ast.UnaryOp(op=op, operand=operand):
            return -_value(operand) if isinstance(op, ast.USub) else _value(operand)
        case ast.BinOp(left=left, op=op, right=right):
            return _apply(op, _value(left), _value(right))
        case _:
            raise ValueError("not arithmetic")


def _apply(op: ast.operator, a: int | float, b: int | float) -> int | float:
    if isinstance(op, ast.Pow):
        if isinstance(a, int) and isinstance(b, int) and b > 0 and a.bit_length() * b > MAX_BITS:
            raise _TooLarge
        result = a**b
        if isinstance(result, complex):
            raise ValueError("not real")
        return result
    if isinstance(op, ast.Mult):
        return a * b
    if isinstance(op, ast.Add):
        return a + b
    if isinstance(op, ast.Sub):
        return a - b
    return a // b if isinstance(op, ast.FloorDiv) else a / b
