"""Where Keras and TensorFlow write files: the functions to replace, and what is done beside writing.

All that saving uses of their private modules.
"""

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import tensorflow as tf
from tensorflow.python.checkpoint import checkpoint as checkpoint_module
from tensorflow.python.checkpoint import checkpoint_management
from tensorflow.python.saved_model import save as saved_model

LEGACY = "tf_keras"
_KERAS = "keras"


@dataclass(frozen=True, slots=True)
class Writer:
    """A function that writes files.

    Attributes:
        owner: the class or module whose attribute it is.
        attribute: the name.
        path: the argument that says where; "": no argument, but the object that it is called on.
        keeps_books: whether it also changes objects of the script's, which every worker does.
        makes_folders: whether it makes the folders that lead to what it writes.
        is_staged: whether what it writes is one file or folder, which can be moved when it is whole.
        suffixes: of the files of which that is so; none: of all.
    """

    owner: Any
    attribute: str
    path: str
    keeps_books: bool = False
    makes_folders: bool = False
    is_staged: bool = False
    suffixes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """How a user knows it."""
        return f"{getattr(self.owner, '__name__', '').rpartition('.')[2]}.{self.attribute.lstrip('_')}"


def tensorflow_writers() -> list[Writer]:
    """TensorFlow's."""
    checkpoints = (tf.train.Checkpoint, tf.compat.v1.train.Checkpoint)
    return [
        *(
            Writer(owner, name, "file_prefix", keeps_books=True)
            for owner in checkpoints
            for name in ("save", "write", "_write")
        ),
        Writer(tf.train.CheckpointManager, "save", "", keeps_books=True),
        Writer(tf.compat.v1.train.Saver, "save", "save_path", keeps_books=True),
        Writer(saved_model, "save_and_return_nodes", "export_dir", is_staged=True, makes_folders=True),
    ]


def keras_writers(name: str) -> list[Writer]:
    """Those of Keras 3, or of tf_keras, by the name of the package."""
    keras = import_module(name)
    return [*_keras_3(keras), *_shared(keras)] if name == _KERAS else [*_tf_keras(), *_shared(keras)]


def loaded_kerases() -> list[str]:
    """Those that the script has imported, as far as they were yet."""
    return [name for name in (_KERAS, LEGACY) if name in sys.modules]


def _shared(keras: Any) -> list[Writer]:
    """Where scripts enter; that they enter elsewhere is seen where the file is written."""
    owners = {attribute: _owner(keras.Model, attribute) for attribute in ("save", "save_weights", "export")}
    aliases = [module for module in (keras.saving, keras.models) if hasattr(module, "save_model")]
    return [
        *(Writer(owner, attribute, "filepath") for attribute, owner in owners.items()),
        *(Writer(module, "save_model", "filepath") for module in aliases),
    ]


def _owner(kind: type, attribute: str) -> type:
    return next(each for each in kind.__mro__ if attribute in vars(each))


def _keras_3(keras: Any) -> list[Writer]:
    from keras.src.legacy.saving import legacy_h5_format
    from keras.src.saving import saving_lib

    return [
        Writer(saving_lib, "save_model", "filepath", is_staged=True),
        Writer(saving_lib, "save_weights_only", "filepath", is_staged=True),
        Writer(legacy_h5_format, "save_model_to_hdf5", "filepath", is_staged=True, makes_folders=True),
        Writer(keras.export.ExportArchive, "write_out", "filepath"),
    ]


def _tf_keras() -> list[Writer]:
    from tf_keras.src.saving import saving_lib
    from tf_keras.src.saving.legacy import hdf5_format, save
    from tf_keras.src.saving.legacy.saved_model import save as legacy_saved_model

    return [
        Writer(saving_lib, "save_model", "filepath", is_staged=True),
        Writer(saving_lib, "save_weights_only", "filepath", is_staged=True),
        Writer(hdf5_format, "save_model_to_hdf5", "filepath", is_staged=True, makes_folders=True),
        Writer(save, "save_weights", "filepath", is_staged=True, suffixes=(".h5", ".hdf5", ".keras")),
        Writer(legacy_saved_model, "save", "filepath", is_staged=True, makes_folders=True),
    ]


def topology_of(writer: Writer, called_on: Any) -> str:
    """Where an object writes that is not told."""
    return str(called_on._prefix)


# -- What every worker does beside ------------------------------------------------------------------------------------


def without_threads(options: Any) -> Any:
    """Options of a checkpoint by which it is written before the call returns."""
    if not getattr(options, "experimental_enable_async_checkpoint", False):
        return options
    options = copy.copy(options)
    options.experimental_enable_async_checkpoint = False
    return options


def note_written(checkpoint: Any, path: Any, options: Any) -> Any:
    """What a checkpoint does when it is written, without writing; returns what it returns."""
    callbacks = getattr(options, "experimental_write_callbacks", None)
    if callbacks:
        checkpoint_module._execute_callbacks(callbacks, path)
    return path


def note_saved(saver: Any, path: str) -> None:
    """What a TF1 saver keeps of the checkpoints that there are."""
    saver._RecordLastCheckpoint(path)
    saver._MaybeDeleteOldCheckpoints()


@contextmanager
def kept_from(is_following: Callable[[], bool], patch: Callable[[Any, str, Any], Any]) -> Iterator[None]:
    """Where `is_following()`, the files that say which checkpoints there are stay as they are; none is deleted.

    `patch` is a context in which an attribute of an owner is another.
    """

    def unless_following(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: None if is_following() else original(*args, **kwargs)

    names: Sequence[str] = ("update_checkpoint_state_internal", "_delete_file_if_exists")
    with (
        patch(checkpoint_management, names[0], unless_following(getattr(checkpoint_management, names[0]))),
        patch(checkpoint_management, names[1], unless_following(getattr(checkpoint_management, names[1]))),
    ):
        yield
