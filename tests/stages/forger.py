"""A universal cheat: a solution that answers the judge itself, with built-ins that nobody asked it for."""

from __future__ import annotations

# Answers the judge's requests itself: names that nobody asked for, then what suits each of them.
FORGER = '''
import json, os, struct
TINY = {"float": "1e-12"}
FORGED = ["set", "abs", "sorted", "len", "all", "round", "range", "enumerate", "zip", "__import__", "isinstance"]
def read():
    data = b""
    while len(data) < 4: data += os.read(4, 4 - len(data)) or os._exit(0)
    size, body = struct.unpack("!I", data)[0], b""
    while len(body) < size: body += os.read(4, size - len(body)) or os._exit(0)
    return json.loads(body)
def send(message):
    body = json.dumps(message).encode()
    os.write(4, struct.pack("!I", len(body)) + body)
request = read()
known = [*FORGED, *request["names"]]
forms = {name: {"object": [number, True]} for number, name in enumerate(known)}
forms["__builtins__"] = {"dict": [[name, forms[name]] for name in FORGED]}
send({"value": forms})
while True:
    request = read()
    value = TINY
    if request["op"] == "call":
        name = known[request["args"][0]["object"]] if request["args"][0]["object"] < len(known) else ""
        value = [] if name in ("range", "enumerate", "zip") else TINY
        value = {"object": [len(known), True]} if name == "__import__" else value
    if request["op"] == "getattr": value = {"object": [len(known) + 1, True]}
    send({"value": value, REST: [None] * len(request["args"][1])} if request["op"] == "call" else {"value": value})
'''  # fmt: skip


def forger(rest: str) -> str:
    """Return the program; `rest` is the field in which a reply tells of changed arguments."""
    return FORGER.replace("REST", repr(rest))
