"""Knowledge distillation: `python -m openrlhf.cli.train_kd`, or the same under torchrun or deepspeed."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from openrlhf.cli.train_sft import ResponsesTask
from openrlhf.config.supervised import KDConfig
from openrlhf.config.supervised_commands import KD
from openrlhf.loop import task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from openrlhf.loop.supervised_run import SupervisedRun
    from openrlhf.models.student import StudentModel
    from openrlhf.training.objectives.kd import DistillationObjective

TEACHER_FLAG = "--teacher.model_name_or_path"


class DistillationTask(ResponsesTask[KDConfig]):
    command = KD

    def models(self) -> Mapping[str, str]:
        return {**super().models(), TEACHER_FLAG: self.config.teacher.model_name_or_path}

    def check_models(self) -> None:
        from openrlhf.models.loading import check_same_vocabulary, load_tokenizer

        super().check_models()
        path = self.config.teacher.model_name_or_path
        own, other = task.load_tokenizer_of(self.config), load_tokenizer(path, flag=TEACHER_FLAG)
        check_same_vocabulary(own, other, TEACHER_FLAG, path)
        if self.config.data.reads_images:
            from openrlhf.data.image_rows import check_same_images

            check_same_images(self.config.model.model_name_or_path, path, TEACHER_FLAG)

    def load_model(self, tokenizer: "PreTrainedTokenizerBase") -> "StudentModel":
        from openrlhf.models.student import StudentModel

        return StudentModel(self.load_causal_lm())

    def objective(self, run: "SupervisedRun[KDConfig]") -> "DistillationObjective":
        from openrlhf.models.student import TeacherModel, linear_head
        from openrlhf.observability.progress import waiting
        from openrlhf.training.models import load_language_model
        from openrlhf.training.objectives.kd import DistillationObjective

        model, path = self.config.model, self.config.teacher.model_name_or_path
        with waiting("loading the teacher", key=path):
            build = lambda: TeacherModel(load_language_model(self.config, path, TEACHER_FLAG))
            teacher = run.frozen(build, self.config.teacher.offload)
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


def main(argv: Sequence[str] | None = None) -> None:
    task.main(DistillationTask, argv)


if __name__ == "__main__":
    main()
