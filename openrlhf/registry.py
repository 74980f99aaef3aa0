"""Registry of classes that a flag selects, by name or by a reference to a user's file. Each class has its own
file.

Configuration, its checks and `--help` read the classes of `algorithms`, so no file there imports torch at its
top.
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
from openrlhf.errors import ErrorCode, UsageError
from openrlhf.user_file import UnusableFile

KindT = TypeVar("KindT", bound="Selectable")


@dataclass_transform(kw_only_default=True, eq_default=False)
class Selectable:
    """Base of classes that a flag selects by `name`. Subclasses become dataclasses: their annotated fields
    are options, `--algo.options.NAME` on the command line, except those of `field(init=False)`."""

    name: ClassVar[str] = ""
    """Value of the flag that selects the class. A user's class needs none."""
    summary: ClassVar[str] = ""
    """Description in `--help`: the first paragraph of the docstring."""

    __dataclass_fields__: ClassVar[dict[str, Field]]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.summary = " ".join((cls.__doc__ or "").partition("\n\n")[0].split())
        dataclass(kw_only=True, eq=False)(cls)

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        """Returns an instance with the options that the class has; other options are ignored."""
        return cls(**{name: options[name] for name in cls.option_names() if name in options})

    @classmethod
    def option_names(cls) -> list[str]:
        return [field.name for field in fields(cls) if field.init]


class Registry(Mapping[str, type[KindT]], Generic[KindT]):
    """Maps values of a flag to classes: built-in names, names that installed packages register as entry
    points, `package.module:Name` and `folder/file.py:Name`. Iterates over the built-in names."""

    def __init__(self, package: str, base: type[KindT]) -> None:
        """`package`: the package whose modules define subclasses of `base`. Its last word names the group of
        entry points, `openrlhf.WORD`."""
        self.package, self.base = package, base
        self.kind = package.rpartition(".")[2]
        self.loaded: dict[str, type[KindT]] = {}
        """Reference with absolute path -> class, so that a process imports a file once."""

    @cached_property
    def ours(self) -> dict[str, type[KindT]]:
        folder = import_module(self.package).__path__
        modules = [import_module(f"{self.package}.{info.name}") for info in iter_modules(folder)]
        found = [
            x for m in modules for x in vars(m).values() if inspect.isclass(x) and x.__module__ == m.__name__
        ]
        classes: dict[str, type[KindT]] = {}
        for x in found:
            if issubclass(x, self.base) and x.name and classes.setdefault(x.name, x) is not x:
                raise ValueError(f"{_place(x)} and {_place(classes[x.name])}: both have the name {x.name!r}")
        return classes

    @property
    def names(self) -> list[str]:
        """Built-in names, and those that installed packages register."""
        return [*self.ours, *plugins.registered(self.kind)]

    def reference(self, name: str) -> str | None:
        """Returns the reference to the class of this name; None for a built-in one. Raises KeyError for an
        unknown name."""
        if name in self.ours:
            return None
        reference = plugins.resolve(name, self.kind)
        if not (plugins.is_reference(reference) or plugins.parse_file(reference)):
            raise KeyError(name)
        return reference

    def __getitem__(self, name: str | type[KindT]) -> type[KindT]:
        """Returns the class, which may be given itself. Raises KeyError for an unknown name, UnusableFile if
        a reference leads to no subclass of `base`."""
        if inspect.isclass(name):
            return name
        reference = self.reference(name)
        if reference is None:
            return self.ours[name]
        place = os.path.abspath(reference) if plugins.parse_file(reference) else reference
        if place not in self.loaded:
            self.loaded[place] = self._load(reference)
        return self.loaded[place]

    def choose(self, name: str, *, flag: str, unknown: str) -> type[KindT]:
        """Returns the class that a value of `flag` names. Raises UsageError if there is none: with the text
        `unknown` for an unknown name."""
        try:
            return self[name]
        except KeyError:
            raise UsageError(ErrorCode.INVALID_VALUE, unknown, flag=flag, value=name) from None
        except ValueError as error:
            raise UsageError(ErrorCode.USER_CODE, str(error), flag=flag, value=name) from error

    def __iter__(self) -> Iterator[str]:
        return iter(self.ours)

    def __len__(self) -> int:
        return len(self.ours)

    def _load(self, reference: str) -> type[KindT]:
        found = plugins.load(reference)
        base = f"{self.base.__module__}.{self.base.__name__}"
        if not inspect.isclass(found) or not issubclass(found, self.base):
            raise UnusableFile(f"{_place(found)} must be a subclass of {base}")
        if missing := sorted(getattr(found, "__abstractmethods__", ())):
            raise UnusableFile(f"{_place(found)} must define {', '.join(missing)}, as {base} says")
        unset = [f.name for f in fields(found) if f.init and f.default is f.default_factory is MISSING]
        if unset:
            raise UnusableFile(
                f"{_place(found)}: give the option {unset[0]} a default, as `{unset[0]}: float = 1.0`"
            )
        return found


def _place(found: Any) -> str:
    """Returns the file, line and name of a class, for messages."""
    try:
        return f"{inspect.getsourcefile(found)}: line {inspect.getsourcelines(found)[1]}: {found.__name__}"
    except TypeError:
        return repr(found)
