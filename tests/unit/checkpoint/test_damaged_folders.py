"""Runs with damaged checkpoints: the one that they resume from, and the remains of an interrupted save."""

import json
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from damages import DAMAGES, IN_ITS_PLACE, as_another_user, damage, put_in_place
from refusals import refused

from openrlhf.checkpoint.folder import UNFINISHED, CheckpointFolder, Found
from openrlhf.checkpoint.manifest import Entry, Manifest, complete
from openrlhf.checkpoint.run_fingerprint import RunFingerprint
from openrlhf.config.ppo import PPOConfig
from openrlhf.config.sections import CkptConfig
from openrlhf.errors import ErrorCode, UsageError

STEPS = (2, 4, 6)


def of(path: Path, **ckpt) -> CheckpointFolder:
    """Returns the checkpoints of a run with a critic."""
    config = CkptConfig(path=str(path), load_enable=True, **ckpt)
    return CheckpointFolder(
        f"{path}/_actor", config, [f"{path}/_critic"], RunFingerprint.of("ppo", PPOConfig(), {})
    )


def save(checkpoints: CheckpointFolder, step: int) -> None:
    rng = random.Random(step)
    with checkpoints.saving(f"global_step{step}", metric=step / 10) as folder:
        assert folder == checkpoints.path / UNFINISHED
        for place in checkpoints.folders:
            made = place / UNFINISHED / f"global_step{step}"
            (made / "inside").mkdir(parents=True)
            for name, size in {"weights.pt": 3000, "optimizer.pt": 90_000, "inside/rank_1": 50}.items():
                (made / name).write_bytes(rng.randbytes(size))
            (place / UNFINISHED / "zero_to_fp32.py").write_text("script")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saves three undamaged checkpoints."""
    path = tmp_path_factory.mktemp("sound")
    for step in STEPS:
        save(of(path), step)
    return path


@pytest.fixture
def copy(sound: Path, tmp_path: Path) -> Path:
    shutil.copytree(sound, tmp_path / "copy")
    return tmp_path / "copy"


@pytest.fixture
def apart(sound: Path) -> Iterator[Path]:
    """Copies the checkpoints to a folder that other users may enter, unlike pytest's."""
    folder = Path(tempfile.mkdtemp())
    yield Path(shutil.copytree(sound, folder, dirs_exist_ok=True))
    shutil.rmtree(folder)


def test_a_save_has_all_models_and_the_files_beside_them(sound: Path) -> None:
    for folder in ("_actor", "_critic"):
        names = {path.name for path in (sound / folder).iterdir()}
        assert names - {"latest"} == {"zero_to_fp32.py", *(f"global_step{step}" for step in STEPS)}
    listed = Manifest.read(sound / "_actor" / "global_step6")
    assert set(listed.files) == {"weights.pt", "optimizer.pt", "inside/rank_1", "origin.json", "metric.json"}
    critic = Entry.of(sound / "_critic" / "global_step6" / "manifest.json").sha256
    assert (listed.step, listed.parts) == (6, {"_critic": critic})
    assert of(sound).find() == Found("global_step6", [])


@pytest.mark.processes
@pytest.mark.parametrize("part", ["_actor", "_critic"])
@pytest.mark.parametrize("kind", DAMAGES)
def test_every_damage_is_found_and_an_older_one_taken(copy: Path, kind: str, part: str) -> None:
    """A flip and a swap in every file, and cuts, zeros and deletions."""
    rng = random.Random(kind + part)
    newest = copy / part / "global_step6"
    for file in [path for path in newest.rglob("*") if path.is_file()]:
        kept, name = file.read_bytes(), str(file.relative_to(newest))
        for _ in range(4):
            if damage(kind, file, copy / part / "global_step2" / name, rng):
                tag, reasons = of(copy).find()
                assert tag == "global_step4", (name, reasons)
                (reason,) = reasons
                assert reason.startswith("global_step6: ") and (name in reason or name == "manifest.json")
            file.write_bytes(kept)
    assert of(copy).find() == Found("global_step6", [])


