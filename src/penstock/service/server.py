"""The HTTP side: the paths of the protocol, keys, and answers in JSON or protobuf.

A request to train is always accepted, if it can be read at all: what is wrong with it is the answer of its
future, because a refused number would leave a gap in the order of commands.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock.config import Config
from penstock.config.demo import resolve_model_path
from penstock.errors import UserError
from penstock.files import say
from penstock.rollout.agent.dialects import DIALECTS
from penstock.service.chat import Chats
from penstock.service.core import CREATE, SAMPLE, Busy, NotFound, ServiceCore, iterate_models
from penstock.service.models import LOAD, SAVE, SAVE_EXTERNAL, SAVE_SAMPLER
from penstock.serving import (
    AppServer,
    NoForeignPages,
    is_loopback,
    json_response,
    listen,
    make_app,
    read_body,
    run_until_stopped,
    url_of,
)
from penstock.store import wire
from penstock.store.command_log import Command

_POLL_S = 25.0  # a client gives up after 45
_CONNECTIONS, _SILENT_S, _BODY_S = 2048, 120.0, 60.0
_MOST_BYTES = 64 << 20
_PROTO = "application/x-protobuf"
Fields = dict[str, Any]
Answer = Callable[["Server", str, Fields], Any]


class Server:
    """Answers requests; `keys` that are none let every key in, each with models of its own."""

    def __init__(self, core: ServiceCore, keys: frozenset[str] = frozenset()) -> None:
        self.core, self._keys = core, keys
        routes = [
            Route(f"/api/v1/{path}", self._handler(answer), methods=[method])
            for (method, path), answer in _PATHS.items()
        ]
        post = ["POST"]
        routes += [
            Route("/api/v1/forward_backward", self._forward_backward, methods=post),
            Route("/api/v1/retrieve_future", self._retrieve, methods=post),
            Route("/api/v1/create_session", self._create_session, methods=post),
        ]
        self._chats = Chats(core)
        routes += [Route(path, self._chat, methods=post) for path in DIALECTS]
        routes.append(Route("/v1/models", self._handler(Server._list_models), methods=["GET"]))
        routes.append(Route("/{path:path}", _refuse, methods=["GET", "POST", "PUT", "DELETE"]))
        self.app = make_app(routes, middleware=[Middleware(NoForeignPages, needs_host=False)])

    def _owner(self, request: Request) -> str:
        """Whose request it is: the key itself is not kept."""
        key = request.headers.get("x-api-key", "")
        key = key or request.headers.get("authorization", "").removeprefix("Bearer ")
        if self._keys and key not in self._keys:
            raise HTTPException(
                401, "X-API-Key: got an unknown key, allowed: a key of this service"
            )
        return hashlib.sha256(key.encode()).hexdigest()[:16]

    def _handler(self, answer: Answer) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            owner, body = self._owner(request), await self._body(request)
            values = {**dict(request.query_params), **_fields(body), **request.path_params}
            return json_response(_guarded(lambda: answer(self, owner, values)))

        return handle

    async def _chat(self, request: Request) -> Response:
        self._owner(request)
        return await self._chats.answer(request)

    async def _body(self, request: Request) -> bytes:
        return await read_body(request, most_bytes=_MOST_BYTES, within_s=_BODY_S)

    # ---- sessions and futures

    async def _create_session(self, request: Request) -> Response:
        owner, body = self._owner(request), await self._body(request)
        key, about = request.headers.get("x-idempotency-key", ""), _fields(body)
        return json_response({"session_id": self.core.create_session(owner, key, about)})

    async def _forward_backward(self, request: Request) -> Response:
        owner, body = self._owner(request), await self._body(request)

        def submit() -> Fields:
            fields = wire.decode_head("ForwardBackwardRequest", body)
            return self._submit(owner, "forward_backward", fields, body)

        return json_response(_guarded(submit))

    def _submit(self, owner: str, kind: str, fields: Fields, body: bytes | None = None) -> Fields:
        """Log a command of a model; the promise of its answer."""
        line, octets = str(fields.get("model_id")), body or _text(fields)
        request_id = self.core.submit(owner, kind, line, fields.get("seq_id"), octets)
        return {"request_id": request_id, "model_id": line}

    def _create_model(self, owner: str, fields: Fields) -> Fields:
        line, seq = f"{fields.get('session_id')}:train", fields.get("model_seq_id")
        return {"request_id": self.core.submit(owner, CREATE, line, seq, _text(fields))}

    def _sample(self, owner: str, fields: Fields) -> Fields:
        line, count = str(fields.get("sampling_session_id")), fields.get("num_samples", 1)
        request_id = self.core.submit(owner, SAMPLE, line, fields.get("seq_id"), _text(fields))
        count = min(count, 1 << 16) if isinstance(count, int) else 0
        names = [f"{request_id}/{number}" for number in range(count)]
        return {"request_id": request_id, "sample_sequence_ids": names}

    async def _retrieve(self, request: Request) -> Response:
        """The answer, or after a while that there is none yet."""
        owner, body = self._owner(request), await self._body(request)
        name = str(_fields(body).get("request_id"))
        try:
            command = await self.core.answer(owner, name, _POLL_S)
        except (NotFound, UnicodeEncodeError) as error:
            raise HTTPException(404, str(error)) from None
        if command is None:
            waits = {"type": "try_again", "request_id": name, "queue_state": "active"}
            return json_response(waits, 408)
        is_proto = command.outcome == "done" and command.kind in ("forward_backward", SAMPLE)
        return Response(command.result, media_type=_PROTO if is_proto else "application/json")

    def _sessions(self, owner: str, fields: Fields) -> Fields:
        return {"sessions": _page(self.core.sessions(owner), fields)[0]}

    def _session(self, owner: str, fields: Fields) -> Fields:
        about, samplers = self.core.session(owner, fields["session"])
        line = f"{fields['session']}:train"
        models = [model_id for model_id, made in self._models_of(owner) if made.line == line]
        return {**about, "training_run_ids": models, "sampler_ids": samplers}

    # ---- models and checkpoints

    def _info(self, owner: str, fields: Fields) -> Fields:
        model_id, config = str(fields.get("model_id")), self.core.config.model
        rank, name = self.core.settings_of(owner, model_id).rank, self.core.base_names[0]
        tokenizer = config.tokenizer or resolve_model_path(config.path)
        data = {"arch": "causal_lm", "model_name": name, "tokenizer_id": tokenizer}
        known = {"model_id": model_id, "model_data": data, "model_name": name}
        return {**known, "is_lora": rank > 0, "lora_rank": rank or None}

    def _weights_info(self, owner: str, fields: Fields) -> Fields:
        checkpoint = self.core.checkpoint(owner, fields.get("tinker_path"))
        settings = self.core.settings_of(owner, checkpoint["model_id"])
        return {
            "base_model": self.core.base_names[0],
            "is_lora": True,  # or the SDK makes no model of it; rank 0 is one with all weights
            "lora_rank": settings.rank,
            "train_unembed": settings.rank == 0,
            "train_mlp": settings.train_mlp,
            "train_attn": settings.train_attn,
        }

    def _models_of(self, owner: str) -> list[tuple[str, Command]]:
        return [model for model in iterate_models(self.core.log) if model[1].owner == owner]

    def _runs(self, owner: str, fields: Fields) -> Fields:
        runs = [self._run(owner, *model) for model in self._models_of(owner)]
        shown, cursor = _page(runs, fields)
        return {"training_runs": shown, "cursor": cursor}

    def _one_run(self, owner: str, fields: Fields) -> Fields:
        for model_id, command in self._models_of(owner):
            if model_id == fields["run"]:
                return self._run(owner, model_id, command)
        raise NotFound(f"training run: got {fields['run']!r}, allowed: one of this key")

    def _run(self, owner: str, model_id: str, command: Command) -> Fields:
        sql = "SELECT max(at) FROM commands WHERE line = ? OR number = ?"
        ((last,),) = self.core.log.query(sql, (model_id, command.number))
        rank = self.core.settings_of(owner, model_id).rank
        newest: Fields = {}
        for checkpoint in self.core.checkpoints(owner, model_id):
            newest.setdefault(checkpoint["kind"], _checkpoint(checkpoint))
        return {
            "training_run_id": model_id,
            "base_model": self.core.base_names[0],
            "model_owner": owner,
            "is_lora": rank > 0,
            "lora_rank": rank or None,
            "last_request_time": _time(last),
            "last_checkpoint": newest.get("weights"),
            "last_sampler_checkpoint": newest.get("sampler_weights"),
            "user_metadata": command.fields.get("user_metadata"),
        }

    def _checkpoints(self, owner: str, fields: Fields) -> Fields:
        found = [_checkpoint(row) for row in self.core.checkpoints(owner, fields.get("run"))]
        if "run" in fields:
            return {"checkpoints": found}
        shown, cursor = _page(found, fields)
        return {"checkpoints": shown, "cursor": cursor}

    def _delete(self, owner: str, fields: Fields) -> Fields:
        self.core.delete_checkpoint(owner, _path(fields))
        return {}

    def _keep(self, owner: str, fields: Fields) -> Fields:
        self.core.keep_checkpoint(owner, _path(fields), fields.get("ttl_seconds"))
        return {}

    def _sampler(self, owner: str, fields: Fields) -> Fields:
        sampler = self.core.sampler(owner, fields["sampler"])
        base = resolve_model_path(self.core.config.model.path)  # the SDK loads its tokenizer by it
        name = {"sampler_id": fields["sampler"], "base_model": base}
        return {**name, "model_path": sampler["model_path"]}

    def _heartbeat(self, owner: str, fields: Fields) -> Fields:
        if not self.core.heard_of(owner, str(fields.get("session_id"))):
            raise HTTPException(410, "session: it has ended")
        return {}

    def _finish(self, owner: str, fields: Fields) -> Fields:
        self.core.finish_session(owner, fields["session"])
        return {}

    def _create_sampler(self, owner: str, fields: Fields) -> Fields:
        return {"sampling_session_id": self.core.create_sampler(owner, fields)}

    def _list_models(self, owner: str, fields: Fields) -> Fields:
        return {"object": "list", "data": [{"id": name} for name in self.core.base_names]}

    def _capabilities(self, owner: str, fields: Fields) -> Fields:
        longest = self.core.models.longest
        model = {"model_name": self.core.base_names[0], "max_context_length": longest}
        return {"supported_models": [{**model, "trainable": True, "sampleable": True}]}


def _command(kind: str) -> Answer:
    return lambda server, owner, fields: server._submit(owner, kind, fields)


_PATHS: dict[tuple[str, str], Answer] = {
    ("POST", "client/config"): lambda server, owner, fields: {},
    ("POST", "client/dynamic_config"): lambda server, owner, fields: {},
    ("GET", "healthz"): lambda server, owner, fields: {"status": "ok"},
    ("POST", "telemetry"): lambda server, owner, fields: {"status": "accepted"},
    ("GET", "get_server_capabilities"): Server._capabilities,
    ("POST", "session_heartbeat"): Server._heartbeat,
    ("POST", "sessions/{session}/finish"): Server._finish,
    ("POST", "create_model"): Server._create_model,
    ("POST", "optim_step"): _command("optim_step"),
    ("POST", "save_weights"): _command(SAVE),
    ("POST", "save_weights_for_sampler"): _command(SAVE_SAMPLER),
    ("POST", SAVE_EXTERNAL): _command(SAVE_EXTERNAL),
    ("POST", "load_weights"): _command(LOAD),
    ("POST", "get_info"): Server._info,
    ("POST", "weights_info"): Server._weights_info,
    ("POST", "create_sampling_session"): Server._create_sampler,
    ("POST", "asample"): Server._sample,
    ("POST", "cancel_future"): lambda server, owner, fields: {},
    ("GET", "samplers/{sampler}"): Server._sampler,
    ("GET", "sessions"): Server._sessions,
    ("GET", "sessions/{session}"): Server._session,
    ("GET", "checkpoints"): Server._checkpoints,
    ("GET", "training_runs"): Server._runs,
    ("GET", "training_runs/{run}"): Server._one_run,
    ("GET", "training_runs/{run}/checkpoints"): Server._checkpoints,
    ("DELETE", "training_runs/{run}/checkpoints/{kind}/{name}"): Server._delete,
    ("PUT", "training_runs/{run}/checkpoints/{kind}/{name}/ttl"): Server._keep,
}


async def _refuse(request: Request) -> Response:
    named = f"{request.method} {request.url.path}"
    raise HTTPException(404, f"{named}: not served here, allowed: what docs/service.md names")


def _guarded(answer: Callable[[], Any]) -> Any:
    """What the answer gives, with our errors as those of HTTP."""
    try:
        return answer()
    except Busy as error:
        raise HTTPException(429, str(error)) from None
    except NotFound as error:
        raise HTTPException(404, str(error)) from None
    except (UserError, UnicodeEncodeError, RecursionError) as error:  # what the log does not take
        raise HTTPException(400, str(error)) from None


def _fields(body: bytes) -> Fields:
    """The JSON object of a request."""
    try:
        fields = json.loads(body) if body else {}
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"body: {error}") from None
    if not isinstance(fields, dict):
        raise HTTPException(400, "body: got no object, allowed: a JSON object")
    return fields


def _path(fields: Fields) -> str:
    return f"tinker://{fields['run']}/{fields['kind']}/{fields['name']}"


def _text(fields: Fields) -> bytes:
    return json.dumps(fields, sort_keys=True).encode()


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _checkpoint(row: Fields) -> Fields:
    expires = row["expires_at"]
    return {
        "checkpoint_id": row["path"].removeprefix(f"tinker://{row['model_id']}/"),
        "checkpoint_type": "training" if row["kind"] == "weights" else "sampler",
        "time": _time(row["at"]),
        "tinker_path": row["path"],
        "size_bytes": row["size_bytes"],
        "user_metadata": json.loads(row["metadata"] or "null"),
        "expires_at": _time(expires) if expires else None,
    }


def _page(rows: list[Any], fields: Fields) -> tuple[list[Any], Fields]:
    try:
        limit, offset = int(fields.get("limit", 20)), int(fields.get("offset", 0))
    except (ValueError, TypeError):
        raise UserError("limit, offset: got no integers, allowed: integers") from None
    cursor = {"offset": offset, "limit": limit, "total_count": len(rows)}
    return rows[max(0, offset) : max(0, offset) + max(0, limit)], cursor


def read_keys(text: str, file: Path | None) -> frozenset[str]:
    """The keys of a variable (commas between them) and of a file (one a line)."""
    words = text.split(",")
    if file is not None:
        try:
            words += file.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise UserError(
                f"--keys: got {file}, which cannot be read ({error.strerror})"
            ) from None
    return frozenset(word.strip() for word in words if word.strip())


def serve_until_stopped(
    config: Config, folder: Path, *, host: str, port: int, keys: frozenset[str]
) -> None:
    """Serve until Ctrl-C. Without keys it listens on this machine only."""
    if not keys and not is_loopback(host):
        raise UserError(
            f"serve: host got {host!r} without keys, allowed: 127.0.0.1, or keys in "
            "PENSTOCK_SERVICE_KEYS or --keys FILE"
        )

    async def main(stopped: asyncio.Event) -> None:
        core = ServiceCore(config, folder)
        await core.start()
        server = AppServer(
            Server(core, keys).app,
            connections=_CONNECTIONS,
            connections_per_client=_CONNECTIONS,
            silent_s=_SILENT_S,
        )
        waits = [asyncio.create_task(event.wait()) for event in (stopped, core.broken)]
        try:
            async with server.on(listening):
                say(f"service: {url_of(host, listening)} model {config.model.path}, {folder}")
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await core.close()
        if core.fault is not None:
            raise core.fault

    with listen("serve", host, port) as listening:
        run_until_stopped(main)
