"""Static check that each class satisfies its protocol. Nothing here runs: pyrefly reads it in `make lint`,
and each function returns an object of the class as one of the protocol."""

from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np

from openrlhf.agents.base import AgentExecutorBase, Engine, Reward, SingleTurnAgentExecutor
from openrlhf.agents.mcp import McpServer
from openrlhf.agents.tools import ToolServer
from openrlhf.backends.base import (
    ModelRanks,
    Objective,
    Pending,
    Rollout,
    Row,
    Trainable,
    TrainableRanks,
)
from openrlhf.backends.model_rank import FrozenRank, TrainedRank
from openrlhf.backends.rollout import RolloutEngine
from openrlhf.backends.transformers.engine import TransformersEngine
from openrlhf.backends.vllm.engine import VLLMEngine
from openrlhf.backends.weight_sync import client, gloo
from openrlhf.cluster import engine_memory
from openrlhf.cluster.engine_client import RayEngineClient
from openrlhf.cluster.engine_handle import RayEngineHandle
from openrlhf.cluster.engine_pool import EnginePool
from openrlhf.cluster.pending import Gathered
from openrlhf.cluster.rank_groups import CriticRanks, FrozenRanks, PolicyRanks, RewardRanks
from openrlhf.data import batches
from openrlhf.data.preference import PairDataset
from openrlhf.data.steps import StepsDataset
from openrlhf.data.store import SampleStore
from openrlhf.data.unpaired import UnpairedDataset
from openrlhf.rewards.function import NoReward, RewardFunction
from openrlhf.rewards.remote import RemoteReward
from openrlhf.rollout import dispatch
from openrlhf.rollout.executors import UserExecutor
from openrlhf.rollout.recorder import RecordingEngine
from openrlhf.rows import ExperienceRow, PackedRow, PairRow, StepsRow, UnpairedRow
from openrlhf.training.objectives.balanced import BalancedObjective
from openrlhf.training.objectives.critic import CriticObjective
from openrlhf.training.objectives.dpo import DPOObjective
from openrlhf.training.objectives.kd import DistillationObjective
from openrlhf.training.objectives.kto import KTOObjective, MismatchedLogRatio
from openrlhf.training.objectives.policy import PolicyObjective
from openrlhf.training.objectives.prm import ProcessObjective
from openrlhf.training.objectives.ptx import PTXObjective
from openrlhf.training.objectives.reference import Reference
from openrlhf.training.objectives.rm import RewardObjective, ScoreMoments
from openrlhf.training.objectives.sft import SFTObjective
from openrlhf.types import Metrics, PromptGroup

ResultT = TypeVar("ResultT")
RowT = TypeVar("RowT", bound=Row)


def trainable_group(group: PolicyRanks | CriticRanks) -> TrainableRanks:
    return group


def model_group(group: PolicyRanks | CriticRanks | FrozenRanks) -> ModelRanks:
    return group


def rollout(pool: EnginePool) -> Rollout[PolicyRanks]:
    return pool


def gathered(refs: Gathered[np.ndarray]) -> Pending[np.ndarray]:
    return refs


def future(work: Future[Metrics]) -> Pending[Metrics]:
    return work


def trainable(engine: TrainedRank) -> Trainable:
    return engine


def row(made: PackedRow | ExperienceRow | PairRow | UnpairedRow | StepsRow) -> Row:
    return made


def row_of_a_dataset(made: Row) -> batches.Row:
    return made


def experience_objective(objective: PolicyObjective | CriticObjective) -> Objective[ExperienceRow]:
    return objective


def packed_objective(objective: SFTObjective | PTXObjective | DistillationObjective) -> Objective[PackedRow]:
    return objective


def pair_objective(objective: DPOObjective | RewardObjective | ScoreMoments) -> Objective[PairRow]:
    return objective


def unpaired_objective(objective: KTOObjective | MismatchedLogRatio) -> Objective[UnpairedRow]:
    return objective


def steps_objective(objective: ProcessObjective) -> Objective[StepsRow]:
    return objective


def any_objective(objective: BalancedObjective[RowT]) -> Objective[RowT]:
    return objective


def reference(model: FrozenRank) -> Reference:
    return model


def transfer(by_gloo: gloo.GlooTransfer) -> client.Transfer:
    return by_gloo


def engine_client(ours: RayEngineClient) -> client.EngineClient:
    return ours


def memory(engines: engine_memory.EngineMemory) -> dispatch.Memory:
    return engines


def handle(member: RayEngineHandle) -> dispatch.EngineHandle:
    return member


def scored(models: RewardRanks) -> Callable[[list[PromptGroup]], list[PromptGroup]]:
    return models.score


def engine(sampler: RolloutEngine | RecordingEngine) -> Engine:
    return sampler


def rollout_engine(sampler: VLLMEngine | TransformersEngine) -> RolloutEngine:
    return sampler


def executor(agent: SingleTurnAgentExecutor | UserExecutor) -> AgentExecutorBase:
    return agent


def tools(server: McpServer) -> ToolServer:
    return server


def reward(source: RewardFunction | RemoteReward | NoReward) -> Callable[[str, str, Any], Awaitable[Reward]]:
    return source


def dataset(made: SampleStore | PairDataset | UnpairedDataset | StepsDataset) -> batches.Dataset:
    return made
