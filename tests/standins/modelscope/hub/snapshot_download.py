"""Stand-in for `snapshot_download` of modelscope 1.40, with its signature. The hub is the folder
$MODELSCOPE_SITE, with files in `model/OWNER/NAME` and `dataset/OWNER/NAME`."""

import os
import shutil
from fnmatch import fnmatch
from pathlib import Path


class NotExistError(Exception):
    pass


def snapshot_download(
    model_id=None,
    revision=None,
    cache_dir=None,
    user_agent=None,
    local_files_only=False,
    cookies=None,
    ignore_file_pattern=None,
    allow_file_pattern=None,
    local_dir=None,
    allow_patterns=None,
    ignore_patterns=None,
    max_workers=None,
    repo_id=None,
    repo_type=None,
    progress_callbacks=None,
    token=None,
    endpoint=None,
):
    site, here = Path(os.environ["MODELSCOPE_SITE"]), Path(os.environ["MODELSCOPE_CACHE"])
    folder, source = here / repo_type / model_id, site / repo_type / model_id
    if local_files_only:
        if not folder.exists():
            raise ValueError("Cannot find the requested files in the cached path")
        return str(folder)
    if not site.exists():
        raise ConnectionError("the hub does not answer")
    if not source.exists():
        raise NotExistError(f"{model_id} does not exist")
    for file in (file for file in source.rglob("*") if file.is_file()):
        if not any(fnmatch(file.name, pattern) for pattern in ignore_patterns or ()):
            (folder / file.relative_to(source)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, folder / file.relative_to(source))
    return str(folder)
