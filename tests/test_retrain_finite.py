"""A model that training has ruined is never given back as a good one."""

from __future__ import annotations

import numpy as np
import pytest
from models import KERAS, X, Y, both, mlp, values

import sparsekit
from sparsekit.errors import NonFiniteError

BAD = X.copy()
BAD[5, 0] = np.nan


@pytest.mark.parametrize("engine", ["dense", "sparse"])
@both
def test_nan_in_the_data(flavour, engine):
    model = sparsekit.prune(mlp(flavour, KERAS[flavour].optimizers.SGD(0.01)), 0.5)
    first = next(iter(values(model)))
    with pytest.raises(NonFiniteError, match=rf"after training \('{first}' and \d+ more\); lower the learning rate"):
        sparsekit.retrain(model, (BAD, Y), engine=engine, batch_size=16, verbose=0)
    report = sparsekit.report(model)
    assert report.status == report.to_dict()["status"] == "not finite"
    # The model is as fit left it: what was kept is ruined, what was pruned is still zero.
    masks = sparsekit.masks_of(model)
    assert np.isnan(values(model)[first][masks[first]]).any()
    assert report.violations == 0
    row = next(row for row in report if row.path == first)
    assert row.not_finite == np.count_nonzero(~np.isfinite(values(model)[first]))
    assert "values are NaN or infinite" in str(report)
    assert str(report).count("not finite") == 1 + sum(row.not_finite > 0 and row.status == "pruned" for row in report)


def test_nan_before_training():
    model = sparsekit.prune(mlp("keras"), 0.5)
    bias = next(weight for weight in model.trainable_variables if weight.path.endswith("bias"))
    bias.assign(np.full(bias.shape, np.inf))
    before = [weight.copy() for weight in model.get_weights()]
    with pytest.raises(NonFiniteError, match=rf"^{bias.shape[0]} values are NaN or infinite before training"):
        sparsekit.retrain(model, (X, Y), verbose=0)
    assert all(np.array_equal(a, b) for a, b in zip(model.get_weights(), before, strict=True))


def test_an_update_rule_that_ruins_the_weights():
    model = sparsekit.prune(mlp("keras"), 0.5)
    with pytest.raises(NonFiniteError, match=r"after training .*; take smaller steps"):
        sparsekit.retrain(model, (X, Y), update=lambda w, mask, step, seed: w * np.nan, verbose=0)