def test_the_structure_alone_finds_all_but_changes_inside_of_large_files(copy: Path, monkeypatch) -> None:
    monkeypatch.setattr("openrlhf.checkpoint.manifest.SMALL", 80_000)
    rng, newest = random.Random(1), copy / "_actor" / "global_step6"
    for name, kind, is_found in [
        ("optimizer.pt", "flip", False),
        ("optimizer.pt", "truncate", True),
        ("optimizer.pt", "delete", True),
        ("weights.pt", "flip", True),
        ("origin.json", "flip", True),
    ]:
        kept = (newest / name).read_bytes()
        damage(kind, newest / name, newest, rng)
        assert (of(copy, verify="structure").find().tag == "global_step4") is is_found, (name, kind)
        assert of(copy).find().tag == "global_step4"
        (newest / name).write_bytes(kept)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("part", ["_actor", "_critic"])
@pytest.mark.parametrize("kind", IN_ITS_PLACE)
@pytest.mark.few(8)
def test_whatever_stands_in_place_of_a_file_of_the_newest_the_next_is_taken(copy: Path, kind, part) -> None:
    newest = copy / part / "global_step6"
    for file in [path for path in newest.rglob("*") if path.is_file()]:
        kept, moved = file.read_bytes(), copy / "moved"
        put_in_place(kind, file)
        tag, (reason,) = of(copy).find()
        assert tag == "global_step4" and reason.startswith("global_step6: "), (file.name, reason)
        assert file.name in reason, reason
        file.rename(moved)
        moved.rmdir() if kind == "folder" else moved.unlink()
        file.write_bytes(kept)
    assert of(copy).find() == Found("global_step6", [])


@pytest.mark.processes
@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["latest", "latest_universal"])
@pytest.mark.parametrize("kind", IN_ITS_PLACE)
def test_whatever_stands_in_place_of_a_pointer_the_newest_is_taken_and_the_run_saves(copy, kind, name):
    put_in_place(kind, copy / "_actor" / name)
    checkpoints = of(copy)
    checkpoints.pointers = (name,)
    tag, (reason,) = checkpoints.find()
    assert tag == "global_step6" and reason.startswith(f"the file {name} ")
    save(of(copy), 8)
    assert of(copy).find() == Found("global_step8", [])


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["metric.json", "origin.json", "manifest.json", "weights.pt"])
@pytest.mark.parametrize("kind", IN_ITS_PLACE)
@pytest.mark.few(14)  # among them every kind and every file
def test_a_run_saves_and_starts_over_beside_an_older_checkpoint_with_damage(copy, kind, name, capsys) -> None:
    """The damaged one counts as one without a metric, so it is the first that is removed."""
    file = copy / "_actor" / "global_step4" / name
    put_in_place(kind, file)
    save(of(copy, max_num=3), 8)
    tags = {path.name for path in (copy / "_actor").glob("global_step*")}
    gone = "global_step4" if name == "metric.json" else "global_step2"
    assert tags == {"global_step2", "global_step4", "global_step6", "global_step8"} - {gone}
    assert (str(file) in capsys.readouterr().err) == (name == "metric.json")
    assert of(copy).find() == Found("global_step8", [])
    put_in_place(kind, copy / "_actor" / "global_step8" / name)
    over = CheckpointFolder(f"{copy}/_actor", CkptConfig(path=str(copy)), [f"{copy}/_critic"])
    tag, (line,) = over.choose()
    assert tag is None and "step 8, written 2" in line
    assert over.set_aside() and of(copy).find() == Found(None, [])


def test_a_state_file_of_another_checkpoint_is_told_and_notes_are_none(copy: Path) -> None:
    newest = copy / "_actor" / "global_step6"
    (newest / "notes.txt").write_text("the best one")
    assert of(copy).find() == Found("global_step6", [])
    shutil.copy(newest / "optimizer.pt", newest / "inside" / "zero_pp_rank_2_mp_rank_00_optim_states.pt")
    tag, (reason,) = of(copy).find()
    assert tag == "global_step4"
    assert "inside/zero_pp_rank_2_mp_rank_00_optim_states.pt" in reason and "move it away" in reason


