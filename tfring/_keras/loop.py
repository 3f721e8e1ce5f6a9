"""Ends Keras' loop over batches on all ranks after the same batch, and then reduces the logs that were not read.

```
rank 0   callbacks of batch k ─► draws batch k + 1 ─► status ─► k + 1 is not trained ─► after the loop
rank 1   callbacks of batch k: stop_training ────────► status ─► draws one too ───────► after the loop
all      callbacks of the epoch's last batch ────────► status ────────────────────────► after the loop
```

A decision of a callback on one rank therefore needs no collective of its own. After the loop all ranks know it, before
validation and before callbacks see the end of the epoch. All ranks have drawn the batch that was not trained.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from tfring import _tf
from tfring._keras.seam import entry_under_way, ring_of_model
from tfring.step import status

_UNREAD = "_tfring_unread"  # attribute of a model while logs of its batches are reduced only after the loop
_MADE = "_tfring_{}_function"  # attribute of a model; its `train_function` may be the program's own that calls this one

KINDS = ("train", "test")


def made(model: Any, kind: str, step_function: Any) -> None:
    """Notes the StepFunction that a model has from now on."""
    vars(model)[_MADE.format(kind)] = step_function


def bind(epoch_iterator: Any, model: Any) -> None:
    """Makes the loop over an EpochIterator of `fit` or `evaluate` end on all ranks at once."""
    is_validation = epoch_iterator is getattr(model, "_eval_epoch_iterator", None)
    kind = "train" if entry_under_way("fit") and not is_validation else "test"
    epoch_iterator.loop = Loop(model, kind)


@contextlib.contextmanager
def unread_logs(model: Any) -> Iterator[None]:
    """Allows calls of `leave_unread` inside the context, and undoes them on exit."""
    before = vars(model).pop(_UNREAD, None)
    try:
        yield
    finally:
        vars(model).pop(_UNREAD, None)
        if before is not None:
            vars(model)[_UNREAD] = before


def leave_unread(model: Any, kinds: Iterable[str]) -> None:
    """Marks kinds of batches with logs that no rank reads one by one. All ranks make the same call."""
    vars(model)[_UNREAD] = vars(model).get(_UNREAD, frozenset()) | set(kinds)


def are_unread(model: Any, kind: str) -> bool:
    """Returns True if `leave_unread` was called and Keras calls no function of the program, which may read the logs."""
    is_keras_own = getattr(model, f"{kind}_function") is vars(model).get(_MADE.format(kind))
    return is_keras_own and kind in vars(model).get(_UNREAD, ())


class Loop:
    """Keras' loop over the batches of one pass.

    Args:
      model: The Keras model.
      kind: "train" or "test".
    """

    def __init__(self, model: Any, kind: str) -> None:
        self.model = model
        self.kind = kind
        self._flag = {"train": "stop_training", "test": "stop_evaluating"}[kind]

    @property
    def step_function(self) -> Any:
        return vars(self.model).get(_MADE.format(self.kind))  # a callback may cause it to be made again

    def on_exit(self) -> None:
        """Agrees with the other ranks on the end of the loop, once Keras has left it without an error."""
        ring = ring_of_model(self.model)
        assert ring is not None
        if ring.is_alone:
            return
        stopped, others_drew = status.announce_loop_end(ring, bool(getattr(self.model, self._flag)))
        if stopped:
            self.mark_stopped()
        if others_drew and self.step_function is not None and self.step_function.iterator is not None:
            _tf.draw(self.step_function.iterator)

    def mark_stopped(self) -> None:
        setattr(self.model, self._flag, True)

    @contextlib.contextmanager
    def end_on_all_ranks(self, keras_loop: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
        """Ends Keras' loop on all ranks at once.

        Args:
          keras_loop: The context manager of Keras' loop.
        """
        try:
            with keras_loop:
                try:
                    with status.named():
                        yield
                except status.StoppedElsewhere:
                    self.mark_stopped()
                else:
                    self.on_exit()
            if self.step_function is not None:  # otherwise the function is the program's own
                self.step_function.reduce_logs_after_loop()
        finally:
            if self.step_function is not None:
                self.step_function.reset()
