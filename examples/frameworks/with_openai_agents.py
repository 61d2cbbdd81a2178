"""The calculator agent with OpenAI's Agents SDK."""

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

set_tracing_disabled(True)  # tracing would send every rollout to OpenAI


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def rollout(task, model, api="chat", stream=False):
    """Let the policy call the calculator until it answers; return whether the answer is right."""
    kind = OpenAIChatCompletionsModel if api == "chat" else OpenAIResponsesModel
    async with AsyncOpenAI(base_url=model.base_url, api_key=model.api_key) as client:
        agent = Agent(name="calculator", model=kind(model.name, client), tools=[add])
        if stream:
            result = Runner.run_streamed(agent, task.messages)
            async for _ in result.stream_events():
                pass
        else:
            result = await Runner.run(agent, task.messages)
    return float(result.final_output.strip() == task.gt_answer)
