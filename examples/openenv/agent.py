"""Plays an environment of OpenEnv as a rollout: the policy's tool calls and answers are its actions."""

import json

from openenv.core import GenericEnvClient

ADD = {
    "name": "add",
    "description": "Add two numbers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}
TOOLS = [{"type": "function", "function": ADD}]


async def rollout(task, model, url):
    """Play one episode on the server at `url`; return the reward of its last step."""
    async with GenericEnvClient(base_url=url) as world:
        shown = await world.reset(seed=model.seed % 2**31, question=task.messages[-1]["content"])
        messages = [{"role": "user", "content": shown.observation["text"]}]
        while True:
            said = await model.chat(messages, TOOLS)
            if "tool_calls" not in said:
                return (await world.step({"answer": said["content"]})).reward
            messages.append(said)
            for call in said["tool_calls"]:
                shown = await world.step(json.loads(call["function"]["arguments"]))
                result = {"role": "tool", "content": shown.observation["text"]}
                messages.append({**result, "tool_call_id": call["id"]})
