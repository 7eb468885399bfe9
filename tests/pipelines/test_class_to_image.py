"""The class pipeline shares the loop; here is what differs."""

from __future__ import annotations

import pytest
import torch

from . import tiny


@pytest.fixture(scope="module")
def pipe():
    return tiny.class_pipeline(drafter=tiny.head())


def test_labels_come_as_number_list_or_tensor(pipe) -> None:
    keywords = {"seeds": 1, "output_type": "tokens"}
    assert torch.equal(pipe(3, **keywords).images, pipe([3], **keywords).images)
    assert torch.equal(pipe(torch.tensor([3, 1]), **keywords).images, pipe([3, 1], **keywords).images)


@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_coupled_batches_equal_plain_single_runs(pipe, guidance: float) -> None:
    keywords = {"guidance_scale": guidance, "output_type": "tokens"}
    batch = pipe([0, 4], num_images_per_label=2, seeds=5, rule="coupled", **keywords)
    for row, label in enumerate([0, 0, 4, 4]):
        alone = pipe(label, seeds=5 + row, rule="plain", **keywords)
        assert torch.equal(batch.images[row], alone.images[0])


@pytest.mark.parametrize(
    "labels, message",
    [(5, "classes 0 to 4"), (-1, "classes 0 to 4"), ([], "empty"), ([True], "does not exist"), ([1.5], "1.5")],
)
def test_labels_that_do_not_exist_are_refused(pipe, labels, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pipe(labels)


def test_unknown_keywords_are_refused(pipe) -> None:
    with pytest.raises(TypeError, match="did you mean 'class_labels'"):
        pipe(class_label=3)


def test_prompts_of_manifests_are_class_numbers(pipe) -> None:
    assert pipe.prompt_keywords(["3", "1"], [None, None]) == {"class_labels": [3, 1]}
    with pytest.raises(ValueError, match="class numbers"):
        pipe.prompt_keywords(["a cat"], [None])
    with pytest.raises(ValueError, match="no negative prompts"):
        pipe.prompt_keywords(["3"], ["a cat"])
