"""Which class satisfies which protocol. Nothing here runs: `make lint` has pyrefly read it, and each function
returns one thing as another."""

from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np

from openrlhf.cluster import engine_pool, residency
from openrlhf.cluster.engine_client import RayEngineClient
from openrlhf.cluster.engine_pool import EngineActor, EnginePool
from openrlhf.cluster.group import CriticGroup, FrozenGroup, PolicyGroup, RewardGroup
from openrlhf.cluster.pending import Gathered
from openrlhf.datasets import batches
from openrlhf.datasets.batches import FirstItems, TokenisedDataset, Windows
from openrlhf.datasets.cache import Cacheable
from openrlhf.datasets.preference import PairDataset
from openrlhf.datasets.steps import StepsDataset
from openrlhf.datasets.store import SampleStore
from openrlhf.datasets.unpaired import UnpairedDataset
from openrlhf.engine import precompute, weight_sync
from openrlhf.engine.deepspeed_engine import DeepSpeedEngine, FrozenModel
from openrlhf.engine.interfaces import (
    ModelGroup,
    Objective,
    Pending,
    Rollout,
    Row,
    TrainableGroup,
    TrainEngine,
)
from openrlhf.engine.vllm_engine import VLLMEngine
from openrlhf.objectives.actor import ActorObjective
from openrlhf.objectives.balanced import BalancedObjective
from openrlhf.objectives.critic import CriticObjective
from openrlhf.objectives.dpo import DPOObjective
from openrlhf.objectives.kd import DistillationObjective
from openrlhf.objectives.kto import KTOObjective, MismatchedLogRatio
from openrlhf.objectives.prm import ProcessObjective
from openrlhf.objectives.ptx import PTXObjective
from openrlhf.objectives.reference import Reference
from openrlhf.objectives.rm import RewardObjective, ScoreMoments
from openrlhf.objectives.sft import SFTObjective
from openrlhf.observe.trackers import JsonlTracker, TensorBoardTracker, Tracker, WandbTracker
from openrlhf.rewards.function import NoReward, RewardFunction
from openrlhf.rewards.remote import RemoteReward
from openrlhf.rollout import dispatch
from openrlhf.rollout.agents import UserExecutor
from openrlhf.rollout.recorder import RecordingEngine
from openrlhf.trainer import supervised
from openrlhf.types import (
    ExperienceRow,
    Group,
    Metrics,
    PackedRow,
    PairRow,
    StepsRow,
    UnpairedRow,
)
from openrlhf.utils.agent import AgentExecutorBase, Engine, Reward, SingleTurnAgentExecutor
from openrlhf.utils.mcp_tools import McpServer
from openrlhf.utils.tools import ToolServer

ResultT = TypeVar("ResultT")
RowT = TypeVar("RowT", bound=Row)


def trainable_group(group: PolicyGroup | CriticGroup) -> TrainableGroup:
    return group


def model_group(group: PolicyGroup | CriticGroup | FrozenGroup) -> ModelGroup:
    return group


def rollout(pool: EnginePool) -> Rollout[PolicyGroup]:
    return pool


def gathered(refs: Gathered[np.ndarray]) -> Pending[np.ndarray]:
    return refs


def future(work: Future[Metrics]) -> Pending[Metrics]:
    return work


def train_engine(engine: DeepSpeedEngine) -> TrainEngine:
    return engine


def row(
    made: PackedRow | ExperienceRow | PairRow | UnpairedRow | StepsRow,
) -> Row:
    return made


def row_of_a_dataset(made: Row) -> batches.Row:
    return made


def experience_objective(objective: ActorObjective | CriticObjective) -> Objective[ExperienceRow]:
    return objective


def packed_objective(
    objective: SFTObjective | PTXObjective | DistillationObjective,
) -> Objective[PackedRow]:
    return objective


def pair_objective(objective: DPOObjective | RewardObjective | ScoreMoments) -> Objective[PairRow]:
    return objective


def unpaired_objective(objective: KTOObjective | MismatchedLogRatio) -> Objective[UnpairedRow]:
    return objective


def steps_objective(objective: ProcessObjective) -> Objective[StepsRow]:
    return objective


def any_objective(objective: BalancedObjective[RowT]) -> Objective[RowT]:
    return objective


def reference(model: FrozenModel) -> Reference:
    return model


def answers(model: DeepSpeedEngine | FrozenModel) -> precompute.Answers:
    return model


def offloadable(engine: DeepSpeedEngine) -> residency.Offloadable:
    return engine


def sendable(engine: DeepSpeedEngine) -> weight_sync.Sendable:
    return engine


def transfer(by_gloo: weight_sync.GlooTransfer) -> weight_sync.Transfer:
    return by_gloo


def engine_client(client: RayEngineClient) -> weight_sync.EngineClient:
    return client


def memory(engines: residency.Residency) -> dispatch.Memory:
    return engines


def sampler(engine: engine_pool._Sampler) -> dispatch.Sampler:
    return engine


def scored(models: RewardGroup) -> Callable[[list[Group]], list[Group]]:
    return models.score


def engine(sampler: VLLMEngine | EngineActor | RecordingEngine) -> Engine:
    return sampler


def executor(agent: SingleTurnAgentExecutor | UserExecutor) -> AgentExecutorBase:
    return agent


def tools(server: McpServer) -> ToolServer:
    return server


def reward(
    source: RewardFunction | RemoteReward | NoReward,
) -> Callable[[str, str, Any], Awaitable[Reward]]:
    return source


def dataset(made: SampleStore | PairDataset | UnpairedDataset | StepsDataset) -> TokenisedDataset:
    return made


def cacheable(made: SampleStore | PairDataset | UnpairedDataset | StepsDataset) -> Cacheable:
    return made


def part_of_a_dataset(items: FirstItems) -> batches.Dataset:
    return items


def windows(rows: Windows[RowT]) -> supervised.Windows[RowT]:
    return rows


def tracker(mirror: JsonlTracker | TensorBoardTracker | WandbTracker) -> Tracker:
    return mirror
