"""A run whose rows go to a folder: what is left in memory are sums, which the folder keeps, too."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from persample.errors import ArgumentError
from persample.inputs import Call, check_params
from persample.merge import Stacked
from persample.processes import Processes
from persample.reductions import Reduction
from persample.reductions.base import Reductions, in_words
from persample.reductions.rows import PerSample
from persample.streams.accumulator import Accumulator, Order, Partial, check_rows, row_format
from persample.streams.batches import Batch, no_batch
from persample.streams.lift import BatchLift
from persample.streams.sink.files import Record
from persample.streams.sink.folder import join_ranks, named, open_own, read_results
from persample.utils import trees
from persample.utils.trees import Leaf, Tree, digest, name_of


class SinkRun:
    """The folder of one call of ``accumulate``."""

    def __init__(
        self,
        folder: str | Path,
        lift: BatchLift,
        container: trees.TreeSpec,
        order: Order,
        processes: Processes,
        *,
        resume: bool,
    ) -> None:
        self.folder = named(folder)
        self.lift, self.container, self.order, self.processes = lift, container, order, processes
        self.names = trees.paths(trees.unflatten(list(range(container.num_leaves)), container), "result")
        self._asked = description(lift, self.names)
        self.sink = open_own(self.folder, self._asked, order, processes, resume=resume)
        self.is_finished, self.done = self.sink.index.finished, self.sink.index.batches
        self.template: Tree = None
        self._last: tuple[Batch, Call] | None = None

    def begin(self, call: Call, leaves: Sequence[Leaf]) -> None:
        """Learn the structure of the results from the first batch."""
        for name, reduction, lifted in zip(self.names, self.lift.wanted, leaves, strict=True):
            if not _has_rows(reduction) and any(isinstance(leaf, Stacked) for leaf in trees.flatten(lifted)[0]):
                expected = "reductions that are sums, or have a row for each sample, with a folder"
                received = f"{type(reduction).__name__}() as {name}, which needs the gradients of all samples at once"
                fix = "Ask for it without sink=, or write Project(dim, seed) to the folder and compute with its rows."
                raise ArgumentError.about("reduce", expected=expected, received=received, fix=fix)
        results = Reductions(self.lift.wanted).finish(leaves, call.params[0].device)
        flat, structure = trees.flatten(trees.unflatten(results, self.container))
        self.template = trees.unflatten(list(range(len(flat))), structure)

    def skip(self, batch: Batch, accumulator: Accumulator) -> None:
        """Skip a committed batch; after the last one, restore the sums."""
        call = self._pass_over(batch, accumulator)
        if batch.number + 1 < self.done:
            return
        self._check_passed(accumulator.samples, accumulator.weight.total, self._last)
        lifted = self.lift.without_samples(call)
        self.begin(call, lifted[0])
        state = self.sink.state()
        accumulator.load(self._sums(lifted), state)
        self.lift.random.state = [x for name, x in state.items() if name.startswith("random")]

    def _pass_over(self, batch: Batch, accumulator: Accumulator) -> Call:
        call = self.lift.normalized(batch)
        accumulator.count(*call.counted)
        self._last = batch, call
        return call

    def _check_passed(self, samples: int, weight: float, last: tuple[Batch, Call] | None) -> None:
        """Reject other batches than those of the folder, by their counts and weights, and by the last one if given."""
        index = self.sink.index
        same = samples == index.samples and math.isclose(weight, index.weight, rel_tol=1e-9)
        if not same or (last is not None and _facts(*last) != (index.batches, index.last_batch)):
            raise ArgumentError.about(
                "batches",
                expected=f"the batches of {index.samples} samples, with these weights, in {str(self.sink.folder)!r}",
                received=f"others, of {samples} samples",
                fix="Give the batches of that run in the same order (shuffle with the same seed), or a new folder.",
            )

    def receive(self, lifted: Tree, chunk: Call) -> Tree:
        """Write the rows of one chunk."""
        if self.template is None:
            self.begin(chunk, self.lift.without_samples(chunk)[0])
        rows = self._tensors(lifted[0], rows=True)
        columns, formats = self.sink.columns, {name: row_format(x) for name, x in rows.items()}
        check_rows({name: row_format(x) for name, x in columns.items()} or formats, formats)
        self.sink.append(rows)
        return self._sums(lifted)

    def commit(self, batch: Batch, call: Call, accumulator: Accumulator) -> None:
        """Commit the batches so far if a commit is due."""
        self._last = batch, call
        if self.sink.is_due:
            self._commit(self._last, accumulator)

    def end(self, accumulator: Accumulator) -> None:
        """Commit all batches."""
        if accumulator.structure is None and self.done:
            expected = f"the {self.done} batches that are in {str(self.sink.folder)!r}"
            fix = "Give the batches of that run, from its first one on, or a new folder."
            raise ArgumentError.about("batches", expected=expected, received="fewer", fix=fix)
        if self._last is not None:
            self._commit(self._last, accumulator)

    def close(self) -> None:
        """Close the files."""
        self.sink.close()

    def _commit(self, last: tuple[Batch, Call], accumulator: Accumulator) -> None:
        state = accumulator.state() | {f"random-{place}": x for place, x in enumerate(self.lift.random.state)}
        batches, checksum = _facts(*last)
        self.sink.commit(batches, accumulator.samples, accumulator.weight.total, checksum, state)

    def finish(self, total: Partial) -> Tree:
        """Write the results without rows; return all results, mapped into memory."""
        values = self._tensors(total.leaves[0], rows=False)
        if self.processes.group is None:
            self.sink.finish(total.count, total.weight.total, values)
        else:
            self.processes.together(lambda: join_ranks(self.folder, self._asked, self.order, self.processes, values))
        return self.results(verify=False)

    def of_finished(self, batches: Iterator[Batch]) -> Tree:
        """Return the results in a folder that is finished; nothing is computed."""
        passed = Accumulator()

        def pass_over() -> None:
            for batch in batches:
                call = self._pass_over(batch, passed)
                if self.template is None:
                    self.begin(call, self.lift.without_samples(call)[0])

        self.lift.random.seed(self.processes)  # as the run did, from the numbers that batches may be drawn from
        self.processes.together(pass_over)
        samples, weights = zip(*self.processes.gather_objects((passed.samples, passed.weight.total)), strict=True)
        last = self._last if self.processes.size == 1 and self.sink.index.batches else None
        self._check_passed(sum(samples), sum(weights), last)
        return self.results()

    def results(self, *, verify: bool = True) -> Tree:
        """Return the results in a folder that is finished, mapped into memory."""
        templates = [one for one in self.processes.gather_objects(self.template) if one is not None]
        if not templates:
            raise no_batch()
        template = templates[0]
        found = read_results(self.folder, verify=verify)
        names = trees.paths(template, "result")
        if set(names) != set(found):
            expected = f"the loss of the run in {str(self.folder)!r}"
            received = f"another, as {sorted({*names} ^ {*found})} differ"
            raise ArgumentError.about("loss_fn", expected=expected, received=received, fix="Return the same (aux).")
        return trees.unflatten([found[name] for name in names], trees.structure(template))

    def _tensors(self, leaves: Sequence[Leaf], *, rows: bool) -> dict[str, Tensor]:
        """Return the results of the reductions that have rows, or of the others, by name."""
        found: dict[str, Tensor] = {}
        for name, reduction, lifted in zip(self.names, self.lift.wanted, leaves, strict=True):
            if _has_rows(reduction) == rows:
                (result,) = Reductions([reduction]).finish([lifted], self.processes.device)
                found |= dict(zip(trees.paths(result, name), trees.flatten(result)[0], strict=True))
        return found

    def _sums(self, lifted: Tree) -> Tree:
        leaves, connected = lifted
        pairs = zip(self.lift.wanted, leaves, strict=True)
        return [() if _has_rows(reduction) else one for reduction, one in pairs], connected


def _facts(batch: Batch, call: Call) -> tuple[int, str]:
    """Return the number of batches up to this one, and its checksum."""
    unit = () if batch.unit is None else torch.as_tensor(batch.unit)
    return batch.number + 1, digest((batch.content, call.weights, unit))


def _has_rows(reduction: Reduction) -> bool:
    return isinstance(reduction, PerSample)


def description(lift: BatchLift, names: list[str]) -> Record:
    """Return what determines the results of a run, beside its batches."""
    tree = check_params(lift.params)
    state = [module.state_dict() for module in tree.modules]
    reduce = {name: in_words(one) for name, one in zip(names, lift.wanted, strict=True)}
    options = {name: repr(value) for name, value in lift.options.items()}
    return {
        "loss_fn": ", ".join(map(name_of, lift.losses.values())),
        "params": digest([dict(zip(tree.paths, tree.tensors, strict=True)), state]),
        "reduce": reduce,
        "options": {**options, "chunk_size": lift.chunk_size, "engine": lift.engine, "unit_reduce": lift.units.reduce},
    }
