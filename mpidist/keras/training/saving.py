"""Saving: the first rank writes, nobody waits, and what is written loads as a plain Keras model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpidist.keras.derive import as_plain, binding_of

if TYPE_CHECKING:
    from keras import Model as _Model
else:
    _Model = object


class SavedByFirst(_Model):  # type: ignore[misc]
    """The methods of a model that write."""

    def save(self, *args: Any, **kwargs: Any) -> Any:
        """Root only, Local elsewhere: other ranks write nothing. As in Keras."""
        return self._write("save", args, kwargs)

    def save_weights(self, *args: Any, **kwargs: Any) -> Any:
        """Root only, Local elsewhere: other ranks write nothing. As in Keras."""
        return self._write("save_weights", args, kwargs)

    def export(self, *args: Any, **kwargs: Any) -> Any:
        """Root only, Local elsewhere: other ranks write nothing. As in Keras."""
        return self._write("export", args, kwargs)

    def _write(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        binding = binding_of(self)
        if binding is None:
            return getattr(super(), method)(*args, **kwargs)
        if binding.rank:
            return None
        with as_plain(binding):
            return getattr(self, method)(*args, **kwargs)

    def __reduce__(self) -> Any:
        binding = binding_of(self)
        if binding is None:
            return super().__reduce__()
        with as_plain(binding):
            return self.__reduce__()
