"""Games of TextArena, played by the policy alone, against an opponent, or against itself."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from openrlhf.api import ErrorCode, RunError, Session, SessionExecutor, behind_thoughts
from openrlhf.environments.conversation import Conversation
from openrlhf.environments.gym import parse_seed
from openrlhf.environments.packages import package
from openrlhf.environments.randomness import GlobalRandom

textarena = package("textarena")


class TextArenaExecutor(SessionExecutor):
    """Plays one game per episode. The prompt is the game's name, such as GuessTheNumber-v0, the label its
    seed. The trained player is number `seed % num_players`; its reward in the game is the episode's."""

    def __init__(
        self,
        num_players: int = 1,
        opponent: Callable[[str], str] | None = None,
        unfinished: float = 0.0,
        **options: Any,
    ) -> None:
        """`opponent(text)`: returns the moves of all other players. None: the policy plays them too, without
        being trained on those moves. `unfinished`: the reward of a game that did not end. `options`:
        arguments of textarena.make."""
        super().__init__()
        self.num_players, self.opponent = num_players, opponent
        self.unfinished, self.options = unfinished, options

    async def play(
        self, prompt: str, label: Any, session: Callable[[], Session], step_timeout: float | None
    ) -> dict:
        """Runs one game with the limits of GymExecutor. Raises RunError if the game ends before the trained
        player has moved."""
        seed = parse_seed(label)
        call, trained = partial(GlobalRandom(seed).call, seconds=step_timeout), seed % self.num_players
        talks = [Conversation(session()) for _ in range(self.num_players)]
        game = await call(Game, prompt, self.num_players, seed, self.options)
        while not game.is_over:
            player, text = await call(game.look)
            if player == trained or self.opponent is None:
                move = await talks[player].answer(text)
            else:
                move = await call(self.opponent, text)
            if move is None:
                break
            await call(game.move, move)
        talk = talks[trained]
        if not talk.token_ids:
            text = f"the game ended before player {trained} moved, so there is nothing to train on"
            raise RunError(ErrorCode.EPISODES_FAILED, text, value=prompt)
        return {
            "reward": game.reward(trained) if game.is_over else self.unfinished,
            "observation_tokens": talk.token_ids,
            "action_ranges": talk.action_ranges,
            "truncated": not game.is_over or talk.is_cut,
            "extra_logs": {"turns": len(talk.action_ranges)},
        }


class Game:
    """A game in progress."""

    def __init__(self, name: str, num_players: int, seed: int, options: dict[str, Any]) -> None:
        self.env = textarena.make(name, **options)
        self.env.reset(num_players=num_players, seed=seed)
        self.is_over = False

    def look(self) -> tuple[int, str]:
        """Returns the player whose turn it is and the text that this player has not read yet."""
        bare = self.env
        while isinstance(bare, textarena.Wrapper):  # wrappers repeat the whole game in every turn
            bare = bare.env
        player, events = bare.get_observation()
        return player, self._text(player, events)

    def _text(self, player: int, events: Sequence[tuple[int, str, Any]]) -> str:
        """Joins the texts of events, without the player's own."""
        names = self.env.state.role_mapping
        others = [event for event in events if event[0] != player]
        return "\n".join(
            text if sender == textarena.GAME_ID else f"[{names[sender]}] {text}" for sender, text, _ in others
        )

    def move(self, text: str) -> None:
        """Plays the move behind thoughts, in which games would find moves, and which other players would
        read."""
        self.is_over, _ = self.env.step(behind_thoughts(text))

    def reward(self, player: int) -> float:
        rewards, _ = self.env.close()
        return float(rewards[player])
