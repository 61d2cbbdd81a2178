"""Triton's interpreter without work that it repeats for every operation.

Before every call of a device function, `tl.sum` too, it replaces Triton's operations by its own: after the first
call of a launch that changes nothing for functions of the same module. And it makes its table of number formats
again whenever it looks one up.
"""

from __future__ import annotations

from typing import Any


def install() -> None:
    """Let a launch replace operations once for each module, and keep the number formats that were looked up."""
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):  # another version: leave it as it is
        return
    replace, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    replaced: set[int] = set()  # the modules' globals, in the launch that runs
    look_up, formats = interpreter._get_np_dtype, {}

    def replace_once(function: Any) -> Any:
        module = id(function.__globals__)
        if module in replaced:
            return interpreter._LangPatchScope()
        replaced.add(module)
        return replace(function)

    def launch_anew(executor: Any, *args: Any, **kwargs: Any) -> None:
        replaced.clear()
        launch(executor, *args, **kwargs)

    def look_up_once(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in formats:
            formats[name] = look_up(kind)
        return formats[name]

    interpreter._patch_lang = replace_once
    interpreter.GridExecutor.__call__ = launch_anew
    interpreter._get_np_dtype = look_up_once
