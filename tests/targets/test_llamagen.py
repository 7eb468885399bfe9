import pytest
import torch
from torch import Tensor

from mediaspec.core.engine import Engine
from mediaspec.core.kv import KVStore
from mediaspec.core.tree import TreeSpec
from mediaspec.drafters import JacobiDrafter
from mediaspec.models.llamagen import LlamaGenConfig, LlamaGenGPT, LlamaGenVQ, LlamaGenVQConfig
from mediaspec.rules import make_rule
from mediaspec.targets.llamagen import ClassCondition, LlamaGenTarget, TextCondition
from mediaspec.testing.check_target import check_target

PREFIX, WIDTH, VOCAB, SIDE = 5, 12, 40, 4
TOKENS = SIDE * SIDE
TREE = TreeSpec.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])


def make_gpt(kind: str = "text", half: bool = True, seed: int = 0, n_kv_head: int | None = None) -> LlamaGenGPT:
    torch.manual_seed(seed)
    prefix = PREFIX if kind == "text" else 1
    gpt = LlamaGenGPT(
        LlamaGenConfig(
            dim=48, n_layer=3, n_head=4, n_kv_head=n_kv_head, multiple_of=16, vocab_size=VOCAB, block_size=TOKENS,
            condition=kind, cls_token_num=prefix, caption_dim=WIDTH, num_classes=10,
        )
    ).eval()  # fmt: skip
    with torch.no_grad():
        for name, parameter in gpt.named_parameters():
            if parameter.dim() == 2 and "embedding" not in name:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
            if half:
                parameter.copy_(parameter.half().float())
    return gpt


def text_rows(rows: int, padded: bool = True) -> TextCondition:
    """Rows of captions of different length; every second row runs on the learned unconditional features."""
    generator = torch.Generator().manual_seed(5)
    features = torch.randn(8, PREFIX, WIDTH, generator=generator)[:rows]
    lengths = torch.tensor([3, 3, 5, 1, 2, 2, 4, 4])[:rows]
    mask = torch.arange(PREFIX) >= PREFIX - lengths[:, None] if padded else torch.ones(rows, PREFIX, dtype=torch.bool)
    return TextCondition(features, mask, torch.arange(rows) % 2 == 1)


def image_tokens(rows: int, count: int = TOKENS, seed: int = 1) -> Tensor:
    return torch.randint(0, VOCAB, (rows, count), generator=torch.Generator().manual_seed(seed))


def truth(gpt: LlamaGenGPT, condition: TextCondition | ClassCondition, tokens: Tensor) -> Tensor:
    """[R, T, V]: row t is the law after t tokens."""
    with torch.no_grad():
        if isinstance(condition, TextCondition):
            return gpt(tokens, condition.features, condition.mask, drop_ids=condition.drop).logits
        return gpt(tokens, condition.labels, drop_ids=condition.drop).logits


def start(
    target: LlamaGenTarget, condition: TextCondition | ClassCondition, extra: int = 12
) -> tuple[KVStore, Tensor]:
    cache = target.new_cache(len(condition), extra)
    return cache, target.prefill(condition, cache).logits


def commit(cache: KVStore, count: int) -> None:
    cache.advance(torch.full_like(cache.lengths, count), [count] * cache.rows)


