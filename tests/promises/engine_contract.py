"""The contract of every engine, as checks over an `EngineCase`. Each engine's test file collects them.

A check takes a case and runs its own event loop. `lacks` names what an engine cannot do; docs/engines.md
tells users the same (a test compares them).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from penstock.engine.protocol import Generation, InferenceEngine
from penstock.errors import DigestMismatch, EngineError, UserError
from penstock.types import expand_segments
from stages import tiny_policy as tiny
from stages.engine_case import EngineCase, started


def assert_true_logprobs(
    case: EngineCase, made: Generation, prompt: list[int], temperature: float = 1.0
) -> None:
    """Assert that each log-prob is the one of the version in the only segment."""
    (version,) = {segment.version for segment in made.segments}
    wanted = tiny.expected_logprobs(version, np.array(prompt), made.token_ids, temperature)
    off = np.abs(wanted - made.logprobs).max()
    assert off < case.logprob_tolerance, f"a log-prob is off by {off:.2g}"


async def until_running(engine: InferenceEngine, tokens: int = 1, *, live: bool = True) -> None:
    """Wait until the engine has sampled `tokens` tokens, or, if it counts late, has requests."""
    before = (await engine.stats()).tokens_generated
    while True:
        stats = await engine.stats()
        if stats.tokens_generated >= before + tokens or (not live and stats.running):
            return
        await asyncio.sleep(0)


# ---- sampling


def check_logprobs_and_length(case: EngineCase) -> None:
    async def main() -> None:
        async with started(case) as engine:
            for temperature in (1.0, 0.6):
                made = await engine.generate(
                    tiny.request("a", [5, 6, 7], seed=3, temperature=temperature, min_tokens=24)
                )
                assert len(made.token_ids) == len(made.logprobs) == 24
                assert made.finish_reason == "length"
                assert tiny.EOS not in made.token_ids[:23]
                wanted = tiny.expected_logprobs(0, np.array([5, 6, 7]), made.token_ids, temperature)
                # banning the end token renormalises: no token becomes less likely
                off = (wanted - made.logprobs).max()
                assert off <= case.logprob_tolerance, f"a log-prob is too low by {off:.2g}"
            free = await engine.generate(tiny.request("b", [9, 9, 3, 30], seed=4))
            assert_true_logprobs(case, free, [9, 9, 3, 30])

    case.run(main)


def check_temperatures_side_by_side(case: EngineCase) -> None:
    """Each request has its own temperature, and log-probs are those of its distribution."""

    async def main() -> None:
        async with started(case) as engine:
            temperatures = (0.5, 0.8, 1.0, 1.3)
            asked = [
                tiny.request(str(t), [5, 6, 7], seed=i, temperature=t)
                for i, t in enumerate(temperatures)
            ]
            for temperature, made in zip(
                temperatures, await engine.generate_many(asked), strict=True
            ):
                assert_true_logprobs(case, made, [5, 6, 7], temperature)

    case.run(main)


def check_greedy(case: EngineCase) -> None:
    async def main() -> None:
        async with started(case) as engine:
            prompt = [5, 6, 7, 8, 9]
            made = await engine.generate(tiny.request("a", prompt, temperature=0))
            ids = list(prompt)
            for token in made.token_ids:
                logits = tiny.reference(0)(input_ids=_tensor(ids)).logits[0, -1]
                assert logits[token] >= logits.max() - 1e-3
                ids.append(int(token))
            assert_true_logprobs(case, made, prompt)

    case.run(main)


def check_top_k_and_top_p(case: EngineCase) -> None:
    async def main() -> None:
        async with started(case) as engine:
            one = await engine.generate(tiny.request("a", temperature=1.0, top_k=1))
            assert np.allclose(one.logprobs, 0, atol=1e-4)
            few = await engine.generate(tiny.request("b", top_p=0.3, seed=9))
            prompt = [5, 6, 7, 8]
            wanted = tiny.expected_logprobs(0, np.array(prompt), few.token_ids)
            assert (few.logprobs >= wanted - 1e-4).all()
            assert few.logprobs.mean() > wanted.mean()

    case.run(main)


async def free_response(engine: InferenceEngine) -> tuple[int, list[int]]:
    """Return a seed and the tokens that it gives: at least eight, without a stop of ours."""
    for seed in range(5, 50):
        made = await engine.generate(tiny.request(f"free-{seed}", seed=seed))
        if len(made.token_ids) >= 8:
            return seed, made.token_ids.tolist()
    raise AssertionError("every response is short")


def check_stops(case: EngineCase) -> None:
    async def main() -> None:
        async with started(case) as engine:
            seed, free = await free_response(engine)
            made = await engine.generate(tiny.request("b", seed=seed, stop_token_ids=(free[6],)))
            assert made.finish_reason == "stop"
            assert made.token_ids.tolist() == free[: free.index(free[6]) + 1]

    case.run(main)


def check_stop_strings(case: EngineCase) -> None:
    case.needs("stop strings")

    async def main() -> None:
        async with started(case) as engine:
            seed, free = await free_response(engine)
            text, whole = tiny.text_of(free[3:5]), tiny.text_of(free)
            made = await engine.generate(tiny.request("b", seed=seed, stop=(text,)))
            assert made.finish_reason == "stop"
            assert tiny.text_of(made.token_ids.tolist()) == whole[: whole.index(text) + len(text)]

    case.run(main)


def check_seed_decides(case: EngineCase) -> None:
    async def main() -> None:
        async with started(case) as engine:
            same = await engine.generate_many(
                [tiny.request(name, seed=7, min_tokens=20) for name in "ab"]
            )
            other = await engine.generate(tiny.request("c", seed=8, min_tokens=20))
            assert same[0].token_ids.tolist() == same[1].token_ids.tolist()
            assert same[0].token_ids.tolist() != other.token_ids.tolist()

    case.run(main)


def check_group_and_many(case: EngineCase) -> None:
    """Run more requests than slots, in groups of equal prompts; each result is right and in order."""

    async def main() -> None:
        async with started(case) as engine:
            prompts = [[5, 6, 7], [9, 8], [30, 31, 32, 33, 34]]
            requests = [
                tiny.request(f"{i}.{k}", prompt, seed=10 * i + k, max_tokens=8 + k)
                for i, prompt in enumerate(prompts)
                for k in range(6)
            ]
            made = await engine.generate_many(requests)
            assert [m.request_id for m in made] == [r.request_id for r in requests]
            for asked, got in zip(requests, made, strict=True):
                assert len(got.token_ids) <= asked.sampling.max_tokens
                assert got.finish_reason == "length" or got.token_ids[-1] == tiny.EOS
                assert_true_logprobs(case, got, asked.prompt_ids.tolist())

    case.run(main)


def check_goes_on_from_partial(case: EngineCase) -> None:
    async def main() -> None:
        async with started(case) as engine:
            prompt, partial = [5, 6, 7], [20, 21, 22]
            made = await engine.generate(
                tiny.request("a", prompt, response=partial, max_tokens=12, min_tokens=12)
            )
            assert len(made.token_ids) == 9
            wanted = tiny.expected_logprobs(0, np.array(prompt + partial), made.token_ids)
            assert (made.logprobs >= wanted - case.logprob_tolerance).all()

    case.run(main)


def check_refuses_what_cannot_fit(case: EngineCase) -> None:
    async def main() -> None:
        async with started(case) as engine:
            with pytest.raises(UserError, match="allowed"):
                await engine.generate(tiny.request("a", max_tokens=100_000))
            with pytest.raises(UserError, match="allowed"):
                await engine.generate(tiny.request("b", []))
            assert (await engine.generate(tiny.request("c"))).finish_reason != "error"

    case.run(main)


# ---- control


def check_abort_one(case: EngineCase) -> None:
    async def main() -> None:
        async with started(case) as engine:
            asked = [
                tiny.request(name, seed=i, max_tokens=400, min_tokens=400)
                for i, name in enumerate("ab")
            ]
            tasks = [asyncio.create_task(engine.generate(r)) for r in asked]
            await until_running(engine, live=case.live)
            await engine.abort("a")
            first = await tasks[0]
            assert first.finish_reason == "abort"
            assert len(first.token_ids) < 400
            await engine.abort("b")
            assert (await tasks[1]).finish_reason in ("abort", "length")
            await engine.abort("nobody")

    case.run(main)


def check_pause_abort(case: EngineCase) -> None:
    async def main() -> None:
        async with started(case) as engine:
            long = [tiny.request(n, seed=3, max_tokens=400, min_tokens=400) for n in "abc"]
            tasks = [asyncio.create_task(engine.generate(r)) for r in long]
            await until_running(engine, live=case.live)
            await engine.pause("abort")
            made = await asyncio.gather(*tasks)
            assert {m.finish_reason for m in made} == {"abort"}
            if "partials" not in case.lacks:
                assert any(len(m.token_ids) for m in made)
                for one in made:
                    assert len(one.token_ids) == len(expand_segments(one.segments))
            held = asyncio.create_task(engine.generate(tiny.request("later", max_tokens=4)))
            assert (await engine.stats()).paused
            assert not held.done()
            await engine.resume()
            assert len((await held).token_ids) <= 4

    case.run(main)


def check_pause_wait(case: EngineCase) -> None:
    async def main() -> None:
        async with started(case) as engine:
            task = asyncio.create_task(
                engine.generate(tiny.request("a", max_tokens=60, min_tokens=60))
            )
            await until_running(engine, live=case.live)
            await engine.pause("wait")
            made = await task
            assert made.finish_reason == "length"
            assert len(made.token_ids) == 60
            await engine.resume()

    case.run(main)


def check_pause_keep_and_update(case: EngineCase) -> None:
    """Held requests continue under the new weights, and their segments say so."""
    case.needs("weight updates")
    case.needs("hold")
    most = case.held_tokens

    async def main() -> None:
        async with started(case) as engine:
            for version in (1, 2, 3):
                task = asyncio.create_task(
                    engine.generate(tiny.request("a", max_tokens=most, min_tokens=most))
                )
                await until_running(engine, 3, live=case.live)
                await engine.pause("keep")
                await engine.update_weights(version, tiny.handle(version))
                await engine.resume()
                made = await task
                versions = expand_segments(made.segments)
                assert len(versions) == len(made.token_ids) == most
                if set(versions) != {version - 1}:  # else it had ended before the pause: once more
                    break
            assert sorted(set(versions)) == [version - 1, version]
            assert versions == sorted(versions)
            assert_switch_is_where_it_says(case, made, versions.index(version), version)

    case.run(main)


def assert_switch_is_where_it_says(
    case: EngineCase, made: Generation, first: int, version: int
) -> None:
    """Assert that tokens before `first` are those of the version before, and later ones are not."""
    prompt = np.array([5, 6, 7, 8])
    wanted = tiny.expected_logprobs(version - 1, prompt, made.token_ids, banned=tiny.EOS)
    off = np.abs(wanted - made.logprobs)
    assert off[:first].max() < case.logprob_tolerance, f"off by {off[:first].max():.2g}"
    assert off[first : first + 2].max() > case.logprob_tolerance


def check_update_changes_every_weight(case: EngineCase) -> None:
    """Log-probs after the update equal those of a fresh model, tied embeddings included."""
    case.needs("weight updates")

    async def main() -> None:
        async with started(case) as engine:
            await engine.generate(tiny.request("warm", [7, 8, 9]))
            for version in (1, 2):
                source = tiny.handle(version)
                assert await engine.update_weights(version, source) == source.digest
                stats = await engine.stats()
                assert (stats.policy_version, stats.digest) == (version, source.digest)
                made = await engine.generate(tiny.request(f"v{version}", [7, 8, 9], seed=2))
                assert {s.version for s in made.segments} == {version}
                assert_true_logprobs(case, made, [7, 8, 9])

    case.run(main)


def check_update_while_running(case: EngineCase) -> None:
    case.needs("weight updates")
    most = case.held_tokens

    async def main() -> None:
        async with started(case) as engine:
            task = asyncio.create_task(
                engine.generate(tiny.request("a", max_tokens=most, min_tokens=most))
            )
            await until_running(engine, 3, live=case.live)
            await engine.update_weights(1, tiny.handle(1))
            made = await task
            assert made.finish_reason in ("length", "abort")
            if "hold" not in case.lacks:
                versions = expand_segments(made.segments)
                assert versions == sorted(versions)
            after = await engine.generate(tiny.request("b", [7, 8, 9]))
            assert_true_logprobs(case, after, [7, 8, 9])

    case.run(main)


def check_wrong_digest_is_refused(case: EngineCase) -> None:
    case.needs("weight updates")

    async def main() -> None:
        async with started(case) as engine:
            with pytest.raises(DigestMismatch):
                await engine.update_weights(1, tiny.handle(1, digest="00" * 16))
            stats = await engine.stats()
            assert stats.policy_version == 0
            made = await engine.generate(tiny.request("a", [7, 8, 9]))
            assert_true_logprobs(case, made, [7, 8, 9])

    case.run(main)


def check_sleep_and_wake(case: EngineCase) -> None:
    async def main() -> None:
        async with started(case) as engine:
            before = await engine.generate(tiny.request("a", seed=4, min_tokens=20))
            await engine.pause("abort")
            await engine.sleep()
            await engine.wake()
            await engine.resume()
            after = await engine.generate(tiny.request("b", seed=4, min_tokens=20))
            assert before.token_ids.tolist() == after.token_ids.tolist()

    case.run(main)


def check_weights_that_come_in_its_sleep(case: EngineCase) -> None:
    case.needs("weight updates")

    async def main() -> None:
        async with started(case) as engine:
            await engine.pause("abort")
            await engine.sleep()
            assert await engine.update_weights(1, tiny.handle(1)) == tiny.handle(1).digest
            await engine.wake()
            await engine.resume()
            made = await engine.generate(tiny.request("a", [7, 8, 9]))
            assert_true_logprobs(case, made, [7, 8, 9])
            assert (await engine.stats()).policy_version == 1

    case.run(main)


def check_sleep_keeps_new_weights(case: EngineCase) -> None:
    case.needs("weight updates")

    async def main() -> None:
        async with started(case) as engine:
            await engine.update_weights(1, tiny.handle(1))
            await engine.pause("abort")
            await engine.sleep()
            await engine.wake()
            assert (await engine.stats()).paused
            held = asyncio.create_task(engine.generate(tiny.request("a", [7, 8, 9])))
            await engine.resume()
            assert_true_logprobs(case, await held, [7, 8, 9])
            assert (await engine.stats()).digest == tiny.handle(1).digest

    case.run(main)


def check_death_fails_requests_and_it_starts_again(case: EngineCase) -> None:
    kill = case.kill
    if kill is None:
        pytest.skip(f"{case.name} is not ours to kill")

    async def main() -> None:
        engine = case.make()
        await engine.start()
        tasks = [
            asyncio.create_task(engine.generate(tiny.request(n, max_tokens=400, min_tokens=400)))
            for n in "abcdef"
        ]
        await until_running(engine, live=case.live)
        killing = kill(engine)
        if killing is not None:
            await killing
        made = await asyncio.gather(*tasks)
        assert {m.finish_reason for m in made} == {"error"}
        assert all(m.error for m in made)
        assert (await engine.generate(tiny.request("late"))).finish_reason == "error"
        with pytest.raises(EngineError):
            await engine.stats()
        await engine.start()
        assert (await engine.generate(tiny.request("again"))).finish_reason != "error"
        await engine.close()

    case.run(main)


def check_close_returns_partials(case: EngineCase) -> None:
    async def main() -> None:
        engine = case.make()
        await engine.start()
        task = asyncio.create_task(
            engine.generate(tiny.request("a", max_tokens=400, min_tokens=400))
        )
        await until_running(engine, live=case.live)
        await engine.close()
        assert (await task).finish_reason == "abort"
        gone = await engine.generate(tiny.request("b"))
        assert gone.finish_reason == "error"
        assert gone.error

    case.run(main)


CHECKS: dict[str, Callable[[EngineCase], None]] = {
    name.removeprefix("check_"): check
    for name, check in list(globals().items())
    if name.startswith("check_")
}


def _tensor(ids: list[int]) -> object:
    import torch

    return torch.tensor([ids])
