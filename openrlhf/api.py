"""The names that others may use, loaded when they are first used.

`import openrlhf as rl` has the first group as `rl.NAME`: `Run` for a loop of one's own, and the records and
base classes that its verbs take and return. The second group is all that `openrlhf.tools`,
`openrlhf.environments` and `openrlhf.tasks` take of the rest; it may change without notice.
"""

import ast
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for users
    from openrlhf.agents.base import AgentExecutorBase, AgentInstanceBase
    from openrlhf.algorithms.advantages.base import AdvantageEstimator, StepView
    from openrlhf.algorithms.curricula.base import Curriculum
    from openrlhf.algorithms.policy_losses.base import PolicyLoss, RowView
    from openrlhf.errors import RunError, UsageError
    from openrlhf.loop.lanes import Result
    from openrlhf.loop.run import Run
    from openrlhf.observability.hooks.base import Evaluation, Hook, Step
    from openrlhf.types import Batch, Outcome, Prompt, PromptGroup, Trajectory

# fmt: off
# isort: off
if TYPE_CHECKING:  # for tools
    from openrlhf.agents.base import MultiTurnAgentExecutor, Reward, RewardError, call_in_time
    from openrlhf.agents.chat_stream import TemplateProblem, probe as probe_template
    from openrlhf.agents.openai import (
        Message as ChatMessage, OpenAIAgentExecutor, Session, SessionExecutor,
    )
    from openrlhf.agents.wire import BadRequest, Object, Wire, read_call, read_content, read_tool, refuse
    from openrlhf.algorithms.kl import KLController
    from openrlhf.algorithms.mismatch import GAPS as MISMATCH_GAPS, PROBE as MISMATCH_PROBE
    from openrlhf.backends.base import Objective, RowT
    from openrlhf.backends.distributed import (
        ProcessMesh, current_device, free_port, init_distributed, leave_distributed, release_cached_memory,
        seed_everything,
    )
    from openrlhf.backends.model_rank import TrainedRank
    from openrlhf.backends.rollout import EngineOptions, RolloutEngine, engine_class
    from openrlhf.backends.vllm.stream import VLLMStream
    from openrlhf.backends.vllm.support import check_vllm_runs
    from openrlhf.backends.weight_sync.sender import BUCKET_BYTES
    from openrlhf.backends.weight_sync.stored_weights import (
        Limit as WeightLimit, Probe as WeightProbe, WeightFingerprint, differing_weights, build_run_probe,
        explain_difference as weight_difference,
    )
    from openrlhf.checkpoint.dcp import METADATA as TORCH_METADATA, TorchReader, load_tensors
    from openrlhf.checkpoint.folder import (
        COPY as CHECKPOINT_COPY, CheckpointFolder, Found as FoundCheckpoint, LATEST as LATEST_FILE,
    )
    from openrlhf.checkpoint.manifest import MANIFEST as MANIFEST_FILE, Manifest
    from openrlhf.checkpoint.run_fingerprint import BUT_GENERATION as FINGERPRINT_BUT_GENERATION
    from openrlhf.checkpoint.saved import ORIGIN as ORIGIN_FILE
    from openrlhf.checkpoint.of_models import check_space
    from openrlhf.checkpoint.start import check_output, check_places
    from openrlhf.checkpoint.zero import (
        Checkpoint as DeepSpeedCheckpoint, MASTER as DEEPSPEED_MASTER, ORDER as DEEPSPEED_ORDER,
    )
    from openrlhf.cluster.layout import (
        ENGINES as ENGINE_ROLE, Layout, demands as resource_demands, described as described_layout,
        compute_layout, resource_problems, table as layout_table,
    )
    from openrlhf.completions import SamplingParams
    from openrlhf.config.checks import check_launcher, looks_local, missing as missing_flag, split_spec
    from openrlhf.config.choices import OneOf as FlagChoices
    from openrlhf.config.command import Command, Explicit, SECRETS as SECRET_FLAGS
    from openrlhf.config.fields import (
        find_change as resume_change, list_flags, flat as flat_settings, tables as flag_tables, to_words,
        flag_values, with_values,
    )
    from openrlhf.config.inference import BatchInferenceConfig, ChatConfig
    from openrlhf.config.inference_commands import BATCH_INFERENCE, CHAT, LORA_COMBINER, SERVE_RM
    from openrlhf.config.lora_combiner import LoraCombinerConfig
    from openrlhf.config.options import PREFIX as OPTION_PREFIX
    from openrlhf.config.parse import Invocation, parse, to_yaml
    from openrlhf.config.pass_through import PassThrough
    from openrlhf.config.ppo import (
        ACTOR_FLAG, AdvantageConfig, AlgoConfig, KLConfig, PPOConfig, REWARD_FLAG, RewardConfig,
        TEACHER_FLAG,
    )
    from openrlhf.config.ppo_checks import reward_function
    from openrlhf.config.ppo_command import PPO
    from openrlhf.config.reasoning_gym import is_gym
    from openrlhf.config.resume import Change as ResumeChange
    from openrlhf.config.sections import DeepSpeedConfig, LoraConfig, OptimConfig
    from openrlhf.config.serve_rm import ServeRMConfig
    from openrlhf.config.speculation import parse_speculation
    from openrlhf.config.supervised import MODEL_FLAG, RMConfig, SupervisedConfig
    from openrlhf.config.supervised_commands import DPO, KD, KTO, PRM, RM, SFT
    from openrlhf.data.bad_rows import BadRow, check_embedded, read_each
    from openrlhf.data.batches import MiniBatches
    from openrlhf.data.encode import Encoder, Text
    from openrlhf.data.images import ImageSources, kept_download, load_image
    from openrlhf.data.inference import (
        Answer, Question, build_answers, build_questions, fingerprint as inference_fingerprint,
        iteration as inference_iteration, with_suffix,
    )
    from openrlhf.data.messages import with_role
    from openrlhf.data.outline import count_rows, first_row
    from openrlhf.data.once import made_once
    from openrlhf.data.packing import pack_to_budget
    from openrlhf.data.pictures import decoded, png
    from openrlhf.data.prompt_sampler import PromptSampler
    from openrlhf.data.prompts import encode_prompts
    from openrlhf.data.reasoning_gym import find_entry, gym_rows
    from openrlhf.data.scored import end_token_id, score_last, with_end
    from openrlhf.data.sources import check_columns, load_rows
    from openrlhf.data.templates import Message, PromptTemplate
    from openrlhf.device import DEVICE_TYPE, own_bytes
    from openrlhf.errors import (
        ErrorCode, catch_signals, counted, describe, first_line, notify, readable, short_errors, warn_once,
    )
    from openrlhf.files import (
        cache_folder, exporting, holds_model, nearest, read_object, unwaiting, unwritable, write_atomically,
    )
    from openrlhf.heap import freeze as freeze_heap
    from openrlhf.hub import WEIGHTS, choose_hub, config_json, model_folder, uses_modelscope
    from openrlhf.loop.local import start_local_roles
    from openrlhf.loop.machines import resolve
    from openrlhf.loop.rl_checks import check_files as check_rl_files, check_users_files
    from openrlhf.loop.rl_command import (
        build_trainer as build_rl_trainer, run as run_rl,
    )
    from openrlhf.loop.supervised.command import (
        checked_task as checked_supervised_task, run as run_supervised,
    )
    from openrlhf.loop.supervised.data_checks import data_notes as supervised_data_notes
    from openrlhf.loop.supervised.datasets import build_train_set, lay_out
    from openrlhf.loop.supervised.reference import ComparedTask, reference_path
    from openrlhf.loop.supervised.run import SupervisedRun
    from openrlhf.loop.supervised.task import Task as SupervisedTask
    from openrlhf.memory.engines import CPU_KV_CACHE_GB, bucket_size, memory_fraction
    from openrlhf.memory.rows import most_tokens
    from openrlhf.memory.sizes import ITEM_BYTES, ModelSize
    from openrlhf.memory.training import (
        FITS, RankMemory, forward_memory, gathered_bytes, state_bytes, training_memory,
    )
    from openrlhf.mesh import Mesh
    from openrlhf.models.backbone import alone, get_row_layout
    from openrlhf.models.checkpoint_layout import CLASSIFIER_HEAD, head_name
    from openrlhf.models.configurations import (
        DTYPES, check_room, find_max_length, load_config, loading as loading_model,
    )
    from openrlhf.models.ends import GENERATION, check_stops, log_stops, stop_token_ids
    from openrlhf.models.generation import Generated as GeneratedAnswers, generate as generate_answers
    from openrlhf.models.loading import OF_FILES, check_loaded, check_model, load_generator, untie_config
    from openrlhf.models.lora import ADAPTER, Merge as AdapterMerge, is_classifier, load_statistics
    from openrlhf.models.policy import PolicyModel, TokenScores, get_head, head_options, transformed_logits
    from openrlhf.models.prefixes import build_tree
    from openrlhf.models.saving import check_saving, save_model
    from openrlhf.models.scorer import (
        ScoreModel, check_reward_model, load_scorer, padding_token_id,
        register_classifier, score_statistics,
    )
    from openrlhf.models.self_check import resolve_row_layout, transformers_attention
    from openrlhf.models.sizes import learner_size, model_size
    from openrlhf.models.tokenizers import (
        load_run_tokenizer, load_tokenizer, missing_embeddings, saved_reader,
    )
    from openrlhf.nvidia_smi import gpu_bytes, gpu_names
    from openrlhf.observability.failures import commonest_failure, headline
    from openrlhf.observability.hooks.load import check_hooks
    from openrlhf.observability.journal import (
        Journal, Trained as TrainedSamples, num_samples, read_journal, read_rows, read_table,
    )
    from openrlhf.observability.lock import LOCK as LOCK_FILE
    from openrlhf.observability.metric_names import headlines
    from openrlhf.observability.observer import Observer
    from openrlhf.observability.progress import KEY_METRICS, Progress, is_evaluation, pass_name
    from openrlhf.observability.phases import Phase
    from openrlhf.observability.waits import checking, tracked, waiting
    from openrlhf.observability.formats import clean_text, format_duration, format_number, shorten
    from openrlhf.observability.run_folder import (
        JOURNAL_FILE, RunFolder, environment as run_environment, find_secrets,
        read_label, reading as reading_run, redact, to_json,
    )
    from openrlhf.observability.run_index import RunIndex
    from openrlhf.observability.selection import best_to_worst, evenly, thinned
    from openrlhf.observability.trackers.base import TrackedRun, Tracker
    from openrlhf.observability.trackers.load import build_trackers
    from openrlhf.observability.trackers.metrics_file import RENAMED
    from openrlhf.rewards.function import RewardFunction, check_reward_file
    from openrlhf.rewards.math import extract_boxed_answer, final_answer, grade_response
    from openrlhf.rollout.local import LocalEngine
    from openrlhf.rollout.seeds import seed_at
    from openrlhf.rollout.worker import RolloutWorker, engine_options, local_options, transfer_backend
    from openrlhf.text import Decode, behind_thoughts, decode, first_token_ids, prompt_token_ids
    from openrlhf.text import decode_response
    from openrlhf.training.collect import StalenessLimit, Collector, SAME_REWARD
    from openrlhf.training.advantages import advantage_arguments
    from openrlhf.observability.rollout_metrics import rollout_metrics
    from openrlhf.training.evaluate import evaluation_metrics
    from openrlhf.training.models import load_reward_model
    from openrlhf.training.objectives.critic import CriticObjective
    from openrlhf.training.objectives.dpo import DPOObjective
    from openrlhf.training.objectives.kto import KTOObjective
    from openrlhf.training.objectives.policy import PolicyObjective
    from openrlhf.training.objectives.reference import reference_log_probs
    from openrlhf.training.objectives.rm import RewardObjective
    from openrlhf.training.objectives.sft import SFTObjective
    from openrlhf.training.rl_data import (
        TEMPLATE, USE_TEMPLATE, build_data as build_rl_data, build_prompt_datasets,
        data_notes as rl_data_notes, missing_template,
    )
    from openrlhf.training.schedule import (
        num_batches, num_updates, prompts_of_steps, training_schedule,
    )
    from openrlhf.training.trained_worker import CriticWorker, PolicyWorker
    from openrlhf.rows import ExperienceRow, LossNorm, PackedRow, Pair, Sample, Steps, UnpairedExample
    from openrlhf.types import Metrics, Schedule, not_none, runs as runs_of_version
    from openrlhf.ranges import Range as FlagRange
    from openrlhf.user_file import UserFiles
# isort: on
# fmt: on


def _places() -> list[dict[str, tuple[str, str]]]:
    """Reads the two groups above: public name -> (module, name in it)."""
    groups = [
        node
        for node in ast.parse(Path(__file__).read_text(encoding="utf-8")).body
        if isinstance(node, ast.If)
    ]
    imports = [[line for line in group.body if isinstance(line, ast.ImportFrom)] for group in groups]
    return [
        {name.asname or name.name: (str(line.module), name.name) for line in group for name in line.names}
        for group in imports
    ]


PUBLIC, FOR_TOOLS = _places()


def __getattr__(name: str) -> Any:
    if (place := PUBLIC.get(name) or FOR_TOOLS.get(name)) is None:
        raise AttributeError(f"openrlhf.api has no name {name!r}")
    module, name = place
    return getattr(import_module(module), name)
