"""What a kernel provider is: it does what one function of torch does, for calls of one form, in another way.

To add one, derive a class from `KernelProvider` with a `name`, `functions` and `__call__`, and either call
`register_provider` or declare it as an entry point of the group `perfladder.kernel_providers`, so that saved plans find
it.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import JsonValue, ValidationError

from perfladder.errors import InputError
from perfladder.models import Model, input_error

if TYPE_CHECKING:
    import torch

    from perfladder.functional.samples import Arguments


class KernelProviderConfig(Model):
    """Options of a provider: none."""


class KernelProvider(ABC):
    """One way to do what a function does.

    What is given to an optimizer is never prepared itself: for each function and form of call a copy of it is made
    (`of`), whose `function` is set, and which then is prepared and called.

    Attributes:
        name: By which plans and archives know it.
        functions: Names of the functions that it can stand for, as profiles have them: `linear`, `Tensor.matmul`.
        config_class: Its options.
        device_types: Where it works.
        is_traceable: `torch.compile` can trace its `__call__` as part of a larger graph.
        function: The name of the function that this one stands for; empty in one that was given to an optimizer.
        original: That function.
    """

    name: ClassVar[str]
    functions: Sequence[str] = ()
    config_class: ClassVar[type[KernelProviderConfig]] = KernelProviderConfig
    device_types: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    is_traceable: ClassVar[bool] = True

    def __init__(self, config: KernelProviderConfig | None = None, **options: Any) -> None:
        """Take a config, or its fields by name.

        Raises:
            InputError: A field is wrong, or both forms are given.
        """
        kind = type(self)
        if config is not None and (options or not isinstance(config, self.config_class)):
            raise InputError(f"{kind.__name__}: give one {self.config_class.__name__}, or options by name.")
        if config is None:
            try:
                config = self.config_class.model_validate(options)
            except ValidationError as error:
                raise input_error(error, self.config_class, kind.__name__) from None
        self.config: Any = config
        self.function = ""
        self.original: Callable[..., Any] = _nothing

    def __repr__(self) -> str:
        changed = self.config.model_dump(exclude_defaults=True)
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in changed.items())})"

    def of(self, function: str) -> Self:
        """A copy, not prepared, that stands for one function.

        Raises:
            InputError: There is no such function.
        """
        from perfladder.kernels.functions import function_named

        made = copy.copy(self)
        made.function, made.original = function, function_named(function)
        return made

    def of_file(self, function: str) -> Self:
        """The same for a name that stands in a file, which may have been edited.

        Raises:
            InputError: There is no such function, or it does not stand for it.
        """
        if function not in self.functions:
            raise InputError(
                f"function: the provider {self.name!r} stands for {', '.join(self.functions) or 'nothing'}, and not "
                f"for {function!r}. Make a new plan."
            )
        return self.of(function)

    def why_not(self, device: torch.device) -> str | None:
        """Why it is not applicable here, such as a library that is not installed; None if it is."""
        if device.type not in self.device_types:
            return f"it runs on {' and '.join(self.device_types)}, not on {device.type}"
        return None

    def why_not_for(self, *args: Any, **kwargs: Any) -> str | None:
        """Why it is not applicable to a call with these arguments; None if it is."""
        return None

    def prepare(self, samples: Sequence[Arguments]) -> None:  # noqa: B027
        """Get ready for calls of one form, of which samples are given; after loading, samples of random numbers.

        They may be called with, and are not to be changed. Whatever is raised is recorded as the reason why this one
        failed.
        """

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Do what the function does with these arguments; on any thread, without gradients."""

    def to_dict(self) -> dict[str, JsonValue]:
        """What `from_dict` makes the same one of, as JSON."""
        return {"provider": self.name, "function": self.function, "config": self.config.model_dump(mode="json")}

    @staticmethod
    def from_dict(data: dict[str, JsonValue]) -> KernelProvider:
        """The provider again, not prepared.

        Raises:
            InputError: It is none of `to_dict`, or a provider or an option is not known here.
        """
        from perfladder.kernels.registry import find_provider

        if not isinstance(data, dict) or not {"provider", "function", "config"} == set(data):
            raise InputError("provider: expected what to_dict() returns, with provider, function and config.")
        kind = find_provider(str(data["provider"]))
        try:
            config = kind.config_class.model_validate(data["config"])
        except ValidationError as error:
            raise input_error(error, kind.config_class, f"The config of the provider {kind.name!r}") from None
        return kind(config).of_file(str(data["function"]))


def _nothing(*_: Any, **__: Any) -> Any:
    raise AssertionError("it stands for no function; `of` makes one that does")
