"""Any rank may save a model alone: reading metric variables must not wait for the others.

Metric variables are summed over replicas when they are read, a collective. Their values in a saved model mean
nothing, so saving sums this worker's only.
"""

from __future__ import annotations

from tfring._keras.seam import ring_of_model, seam


def install():
    from keras.src.saving import saving_lib

    @seam(saving_lib, "_save_state")
    def save_state(original, saveable, *args, **kwargs):
        strategy = ring_of_model(saveable)
        if strategy is None:
            return original(saveable, *args, **kwargs)
        with strategy.extended.local_reads():
            return original(saveable, *args, **kwargs)
