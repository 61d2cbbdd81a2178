"""Packed sequences give what each sequence gives alone, for several architectures."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import UserError
from penstock.model.attention import fits_flash
from penstock.training.flat_batch import FlatBatch
from penstock.training.model_check import check_model
from penstock.training.pack import empty_pack, join_by_context, make_pack, split_by_tokens
from penstock.training.policy import Policy
from penstock.types import VersionSegment
from stages.training_data import (
    VOCABULARY,
    config_of,
    consumer_of,
    exact_model,
    from_disk,
    random_batch,
    tiny_model,
)

CPU = torch.device("cpu")
ARCHITECTURES = [
    ("Qwen3", {}),
    ("Qwen2", {"tie_word_embeddings": False}),
    ("Llama", {}),
    ("Gemma2", {"sliding_window": 3, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 0.5}),
    ("GptOss", {"sliding_window": 3, "num_local_experts": 4, "num_experts_per_tok": 2}),
    ("Granite", {"logits_scaling": 3.0}),
]


def sequences(lengths, seed=0):
    generator = np.random.default_rng(seed)
    ids = [generator.integers(1, VOCABULARY, length).astype(np.int32) for length in lengths]
    predictors = [np.arange(length // 3, length - 1) for length in lengths]
    starts = np.cumsum([0, *(len(index) for index in predictors)])
    return ids, predictors, starts


def padded_logprobs(model, ids, predictors, temperature):
    """Score a padded batch with a mask through the unchanged model, with full logits."""
    longest = max(len(row) for row in ids)
    padded = torch.zeros(len(ids), longest, dtype=torch.int64)
    mask = torch.zeros(len(ids), longest, dtype=torch.int64)
    for row, tokens in enumerate(ids):
        padded[row, : len(tokens)] = torch.from_numpy(tokens)
        mask[row, : len(tokens)] = 1
    logits = model(padded, attention_mask=mask).logits / temperature
    log_all = torch.log_softmax(logits, -1)
    return torch.cat(
        [
            log_all[row, index].gather(-1, torch.from_numpy(ids[row])[index + 1, None].long())[:, 0]
            for row, index in enumerate(predictors)
        ]
    )


def alone_and_packed(kind, fields, ids, predictors):
    """Return (unchanged model, its log-probs of each sequence alone, an equal model to pack for)."""
    plain, packed = tiny_model(kind, **fields), tiny_model(kind, **fields)
    plain.set_attn_implementation("eager")  # the only built-in one with caps and sinks
    for model in (plain, packed):
        if "num_local_experts" in fields:
            model.set_experts_implementation("eager")  # the others have no float64
    pairs = zip(ids, predictors, strict=True)
    alone = [padded_logprobs(plain, [row], [index], 1.3) for row, index in pairs]
    return plain, torch.cat(alone), packed


@pytest.mark.parametrize(("kind", "fields"), ARCHITECTURES)
def test_packed_equals_each_sequence_alone(kind, fields) -> None:
    ids, predictors, starts = sequences([7, 4, 9, 4, 2, 7])
    plain, expected, packed = alone_and_packed(kind, fields, ids, predictors)
    pack = make_pack(range(len(ids)), ids, predictors, starts, CPU)
    temperatures = torch.full((len(pack.target_N),), 1.3, dtype=torch.float64)
    got, entropies = Policy(packed)(pack, temperatures)
    in_batch_order = torch.empty_like(got)
    in_batch_order[torch.from_numpy(pack.token_N)] = got
    torch.testing.assert_close(in_batch_order, expected, rtol=1e-6, atol=1e-6)
    assert (entropies > 0).all()
    expected.sum().backward()
    got.sum().backward()
    for (name, own), other in zip(packed.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, msg=name, rtol=1e-5, atol=1e-5)


def groups_of_rows(prompts, responses, seed=3):
    """Return rows of a group for each prompt length, with one response of each length."""
    generator = np.random.default_rng(seed)

    def draw(length):
        return generator.integers(1, VOCABULARY, length).astype(np.int32)

    ids, predictors = [], []
    for prompt in prompts:
        shared = draw(prompt)
        for length in responses:
            ids.append(np.concatenate([shared, draw(length)]))
            predictors.append(np.arange(prompt - 1, prompt + length - 1))
    return ids, predictors, np.cumsum([0, *(len(index) for index in predictors)])


@pytest.mark.parametrize(("kind", "fields"), ARCHITECTURES)
def test_a_prompt_computed_once_gives_what_each_sequence_gives_alone(kind, fields) -> None:
    ids, predictors, starts = groups_of_rows([6, 4, 6], [5, 1, 3, 5])
    predictors[2] = predictors[2][[0, 2]]  # a masked token in the middle of a response
    starts = np.cumsum([0, *(len(index) for index in predictors)])
    plain, expected, packed = alone_and_packed(kind, fields, ids, predictors)
    pack = make_pack(range(len(ids)), ids, predictors, starts, CPU)
    # each prompt once, and no last token of a response, which predicts nothing
    assert len(pack.input_ids_T) == 6 + 4 + 6 + 3 * (4 + 0 + 2 + 4)
    got, _ = Policy(packed)(pack, torch.full((len(pack.target_N),), 1.3, dtype=torch.float64))
    in_batch_order = torch.empty_like(got)
    in_batch_order[torch.from_numpy(pack.token_N)] = got
    torch.testing.assert_close(in_batch_order, expected, rtol=1e-6, atol=1e-6)
    factors = torch.randn(len(got), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    (expected * factors).sum().backward()
    (in_batch_order * factors).sum().backward()
    for (name, own), other in zip(packed.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, msg=name, rtol=1e-5, atol=1e-5)


def tree_of_rows(depth, branching, seed=5):
    """Return the leaf paths of a tree: each node observes and samples; a sampled token is trained once."""
    generator = np.random.default_rng(seed)
    ids, predictors = [], []

    def grow(context, trained, level):
        if level == depth:
            ids.append(context)
            predictors.append(np.array(trained, np.int64))
            return
        for branch in range(branching):
            observed, sampled = generator.integers(2, 7, 2)
            new = generator.integers(1, VOCABULARY, observed + sampled).astype(np.int32)
            first = len(context) + observed
            before = trained if branch == 0 else []
            places = [*before, *range(first - 1, first + sampled - 1)]
            grow(np.concatenate([context, new]), places, level + 1)

    grow(np.zeros(0, np.int32), [], 0)
    return ids, predictors, np.cumsum([0, *(len(index) for index in predictors)])


def unique_tokens(ids, predictors):
    """Return how many tokens the rows have up to their last predictor, shared prefixes once."""
    pairs = zip(ids, predictors, strict=True)
    return len({tuple(row[: end + 1]) for row, index in pairs for end in range(index[-1] + 1)})


@pytest.mark.parametrize(("kind", "fields"), ARCHITECTURES)
def test_a_tree_computed_once_gives_what_each_of_its_paths_gives_alone(kind, fields) -> None:
    ids, predictors, starts = tree_of_rows(depth=4, branching=2)
    plain, expected, packed = alone_and_packed(kind, fields, ids, predictors)
    pack = make_pack(range(len(ids)), ids, predictors, starts, CPU)
    unique = unique_tokens(ids, predictors)  # single tokens that happen to be equal are not shared
    assert unique <= len(pack.input_ids_T) < 1.05 * unique < sum(map(len, ids)) / 2
    got, _ = Policy(packed)(pack, torch.full((len(pack.target_N),), 1.3, dtype=torch.float64))
    in_batch_order = torch.empty_like(got)
    in_batch_order[torch.from_numpy(pack.token_N)] = got
    torch.testing.assert_close(in_batch_order, expected, rtol=1e-5, atol=1e-5)
    (expected.sum() / 8).backward()
    (in_batch_order.sum() / 8).backward()
    for (name, own), other in zip(packed.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, msg=name, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"sliding_window": 6, "use_sliding_window": True}])
@pytest.mark.parametrize(("depth", "branching"), [(8, 2), (3, 4), (6, 1)])
def test_log_probs_and_gradients_of_a_tree_are_those_of_separate_rows(
    depth, branching, fields
) -> None:
    """To 1e-10 in float64: the model rounds nothing to float32 on its way."""
    ids, predictors, starts = tree_of_rows(depth, branching)
    factors = torch.randn(
        starts[-1], dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )

    def scored(rows_of_packs):
        model = exact_model(**fields)
        policy, logprobs = Policy(model), torch.zeros(int(starts[-1]), dtype=torch.float64)
        for rows in rows_of_packs:
            pack = make_pack(rows, ids, predictors, starts, CPU)
            got, _ = policy(pack, torch.ones(len(pack.target_N), dtype=torch.float64))
            (got * factors[torch.from_numpy(pack.token_N)]).sum().backward()
            logprobs[torch.from_numpy(pack.token_N)] = got.detach()
        return logprobs, {name: value.grad for name, value in model.named_parameters()}

    together, gradients = scored([range(len(ids))])
    alone, expected = scored([[number] for number in range(len(ids))])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-10)
    for name, gradient in gradients.items():
        scale = float(expected[name].abs().max())
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-10 * max(1, scale))


def test_the_rows_of_a_session_stay_in_one_pack_where_they_fit() -> None:
    ids, predictors, _starts = tree_of_rows(depth=4, branching=2)
    others, more, _ = tree_of_rows(depth=4, branching=2, seed=6)
    rows, index = [*ids, *others], [*predictors, *more]
    units = [[number] for number in np.random.default_rng(0).permutation(len(rows)).tolist()]
    joined, _ = join_by_context(units, rows, index, budget=10_000)
    trees = [{int(rows[number][0]) for number in unit} for unit in joined]
    assert all(len(tree) == 1 for tree in trees)
    assert len(joined) < len(rows) / 3


def test_the_packs_of_a_tree_that_is_cut_are_as_full_as_they_may_be() -> None:
    ids, predictors, _ = tree_of_rows(depth=8, branching=2)
    units = [[number] for number in range(len(ids))]
    joined, costs = join_by_context(units, ids, predictors, budget=1000)
    unique = [
        unique_tokens([ids[n] for n in unit], [predictors[n] for n in unit]) for unit in joined
    ]
    assert costs == unique
    assert min(unique[:-1]) > 900
    assert sum(unique) < 1.1 * unique_tokens(ids, predictors)


def test_a_context_that_saves_little_is_not_shared() -> None:
    ids, predictors, starts = groups_of_rows([1], [40, 40])
    pack = make_pack(range(2), ids, predictors, starts, CPU)
    assert pack.layout.shared is None
    assert len(pack.input_ids_T) == 2 * 40


def test_a_group_stays_in_one_pack_where_it_fits() -> None:
    ids, predictors, _ = groups_of_rows([6, 4], [5, 1, 3, 5])
    units = [[number] for number in range(8)]
    joined, costs = join_by_context(units, ids, predictors, budget=100)
    assert joined == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert costs == [6 + 4 + 0 + 2 + 4, 4 + 4 + 0 + 2 + 4]
    joined, costs = join_by_context(units, ids, predictors, budget=12)
    assert joined == [[0, 1, 2], [3], [4, 5, 6], [7]]
    assert costs == [12, 10, 10, 8]
    joined, _ = join_by_context(units, ids, predictors, budget=1)
    assert joined == units


def test_packed_gradient_equals_padded() -> None:
    ids, predictors, starts = sequences([7, 4, 9, 4])
    plain, packed = exact_model(), tiny_model()
    padded_logprobs(plain, ids, predictors, 1.0).sum().backward()
    pack = make_pack(range(4), ids, predictors, starts, CPU)
    Policy(packed)(pack, torch.ones(len(pack.target_N), dtype=torch.float64))[0].sum().backward()
    for (name, own), other in zip(packed.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, msg=name, rtol=1e-6, atol=1e-8)


def test_no_token_sees_another_sequence() -> None:
    ids, predictors, starts = sequences([5, 5, 6])
    policy = Policy(tiny_model())
    alone = make_pack([1], ids, predictors, starts, CPU)
    expected, _ = policy(alone, torch.ones(len(alone.target_N), dtype=torch.float64))
    ids[0], ids[2] = ids[0][::-1].copy(), ids[2][::-1].copy()
    pack = make_pack([0, 1, 2], ids, predictors, starts, CPU)
    got, _ = policy(pack, torch.ones(len(pack.target_N), dtype=torch.float64))
    torch.testing.assert_close(got[pack.sequence_N == 1], expected)


def test_an_empty_pack_runs_forward_and_backward() -> None:
    policy = Policy(tiny_model())
    logprobs, _ = policy(empty_pack(CPU), torch.zeros(0, dtype=torch.float64))
    logprobs.sum().backward()
    assert all(not p.grad.any() for p in policy.parameters() if p.grad is not None)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), max_size=30), st.integers(1, 60))
def test_bins_hold_every_sequence_once_and_keep_the_budget(lengths, budget) -> None:
    bins = split_by_tokens(lengths, budget)
    assert sorted(index for part in bins for index in part) == list(range(len(lengths)))
    for part in bins:
        assert len(part) == 1 or sum(lengths[index] for index in part) <= budget


@pytest.mark.parametrize("half", [False, True])
def test_a_model_that_mixes_packed_sequences_trains_them_one_by_one(tmp_path, caplog, half) -> None:
    fields = {"layer_types": ["conv", "full_attention"], "bos_token_id": 1, "eos_token_id": 2}
    tiny_model("Lfm2", dtype=torch.float32, **fields).save_pretrained(tmp_path)
    model = {"dtype": "bfloat16", "lora": {"rank": 2}} if half else {}
    consumer = from_disk(tmp_path, model=model)
    assert not consumer.policy.packs
    assert "its layers mix packed sequences" in caplog.text
    batch = random_batch()
    flat = FlatBatch.from_groups(batch.groups, 1, consumer.settings)
    assert all(pack.num_sequences == 1 for pack in consumer._packs(flat, np.arange(24)))
    if not half:  # log-probs of the unchanged model: the ratio is 1
        plain = tiny_model("Lfm2", dtype=torch.float32, **fields)
        for number, rollout in enumerate(batch.rollouts):
            ids, index = [flat.token_ids[number]], [flat.predictors[number]]
            rollout.logprobs = padded_logprobs(plain, ids, index, 1.0).detach().numpy()
        metrics = consumer.train(batch).metrics
        assert metrics["ratio/max"] == pytest.approx(1.0, abs=1e-4)
        assert metrics["clip/fraction"] == 0.0


def test_answers_of_one_token_do_not_share_the_pass_of_a_model_that_cannot_pack() -> None:
    """A prompt and an answer of one token each: the second row adds nothing to the first one's cost."""
    consumer = consumer_of(config_of())
    consumer.policy.pack_sequences(False)
    batch = random_batch(groups=1)
    for rollout in batch.groups[0].rollouts:
        rollout.prompt_ids = np.array([5], np.int32)
        rollout.response_ids, rollout.logprobs = rollout.response_ids[:1], rollout.logprobs[:1]
        rollout.loss_mask, rollout.segments = np.ones(1, bool), (VersionSegment(0, 1),)
    assert consumer.train(batch).metrics["tokens/trained"] == 4


