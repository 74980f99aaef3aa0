"""Options of DeepSpeed that are passed through, compared with those that the installed DeepSpeed reads."""

import json
from typing import Any

import pytest
from refusals import refused

from openrlhf.backends.deepspeed.support import FLAG, check_options
from openrlhf.config.pass_through import PassThrough
from openrlhf.config.sections import DeepSpeedConfig
from openrlhf.errors import ErrorCode

pytest.importorskip("deepspeed")


def check(**options: Any) -> None:
    check_options(DeepSpeedConfig(config=PassThrough.read([json.dumps(options)])))


@pytest.mark.parametrize(
    "options",
    [
        {"wall_clock_breakdown": True, "flops_profiler": {"enabled": True}},
        {"zero_optimization": {"sub_group_size": 1_000_000}, "communication_data_type": "fp32"},
        {"aio": {"block_size": 1}, "comms_logger": {"enabled": False}, "csv_monitor": {"enabled": False}},
        {"dump_state": True, "prescale_gradients": True, "gradient_predivide_factor": 2.0, "timers": {}},
    ],
)
def test_options_that_deepspeed_reads(options: dict) -> None:
    check(**options)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("wall_clock_brakdown", "did you mean wall_clock_breakdown"),
        ("zero_optimisation", "did you mean zero_optimization"),
        ("qqq", "remove it"),
    ],
)
def test_a_name_that_deepspeed_would_ignore(name: str, remedy: str) -> None:
    with refused(ErrorCode.UNKNOWN_FLAG, flag=f"{FLAG}.{name}", told=remedy):
        check(wall_clock_breakdown=True, **{name: {}})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"zero_optimization": {"sub_group_sice": 5}}, "sub_group_sice"),
        ({"zero_optimization": {"sub_group_size": "much"}}, "sub_group_size"),
        ({"sparse_attention": {}}, "removed"),
        ({"wall_clock_breakdown": "maybe"}, "str"),
    ],
)
def test_what_deepspeed_refuses(options: dict, words: str) -> None:
    with refused(ErrorCode.INVALID_VALUE, flag=FLAG, told=words):
        check(**options)
