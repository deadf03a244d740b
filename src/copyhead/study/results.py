"""Finished cells of the blocks of a study, each block as one data set over P, data seed and start."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr

from copyhead.problem import ProblemError
from copyhead.study.cell import BOTH, groups
from copyhead.study.cell_store import CellStore, joined
from copyhead.study.methods import REFUSED
from copyhead.study.spec import Blocks
from copyhead.study.study_file import EXPECTED, Block

# Labels of a cell that are axes, or the same for a whole block.
AXES = ("P", "seed", "start")


class Results:
    """Cells of named blocks; a block must have one problem and no axis but P.

    Raises:
        ProblemError: if a cell was refused by its method. KeyError: if one is not there.
    """

    def __init__(self, store: CellStore, blocks: Blocks) -> None:
        self.blocks = blocks
        self.cells = {name: [cell for _, cells in groups([block]) for cell in cells] for name, block in blocks.items()}
        wanted = {cell.identity for cells in self.cells.values() for cell in cells}
        self.pieces = list(store.pieces(wanted))
        self.place = {str(name): (k, n) for k, piece in enumerate(self.pieces) for n, name in enumerate(piece.identity.values)}
        self.known: dict[str, xr.Dataset] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.blocks

    def __getitem__(self, name: str) -> xr.Dataset:
        """Results of a block, dimensions P, seed and start, and what a variable has beside them."""
        if name not in self.known:
            self.known[name] = self._block(self.blocks[name], self.cells[name])
        return self.known[name]

    def _block(self, block: Block, cells: list[Any]) -> xr.Dataset:
        by_piece: dict[int, list[int]] = {}
        for piece, row in (self.place[cell.identity] for cell in cells):
            by_piece.setdefault(piece, []).append(row)
        found = joined([self.pieces[piece].isel(cell=rows) for piece, rows in by_piece.items()])
        refused = found.message.values[found.status.values == REFUSED]
        if len(refused):
            raise ProblemError(str(refused[0]))
        rows = {str(name): row for row, name in enumerate(found.identity.values)}
        found = found.isel(cell=[rows[cell.identity] for cell in cells])
        axes = {
            "P": [np.nan if place is None else place for place in block.sequences],
            "seed": list(block.seeds) if block.method.seeded else [EXPECTED],
            "start": list(block.starts) if block.method.started else [BOTH],
        }
        shape = tuple(len(places) for places in axes.values())
        values = {
            name: ((*AXES, *array.dims[1:]), array.values.reshape(*shape, *array.shape[1:]), array.attrs)
            for name, array in found.data_vars.items()
        }
        own = {str(dim): found[dim].values for dim in found.dims if dim != "cell"}
        return xr.Dataset(values, coords={**axes, **own})