@pytest.mark.parametrize("kind", ["Qwen3", "Gemma2"])
def test_half_precision_is_not_taken_for_a_leak(tmp_path, kind) -> None:
    tiny_model(kind, dtype=torch.float32).save_pretrained(tmp_path)
    assert from_disk(tmp_path, model={"dtype": "bfloat16", "lora": {"rank": 2}}).policy.packs


@pytest.mark.parametrize("breaks", [False, True])
def test_a_kernel_that_is_wrong_only_in_half_precision_is_found(
    tmp_path, monkeypatch, breaks
) -> None:
    """All weights are trained, so the model is loaded in float32 and computes in bfloat16."""
    forward = Policy.forward

    def leaking(self, pack, *rest):
        logprobs_N, entropies_N = forward(self, pack, *rest)
        if breaks and self.packs and self.model.dtype == torch.bfloat16:
            logprobs_N = logprobs_N + 0.5
        return logprobs_N, entropies_N

    monkeypatch.setattr(Policy, "forward", leaking)
    tiny_model("Qwen3", dtype=torch.float32).save_pretrained(tmp_path)
    assert from_disk(tmp_path, model={"dtype": "bfloat16"}).policy.packs == (not breaks)


def test_a_model_the_trainer_would_misread_is_one_line(tmp_path) -> None:
    model = tiny_model("Qwen3", dtype=torch.float32)
    model.save_pretrained(tmp_path)
    policy = Policy(model)
    model.lm_head.register_forward_hook(lambda _module, _inputs, output: output * 1.5)
    with pytest.raises(UserError, match=r"\(Qwen3ForCausalLM\), whose log-probs the trainer would"):
        check_model(policy, str(tmp_path))


