"""Checks the models of a supervised command, and loads what is saved with them."""

from typing import Any

from transformers import PreTrainedTokenizerBase

from openrlhf.backends.deepspeed.support import check_options
from openrlhf.config.supervised import MODEL_FLAG, SupervisedConfig
from openrlhf.loop.supervised.task import Task
from openrlhf.models.experts import check_experts, check_routers
from openrlhf.models.loading import check_model
from openrlhf.models.saving import check_saving
from openrlhf.models.tensor_parallel import check_tensor_parallel
from openrlhf.models.tokenizers import load_run_tokenizer, saved_reader
from openrlhf.training.models import check_loadable


def check_models(task: Task) -> None:
    """Raises UsageError for a missing or unsuitable model."""
    config, own = task.config, task.config.model.model_name_or_path
    for flag, path in task.models().items():
        check_model(path, flag)
        check_loadable(config, path, flag)
    if config.train.backend == "deepspeed":
        check_options(config.ds)
    check_saving(own, MODEL_FLAG, reader_of(config))
    if config.model.aux_loss_coef > 0:
        check_experts(own, MODEL_FLAG, "--model.aux_loss_coef")
    if config.model.freeze_moe_router:
        check_routers(own, MODEL_FLAG, "--model.freeze_moe_router")
    if (size := config.ds.tensor_parallel_size) > 1:
        for flag, path in task.models().items():
            check_tensor_parallel(path, flag, size)
    task.check_models()


def reader_of(config: SupervisedConfig, tokenizer: PreTrainedTokenizerBase | None = None) -> Any:
    """Returns what is saved with the model: its tokenizer, or its processor if it reads images."""
    own = tokenizer or load_run_tokenizer(config)
    return saved_reader(own, config.model.model_name_or_path, images=config.data.reads_images)