def close(got: Tensor, wanted: Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(got.float(), wanted, atol=atol, rtol=1e-5)


@pytest.mark.parametrize("linear", ["auto", "onednn", "plain"])
@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_chains_equal_the_module(linear: str, half: bool, padded: bool) -> None:
    gpt, condition, tokens = make_gpt(half=half), text_rows(4, padded), image_tokens(4)
    target, wanted = LlamaGenTarget(gpt, linear=linear), truth(gpt, condition, tokens)
    cache, first = start(target, condition)
    close(first, wanted[:, :1])
    place = 0
    for count in (1, 3, 6, 1, 4):
        close(target.score(tokens[:, place : place + count], cache).logits, wanted[:, place + 1 : place + count + 1])
        commit(cache, count)
        place += count
    assert place == TOKENS - 1  # the last token predicts nothing


def test_classes_equal_the_module() -> None:
    gpt, condition = make_gpt("class"), ClassCondition.build(torch.tensor([3, 7]), guided=True)
    assert condition.labels.tolist() == [3, 3, 7, 7] and condition.drop.tolist() == [False, True, False, True]
    target, tokens = LlamaGenTarget(gpt), image_tokens(4)
    wanted = truth(gpt, condition, tokens)
    cache, first = start(target, condition)
    close(first, wanted[:, :1])
    close(target.score(tokens[:, :6], cache).logits, wanted[:, 1:7])


def test_grouped_key_heads() -> None:
    gpt, condition, tokens = make_gpt(n_kv_head=2), text_rows(2), image_tokens(2)
    target, wanted = LlamaGenTarget(gpt), truth(gpt, condition, tokens)
    cache, _ = start(target, condition)
    for place in range(0, 6, 3):
        close(target.score(tokens[:, place : place + 3], cache).logits, wanted[:, place + 1 : place + 4])
        commit(cache, 3)


def test_ragged_rows_after_a_rollback() -> None:
    gpt, condition, tokens = make_gpt(), text_rows(4), image_tokens(4)
    target, wanted = LlamaGenTarget(gpt), truth(gpt, condition, tokens)
    cache, _ = start(target, condition)
    target.score(image_tokens(4, 6, seed=9), cache)  # rejected altogether
    target.score(tokens[:, :7], cache)
    counts = [2, 5, 1, 7]
    cache.advance(torch.tensor(counts), counts)
    ahead = torch.stack([row[count : count + 4] for row, count in zip(tokens, counts, strict=True)])
    expected = torch.stack([row[count + 1 : count + 5] for row, count in zip(wanted, counts, strict=True)])
    close(target.score(ahead, cache).logits, expected)


@pytest.mark.parametrize("ragged", [False, True])
def test_tree_rows_equal_the_chains_along_their_paths(ragged: bool) -> None:
    gpt, condition, tokens = make_gpt(), text_rows(3), image_tokens(3)
    target = LlamaGenTarget(gpt)
    cache, _ = start(target, condition)
    target.score(tokens[:, :4], cache)
    counts = [4, 2, 3] if ragged else [3, 3, 3]
    cache.advance(torch.tensor(counts), counts)
    inputs = image_tokens(3, TREE.num_nodes + 1, seed=4)
    scored = target.score(inputs, cache, TREE).logits
    for node in range(TREE.num_nodes + 1):
        path = [node]
        while path[0]:
            path.insert(0, TREE.parents[path[0] - 1])
        for row, count in enumerate(counts):
            whole = torch.cat([tokens[row, :count], inputs[row, path]])[None]
            parts = (condition.features, condition.mask, condition.drop)
            alone = TextCondition(*(part[row : row + 1] for part in parts))
            close(scored[row, node], truth(gpt, alone, whole)[0, -1])


def test_select_and_fork() -> None:
    gpt, condition, tokens = make_gpt(), text_rows(4), image_tokens(4)
    target, wanted = LlamaGenTarget(gpt), truth(gpt, condition, tokens)
    cache, _ = start(target, condition)
    target.score(tokens[:, :3], cache)
    commit(cache, 3)
    rows = torch.tensor([2, 3, 2, 3, 0])
    cache.select(rows)
    close(target.score(tokens[rows, 3:6], cache).logits, wanted[rows, 4:7])


@pytest.mark.parametrize("kind", ["text", "class"])
def test_the_conformance_suite(kind: str) -> None:
    target = LlamaGenTarget(make_gpt(kind))
    check_target(target, text_rows if kind == "text" else lambda rows: ClassCondition(torch.arange(rows)), atol=2e-5)


def row_exact_products() -> bool:
    """Whether this machine's BLAS gives a row the same bits among 4 and 6 rows, with 40 and 48 summands."""
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(3, 6, 40, generator=generator), torch.randn(3, 48, 12, generator=generator)
    few, many = torch.bmm(left[:, :4].contiguous(), right[:, :40]), torch.bmm(left, right[:, :40])
    padded = torch.bmm(torch.nn.functional.pad(left, (0, 8)), right)
    return torch.equal(few, many[:, :4]) and torch.equal(many, padded)


@pytest.mark.parametrize("linear", ["half", "onednn"])
def test_logits_are_the_same_bits_plain_verifying_and_in_a_batch(linear: str) -> None:
    """Under shared noise tokens agree only where logits do; trees (keys in another order) agree to rounding."""
    target, condition, tokens = LlamaGenTarget(make_gpt(), linear=linear), text_rows(8), image_tokens(8)
    atol = 0.0 if row_exact_products() else 4e-6
    cache, first = start(target, condition)
    blocks = [target.score(tokens[:, :3], cache).logits]
    commit(cache, 3)
    ragged = torch.arange(8) // 2
    blocks.append(target.score(tokens[:, 3:9], cache).logits)
    cache.advance(ragged, ragged.tolist())
    places = (3 + ragged)[:, None] + torch.arange(6)
    late = target.score(tokens.gather(1, places), cache).logits
    for row in range(0, 8, 2):
        pair = slice(row, row + 2)
        alone = TextCondition(condition.features[pair], condition.mask[pair], condition.drop[pair])
        single, begun = start(target, alone)
        torch.testing.assert_close(begun, first[pair], atol=atol, rtol=0)
        plain = []
        for place in range(12):
            plain.append(target.score(tokens[pair, place : place + 1], single).logits)
            commit(single, 1)
        plain = torch.cat(plain, 1)
        torch.testing.assert_close(torch.cat(blocks, 1)[pair], plain[:, :9], atol=atol, rtol=0)
        begin = 3 + int(ragged[row])
        torch.testing.assert_close(late[pair], plain[:, begin : begin + 6], atol=atol, rtol=0)


def test_changed_cast_and_moved_weights_are_seen() -> None:
    gpt, condition, tokens = make_gpt(), text_rows(2), image_tokens(2)
    target = LlamaGenTarget(gpt)
    cache, before = start(target, condition)
    step = target.step
    start(target, condition)
    assert target.step is step, "unchanged weights are not prepared twice"
    with torch.no_grad():
        gpt.layers[0].feed_forward.w2.weight.mul_(0.5)
    cache, after = start(target, condition)
    assert target.step is not step and (after - before).abs().max() > 1e-3
    close(target.score(tokens[:, :3], cache).logits, truth(gpt, condition, tokens)[:, 1:4])
    gpt.load_state_dict(make_gpt(seed=3).state_dict())
    cache, _ = start(target, condition)
    close(target.score(tokens[:, :3], cache).logits, truth(gpt, condition, tokens)[:, 1:4])
    wanted = truth(gpt, condition, tokens)[:, 1:4]
    for dtype, atol in ((torch.bfloat16, 0.25), (torch.float16, 0.03), (torch.float32, 0.25)):
        gpt.to(dtype)
        cache, _ = start(target, condition)
        output = target.score(tokens[:, :3], cache)
        assert cache.keys.dtype == dtype and output.hidden.dtype == dtype and output.logits.dtype == torch.float32
        close(output.logits, wanted, atol=atol)


def test_bfloat16_matrices_on_a_float32_model() -> None:
    gpt, condition, tokens = make_gpt(), text_rows(2), image_tokens(2)
    target = LlamaGenTarget(gpt, dtype=torch.bfloat16)
    cache, _ = start(target, condition)
    assert cache.keys.dtype == torch.float32
    close(target.score(tokens[:, :3], cache).logits, truth(gpt, condition, tokens)[:, 1:4], atol=0.25)


def test_build_makes_pairs() -> None:
    features, mask = torch.randn(2, PREFIX, WIDTH), torch.arange(PREFIX) >= torch.tensor([[1], [3]])
    plain = TextCondition.build(features, mask, guided=False)
    assert len(plain) == 2 and plain.drop is None
    pairs = TextCondition.build(features, mask, guided=True)
    assert len(pairs) == 4 and pairs.drop.tolist() == [False, True] * 2
    assert torch.equal(pairs.mask, mask.repeat_interleave(2, 0))
    negative, other = torch.randn(2, PREFIX, WIDTH), torch.ones(2, PREFIX, dtype=torch.bool)
    mixed = TextCondition.build(features, mask, True, negative, other, torch.tensor([True, False]))
    assert mixed.drop.tolist() == [False, False, False, True]
    assert torch.equal(mixed.features[1], negative[0]) and torch.equal(mixed.features[0], features[0])
    assert mixed.mask[1].all() and torch.equal(mixed.mask[3], mask[1]), "a dropped row keeps its caption's mask"
    with pytest.raises(ValueError, match="guidance"):
        TextCondition.build(features, mask, False, negative, other)
    with pytest.raises(ValueError, match="same number of positions"):
        TextCondition.build(features, mask, True, negative[:, :2], other)


def test_coupled_speculation_gives_the_tokens_of_plain_decoding() -> None:
    """Drafts come from Jacobi windows: many positions per call, rows of different lengths, guidance pairs."""
    target = LlamaGenTarget(make_gpt())
    features = torch.randn(3, PREFIX, WIDTH, generator=torch.Generator().manual_seed(2))
    condition = TextCondition.build(features, torch.arange(PREFIX) >= torch.tensor([[0], [2], [4]]), guided=True)
    seeds = torch.tensor([1, 2, 3])
    plain = Engine(target, make_rule("exact")).decode(condition, seeds, guidance_scale=2.0, num_draft_tokens=0)
    engine = Engine(target, make_rule("coupled"), JacobiDrafter(window=5))
    fast = engine.decode(condition, seeds, guidance_scale=2.0, num_draft_tokens=5)
    assert torch.equal(fast.tokens, plain.tokens)
    assert fast.stats.target_calls < plain.stats.target_calls


def test_pixels() -> None:
    config = LlamaGenVQConfig(ch=8, ch_mult=(1, 1), num_res_blocks=1, z_channels=8, codebook_size=VOCAB, norm_groups=4)
    vq = LlamaGenVQ(config)
    target = LlamaGenTarget(make_gpt("class"), vq.eval())
    pixels = target.decode(image_tokens(2))
    assert pixels.shape == (2, 3, 2 * SIDE, 2 * SIDE) and pixels.abs().max() <= 1.0
    assert target.codebook.shape == (VOCAB, 8)
    torch.testing.assert_close(target.decode(image_tokens(2)[1:]), pixels[1:], atol=0, rtol=0)
    with pytest.raises(ValueError, match="no tokenizer"):
        LlamaGenTarget(make_gpt("class")).decode(image_tokens(1))


def test_misfits_are_refused_at_construction_and_prefill() -> None:
    gpt = make_gpt("class")
    with pytest.raises(ValueError, match="not trained together"):
        LlamaGenTarget(gpt, codebook=torch.zeros(VOCAB - 1, 8))
    assert LlamaGenTarget(gpt, codebook=torch.zeros(VOCAB + 1, 8)).codebook.shape == (VOCAB, 8)
    target = LlamaGenTarget(gpt)
    with pytest.raises(ValueError, match="class-conditional"):
        target.prefill(text_rows(2), target.new_cache(2, 0))
    with pytest.raises(ValueError, match="make both equal"):
        target.prefill(ClassCondition(torch.tensor([1])), target.new_cache(2, 0))
    with torch.no_grad():
        gpt.layers[1].attention.wo.weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match="layers.1.attention.wo.weight holds NaN"):
        target.prefill(ClassCondition(torch.tensor([1])), target.new_cache(1, 0))
    with pytest.raises(ValueError, match="meta device"):
        LlamaGenTarget(make_gpt("class").to("meta"))
