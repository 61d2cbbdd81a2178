"""The calculator agent with Anthropic's client, streaming or not."""

from anthropic import AsyncAnthropic

ADD = {
    "name": "add",
    "description": "Add two numbers.",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}


async def rollout(task, model, stream=False):
    """Let the policy call the calculator until it answers; return whether the answer is right."""
    messages = list(task.messages)
    async with AsyncAnthropic(base_url=model.base_url, api_key=model.api_key) as client:
        while True:
            asked = {"model": model.name, "max_tokens": 1024, "messages": messages, "tools": [ADD]}
            if stream:
                async with client.messages.stream(**asked) as events:
                    said = await events.get_final_message()
            else:
                said = await client.messages.create(**asked)
            calls = [block for block in said.content if block.type == "tool_use"]
            if not calls:
                break
            messages.append({"role": "assistant", "content": said.content})
            results = [
                {
                    "type": "tool_result",
                    "tool_use_id": call.id,
                    "content": str(call.input["a"] + call.input["b"]),
                }
                for call in calls
            ]
            messages.append({"role": "user", "content": results})
    answer = "".join(block.text for block in said.content if block.type == "text")
    return float(answer.strip() == task.gt_answer)