FILES = ("latest", "global_step6/manifest.json", "global_step6/weights.pt")
CLOSED = [(name, 0) for name in FILES] + [(f"global_step{n}", mode) for n in (4, 6) for mode in (0, 0o400)]


@pytest.mark.parametrize(("closed", "mode"), CLOSED)
def test_a_place_that_must_not_be_read_is_damage_of_its_checkpoint_alone(apart: Path, closed, mode) -> None:
    def resume_and_save() -> tuple[Found, Found]:
        (apart / "_actor" / closed).chmod(mode)
        (apart / "_actor" / "latest").unlink(missing_ok=closed == "global_step6")
        found = of(apart).find()
        of(apart)._found()
        save(of(apart, max_num=3), 8)
        save(of(apart, max_num=3), 6)  # the step of the closed one
        return found, of(apart).find()

    before, after = as_another_user(resume_and_save, apart)
    is_newest = closed.startswith("global_step6")
    assert before.tag == ("global_step4" if is_newest else "global_step6")
    assert any("Permission denied" in reason for reason in before.skipped) == is_newest
    assert after == Found("global_step6", [])


@pytest.mark.parametrize("load", [True, False])
@pytest.mark.parametrize("mode", [0, 0o300, 0o400])
def test_a_folder_of_checkpoints_that_must_not_be_read_is_no_empty_one(apart: Path, mode: int, load) -> None:
    def closed() -> list[str]:
        (apart / "_actor").chmod(mode)
        checkpoints = of(apart)
        checkpoints.ckpt = replace(checkpoints.ckpt, load_enable=load)
        try:
            return [checkpoints.choose()[1][0]]
        except UsageError as refusal:
            return [refusal.code, refusal.flag, refusal.text]

    told = as_another_user(closed, apart)
    if mode == 0o300 and not load:
        assert "has a checkpoint of step 6" in told[0]
    else:
        assert told[:2] == [ErrorCode.UNREADABLE, "--ckpt.path"] and "Permission denied" in told[2]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "the file latest is missing"),
        (b"", "the file latest names no checkpoint"),
        (b"\x00\xff", "the file latest names no checkpoint"),
        (b"../../../global_step6", "the file latest names no checkpoint"),
        (b"global_step99", "the file latest names global_step99, which does not exist"),
    ],
)
def test_a_pointer_that_names_nothing_means_a_look_at_the_folders(copy: Path, content, reason) -> None:
    pointer = copy / "_actor" / "latest"
    pointer.unlink() if content is None else pointer.write_bytes(content)
    assert of(copy).find() == Found("global_step6", [reason])
    tag, (line, *_) = of(copy).choose()
    assert tag == "global_step6" and "step 6, written 2" in line


def test_a_pointer_that_names_a_sound_checkpoint_is_a_choice(copy: Path) -> None:
    (copy / "_actor" / "latest").write_text("global_step2\n")
    assert of(copy).find() == Found("global_step2", [])
    (copy / "_actor" / "global_step2" / "weights.pt").unlink()
    assert of(copy).find() == Found("global_step6", ["global_step2: weights.pt is missing"])


def test_where_none_is_sound_the_run_is_refused_with_all_reasons(copy: Path) -> None:
    for step in STEPS:
        (copy / "_critic" / f"global_step{step}" / "weights.pt").write_bytes(b"")
    with refused(ErrorCode.DAMAGED_CHECKPOINT, flag="--ckpt.load_enable") as told:
        of(copy).choose()
    head, *reasons, _, _ = told.value.text.splitlines()
    assert f"{copy}/_actor" in head
    shown = "_critic: weights.pt has 0 bytes instead of 3,000"
    assert reasons == [f"  global_step{step}: {shown}" for step in reversed(STEPS)]


