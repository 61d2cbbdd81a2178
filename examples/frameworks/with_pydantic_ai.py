"""The calculator agent with pydantic-ai, over OpenAI's chat or responses, or Anthropic's messages."""

from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def policy(model, api):
    """Return the policy as a model of pydantic-ai, and its client."""
    if api == "messages":
        client = AsyncAnthropic(base_url=model.base_url, api_key=model.api_key)
        return AnthropicModel(
            model.name, provider=AnthropicProvider(anthropic_client=client)
        ), client
    client = AsyncOpenAI(base_url=model.base_url, api_key=model.api_key)
    kind = OpenAIChatModel if api == "chat" else OpenAIResponsesModel
    return kind(model.name, provider=OpenAIProvider(openai_client=client)), client


async def rollout(task, model, api="chat", stream=False):
    """Let the policy call the calculator until it answers; return whether the answer is right."""
    made, client = policy(model, api)
    agent = Agent(made, tools=[add])
    question = task.messages[-1]["content"]
    async with client:
        result = await agent.run(question, event_stream_handler=see if stream else None)
    return float(result.output.strip() == task.gt_answer)


async def see(context, events):
    """Take the events of an answer as they come; with it, the client asks for streams."""
    async for _ in events:
        pass
