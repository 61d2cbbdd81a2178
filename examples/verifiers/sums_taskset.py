"""A taskset of verifiers: sums of two numbers, a calculator in the harness, a reward for the right last reply.

Nothing of Penstock is in this file: it is a package as the Environments Hub has them.
"""

import json
import random

import verifiers.v1 as vf
from openai import AsyncOpenAI

__all__ = ["CalculatorHarness", "SumsTaskset"]

ADD = {
    "name": "add",
    "description": "Add two numbers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}


class SumData(vf.TaskData):
    """One sum and its result."""

    answer: str


class SumTask(vf.Task[SumData]):
    """Right or wrong, by the last reply."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)


class SumsTaskset(vf.Taskset[SumTask]):
    """400 sums of numbers of three digits."""

    def load(self):
        choice = random.Random(0)
        for _ in range(400):
            a, b = choice.randint(100, 499), choice.randint(100, 499)
            yield SumTask(SumData(prompt=f"{a}+{b}", answer=str(a + b)), self.config.task)


class CalculatorHarness(vf.Harness[vf.HarnessConfig]):
    """Calls the model until it answers without a tool; runs in this process."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        messages = [{"role": "user", "content": data.prompt}]
        tools = [{"type": "function", "function": ADD}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            while True:
                answer = await client.chat.completions.create(
                    model=ctx.model, messages=messages, tools=tools
                )
                said = answer.choices[0].message
                if not said.tool_calls:
                    return vf.ProgramResult(0, said.content or "", "")
                messages.append(said.model_dump(exclude_none=True))
                for call in said.tool_calls:
                    given = json.loads(call.function.arguments)
                    result = {"role": "tool", "content": str(given["a"] + given["b"])}
                    messages.append({**result, "tool_call_id": call.id})
