"""Classes that a flag selects: each in a file of its own, found by name or by a reference to a user's file.

Configuration, its checks and `--help` read those of `algorithms`, so no file there imports torch at its top.
"""

import inspect
import os
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from functools import cached_property
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, ClassVar, Generic, Self, TypeVar, dataclass_transform

from openrlhf import plugins

KindT = TypeVar("KindT", bound="Selectable")


@dataclass_transform(kw_only_default=True, eq_default=False)
class Selectable:
    """A class that a flag selects by its `name`. Subclasses are dataclasses: their annotated fields are
    options, `--algo.options.NAME` on the command line, except those of `field(init=False)`."""

    name: ClassVar[str] = ""
    """What the flag takes. A user's class needs none."""
    summary: ClassVar[str] = ""
    """What `--help` says of it: the first paragraph of the docstring."""

    __dataclass_fields__: ClassVar[dict[str, Field]]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.summary = " ".join((cls.__doc__ or "").partition("\n\n")[0].split())
        dataclass(kw_only=True, eq=False)(cls)

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        """Returns an instance with those of the options that are its own."""
        return cls(**{name: options[name] for name in cls.option_names() if name in options})

    @classmethod
    def option_names(cls) -> list[str]:
        return [field.name for field in fields(cls) if field.init]


class Registry(Mapping[str, type[KindT]], Generic[KindT]):
    """Maps what a flag takes to a class: the names of a package's files, those that installed packages
    register as entry points, `package.module:Name` and `folder/file.py:Name`. Iteration is over ours."""

    def __init__(self, package: str, base: type[KindT]) -> None:
        """`package`: whose modules define subclasses of `base`. Its last word names the group of entry
        points, `openrlhf.WORD`."""
        self.package, self.base = package, base
        self.kind = package.rpartition(".")[2]
        self.loaded: dict[str, type[KindT]] = {}
        """By reference with the whole path of its file: a file is imported once in a process."""

    @cached_property
    def ours(self) -> dict[str, type[KindT]]:
        folder = import_module(self.package).__path__
        modules = [import_module(f"{self.package}.{info.name}") for info in iter_modules(folder)]
        found = [
            x for m in modules for x in vars(m).values() if inspect.isclass(x) and x.__module__ == m.__name__
        ]
        return {x.name: x for x in found if issubclass(x, self.base) and x.name}

    @property
    def names(self) -> list[str]:
        """Ours, and those that installed packages register."""
        return [*self.ours, *plugins.registered(self.kind)]

    def reference(self, name: str) -> str | None:
        """Returns where the class of this name is defined; None for one of ours. Raises KeyError for a name
        that nobody has."""
        if name in self.ours:
            return None
        reference = plugins.resolve(name, self.kind)
        if not (plugins.is_reference(reference) or plugins.file_of(reference)):
            raise KeyError(name)
        return reference

    def __getitem__(self, name: str) -> type[KindT]:
        """Raises KeyError for a name that nobody has, ValueError where a reference leads to no such class."""
        reference = self.reference(name)
        if reference is None:
            return self.ours[name]
        place = os.path.abspath(reference) if plugins.file_of(reference) else reference
        if place not in self.loaded:
            self.loaded[place] = self._load(reference)
        return self.loaded[place]

    def __contains__(self, name: object) -> bool:
        """Raises ValueError where a reference leads to no such class."""
        try:
            return bool(self[str(name)])
        except KeyError:
            return False

    def __iter__(self) -> Iterator[str]:
        return iter(self.ours)

    def __len__(self) -> int:
        return len(self.ours)

    def _load(self, reference: str) -> type[KindT]:
        try:
            found = plugins.load(reference, flag="")
        except ValueError as error:  # the caller names the flag and the reference
            raise ValueError(str(error).removeprefix(f" {reference}: ")) from error
        base = f"{self.base.__module__}.{self.base.__name__}"
        if not inspect.isclass(found) or not issubclass(found, self.base):
            raise ValueError(f"{_place(found)} must be a subclass of {base}")
        if missing := sorted(getattr(found, "__abstractmethods__", ())):
            raise ValueError(f"{_place(found)} must define {', '.join(missing)}, as {base} says")
        unset = [f.name for f in fields(found) if f.init and f.default is f.default_factory is MISSING]
        if unset:
            raise ValueError(
                f"{_place(found)}: give the option {unset[0]} a default, as `{unset[0]}: float = 1.0`"
            )
        return found


def _place(found: Any) -> str:
    """The file and line of a class."""
    try:
        return f"{inspect.getsourcefile(found)}: line {inspect.getsourcelines(found)[1]}: {found.__name__}"
    except TypeError:
        return repr(found)
