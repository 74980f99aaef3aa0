"""The tasks that compare a policy with a reference model: DPO and KTO."""

from typing import TypeVar

from openrlhf.config.supervised import DPOConfig, KTOConfig
from openrlhf.loop.task import Task, load_run_tokenizer

ConfigT = TypeVar("ConfigT", DPOConfig, KTOConfig)

REF_FLAG = "--ref.model_name_or_path"


class ComparedTask(Task[ConfigT]):
    """A task that trains a policy against a reference model."""

    def models(self) -> dict[str, str]:
        return {**super().models(), REF_FLAG: reference_path(self.config)}

    def check_models(self) -> None:
        """Also refuses a reference whose vocabulary differs from the policy's."""
        from openrlhf.models.loading import check_same_vocabulary, load_tokenizer

        super().check_models()
        path = reference_path(self.config)
        if path != self.config.model.model_name_or_path:
            own, other = load_run_tokenizer(self.config), load_tokenizer(path, flag=REF_FLAG)
            check_same_vocabulary(own, other, REF_FLAG, path)


def reference_path(config: DPOConfig | KTOConfig) -> str:
    """Returns the folder or hub name of the reference; by default that of the policy."""
    return config.ref.model_name_or_path or config.model.model_name_or_path
