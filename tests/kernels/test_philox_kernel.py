"""Philox4x32-10: known answers, equal bits in both implementations, numbers free of their neighbours, laws."""

import pytest
import torch
from scipy import stats

from mediaspec.kernels import philox
from mediaspec.kernels.philox.reference import philox4x32

from .conftest import DEVICE, NUMPY_NOISE

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(counter, key, expected):
    words = philox4x32(tuple(torch.tensor(c) for c in counter), tuple(torch.tensor(k) for k in key))
    assert tuple(int(word) for word in words) == expected


@pytest.mark.filterwarnings(NUMPY_NOISE)
def test_triton_gives_the_same_bits():
    seeds = torch.tensor([0, -1, 5, 1 << 40, -(1 << 62)], device=DEVICE)
    positions = torch.tensor([[0, 1], [7, 2**31], [2**32 - 1, 3], [255, 256], [9, 9]], device=DEVICE)
    for purpose, sibling in ((0, 0), (1, 0), (2, 3)):
        expected = philox.uniform(seeds, positions, purpose, sibling, impl="reference")
        assert torch.equal(philox.uniform(seeds, positions, purpose, sibling, impl="triton"), expected)
    for vocab in (1, 5, 16, 70):
        expected = philox.exponential(seeds, positions, vocab, 1, impl="reference")
        given = philox.exponential(seeds, positions, vocab, 1, impl="triton")
        torch.testing.assert_close(given, expected, rtol=1e-6, atol=1e-7)


def test_layout_of_the_counter():
    seed = torch.tensor([0x299F31D0 << 32 | 0xA4093822])
    position, purpose = 0x85A308D3, 0x13198A2E
    word = tuple(torch.tensor(v) for v in (1, position, purpose, 0))
    lanes = philox4x32(word, (torch.tensor(0xA4093822), torch.tensor(0x299F31D0)))
    drawn = philox.exponential(seed, torch.tensor([[position]]), 8, purpose)[0, 0, 4:]
    expected = torch.tensor([-torch.tensor(((int(b) >> 9) * 2 + 1) * 2.0**-24).log() for b in lanes])
    torch.testing.assert_close(drawn, expected)


def test_numbers_depend_on_seed_position_and_purpose_alone():
    seeds = torch.arange(6) * 1000003
    positions = torch.arange(5).expand(6, 5)
    whole = philox.exponential(seeds, positions, 33, philox.TARGET)
    order = torch.tensor([4, 0, 2])
    back = torch.tensor([3, 1])
    part = philox.exponential(seeds[order], positions[:3][:, back], 33, philox.TARGET)
    assert torch.equal(part, whole[order][:, back])
    assert torch.equal(philox.exponential(seeds, positions, 20, philox.TARGET), whole[..., :20])
    others = [whole, philox.exponential(seeds, positions, 33, philox.DRAFT)]
    assert not torch.equal(*others)
    first = philox.uniform(seeds, positions, philox.ACCEPT)
    assert not torch.equal(first, philox.uniform(seeds, positions, philox.ACCEPT, sibling=1))


def test_uniform_law():
    """Chi-square over 256 bins and over neighbouring pairs; each fails a correct generator 1 time in 1000."""
    u = philox.uniform(torch.arange(64), torch.arange(2048).expand(64, -1), philox.ACCEPT)
    assert float(u.min()) >= 0 and float(u.max()) < 1
    counts = torch.bincount((u.flatten() * 256).long(), minlength=256)
    assert stats.chisquare(counts.numpy()).pvalue > 1e-3
    pairs = (u[:, ::2] * 16).long() * 16 + (u[:, 1::2] * 16).long()
    assert stats.chisquare(torch.bincount(pairs.flatten(), minlength=256).numpy()).pvalue > 1e-3


def test_exponential_law():
    e = philox.exponential(torch.arange(16), torch.arange(32).expand(16, -1), 255, philox.DRAFT)
    assert float(e.min()) > 0 and bool(e.isfinite().all())
    counts = torch.bincount(((-e).exp().flatten() * 256).long().clamp(max=255), minlength=256)
    assert stats.chisquare(counts.numpy()).pvalue > 1e-3
    winners = torch.bincount(e[..., :5].argmin(-1).flatten(), minlength=5)
    assert stats.chisquare(winners.numpy()).pvalue > 1e-3