def test_models_of_two_saves_are_no_checkpoint(copy: Path) -> None:
    """As after a kill between the renames of the critic's and the policy's folder."""
    other = copy.with_name("other")
    for step in STEPS:
        save(of(other), step)
    critic = "_critic/global_step6"
    shutil.rmtree(copy / critic)
    shutil.copytree(other / critic, copy / critic)
    manifest = copy / critic / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format"', ' "format"'))
    assert of(copy).find() == Found(
        "global_step4", ["global_step6: _critic: manifest.json belongs to another save"]
    )
    shutil.rmtree(copy / critic)
    assert of(copy).find() == Found("global_step4", ["global_step6: _critic: manifest.json is missing"])


def test_checkpoints_of_earlier_releases_still_load(copy: Path) -> None:
    for step in STEPS:
        for part in ("_actor", "_critic"):
            (copy / part / f"global_step{step}" / "manifest.json").unlink()
        origin = copy / "_actor" / f"global_step{step}" / "origin.json"
        origin.write_text(json.dumps({"written": "then", "origin": json.loads(origin.read_text())["origin"]}))
    tag, (line, note) = of(copy).choose()
    assert tag == "global_step6" and line.endswith("written then")
    assert "no manifest" in note


def test_an_older_checkpoint_is_replaced_when_its_step_is_saved_again(copy: Path) -> None:
    (copy / "_actor" / "global_step6" / "weights.pt").write_bytes(b"")
    save(of(copy), 6)
    assert of(copy).find() == Found("global_step6", [])


@pytest.mark.parametrize("fails", [OSError(28, os.strerror(28)), KeyboardInterrupt()])
def test_a_failed_save_leaves_what_was_there(copy: Path, fails: BaseException) -> None:
    before = sorted(copy.rglob("*"))
    with pytest.raises((RuntimeError, KeyboardInterrupt)) as told, of(copy).saving("global_step8") as folder:
        (folder / "global_step8").mkdir(parents=True)
        raise fails
    if isinstance(fails, OSError):
        assert told.value.code is ErrorCode.NOT_WRITABLE
        assert f"{copy}/_actor/.saving" in told.value.text and fails.strerror in told.value.text
    assert sorted(copy.rglob("*")) == before


def test_a_killed_save_is_removed_at_the_next_start(copy: Path) -> None:
    (copy / "_critic" / UNFINISHED / "global_step8").mkdir(parents=True)
    assert of(copy).find().tag == "global_step6"
    assert of(copy).remove_unfinished() == [
        f"{copy}/_critic/.saving: removed an unfinished checkpoint: global_step8"
    ]
    assert of(copy).remove_unfinished() == [] and not (copy / "_critic" / UNFINISHED).exists()


@pytest.mark.parametrize("killed_at", range(12))
def test_a_kill_at_any_call_leaves_a_sound_checkpoint(copy: Path, monkeypatch, killed_at: int) -> None:
    """Killed before the n-th rename or removal of a save with rotation."""

    class Killed(BaseException):
        pass

    calls = 0

    def counting(call):
        def counted(*args, **options):
            nonlocal calls
            calls += 1
            if calls > killed_at:
                raise Killed
            return call(*args, **options)

        return counted

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", counting(Path.replace))
        patch.setattr(shutil, "rmtree", counting(shutil.rmtree))
        with suppress(Killed):
            save(of(copy, max_num=2), 8)
    tag, reasons = of(copy).find()
    assert tag in ("global_step6", "global_step8") and not reasons
    of(copy).remove_unfinished()
    save(of(copy, max_num=2), 8)
    assert of(copy).find() == Found("global_step8", [])


def test_a_file_that_the_engine_lists_must_be_there(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(b"12")
    complete(tmp_path, step=1)
    os.truncate(tmp_path / "weights", 1)
    with pytest.raises(ValueError, match=r"weights\b.*\b1\b.*\b2\b"):
        complete(tmp_path, step=1)
