"""Knowledge distillation."""

from collections.abc import Mapping

from transformers import PreTrainedTokenizerBase

from openrlhf.config.supervised import KDConfig
from openrlhf.config.supervised_commands import KD
from openrlhf.data.image_rows import load_processor
from openrlhf.errors import ErrorCode, UsageError
from openrlhf.loop.supervised.sft import ResponsesTask
from openrlhf.loop.supervised.task import Parts
from openrlhf.models.student import StudentModel, TeacherModel, linear_head
from openrlhf.models.tokenizers import check_same_vocabulary, load_run_tokenizer, load_tokenizer
from openrlhf.observability.waits import waiting
from openrlhf.text import image_layout, patch_counts
from openrlhf.training.models import load_language_model
from openrlhf.training.objectives.kd import DistillationObjective

TEACHER_FLAG = "--teacher.model_name_or_path"


class DistillationTask(ResponsesTask[KDConfig]):
    command = KD

    def models(self) -> Mapping[str, str]:
        return {**super().models(), TEACHER_FLAG: self.config.teacher.model_name_or_path}

    def check_models(self) -> None:
        super().check_models()
        path = self.config.teacher.model_name_or_path
        own, other = load_run_tokenizer(self.config), load_tokenizer(path, flag=TEACHER_FLAG)
        check_same_vocabulary(own, other, TEACHER_FLAG, path)
        if self.config.data.reads_images:
            check_same_images(self.config.model.model_name_or_path, path, TEACHER_FLAG)

    def load_model(self, tokenizer: PreTrainedTokenizerBase) -> StudentModel:
        return StudentModel(self.load_causal_lm())

    def objective(self, parts: Parts) -> DistillationObjective:
        model, path = self.config.model, self.config.teacher.model_name_or_path
        with waiting("loading the teacher", key=path):
            build = lambda: TeacherModel(load_language_model(self.config, path, TEACHER_FLAG))
            teacher = parts.frozen(build, self.config.teacher.offload)
        head = linear_head(teacher.module.model)
        return DistillationObjective(
            teacher=teacher,
            teacher_head=head._replace(
                weight=teacher.whole(head.weight),
                bias=None if head.bias is None else teacher.whole(head.bias),
            ),
            coef=model.kd_coef,
            temperature=model.kd_temperature,
            kind=model.kd_loss_type,
        )


def check_same_images(own: str, other: str, flag: str) -> None:
    """Raises UsageError if the model `other`, named by `flag`, expands images to other tokens than the
    model `own`."""
    first, second = (load_processor(path, flag) for path in (own, other))
    counts = [patch_counts(processor, SIZES) for processor in (first, second)]
    if image_layout(first) != image_layout(second) or counts[0] != counts[1]:
        raise UsageError(
            ErrorCode.INVALID_MODEL,
            f"its processor expands images to other tokens than that of {own}.\nChoose a model of the same "
            "family, whose processor has the same patch size and image size limits.",
            flag=flag,
            value=other,
        )


SIZES = ((56, 56), (96, 160), (224, 224), (640, 480), (1080, 1920), (4000, 3000))
"""(height, width) of images with which processors are compared."""
