import pytest
import torch

from openrlhf.backends.vllm.on_cpu.speculation import expand_batch_to_tokens
from openrlhf.config.speculation import parse_speculation


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ngram:3", {"method": "ngram", "num_speculative_tokens": 3}),
        ('{"model": "draft", "num_speculative_tokens": 2}', {"model": "draft", "num_speculative_tokens": 2}),
        (' {"method": "suffix"}', {"method": "suffix"}),
    ],
)
def test_forms(text, expected):
    assert parse_speculation(text) == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("ngram", "neither a JSON object nor METHOD:TOKENS"),
        (":3", "neither"),
        ("ngram:three", "neither"),
        ("[1]", "neither"),
        ('{"method": "ngram"', "not a JSON object"),
        ('{"num_speculative_tokens": 3}', 'no "method"'),
        ("ngram:0", "at least 1"),
        ('{"method": "ngram", "num_speculative_tokens": true}', "true; it must be an integer"),
        (
            '{"method": "ngram", "num_speculative_tokens": 3, "rejection_sample_method": "synthetic"}',
            "do not follow the policy",
        ),
    ],
)
def test_other_texts_are_refused(text, reason):
    with pytest.raises(ValueError, match=reason):
        parse_speculation(text)


def test_each_proposed_token_has_the_value_of_its_request():
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    temperatures = torch.tensor([0.5, 0.7, 0.0])
    found = expand_batch_to_tokens(temperatures, ends, 5, replace_from=0, replace_to=1)
    assert found.tolist() == [0.5, 0.5, 1.0, 1.0, 1.0]
    top_k = expand_batch_to_tokens(torch.tensor([3, 4, 5], dtype=torch.int32), ends, 5)
    assert top_k.dtype is torch.int32 and top_k.tolist() == [3, 3, 5, 5, 5]
