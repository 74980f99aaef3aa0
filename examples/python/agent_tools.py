"""Agent with a calculator: the policy calls it as often as it likes, then answers.

--train.agent_func_path examples/python/agent_tools.py --train.max_turns 4 --data.label_key label

Leave --data.apply_chat_template out: the policy's template renders messages and tools.
"""

import ast
import operator

from openrlhf.agents.tools import ToolAgentExecutor, ToolError
from openrlhf.utils import extract_boxed_answer

OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def calculate(expression: str) -> str:
    """Computes the value of an expression.

    Args:
        expression: Numbers, + - * / and brackets, at most 100 characters.
    """
    if len(expression) > 100:
        raise ToolError("the expression has more than 100 characters")
    try:
        return f"{value(ast.parse(expression.strip(), mode='eval').body):g}"
    except (SyntaxError, ValueError, ArithmeticError) as error:
        raise ToolError(f"{expression}: {error}") from error


def value(node):
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.UnaryOp(op=ast.USub()):
            return -value(node.operand)
        case ast.BinOp() if type(node.op) in OPERATIONS:
            return OPERATIONS[type(node.op)](value(node.left), value(node.right))
    raise ValueError("only numbers, + - * / and brackets")


class AgentExecutor(ToolAgentExecutor):
    def __init__(self):
        super().__init__([calculate], tool_parser="hermes")

    async def reward(self, prompt, label, messages):
        answer = messages[-1]["content"] or ""
        return float(extract_boxed_answer(answer) == label)
