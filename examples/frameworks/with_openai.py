"""The calculator agent with OpenAI's client: chat completions or responses, streaming or not."""

import json

from openai import AsyncOpenAI

ADD = {
    "name": "add",
    "description": "Add two numbers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}


def add(arguments):
    """Return the result of a call of the tool, as text."""
    given = json.loads(arguments)
    return str(given["a"] + given["b"])


async def rollout(task, model, api="chat", stream=False):
    """Let the policy call the calculator until it answers; return whether the answer is right."""
    async with AsyncOpenAI(base_url=model.base_url, api_key=model.api_key) as client:
        talk = chat if api == "chat" else respond
        answer = await talk(client, model.name, task.messages, stream)
    return float(answer.strip() == task.gt_answer)


async def chat(client, name, messages, stream):
    """Talk over /v1/chat/completions; return the last answer."""
    messages, tools = list(messages), [{"type": "function", "function": ADD}]
    while True:
        asked = {"model": name, "messages": messages, "tools": tools}
        if stream:
            async with client.chat.completions.stream(**asked) as events:
                answer = await events.get_final_completion()
        else:
            answer = await client.chat.completions.create(**asked)
        said = answer.choices[0].message
        if not said.tool_calls:
            return said.content or ""
        messages.append(said.model_dump(exclude_none=True))
        for call in said.tool_calls:
            result = add(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


async def respond(client, name, messages, stream):
    """Talk over /v1/responses; return the last answer."""
    items, tools = list(messages), [{"type": "function", "strict": False, **ADD}]
    while True:
        asked = {"model": name, "input": items, "tools": tools}
        if stream:
            async with client.responses.stream(**asked) as events:
                answer = await events.get_final_response()
        else:
            answer = await client.responses.create(**asked)
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            return answer.output_text
        items += [item.model_dump(exclude_none=True) for item in answer.output]
        for call in calls:
            result = {"type": "function_call_output", "call_id": call.call_id}
            items.append({**result, "output": add(call.arguments)})