@pytest.mark.parametrize(
    ("key_size", "value_size", "fits"),
    [(128, 128, True), (192, 128, False), (512, 512, False), (12, 12, False), (256, 256, True)],
)
def test_heads_that_the_flash_kernel_refuses_are_not_given_to_it(
    key_size, value_size, fits
) -> None:
    assert fits_flash(key_size, value_size) == fits


LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "moe_intermediate_size": 32, "first_k_dense_replace": 2, "num_key_value_heads": 4,
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("Qwen3", {}),
        ("Mistral", {"sliding_window": 3}),
        ("Gemma", {"head_dim": 512}),
        ("DeepseekV3", LATENT),
    ],
)
@pytest.mark.parametrize("shared", [False, True])
def test_half_precision_on_a_gpu_packs_as_float32_does_alone(kind, fields, shared) -> None:
    ids, predictors, starts = sequences([17, 4, 9, 4, 40, 17])
    if shared:  # two prompts, computed once each
        ids, predictors, starts = groups_of_rows([20, 9], [7, 1, 12, 7])
    plain = tiny_model(kind, dtype=torch.float32, **fields)
    pairs = zip(ids, predictors, strict=True)
    with torch.no_grad():
        alone = torch.cat([padded_logprobs(plain, [row], [index], 1.0) for row, index in pairs])
    policy = Policy(tiny_model(kind, dtype=torch.bfloat16, **fields).to("cuda"))
    check_model(policy, kind)
    assert policy.packs
    pack = make_pack(range(len(ids)), ids, predictors, starts, policy.device)
    got, _ = policy(pack, torch.ones(len(pack.target_N), device="cuda"))
    got.sum().backward()
    in_batch_order = torch.empty(len(got))
    in_batch_order[torch.from_numpy(pack.token_N)] = got.detach().cpu()
    assert float((in_batch_order - alone).abs().mean()) < 0.1
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in policy.parameters())
