"""The calculator agent with LangGraph: a graph of the policy and its tool."""

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def rollout(task, model, api="chat", stream=False):
    """Let the policy call the calculator until it answers; return whether the answer is right."""
    policy = ChatOpenAI(
        base_url=model.base_url,
        api_key=model.api_key,
        model=model.name,
        use_responses_api=api == "responses",
        streaming=stream,
    ).bind_tools([add])

    async def ask(state: MessagesState):
        return {"messages": [await policy.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("policy", ask)
    graph.add_node("tools", ToolNode([add]))
    graph.add_edge(START, "policy")
    graph.add_conditional_edges("policy", tools_condition)
    graph.add_edge("tools", "policy")
    state = await graph.compile().ainvoke({"messages": task.messages})
    return float(state["messages"][-1].text.strip() == task.gt_answer)
