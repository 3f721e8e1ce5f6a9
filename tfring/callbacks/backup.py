"""`Backup`: resumes interrupted training as if it had never stopped."""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import json
import os
import pathlib
import secrets
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import keras
import numpy as np

from tfring import seeding
from tfring._keras import randomness, resume
from tfring._keras.callbacks import LateCallback
from tfring._keras.seam import ring_of_model
from tfring._keras.trainer import allow_first_reset, build_by_step
from tfring.callbacks import files, random_states, variables
from tfring.callbacks.attributes import Attributes
from tfring.cluster.launch_variables import PREEMPTED
from tfring.errors import ConfigurationError

_FORMAT, _FORMAT_OF_SHARDS = 3, 4  # 1 and 2 did not contain the mesh
_NOTHING, _SAVE, _SAVE_AND_LEAVE = range(3)
_NOT_SAVED = 128 + signal.SIGTERM  # exit code of a process that SIGTERM stopped before it had saved


class Backup(LateCallback, keras.callbacks.Callback):
    """Saves the state of a `fit` to a folder, from which the same program resumes after it was stopped or killed.

    On the same number of workers, training ends with the same weights, bit for bit, as if it had never been
    interrupted, and with the same logs. On another number of workers it ends with the weights and logs of that number,
    up to the last digits. A backup contains the weights, the state of optimizers and metrics, seed generators,
    gradients accumulated between two updates, the epoch and the step in it, the position in the data, the logs so far,
    the random states of Python, NumPy, Keras and, if it has a global seed, TensorFlow, and simple attributes of other
    callbacks (EarlyStopping, ReduceLROnPlateau). A warning names the attributes that are not kept.

    Rank 0 copies the state after a step and writes it from a thread while training continues. The next save and the end
    of `fit` wait until it is written. The other ranks restore what rank 0 reads. With `sharded=True`, each rank writes
    its own shards (weights of sharded layers and of stages, sharded slots) before its next step, because there may be
    no memory for a copy; rank 0 writes the rest and the locations of the shards. A file is written under a temporary
    name and then renamed, so a kill loses nothing. An incomplete file is detected, and the one before it is used. Files
    are plain zip files, see `docs/restarts.md`. The last file stays when training has ended: the same `fit` then has
    nothing left to do, and one with more epochs resumes. Remove the folder to train from the start.

    Schedulers send SIGTERM to announce that they reclaim a machine. All ranks then save after the current step and exit
    with code 75, upon which `tfring launch --max-restarts` starts them again. If they cannot save, a line gives
    the reason and they exit with code 143. Backup leaves SIGTERM alone if the program handles it itself, or calls `fit`
    outside of the main thread.

    Args:
      folder: Folder for this `fit` alone, on a disk that rank 0 sees after a restart too.
      every_steps: Number of steps between two saves. Defaults to None.
      every_seconds: Number of seconds between two saves, by rank 0's clock. A save follows the step at which they have
        passed. Defaults to None. If `every_steps` is None too, a save follows each epoch.
      keep: Number of files to keep in the folder. Defaults to 2.
      sharded: Whether each rank writes its shards to a file of its own, all at the same time. Such a backup can also be
        read on any number of workers, and by a Backup of either kind. `folder` must be on a disk that all ranks see.
        Defaults to False.
      grace_seconds: Number of seconds after SIGTERM within which the current step or validation has to end. Otherwise
        the process exits without saving, with code 143. Defaults to 20.

    Raises:
      ConfigurationError: If an argument is out of range; in `fit`, if the model was not made in the scope of a
        RingStrategy or is not the one that was saved, if another job uses the folder now, or if some rank does not see
        the folder with `sharded`.
      OSError: In `fit`, if the folder contains files and none is complete.

    Backup restores the position in the data by drawing batches again. Those of the current epoch are drawn and
    discarded. Earlier epochs cost nothing if the data is arrays or a `tf.data` pipeline. They are drawn too if the data
    runs Python, is cached, or `steps_per_epoch` lets one iterator continue through all epochs. The data must come in
    the same order when the program runs again: seed its shuffles (`keras.utils.set_random_seed`), or start the program
    with `tfring launch`, which passes the same `TFRING_DATA_SEED` to every try. Random operations that keep their state
    inside the operation, such as `tf.random.normal` in a compiled step, start over; those of Keras continue.

    >>> import tempfile
    >>> import tfring
    >>> with tfring.RingStrategy().scope():
    ...     model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    ...     model.compile("sgd", "mse")
    >>> folder = tempfile.mkdtemp()
    >>> x = np.ones((8, 1), "float32")
    >>> history = model.fit(x, x, epochs=2, callbacks=[Backup(folder)], verbose=0)
    >>> sorted(os.listdir(folder))
    ['epoch-00001-step-00000000.npz', 'epoch-00002-step-00000000.npz']
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        every_steps: int | None = None,
        every_seconds: float | None = None,
        *,
        keep: int = 2,
        sharded: bool = False,
        grace_seconds: float = 20.0,
    ) -> None:
        super().__init__()
        for name, value in (("every_steps", every_steps), ("every_seconds", every_seconds), ("keep", keep)):
            if value is not None and not value > 0:
                raise ConfigurationError(f"`{name}` is {value!r}, not a number above 0.")
        self._folder = pathlib.Path(folder)
        self._every_steps = every_steps
        self._every_seconds = every_seconds
        self._keep = keep
        self._sharded = sharded
        self._grace_seconds = grace_seconds
        self._ring: Any = None  # while `fit` runs
        self._restored: Any = None  # the state from which `fit` resumes
        self._arrays: list[np.ndarray] | None = None  # on rank 0
        self._problem = ""  # on rank 0: why the last save failed
        self._writer: Any = None  # a thread, while `fit` runs
        self._written: concurrent.futures.Future | None = None  # on rank 0: of the last save

    # -- around fit ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def around_fit(self, model: Any) -> Iterator[None]:
        self._ring = ring_of_model(model)
        initial_epoch, self._preempted, self.granted = model._initial_epoch, False, _NOTHING
        try:
            if self._sharded:
                self._check_folder_is_shared()
            with (
                files.held(self._folder) if self._ring.cluster.is_chief else contextlib.nullcontext("") as holder,
                concurrent.futures.ThreadPoolExecutor(1, "tfring-backup") as self._writer,
                contextlib.ExitStack() as at_the_end,
            ):
                at_the_end.callback(self._finish_writing)
                self._read(holder)
                # These have shuffled the data, so they are set before data is drawn.
                states = self._of_rank(self._restored["random_at_start"]) if self._restored else None
                if states:
                    random_states.give(states)
                self._random_at_start = states or random_states.take()
                with self._sigterm():
                    yield
        finally:
            self._ring, self._restored, self._arrays, self._writer = None, None, None, None
            model._initial_epoch = initial_epoch

    def _check_folder_is_shared(self) -> None:
        ring, is_chief = self._ring, self._ring.cluster.is_chief
        name = f".{secrets.token_hex(8)}" if is_chief else ""
        if is_chief:
            with contextlib.suppress(OSError):  # then no rank sees it
                self._folder.mkdir(parents=True, exist_ok=True)
                (self._folder / name).touch()
        name = variables.broadcast_bytes(ring, name.encode()).decode()
        sees = variables.gather_bytes(ring, b"1" if (self._folder / name).exists() else b"0")
        if is_chief:
            with contextlib.suppress(OSError):
                (self._folder / name).unlink()
        blind = [rank for rank, answer in enumerate(sees) if answer == b"0"]
        if blind:
            raise ConfigurationError(
                f"Rank {', '.join(map(str, blind))} does not see files that rank 0 writes to {str(self._folder)!r}, "
                "but `sharded=True` needs a folder that all ranks share. Use another folder, or leave `sharded` out: "
                "rank 0 then writes everything."
            )

    def _read(self, holder: str) -> None:
        """Reads the newest state, or None, on all ranks, and its arrays on rank 0.

        Raises ConfigurationError if another process uses the folder.
        """
        self._restored = self._arrays = None
        reply: dict = {"holder": holder} if holder else {}
        if self._ring.cluster.is_chief and not holder:
            try:
                found = files.newest(self._folder)
                if found:
                    path, state, self._arrays = found
                    reply = {"path": str(path), "state": state}
            except OSError as error:
                reply = {"problem": str(error)}
        reply = json.loads(variables.broadcast_bytes(self._ring, json.dumps(reply).encode()))
        if "problem" in reply:
            raise OSError(reply["problem"])
        if "holder" in reply:
            raise ConfigurationError(
                f"Another job uses {str(self._folder)!r} for its Backup: {reply['holder']}. Give each job its own "
                "folder."
            )
        if reply:
            self._restored = reply["state"]
            if self._restored["format"] not in (_FORMAT, _FORMAT_OF_SHARDS):
                raise ConfigurationError(
                    f"{reply['path']} has the backup format {self._restored['format']}, but this version of tfring "
                    f"reads {_FORMAT} and {_FORMAT_OF_SHARDS}."
                )
            text = f"training continues from {reply['path']}"
            before, now = self._restored.get("seed"), seeding.current()
            if before not in (None, now):
                text += (
                    f". That run had seed {before}, and this one has {'none' if now is None else now}: a program that "
                    f"draws rows at random without a seed of its own needs `tfring launch --seed {before}`"
                )
            self._say(text)

    def _of_rank(self, states: list) -> Any:
        return states[variables.find_saved_rank(self._ring, self._restored["cluster"])]

    @contextlib.contextmanager
    def _sigterm(self) -> Iterator[None]:
        """Makes SIGTERM request a save and an exit inside the context."""
        main = threading.current_thread() is threading.main_thread()
        if not main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
            yield
            return

        limit = threading.Timer(self._grace_seconds, self._give_up)
        limit.daemon = True

        def on_sigterm(signum: int, frame: Any) -> None:
            if not self._preempted:
                self._preempted, self._preempted_at = True, time.monotonic()
                limit.start()

        signal.signal(signal.SIGTERM, on_sigterm)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            limit.cancel()
        if self._preempted:  # after the last step
            raise SystemExit(_NOT_SAVED if self._problem else PREEMPTED)

    def _give_up(self) -> NoReturn:
        """Ends the process if the ranks have not reached the end of a step."""
        self._say(self._not_saved(f"the current step has not ended within {self._grace_seconds:g} s"))
        os._exit(_NOT_SAVED)

    def _leave(self) -> NoReturn:
        # No rank exits before rank 0 has written.
        self._finish_writing()
        problem = variables.broadcast_bytes(self._ring, self._problem.encode()).decode()
        if problem:
            self._say(self._not_saved(problem))
            raise SystemExit(_NOT_SAVED)
        self._say(f"SIGTERM: training is saved in {self._folder}, and ends with exit code {PREEMPTED}")
        raise SystemExit(PREEMPTED)

    def _not_saved(self, problem: str) -> str:
        return (
            f"SIGTERM: training could not be saved in {self._folder} ({problem}), and ends with exit code "
            f"{_NOT_SAVED}. A restart continues from the previous backup, or from the start if there is none"
        )

    def _say(self, text: str) -> None:
        if self._ring.cluster.is_chief:
            print(f"tfring: {text}", file=sys.stderr, flush=True)

    # -- restoring -------------------------------------------------------------------------------------------------

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        if self._ring is None:
            raise ConfigurationError(
                "Backup was given a model made outside of the scope of a `tfring.RingStrategy`, or is not in the list "
                "`callbacks` of `fit`. A single process needs the scope as well. Custom training loops save with "
                "tf.train.CheckpointManager (docs/restarts.md)."
            )
        self._attributes = Attributes(self.others)
        self._epoch, self._finished = 0, False
        self._logs: dict[str, Any] | None = None
        self._executions: list[int] = []  # calls of the step function in each epoch, the current one last
        self._validations: list[int] = []  # the same for each validation
        self._saved_at = time.monotonic()
        self._steps_since_due = 0  # for `every_steps`, which other saves do not delay: its save may end a window
        self._metrics_to_restore = False
        self._validations_to_pass: list[int] = []
        if self._restored:
            self._restore(self._restored)

    def _restore(self, state: dict[str, Any]) -> None:
        model, ring = self.model, self._ring
        build_by_step(model)
        variables.build_optimizers(ring, model, state["optimizers"])
        self._give_variables(variables.variables_of(model))
        allow_first_reset(model)
        arrays = self._attribute_arrays(state)
        self._attributes.set(state["callbacks"], arrays)
        model.history.history.update(state["history"])
        self._executions = state["executions"]
        self._steps_since_due = state.get("steps_since_due", 0)
        self._validations = state["validations"]
        self._validations_to_pass = list(self._validations)
        self._metrics_to_restore = True
        self._epoch, self._logs = state["epoch"], state["logs"]
        if state["stopped"]:
            self._epoch = max(self._epoch, self.params["epochs"])
        model._initial_epoch = self._epoch
        self._finished = self._epoch >= self.params["epochs"]
        if self._finished:
            self._say(f"this training has already ended; remove {self._folder} to train from the start")
            return
        resume.training(self._executions, self._logs)
        states = self._of_rank(state["random"])
        if not resume.draws_from_python():  # otherwise drawing again leaves them in the right state
            random_states.give(states)
        if states["keras"] is not None:
            randomness.give_global_seed(ring, states["keras"])

    def _give_variables(self, chosen: Sequence[keras.Variable]) -> None:
        state = self._restored
        variables.check_descriptions(chosen, state["variables"])
        variables.give(self._ring, self.model, chosen, state["variables"], self._arrays, state["cluster"])

    def _attribute_arrays(self, state: dict[str, Any]) -> list[np.ndarray]:
        mine = None if self._arrays is None else self._arrays[len(state["variables"]) :]
        return [
            variables.broadcast(self._ring, None if mine is None else mine[n], tuple(a["shape"]), a["dtype"])
            for n, a in enumerate(state["callback_arrays"])
        ]

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self._metrics_to_restore:  # Keras has just reset them
            self._metrics_to_restore = False
            self.model.history.epoch = list(self._restored["history_epochs"])
            if self._executions[-1]:
                self._give_variables(variables.variables_of(self.model))
            self._arrays = None
        self._epoch = epoch
        if not self._executions:
            self._executions.append(0)

    # -- counting and saving ---------------------------------------------------------------------------------------

    def wants(self) -> int:
        if self._preempted and self._may_save(self._preempted_at):
            return _SAVE_AND_LEAVE
        due_at = self._saved_at + (self._every_seconds or 0)
        due = self._every_seconds is not None and time.monotonic() >= due_at and self._may_save(due_at)
        return _SAVE if due and self._ring.cluster.is_chief else _NOTHING

    def _may_save(self, due_at: float) -> bool:
        """Returns False if saving would end a window of `Delayed` early, for at most half of `grace_seconds`."""
        steps = self._steps_since_due + self.model.steps_per_execution  # including those just done
        if self._ring.updater is None or (self._every_steps is not None and steps >= self._every_steps):
            return True
        return self._ring.updater.is_at_rest(self.model) or time.monotonic() >= due_at + self._grace_seconds / 2

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._executions[-1] += 1
        self._steps_since_due += self.model.steps_per_execution
        self._logs = logs
        self._save_if_due()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch, self._logs = epoch + 1, None
        self._executions.append(0)
        last = self.model.stop_training or self._epoch >= self.params["epochs"]
        if not last:  # otherwise on_train_end saves
            self._save_if_due(every_epoch=self._every_steps is None and self._every_seconds is None)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        if self._finished:
            self.model.history.epoch = list(self._restored["history_epochs"])
            return
        self._save(stopped=self.model.stop_training)
        self._finish_writing()
        if self.granted == _SAVE_AND_LEAVE:
            self._leave()

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        if self._validations_to_pass:
            resume.validation(self.model, self._validations_to_pass)
            self._validations_to_pass = []
        self._validations.append(0)

    def on_test_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._validations[-1] += 1

    def _save_if_due(self, every_epoch: bool = False) -> None:
        steps_due = self._every_steps is not None and self._steps_since_due >= self._every_steps
        if steps_due:
            self._steps_since_due = 0
        if self.granted or steps_due or every_epoch:
            self._save()
        if self.granted == _SAVE_AND_LEAVE:
            self._leave()

    def _save(self, stopped: bool = False) -> None:
        """Saves, on all ranks; rank 0 writes in a thread while training continues."""
        self._finish_writing()
        self._saved_at = time.monotonic()
        ring, model = self._ring, self.model
        step = self._executions[-1] * model.steps_per_execution if self._executions else 0
        taken = variables.take(ring, model, variables.variables_of(model), apart=self._sharded)
        mine: dict[str, Any] = {"random_at_start": self._random_at_start, "random": random_states.take()}
        if taken.shards:
            try:
                rank = ring.cluster.rank
                mine["pieces"] = files.write_shards(self._folder, self._epoch, step, rank, taken.shards)
            except OSError as error:
                mine["problem"] = f"rank {rank}: {error}"
        everyones = [json.loads(data) for data in variables.gather_bytes(ring, json.dumps(mine).encode())]
        if not ring.cluster.is_chief:
            return
        self._problem = ""
        of_callbacks: list[np.ndarray] = []
        callbacks = self._attributes.changed(of_callbacks)
        state = {
            "format": _FORMAT,
            "epoch": self._epoch,
            "step": step,
            "stopped": bool(stopped),
            "seed": seeding.current(),
            "cluster": variables.describe_cluster(ring),
            "executions": self._executions,
            "steps_since_due": self._steps_since_due,
            "validations": self._validations,
            "logs": self._logs,
            "history": model.history.history,
            "history_epochs": model.history.epoch,
            "random_at_start": [each["random_at_start"] for each in everyones],
            "random": [each["random"] for each in everyones],
            "optimizers": variables.describe_optimizers(model),
            "variables": taken.descriptions,
            "callbacks": callbacks,
            "callback_arrays": [{"dtype": a.dtype.name, "shape": list(a.shape)} for a in of_callbacks],
            "num_arrays": len(taken.arrays) + len(of_callbacks),
        }
        if self._sharded:
            state |= {"format": _FORMAT_OF_SHARDS, "pieces": [each.get("pieces") for each in everyones]}
        arrays = [*taken.arrays, *(variables.bits(np.array(array)) for array in of_callbacks)]
        problems = [each["problem"] for each in everyones if "problem" in each]
        now = copy.deepcopy(state)  # training appends to its lists
        self._written = self._writer.submit(self._write, self._epoch, step, now, arrays, "; ".join(problems))

    def _write(self, epoch: int, step: int, state: dict, arrays: list[np.ndarray | None], problem: str) -> None:
        if problem:
            files.remove_all_but(self._folder, self._keep)
            raise OSError(problem)
        files.write(self._folder, epoch, step, state, arrays, self._keep)

    def _finish_writing(self) -> None:
        """Waits until the last save is written. Only warns of an OSError: a full disk must not end training."""
        written, self._written = self._written, None
        try:
            if written:
                written.result()
        except OSError as error:
            self._problem = str(error)
            if self.granted != _SAVE_AND_LEAVE:  # otherwise `_leave` reports it
                warnings.warn(
                    f"tfring could not save in {self._folder} and continues without this backup: {error}",
                    stacklevel=2,
                )
